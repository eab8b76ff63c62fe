"""Runs PyTorch's own attention with kernels that give equal bits for equal inputs.

On CUDA the backward of flash attention adds with atomics, in any order, unless torch is asked for deterministic
algorithms. That setting holds for the whole process and makes other operators slow or fail, so it is on only while
attention chooses its kernel and while its own backward runs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from titan_mi100.device import accelerator


def differs(device: torch.device) -> bool:
    """Whether equal calls may give other bits there."""
    return accelerator.is_cuda(device)


def has_kernel(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> bool:
    """Whether SDPA takes a fused kernel. Its explicit scores repeat, and cuBLAS refuses to be deterministic."""
    return bool(torch._fused_sdp_choice(q, k, v, **mask) != SDPBackend.MATH.value)


@contextmanager
def repeatable(wanted: bool) -> Iterator[None]:
    """Deterministic algorithms inside, if wanted."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    compiler: Any = import_module("torch._inductor.config")  # torch 2.13 sets it along
    others = settings.fill_uninitialized_memory, getattr(compiler, "deterministic", None)
    torch.use_deterministic_algorithms(True)  # with warn_only the kernel would only warn
    settings.fill_uninitialized_memory = False  # every element is written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = others[0]
        if others[1] is not None:
            compiler.deterministic = others[1]


def with_repeatable_backward(out: Tensor, wanted: bool) -> Tensor:
    """The same tensor; if wanted, the operator that made it runs its backward inside `repeatable`."""
    if out.grad_fn is None or not wanted:
        return out
    scope = ExitStack()

    def begin(_: Any) -> None:
        scope.enter_context(repeatable(True))

    def end(*_: Any) -> None:
        scope.close()

    out.grad_fn.register_prehook(begin)
    out.grad_fn.register_hook(end)
    return out
