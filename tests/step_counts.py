"""Counts what a microbatch gives a GPU beside products and attention: launches, bytes, waits of the host. By hand:

    python tests/step_counts.py          the table, and a model of an H100's time
    python tests/step_counts.py --host   the host's time per layer, measured on this CPU

The run's own model in its layout, on the meta device with the shapes that were published: two layers and three, whose
difference is a layer. Our kernels count where they are launched. Nothing is computed, so nothing here was measured.
"""

import json
import math
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
from titan_mi100.data.microbatch import Microbatch
from titan_mi100.device import operators
from titan_mi100.model import experts, fused
from titan_mi100.model.fused import running
from titan_mi100.model.layers import TOGETHER
from titan_mi100.model.loss import HeadMemory
from titan_mi100.objectives.choose import choose
from titan_mi100.parallel import build
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.build import Computation, Placement, build_model
from titan_mi100.parallel.distributed import build_mesh
from titan_mi100.planning.workload import Workload, with_settings
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import PRESETS
from titan_mi100.workshop.rehearsal import lone_group
from titan_mi100.workshop.rehearsal.counter import FusedKernel, one_document_per_row

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
Counts = Counter[tuple[str, str]]  # launches may be fractions
_FLOPS = {operator.__name__: formula for operator, formula in flop_registry.items()}


class Counted(TorchDispatchMode):
    """Counts by (what, name): launches and bytes by operator or kernel; products and flops of them, views, copies to
    the card, waits, and calls: all that the host dispatches.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = Counter()

    def note(self, name: str, launches: float, *tensors: Tensor) -> None:
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
        if name.startswith("_foreach"):  # the first list is written; a launch has TOGETHER tensors
            self.note(name, len(args[0]) / TOGETHER, *read, *(args[0] if "add" in name else ()))
            return made
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
        stack.enter_context(patch.object(experts.Routes, "counts", property(_even)))
        stack.enter_context(running.only(kinds))
        yield


def _even(routes: experts.Routes) -> list[int]:
    """In place of Routes.counts, for which the host waits: as many rows for each expert, as a meta tensor has none."""
    return [len(routes.order) // len(routes.ends)] * len(routes.ends)


class Form(NamedTuple):
    """Kinds of our kernels that run, and whether torch has a kernel for the norms that none of ours computes."""

    kinds: Collection[str] = ()
    has_norm: bool = True


FORMS = {
    "plain, torch 2.8": Form(has_norm=False),
    "plain": Form(),
    "ours": Form(("delta", "elementwise", "experts", "head", "nf4")),
}


class Case(NamedTuple):
    spec: ModelSpec
    seq: int  # tokens of a microbatch, one row
    settings: Mapping[str, dict[str, Any]] = MappingProxyType({})
    group: int = 1  # layers that recur together

    def workload(self, layers: int, mode: str = "none") -> Workload:
        batch = {"seq_len": self.seq, "local_batch_size": 1, "gradient_accumulation_steps": 2}
        settings = {"training": batch, "activation_checkpoint": {"mode": mode}, **self.settings}
        kinds = {"layer_types": self.spec.layer_types[:layers]} if self.group > 1 else {}  # type: ignore[attr-defined]
        return Workload.of(with_settings(Config(), settings), 1, replace(self.spec, num_hidden_layers=layers, **kinds))


CASES = {
    "0.6B": Case(PRESETS["0.6B"], 8192),
    "0.6B LoRA": Case(PRESETS["0.6B"], 8192, {"lora": {"rank": 16}}),
    "8B QLoRA": Case(PRESETS["8B"], 2048, {"lora": {"rank": 16, "base": "nf4"}}),
    "0.6B DPO": Case(PRESETS["0.6B"], 8192, {"objective": {"name": "preference"}}),
}
QWEN3_5 = Case(PRESETS["qwen3.5-0.8B"], 8192, group=4)
A3B = {"rank": 8, "base": "nf4"}, {"target_modules": ("q_proj", "k_proj", "v_proj", "o_proj", "experts")}
OF_EXPERTS = {  # 30B-A3B in 4 bits, with adapters of attention, and of experts
    "30B-A3B QLoRA": Case(PRESETS["30B-A3B"], 2048, {"lora": A3B[0]}),
    "30B-A3B QLoRA of experts": Case(PRESETS["30B-A3B"], 2048, {"lora": {**A3B[0], **A3B[1]}}),
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
    objective = choose(workload.config.objective, workload.config.draft_head)
    computation = Computation(FusedKernel(), HeadMemory.of_gpu(CARD), objective)
    with lone_group.group(0, 1):
        mesh = build_mesh(workload.layout, torch.device("cpu"))
        with patch.object(build, "choose_products", lambda *_: None):  # a trial reads values
            model = build_model(workload, computation, Placement(mesh, torch.device(device), CARD))
        yield model


def count(case: Case, form: Form, layers: int, mode: str, microbatches: int) -> Counts:
    """Count forward and backward of a step's first microbatches."""
    workload = case.workload(layers, mode)
    with _model(workload, "meta") as model, Counted() as counted:
        norm = partial(_FusedNorm.call, counted) if form.has_norm else F.rms_norm
        with _as_on_a_card(form.kinds, norm, counted.launch):
            model.forward_backward([_microbatch(workload)] * microbatches, 1.0)
    return counted.counts


def counts(case: Case, form: Form, mode: str = "none", microbatches: int = 1) -> tuple[Counts, Counts]:
    """Of a layer or a group, and of the whole model; with several microbatches, of the last one."""
    few = (2, 3) if case.group == 1 else (case.group, 2 * case.group)
    two, three = (count(case, form, layers, mode, microbatches) for layers in few)
    if microbatches > 1:
        for counted, layers in zip((two, three), few, strict=True):
            counted.subtract(count(case, form, layers, mode, microbatches - 1))
    three.subtract(two)
    others = (case.spec.num_hidden_layers - few[0]) // case.group
    return three, Counter({key: two[key] + others * three[key] for key in two | three})


def total(counted: Counts, what: str) -> int:
    """Rounded up: part of a launch may be another layer's."""
    return math.ceil(sum(n for (kind, _), n in counted.items() if kind == what))


def host_seconds(counted: Counts) -> float:
    """Of a card's host, by assumption: 6 us for a launch of torch's, 1.2 for a view; 20 for one of ours, whose function
    is in Python (--host: so plain operations and ours take about as long, although ours launch half as much).
    """
    ours = sum(n for (what, name), n in counted.items() if what == "launches" and name.endswith("_kernel"))
    others = total(counted, "launches") - ours + counted["products", ""] + total(counted, "copies")
    return 6e-6 * others + 20e-6 * ours + 1.2e-6 * counted["views", ""]


def card_seconds(counted: Counts) -> float:
    """Of an H100 SXM, by assumption: 620 TFLOP/s for products (63% of its peak), 2.7 TB/s (81%), and 2 us for a kernel
    at least. Without attention and the update.
    """
    seconds = counted["flops", ""] / 620e12
    for name in {name for what, name in counted if what == "launches"}:
        seconds += max(counted["bytes", name] / 2.7e12, counted["launches", name] * 2e-6)
    return seconds


def host_times(case: Case, rounds: int = 40) -> dict[str, float]:
    """Microseconds of this CPU per layer, forward and backward, by form; the least of rounds in which forms take turns.

    Layers are so narrow that arithmetic is little, and the same in both. Attention and the launches of our kernels do
    nothing: Triton's launcher is not in it. torch's layer norm is in the place of RMSNorm, a composite on a CPU.
    """
    narrow = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    tiny = case._replace(seq=2, spec=replace(case.spec, **narrow, head_dim=64, vocab_size=256))
    least = {(name, layers): math.inf for name in ("plain", "ours") for layers in (2, 10)}
    norm = lambda x, shape, gain, eps: F.layer_norm(x, shape, gain, None, eps)  # noqa: E731
    for layers in (2, 10):
        workload = tiny.workload(layers)
        with torch.backends.mkldnn.flags(enabled=False), _model(workload, "cpu") as model:
            for _, parameter in model.named_parameters():
                parameter.data.zero_()
            for name in ("plain", "ours") * rounds:
                with _as_on_a_card(FORMS[name].kinds, norm, lambda *_, **__: None):
                    for _ in range(2):
                        model.clear_gradients()
                        start = time.process_time()
                        model.forward_backward([_microbatch(workload)], 1.0)
                        least[name, layers] = min(least[name, layers], time.process_time() - start)
    return {name: 1e6 * (least[name, 10] - least[name, 2]) / 8 for name in ("plain", "ours")}


def table() -> dict[str, tuple[Counts, Counts]]:
    """Counts of a layer and of a microbatch, by what is trained and the form."""
    made = {f"{case}, {form}": counts(CASES[case], FORMS[form]) for case in CASES for form in FORMS}
    for mode in ("selective", "full"):
        made[f"0.6B, ours, {mode}"] = counts(CASES["0.6B"], FORMS["ours"], mode)
    for case in ("0.6B", "0.6B LoRA"):
        made[f"{case}, ours, 2nd"] = counts(CASES[case], FORMS["ours"], microbatches=2)
    for form in ("plain", "ours"):
        made[f"qwen3.5-0.8B, {form}"] = counts(QWEN3_5, FORMS[form])
    for case, settings in OF_EXPERTS.items():
        made[f"{case}, plain"] = counts(settings, FORMS["plain"])
        for mode in ("none", "full"):
            made[f"{case}, ours, {mode}"] = counts(settings, FORMS["ours"], mode)
    return made


def main() -> None:
    if find_spec("triton") is None:
        _stand_in_for_triton()
    if "--json" in sys.argv:  # test_step_counts.py reads it
        found = {words: [[[*key, n] for key, n in of.items() if n] for of in both] for words, both in table().items()}
        print(json.dumps(found))
        return
    if "--host" in sys.argv:
        for name, case in CASES.items():
            print(name, *(f"{form}: {us:.0f} us a layer" for form, us in host_times(case).items()), sep=", ")
        return
    has_norm = hasattr(torch.ops.aten, "_fused_rms_norm_backward")
    print(f"torch {torch.__version__}; on a card its RMSNorm is {'a kernel' if has_norm else 'a composite'}")
    for words, (layer, every) in table().items():
        print(
            f"{words:<26} launches {total(layer, 'launches'):>4} {total(every, 'launches'):>5}  "
            f"GB {total(layer, 'bytes') / 1e9:>5.2f} {total(every, 'bytes') / 1e9:>6.1f}  "
            f"products {layer['products', '']:>2}  views {layer['views', '']:>3}  calls {layer['calls', '']:>3}  "
            f"waits {total(every, 'waits')}  copies {total(every, 'copies')}  "
            f"H100: card {1e3 * card_seconds(every):>5.1f} ms, host {1e3 * host_seconds(every):>4.1f} ms"
        )


if __name__ == "__main__":
    main()
