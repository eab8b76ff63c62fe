"""Which of our fused kernels run, and the one place where they are launched.

The plain forms beside them (nf4.py, elementwise.py, loss.py) are the reference. A kind of kernel runs where the run has
chosen it: on a device that Triton compiles for, after a trial against the plain form. What decides bits is recorded
with the run, as attention's choice is.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from titan_mi100.device import accelerator
from titan_mi100.device.compiler import cannot_compile
from titan_mi100.device.operators import is_watched
from titan_mi100.log import log
from titan_mi100.wording import shortened

Trial = Callable[[torch.device, torch.dtype], str]  # what is wrong with a kernel on a device; "": nothing

_running: frozenset[str] = frozenset()
_device = ""  # type of the device whose tensors they take; "": any, for Triton's interpreter


def runs(kind: str, x: Tensor) -> bool:
    """Whether the kernels of a kind take this tensor. They have no fp64."""
    return kind in _running and x.dtype != torch.float64 and _device in ("", x.device.type)


def runs_unwatched(kind: str, x: Tensor) -> bool:
    """The same, of kernels that are no operators: where operators are traced or counted, the plain form is."""
    return runs(kind, x) and not is_watched(x)


@contextmanager
def only(kinds: Collection[str]) -> Iterator[None]:
    """Context in which these kinds run, and no others."""
    kinds_before, device_before = _running, _device
    use(kinds)
    try:
        yield
    finally:
        use(kinds_before, device_before)


def use(kinds: Collection[str], device: str = "") -> None:
    """Let these kinds run in this process from now on, and no others. Args: device: its type; "": any."""
    global _running, _device
    _running, _device = frozenset(kinds), device


def choose(trials: Mapping[str, Trial], wanted: Collection[str], device: torch.device, dtype: torch.dtype) -> list[str]:
    """The wanted kinds whose kernels work on this device. Logs those that do not.

    Args:
        trials: kind -> its trial.
    """
    if not accelerator.is_cuda(device):
        return []
    works = []
    for kind in sorted(wanted):
        try:
            problem = trials[kind](device, dtype)
        except Exception as error:  # Triton is missing, or builds its launcher with the C compiler at the first call
            reason = shortened(" ".join(str(error).split()) or type(error).__name__, 300)
            problem = ": ".join(filter(None, (reason, *cannot_compile())))
        if problem:
            log.warning(f"our {kind} kernels cannot be used, plain torch operations replace them: {problem}")
        else:
            works.append(kind)
    return works


def difference(
    kind: str, function: Callable[..., Any], inputs: Sequence[Tensor], dtypes: tuple[torch.dtype, torch.dtype],
    bar: float, parameters: Sequence[Tensor] = (), at_once: bool = False,
) -> str:  # fmt: skip
    """What is wrong with a function's results and gradients where a kind of kernels computes them; "": nothing.

    Args:
        inputs: of the function, which are cast.
        dtypes: of the inputs for plain operations, and for the kernels.
        bar: how far the kernels' may be from the others, by the largest element of each.
        parameters: what has gradients besides.
        at_once: gradients are measured by the largest element of them all.
    """
    computed, weights = list[list[Tensor]](), list[Tensor]()
    for kinds, dtype in zip(((), (kind,), (kind,)), (*dtypes, dtypes[1]), strict=True):
        leaves = [*(x.detach().to(dtype).requires_grad_() for x in inputs), *parameters]
        with only(kinds), torch.enable_grad():
            made = function(*leaves[: len(inputs)])
            outputs = [made] if isinstance(made, Tensor) else [*made]
            weights = weights or [y.detach().cos() for y in outputs]
            learned = [(y, weight.to(y.dtype)) for y, weight in zip(outputs, weights, strict=True) if y.requires_grad]
            ys, of_ys = zip(*learned, strict=True)
            gradients = torch.autograd.grad(ys, leaves, of_ys, allow_unused=True, materialize_grads=True)
        computed.append([*(y.detach() for y in outputs), *gradients])
    exact, ours, again = computed
    if not all(map(torch.equal, ours, again)):
        return "gives other bits the second time"
    largest = [x.abs().max() for x in exact]
    if at_once:
        largest[len(weights) :] = [max(largest[len(weights) :])] * len(inputs)
    errors = [(a - b).abs().max() for a, b in zip(exact, ours, strict=True)]
    # `not <=`: a number that is not one is wrong, too
    is_right = all(error <= bar * size for error, size in zip(errors, largest, strict=True))
    return "" if is_right else "differs from that of plain operations"


def launch(kernel: Any, programs: tuple[int, ...], first: Tensor, *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument. A fake tensor has no values to compute."""
    if first.is_meta or isinstance(first, torch._subclasses.FakeTensor):
        return
    with accelerator.device_guard(first.device):
        kernel[programs](first, *arguments, **constants)
