"""Lists the parts that are measured on a machine, with their time limits. Imports no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from titan_mi100.config.check import check
from titan_mi100.config.kernels import KERNELS
from titan_mi100.planning.hardware import find_gpu
from titan_mi100.planning.plan import GIB, make_plan
from titan_mi100.shapes.base import AttentionShape
from titan_mi100.shapes.families import PRESETS
from titan_mi100.tools.certificate.form import DTYPES, Machine
from titan_mi100.tools.measure.children import Task
from titan_mi100.tools.measure.layouts import config_of

MODELS: Mapping[str, str] = {name if name == "debug" else f"qwen3-{name.lower()}": name for name in PRESETS}
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
                part, target = f"attention/{name}/{model}/{dtype}", "titan_mi100.tools.measure.attention:measure"
                arguments = {"name": name, "shape": {**shape, "dtype": dtype}}
                yield Task(part, target, arguments, seconds=150, optional=not kernel.is_plain)


def _gemm(machine: Machine, models: Sequence[str]) -> Iterable[Task]:
    for model in models:
        for dtype in DTYPES:
            arguments = {"model": model, "tokens": _seq(machine), "dtype": dtype}
            yield Task(f"gemm/{model}/{dtype}", "titan_mi100.tools.measure.products:gemm", arguments)
    one = {"model": models[0], "tokens": _seq(machine), "dtype": DTYPES[0], "only": "down"}
    for card in _other_cards(machine):
        yield Task(f"gemm/device {card}", "titan_mi100.tools.measure.products:gemm", {**one, "card": card}, seconds=60)


def _other_cards(machine: Machine) -> range:
    """The cards besides the first."""
    return range(1, machine.cards if machine.memory else 1)


def _between_cards(machine: Machine) -> Iterable[Task]:
    for card in (0, *_other_cards(machine)):
        yield Task(
            f"bandwidth/device {card}", "titan_mi100.tools.measure.products:bandwidth", {"card": card}, seconds=60
        )
    ranks = machine.cards
    refused = "" if ranks > 1 else "needs two cards; this machine has one"
    sizes = [1 << 20, 1 << 25, 1 << 28] if machine.memory else [1 << 16, 1 << 20, 1 << 24]
    for operation in _OPERATIONS:
        asked: dict[str, Any] = {"operation": operation, "sizes": sizes}
        target = "titan_mi100.tools.measure.collectives:measure"
        yield Task(f"collective/{operation}", target, asked, ranks, seconds=90, refused=refused)
    target, rows = "titan_mi100.tools.measure.parity:measure", {"rows": 2 * ranks, "steps": 3}
    yield Task("parity/one rank", target, {**rows, "layouts": ["fsdp2"]}, seconds=90)
    both = {**rows, "layouts": ["fsdp2", "ddp"]}
    yield Task(f"parity/{ranks} ranks", target, both, ranks, seconds=90, refused=refused)


def steps(machine: Machine, models: Sequence[str], backends: Mapping[str, str]) -> Iterable[Task]:
    """Training steps of the models.

    Args:
        backends: dtype -> attention backend, the fastest correct one; other dtypes use "auto".
    """
    gpu, target = find_gpu(machine.arch, machine.compute_units), "titan_mi100.tools.measure.steps:measure"
    for model in models:
        for layout, batch, ga, mode, dtype in _ROWS if machine.memory else _ROWS_ON_CPU:
            if machine.cards == 1 and layout in _STEPS_ALONE:
                continue
            row: dict[str, Any] = {
                "model": model, "layout": layout if machine.cards > 1 else "one card", "batch": batch, "ga": ga,
                "seq": _seq(machine), "checkpointing": mode, "dtype": dtype, "attention": backends.get(dtype, "auto"),
            }  # fmt: skip
            name = f"steps/{model}/{row['layout']} m={batch} GA={ga} {mode} {dtype}"
            task = Task(name, target, {"row": row}, machine.cards, seconds=180)
            yield replace(task, refused=_refusal(row, machine, gpu))


def _refusal(row: dict[str, Any], machine: Machine, gpu: Any) -> str:
    """Why the trainer would refuse this row; "": it would not."""
    config = config_of(row, machine.cards)
    if problems := check(config, machine.cards, with_files=False):
        return str(problems[0])
    if machine.memory:
        plan = make_plan(config, machine.cards, machine.memory, gpu)
        if not plan.fits:
            return f"does not fit: {plan.most / GIB:.1f} GiB by plan, of {machine.memory / GIB:.1f}"
    return ""
