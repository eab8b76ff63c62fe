"""Counts what a microbatch gives a GPU beside products and attention: launches, bytes, waits of the host. By hand:

    python tests/step_counts.py          the table, and a model of an H100's time; --json: every operator
    python tests/step_counts.py --host   the host's time per layer, measured on this CPU

The run's own model in its layout, on the meta device with the shapes that were published: two layers and three, whose
difference is a layer. Our kernels count where they are launched. Nothing is computed, so nothing here was measured.
"""

import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock, patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from titan_mi100.config.settings import Config
from titan_mi100.data.answers import REFERENCE
from titan_mi100.data.microbatch import Microbatch, one_document_per_row
from titan_mi100.device import operators
from titan_mi100.model import fused
from titan_mi100.model.fused import running
from titan_mi100.model.loss import HeadMemory
from titan_mi100.objectives.choose import choose
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.build import Computation, Placement, build_model
from titan_mi100.parallel.distributed import build_mesh
from titan_mi100.planning.workload import Workload, with_settings
from titan_mi100.shapes.families import PRESETS
from titan_mi100.workshop.rehearsal import lone_group
from titan_mi100.workshop.rehearsal.counter import FusedKernel

LEARNED = 0.65  # of the tokens: assumed
CARD = 80 << 30  # bytes of its memory, by which the head keeps logits
# Launches of an operator where they are not one, read in torch's CUDA sources; 5 of a sort and 2 of a scan are assumed.
_TWO = ("index_put", "scatter", "constant_pad_nd", "slice_backward", "select_backward")  # a copy or zeros, and the work
_LAUNCHES: dict[str, Callable[..., int]] = {
    # up to 3,072 tokens zeros and one kernel; above, zeros, a sort, two scans and five kernels
    "embedding_dense_backward": lambda _, ids, *__: 2 if ids.numel() <= 3072 else 15,
    "index_put_": lambda *args, accumulate=False: 10 if accumulate or args[3:] == (True,) else 1,  # a sort, and its sum
    **dict.fromkeys(_TWO, lambda *_, **__: 2),
}
_NO_KERNEL = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh")
_ROWS_OF = ("embedding", "index", "gather")  # they read of their first tensor as much as they return
_OVERWRITES = ("copy_", "fill_", "zero_")
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal")
_HEAD = {"gradient_kernel": 2, "pick_kernel": 0, "ids_gradient_kernel": 0}  # passes over the logits, where not one
Counts = Counter[tuple[str, str]]
_FLOPS = {operator.__name__: formula for operator, formula in flop_registry.items()}


class Counted(TorchDispatchMode):
    """Counts by (what, name): launches and bytes by operator or kernel; products and flops of them, views, copies to
    the card, waits, and calls: all that the host dispatches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = Counter()

    def note(self, name: str, launches: int, *tensors: Tensor) -> None:
        """Args: tensors: that are read or written once."""
        self.counts["launches", name] += launches
        self.counts["bytes", name] += sum(map(_touched, tensors))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made, name = function(*args, **kwargs), function.overloadpacket.__name__
        read = [x for x in tree_leaves((args, {**kwargs, "out": None})) if isinstance(x, Tensor)]
        written = [x for x in tree_leaves(made) if isinstance(x, Tensor) and x.is_meta]
        self.counts["calls", ""] += 1
        self.counts["waits", name] += name in _WAITS
        if not written:  # the host's own work
            return made
        if function.is_view or name in _NO_KERNEL:
            self.counts["views", ""] += 1
        elif any(x.device.type == "cpu" and x.ndim for x in read):
            self.counts["copies", name] += 1
            self.counts["waits", name] += not kwargs.get("non_blocking", args[2:] == (True,))
        elif (formula := _FLOPS.get(name.removesuffix("_"))) is not None:
            self.counts["products", ""] += 1
            self.counts["flops", ""] += formula(*args, **kwargs, out_val=made)
        else:
            if name in _ROWS_OF:
                read = [*read[1:], *written]
            elif name in _OVERWRITES:
                read = read[1:]
            elif name == "index_put_":  # it changes as many values as it is given
                read, written = read[1:], read[-1:] * 2
            self.note(name, _LAUNCHES.get(name, lambda *_, **__: 1)(*args, **kwargs), *read, *written)
        return made

    def launch(self, kernel: Any, programs: tuple[int, ...], first: Tensor, *others: Any, **constants: Any) -> None:
        """In place of running.launch."""
        name, tensors = kernel.fn.__name__, {id(x): x for x in others if isinstance(x, Tensor) and x is not first}
        self.note(name, 1, *[first] * _HEAD.get(name, 1), *tensors.values())


def _touched(x: Tensor) -> int:
    """Bytes of a tensor's values, of repeated ones once."""
    return math.prod(n for n, stride in zip(x.shape, x.stride(), strict=True) if stride) * x.itemsize


class _FusedNorm(torch.autograd.Function):
    """F.rms_norm as torch has it on CUDA since 2.9; on the meta device every torch shows 2.8's composite."""

    @classmethod
    def call(cls, counted: Counted, x: Tensor, shape: Any, gain: Tensor, eps: float) -> Tensor:
        return cls.apply(x, gain, counted)  # type: ignore[no-any-return]

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, counted: Counted) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.counted, normed = counted, torch.empty_like(x)
        counted.note("_fused_rms_norm", 1, x, gain, normed)
        return normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        x, gain = ctx.saved_tensors
        of_x, is_trained = torch.empty_like(x), ctx.needs_input_grad[1]
        of_gain = torch.empty_like(gain) if is_trained else None
        # the gradient of x; that of the gain reads both again, and of many rows it is summed in two kernels
        launches = 1 + is_trained * (2 if x.numel() // x.shape[-1] > 1 << 16 else 1)
        ctx.counted.note("_fused_rms_norm_backward", launches, *(1 + is_trained) * [grad, x], of_x, gain)
        return of_x, of_gain, None


def _stand_in_for_triton() -> None:
    """Where Triton is missing: kernels that have a name, whose launches are only counted."""
    stub: Any = ModuleType("triton")
    stub.language = MagicMock()
    stub.jit = lambda function=None, **_: SimpleNamespace(fn=function) if function else stub.jit
    stub.cdiv, stub.next_power_of_2 = lambda a, b: -(-a // b), lambda n: 1 << (n - 1).bit_length()
    sys.modules.update({"triton": stub, "triton.language": stub.language})


@contextmanager
def _as_on_a_card(kinds: Collection[str], norm: Callable[..., Tensor], launch: Callable[..., None]) -> Iterator[None]:
    """These kinds of our kernels run inside, whatever watches; `launch` launches them. Args: norm: F.rms_norm."""
    modules = [import_module(f"{fused.__name__}.{entry.name}") for entry in iter_modules(fused.__path__)]
    with ExitStack() as stack:
        for module in modules:
            if module is not running and getattr(module, "launch", None) is running.launch:
                stack.enter_context(patch.object(module, "launch", launch))
        for module in (running, operators):
            stack.enter_context(patch.object(module, "is_watched", lambda _: False))
        stack.enter_context(patch.object(F, "rms_norm", norm))
        stack.enter_context(running.only(kinds))
        yield


class Form(NamedTuple):
    """Kinds of our kernels that run, and whether torch has a kernel for the norms that none of ours computes."""

    kinds: Collection[str] = ()
    has_norm: bool = True


FORMS = {
    "plain, torch 2.8": Form(has_norm=False),
    "plain": Form(),
    "ours": Form(("elementwise", "head", "nf4")),
}


class Case(NamedTuple):
    flavor: str
    rows: int
    seq: int
    settings: Mapping[str, dict[str, Any]] = MappingProxyType({})

    def workload(self, layers: int, mode: str) -> Workload:
        batch = {"seq_len": self.seq, "local_batch_size": self.rows, "gradient_accumulation_steps": 2}
        settings = {"training": batch, "activation_checkpoint": {"mode": mode}, **self.settings}
        return Workload.of(
            with_settings(Config(), settings), 1, replace(PRESETS[self.flavor], num_hidden_layers=layers)
        )


CASES = {
    "0.6B, all weights": Case("0.6B", 1, 8192),
    "0.6B, LoRA": Case("0.6B", 1, 8192, {"lora": {"rank": 16}}),
    "8B, QLoRA": Case("8B", 1, 2048, {"lora": {"rank": 16, "base": "nf4"}}),
    "0.6B, DPO": Case("0.6B", 1, 8192, {"objective": {"name": "preference"}}),
}


def _microbatch(workload: Workload) -> Microbatch:
    training = workload.config.training
    made = one_document_per_row(training.local_batch_size, training.seq_len)
    made["supervised"] = made["supervised"][: int(LEARNED * made["labels"].numel())]
    if workload.config.objective.has_reference:
        made[REFERENCE] = torch.zeros(made["labels"].shape, dtype=torch.float64)
    return made


@contextmanager
def _model(workload: Workload, device: str) -> Iterator[ParallelModel]:
    computation = Computation(FusedKernel(), HeadMemory.of_gpu(CARD), choose(workload.config.objective))
    with lone_group.group(0, 1):
        mesh = build_mesh(workload.layout, torch.device("cpu"))
        yield build_model(workload, computation, Placement(mesh, torch.device(device)))


def count(case: Case, form: Form, layers: int, mode: str, microbatches: int) -> Counts:
    """Count forward and backward of a step's first microbatches."""
    workload = case.workload(layers, mode)
    with _model(workload, "meta") as model, Counted() as counted:
        norm = partial(_FusedNorm.call, counted) if form.has_norm else F.rms_norm
        with _as_on_a_card(form.kinds, norm, counted.launch):
            model.forward_backward([_microbatch(workload)] * microbatches, 1.0)
    return counted.counts


def counts(case: Case, form: Form, mode: str = "none", microbatches: int = 1) -> tuple[Counts, Counts]:
    """Of a layer, and of the whole model; with several microbatches, of the last one."""
    two, three = (count(case, form, layers, mode, microbatches) for layers in (2, 3))
    if microbatches > 1:
        for counted, layers in ((two, 2), (three, 3)):
            counted.subtract(count(case, form, layers, mode, microbatches - 1))
    three.subtract(two)
    others = PRESETS[case.flavor].num_hidden_layers - 2
    return three, Counter({key: two[key] + others * three[key] for key in two | three})


def total(counted: Counts, what: str) -> int:
    return sum(n for (kind, _), n in counted.items() if kind == what)


def milliseconds(counted: Counts) -> tuple[float, float]:
    """A model of an H100 SXM, of the card and of its host: no attention, no update; every constant is assumed."""
    product, byte, least = 1 / 620e12, 1 / 2.7e12, 2e-6  # 63% of 989 TFLOP/s, 81% of 3.35 TB/s, a kernel's least time
    card = counted["flops", ""] * product
    for name in {name for what, name in counted if what == "launches"}:
        card += max(counted["bytes", name] * byte, counted["launches", name] * least)
    launches = total(counted, "launches") + counted["products", ""] + total(counted, "copies")
    return 1e3 * card, 1e3 * (6e-6 * launches + 1.2e-6 * counted["views", ""])


def host_times(case: Case, rounds: int = 15) -> dict[str, float]:
    """Microseconds of the host per layer, forward and backward, by form; medians of rounds in which forms take turns.

    The layers are so narrow that arithmetic is nothing; attention and the launches of our kernels do nothing, so that
    Triton's launcher is not in it. torch's layer norm is in the place of its RMSNorm, which is a composite on a CPU.
    """
    narrow = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    spec = replace(PRESETS[case.flavor], **narrow, head_dim=64, vocab_size=256)
    settings = {"training": {"seq_len": 4, "gradient_accumulation_steps": 1}, "activation_checkpoint": {"mode": "none"}}
    seconds: dict[tuple[str, int], list[float]] = {(name, n): [] for name in ("plain", "ours") for n in (2, 10)}
    for _ in range(rounds):
        for name, layers in seconds:
            config = with_settings(Config(), {**settings, **case.settings})
            workload = Workload.of(config, 1, replace(spec, num_hidden_layers=layers))
            norm = lambda x, shape, gain, eps: F.layer_norm(x, shape, gain, None, eps)  # noqa: E731
            form = _as_on_a_card(FORMS[name].kinds, norm, lambda *_, **__: None)
            with _model(workload, "cpu") as model, form:
                for _, parameter in model.named_parameters():
                    parameter.data.zero_()
                for _ in range(3):
                    start = time.process_time()
                    model.forward_backward([_microbatch(workload)], 1.0)
                    last = time.process_time() - start
                seconds[name, layers].append(last)
    middle = {key: statistics.median(each) for key, each in seconds.items()}
    return {name: 1e6 * (middle[name, 10] - middle[name, 2]) / 8 for name in ("plain", "ours")}


def main() -> None:
    if find_spec("triton") is None:
        _stand_in_for_triton()
    if "--host" in sys.argv:
        for name, case in CASES.items():
            print(name, *(f"{form}: {us:.0f} us a layer" for form, us in host_times(case).items()), sep=", ")
        return
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "has norm": hasattr(torch.ops.aten, "_fused_rms_norm_backward"),
    }
    wanted = {(case, form): {} for case in CASES for form in FORMS}
    dense = "0.6B, all weights"
    wanted |= {(dense, "ours", mode): {"mode": mode} for mode in ("selective", "full")}
    wanted |= {(case, "ours", "2nd"): {"microbatches": 2} for case in (dense, "0.6B, LoRA")}
    print(f"torch {found['torch']}, on a card RMSNorm is {'its kernel' if found['has norm'] else 'a composite'}")
    for (case, form, *more), options in wanted.items():
        layer, every = counts(CASES[case], FORMS[form], **options)
        words = ", ".join((case, form, *more))
        rows = [{f"{what} {name}".strip(): n for (what, name), n in one.items() if n} for one in (layer, every)]
        found[words] = dict(zip(("layer", "microbatch"), rows, strict=True))
        if "--json" in sys.argv:
            continue
        card, host = milliseconds(every)
        print(
            f"{words:<36} launches {total(layer, 'launches'):>4} {total(every, 'launches'):>6}"
            f" GB {total(layer, 'bytes') / 1e9:>6.2f} {total(every, 'bytes') / 1e9:>7.1f}"
            f" products {layer['products', '']:>3} views {layer['views', '']:>4} calls {layer['calls', '']:>4}"
            f" waits {total(every, 'waits')} copies {total(every, 'copies')}"
            f" H100: card {card:>6.1f} ms, host {host:>5.1f} ms"
        )
    if "--json" in sys.argv:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
