"""Lists the parts that are measured on a machine, with their time limits. Imports no torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan_mi100.config.check import check
from titan_mi100.config.kernels import KERNELS
from titan_mi100.planning.hardware import find_gpu
from titan_mi100.planning.plan import GIB, make_plan
from titan_mi100.run.machine import Machine
from titan_mi100.shapes.base import AttentionShape
from titan_mi100.shapes.families import PRESETS
from titan_mi100.tools.measure.children import Task
from titan_mi100.tools.measure.configs import config_of
from titan_mi100.tools.measure.parts import DTYPES

MODELS: Mapping[str, str] = {name if name == "debug" else f"qwen3-{name.lower()}": name for name in PRESETS}
_HERE = "titan_mi100.tools.measure"
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")
# Kind of part -> fraction of the total time after which no part of this kind starts or goes on: each gets some time.
SHARES: Mapping[str, float] = {
    "attention": 0.45, "gemm": 0.55, "bandwidth": 0.6, "collective": 0.7, "parity": 0.8, "steps": 1.0,
}  # fmt: skip
# (layout, rows per forward, forwards per step, activation checkpointing, dtype). The most informative rows come first,
# because the time may end before the last.
_ROWS = (
    ("fsdp2", 1, 8, "full", "bfloat16"),
    ("pp", 1, 8, "full", "bfloat16"),
    ("ddp", 1, 8, "full", "bfloat16"),
    ("fsdp2", 4, 8, "full", "bfloat16"),
    ("pp", 4, 8, "full", "bfloat16"),
    ("fsdp2", 1, 8, "none", "bfloat16"),
    ("fsdp2", 1, 32, "full", "bfloat16"),
    ("pp", 1, 32, "full", "bfloat16"),
    ("fsdp2", 1, 8, "full", "float32"),
    ("fsdp2", 1, 8, "full", "float16"),
)
_ROWS_ON_CPU = (
    ("fsdp2", 1, 2, "full", "float32"),
    ("pp", 1, 2, "full", "float32"),
    ("ddp", 1, 2, "full", "float32"),
    ("fsdp2", 1, 8, "none", "float32"),
)
_STEPS_ALONE = ("ddp", "pp")  # layouts that need several cards


def before_steps(machine: Machine, models: Sequence[str]) -> list[Task]:
    """All parts except the training steps, in order."""
    return [*_attention(machine, models), *_gemm(machine, models), *_between_cards(machine)]


def _seq(machine: Machine) -> int:
    return 1024 if machine.memory else 256


def _attention(machine: Machine, models: Sequence[str]) -> Iterable[Task]:
    shapes: dict[AttentionShape, str] = {}
    for model in models:
        shapes.setdefault(PRESETS[model].attention, model)
    for attention, model in shapes.items():
        for dtype in DTYPES:
            shape = {"batch": 2, "seq": _seq(machine), **attention._asdict()}
            for name, kernel in sorted(KERNELS.items(), key=lambda entry: not entry[1].is_plain):  # a stable sort
                part, target = f"attention/{name}/{model}/{dtype}", f"{_HERE}.attention:measure"
                arguments = {"name": name, "shape": {**shape, "dtype": dtype}}
                yield Task(part, target, arguments, seconds=150, optional=not kernel.is_plain)


def _gemm(machine: Machine, models: Sequence[str]) -> Iterable[Task]:
    target, tokens = f"{_HERE}.products:gemm", {"tokens": _seq(machine)}
    for model in models:
        for dtype in DTYPES:
            arguments = {"model": model, **tokens, "dtype": dtype, "peak": _peak(machine, dtype)}
            yield Task(f"gemm/{model}/{dtype}", target, arguments)
    one = {"model": models[0], **tokens, "dtype": DTYPES[0], "peak": _peak(machine, DTYPES[0]), "only": "down"}
    for card in _other_cards(machine):
        yield Task(f"gemm/device {card}", target, {**one, "card": card}, seconds=60)


def _peak(machine: Machine, dtype: str) -> float | None:
    """TFLOP/s of the data sheet; None: not known."""
    gpu = find_gpu(machine.arch, machine.compute_units)
    return gpu.tflops.get(dtype) if gpu else None


def _other_cards(machine: Machine) -> range:
    """The cards besides the first."""
    return range(1, machine.cards if machine.memory else 1)


def _between_cards(machine: Machine) -> Iterable[Task]:
    for card in (0, *_other_cards(machine)):
        yield Task(f"bandwidth/device {card}", f"{_HERE}.products:bandwidth", {"card": card}, seconds=60)
    ranks = machine.cards
    refused = "" if ranks > 1 else "needs two cards; this machine has one"
    sizes = [1 << 20, 1 << 25, 1 << 28] if machine.memory else [1 << 16, 1 << 20, 1 << 24]
    for operation in _OPERATIONS:
        asked, target = {"operation": operation, "sizes": sizes}, f"{_HERE}.collectives:measure"
        yield Task(f"collective/{operation}", target, asked, ranks, seconds=90, refused=refused)
    target, rows = f"{_HERE}.training:same_losses", {"rows": 2 * ranks}
    yield Task("parity/one rank", target, {**rows, "layouts": ["fsdp2"]}, seconds=90)
    both = {**rows, "layouts": ["fsdp2", "ddp"]}
    yield Task(f"parity/{ranks} ranks", target, both, ranks, seconds=90, refused=refused)


def steps(machine: Machine, models: Sequence[str], backends: Mapping[str, str]) -> Iterable[Task]:
    """Training steps of the models.

    Args:
        backends: dtype -> attention backend, the fastest correct one; other dtypes use "auto".
    """
    for model in models:
        for layout, batch, ga, mode, dtype in _ROWS if machine.memory else _ROWS_ON_CPU:
            if machine.cards == 1 and layout in _STEPS_ALONE:
                continue
            row: dict[str, Any] = {
                "model": model, "layout": layout if machine.cards > 1 else "one card", "batch": batch, "ga": ga,
                "seq": _seq(machine), "checkpointing": mode, "dtype": dtype, "attention": backends.get(dtype, "auto"),
            }  # fmt: skip
            name = f"steps/{model}/{row['layout']} m={batch} GA={ga} {mode} {dtype}"
            arguments, refused = {"row": row, "peak": _peak(machine, dtype)}, _refusal(row, machine)
            yield Task(name, f"{_HERE}.training:steps", arguments, machine.cards, seconds=180, refused=refused)


def _refusal(row: dict[str, Any], machine: Machine) -> str:
    """Why the trainer would refuse this row; "": it would not."""
    config = config_of(row, machine.cards)
    if problems := check(config, machine.cards, with_files=False):
        return str(problems[0])
    if machine.memory:
        gpu = find_gpu(machine.arch, machine.compute_units)
        plan = make_plan(config, machine.cards, machine.memory, gpu)
        if not plan.fits:
            return f"does not fit: {plan.most / GIB:.1f} GiB by plan, of {machine.memory / GIB:.1f}"
    return ""
