"""Lists the parts that are measured on a machine, with their time limits. Imports no torch."""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import product
from typing import Any

from titan_mi100.cli import version_of
from titan_mi100.config.check import check
from titan_mi100.config.kernels import AUTO, KERNELS
from titan_mi100.config.settings import Config
from titan_mi100.planning.plan import GIB, make_plan
from titan_mi100.planning.workload import Workload, with_settings
from titan_mi100.run.machine import Machine
from titan_mi100.shapes.families import PRESETS
from titan_mi100.tools.new_config import METHODS, Change
from titan_mi100.workshop.measure.children import Task
from titan_mi100.workshop.measure.parts import DTYPES, NOT_RUN, PASS, UNAVAILABLE, Part, rankings

MODELS: Mapping[str, str] = {
    name if name == "debug" or "qwen" in name else f"qwen3-{name.lower()}": name for name in PRESETS
}
_HERE = "titan_mi100.workshop.measure"
# Kind of part, in order -> fraction of the total time after which no part of this kind starts or goes on, so that a
# slow kind leaves the others their time.
SHARES: Mapping[str, float] = {
    "attention": 0.4, "gemm": 0.5, "bandwidth": 0.53, "steps": 0.85, "collective": 0.93, "parity": 1.0,
}  # fmt: skip
_LADDER = ("0.6B", "1.7B", "4B", "8B")  # of each method the first and the last that fit the card are measured
_METHODS: Mapping[str, Change] = {
    "full": {}, "full, lean": METHODS["full"][2][1], "LoRA": METHODS["lora"][0][1], "QLoRA": METHODS["qlora"][0][1],
}  # fmt: skip
_LAYOUTS = {"fsdp2": {"zero_stage": 3}, "ddp": {"zero_stage": 0}}
_ONE_ROW = {"local_batch_size": 1, "gradient_accumulation_steps": 8}
# (method, layout, change): other settings of the first model (pp: see _steps); on a CPU only the first three.
_VARIANTS: Sequence[tuple[str, str, Change]] = (
    ("full", "pp", {"training": _ONE_ROW}),
    ("full", "ddp", {}),
    ("full", "fsdp2", {"activation_checkpoint": {"mode": "none"}}),
    ("full", "fsdp2", {"training": {"mixed_precision_param": "float16"}}),
    ("full", "fsdp2", {"training": _ONE_ROW}),
    ("full, compiled", "fsdp2", {"activation_checkpoint": {"mode": "selective"}, "compile": {"enable": True}}),
)


def tasks(machine: Machine, models: Sequence[str], parts: Sequence[Part]) -> Iterator[Task]:
    """All parts to measure, what matters most first.

    Args:
        models: names in PRESETS; none: by the memory of the card.
        parts: grows by the result of each task before the next one is asked for: later tasks depend on earlier ones.
    """
    ranks, lengths = machine.cards, (1024, 4096, 16384) if machine.memory else (256, 1024)
    ladder = models or (_LADDER if machine.memory else ("debug",))
    shaped = models or ladder[:1]
    yield from _attention(shaped, lengths, parts)
    for name, dtype in product(shaped, DTYPES):
        asked: dict[str, Any] = {"model": name, "tokens": lengths[0], "dtype": dtype}
        yield Task(f"gemm/{name}/{dtype}", f"{_HERE}.products:gemm", asked)
    for card in range(ranks if machine.memory else 1):
        asked = {"model": shaped[0], "tokens": lengths[0], "dtype": DTYPES[0], "most_frequent": True}
        if card:
            yield Task(f"gemm/device {card}", f"{_HERE}.products:gemm", asked, card=card)
        yield Task(f"bandwidth/device {card}", f"{_HERE}.products:bandwidth", card=card)
    yield from _steps(machine, ladder, not models, lengths[0], parts)
    refused = "" if ranks > 1 else "needs two cards; this machine has one"
    sizes = [1 << 20, 1 << 25, 1 << 28] if machine.memory else [1 << 16, 1 << 20, 1 << 24]
    for name in ("all_reduce", "all_gather", "reduce_scatter", "send_recv"):
        asked = {"operation": name, "sizes": sizes}
        yield Task(f"collective/{name}", f"{_HERE}.collectives:measure", asked, ranks, refused=refused)
    for name, size, why in (("one rank", 1, ""), (f"{ranks} ranks", ranks, refused)):
        asked = {"rows": 2 * ranks, "layouts": _LAYOUTS}
        yield Task(f"parity/{name}", f"{_HERE}.training:same_losses", asked, size, refused=why)


def _attention(models: Sequence[str], lengths: Sequence[int], parts: Sequence[Part]) -> Iterator[Task]:
    """Every length has the same number of tokens. A backend gets long rows if it computes short ones well."""
    shapes = {PRESETS[model].attention: model for model in reversed(models)}  # of equal shapes the first model's
    for dtype, seq in ((dtype, seq) for dtype in DTYPES for seq in lengths if seq == lengths[0] or dtype != "float32"):
        for (attention, model), name in product(reversed(shapes.items()), KERNELS):
            packages, prefix = KERNELS[name].packages, f"attention/{name}/{model}/{dtype}"
            refused = (
                "" if not packages or any(map(version_of, packages)) else f"not installed: {' or '.join(packages)}"
            )
            short = {part.name: part for part in parts}.get(f"{prefix}/{lengths[0]}")
            if short and short.verdict == UNAVAILABLE:
                continue  # said once
            is_good = short and short.verdict == PASS and short.found and not short.found["explicit"]
            if short and short.verdict != NOT_RUN and not is_good:
                refused = f"not tried in longer rows: {'S x S scores' if short.verdict == PASS else short.verdict}"
            shape = {"batch": lengths[-1] // seq, "seq": seq, **attention._asdict(), "dtype": dtype}
            yield Task(
                f"{prefix}/{seq}", f"{_HERE}.attention:measure", {"name": name, "shape": shape},
                seconds=240, refused=refused, optional=not KERNELS[name].is_plain,
            )  # fmt: skip


def _steps(machine: Machine, models: Sequence[str], some: bool, seq: int, parts: Sequence[Part]) -> Iterator[Task]:
    """Training steps: each method; then variants of the first model's.

    Args:
        some: of each method, only the first and the last model that fit.
    """
    ranks, gpu = machine.cards, bool(machine.memory)
    backends = {name: ranked[0]["backend"] for name, ranked in rankings(parts).items() if ranked}
    training: dict[str, Any] = {"seq_len": seq, "local_batch_size": 4 if gpu else 1, "gradient_accumulation_steps": 2}
    training["mixed_precision_param"] = "bfloat16" if gpu else "float32"

    def step(model: str, method: str, layout: str, change: Change) -> Task:
        parallelism = {**_LAYOUTS, "pp": {"pipeline_parallel_degree": ranks}}[layout] if ranks > 1 else {}
        first: Change = {"training": training, "activation_checkpoint": {"mode": "full"}, "parallelism": parallelism}
        changes = [{**first, "model": {"flavor": model}}, change]
        config: Config = reduce(with_settings, changes, Config())
        problems = [str(problem) for problem in check(config, ranks, with_files=False)]
        if gpu and not problems and not (plan := make_plan(Workload.of(config, ranks), machine.memory)).fits:
            problems = [f"does not fit: {plan.most / GIB:.1f} GiB by plan, of {machine.memory / GIB:.1f}"]
        dtype = config.training.mixed_precision_param
        changes.append({"model": {"attention_backend": backends.get(f"{models[0]}/{dtype}/{seq}", AUTO)}})
        row = {
            "model": model, "method": method, "layout": layout if ranks > 1 else "one card", "N": str(ranks),
            "m": str(config.training.local_batch_size), "GA": str(config.training.gradient_accumulation_steps),
            "ckpt": config.activation_checkpoint.mode, "bf16": "yes" if dtype == "bfloat16" else f"no ({dtype})",
        }  # fmt: skip
        return Task(
            f"steps/{model}/{method}/{row['layout']} m={row['m']} GA={row['GA']} {row['ckpt']} {dtype}",
            f"{_HERE}.training:steps", {"row": row, "changes": changes}, ranks, seconds=240,
            refused="; ".join(problems), optional=config.compile.enable,  # that needs a compiler
        )  # fmt: skip

    rows = {(name, method): step(name, method, "fsdp2", _METHODS[method]) for name in models for method in _METHODS}
    for (model, method), task in rows.items():
        fitting = [name for name in models if not rows[name, method].refused]
        if task.refused or not some or model in (fitting[0], fitting[-1]):
            yield task
    for method, layout, change in _VARIANTS if gpu else _VARIANTS[:3]:
        if layout == "pp" and ranks > 1:  # of the largest model that fits: a pipeline is for what needs memory
            pipelines = [
                step(name, method, layout, {**_METHODS[method], **change})
                for name in reversed(models)
                for method in ("full", "full, lean")
            ]
            yield next((task for task in pipelines if not task.refused), pipelines[0])
        elif ranks > 1 or layout == "fsdp2":
            yield step(models[0], method, layout, change)
