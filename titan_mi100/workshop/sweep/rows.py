"""The rows of a sweep: their layouts, the presets, and the config of each row. Imports no torch."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100.config.as_text import toml_value
from titan_mi100.config.check import check
from titan_mi100.config.problem import ConfigError
from titan_mi100.config.settings import Config, ParallelismConfig
from titan_mi100.planning.plan import GIB, Plan
from titan_mi100.planning.workload import with_settings
from titan_mi100.shapes.base import ModelSpec, parameter_count
from titan_mi100.shapes.families import PRESETS as MODELS
from titan_mi100.shapes.families import fingerprint
from titan_mi100.workshop.sweep.published import PUBLISHED

OWN_LAYOUT = "config"  # the layout of the config's own [parallelism]
# axis -> the setting that it sets
AXES = {
    "batch": "training.local_batch_size",
    "ga": "training.gradient_accumulation_steps",
    "tokens": "training.target_tokens_per_step",
    "ckpt": "activation_checkpoint.mode",
    "dtype": "training.mixed_precision_param",
}
EITHER = {"ga": "tokens", "tokens": "ga"}  # one of them gives the other
# settings beside the axes that time and memory of a step depend on
_SHOWN = (
    "model.attention_backend", "training.mixed_precision_reduce", "training.train_router", "optimizer.state",
    "optimizer.master", "lora.rank", "lora.base", "lora.dropout", "lora.target_modules", "lora.expert_rank",
    "memory.limit_gib", "memory.offload", "memory.offload_activations", "memory.piece_tokens",
    "compile.enable", "compile.backend",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """All that a row's figures depend on, but for the machine.

    Attributes:
        batch: rows per data-parallel rank and forward (B_micro).
        tokens: of a step, over all ranks (T_eff); 0: the layout does not fit the processes.
        model: short name of its shape, or its folder's name and size.
        settings: those beside the axes that are not the default's, in words.
        digest: of the model's shape and of all settings that a step depends on.
    """

    layout: str
    processes: int
    batch: int
    ga: int
    tokens: int
    checkpointing: str
    dtype: str
    model: str
    seq: int
    settings: str
    digest: str
    steps: int
    warmup: int

    def __str__(self) -> str:
        words = f"{self.layout} x{self.processes}, B_micro {self.batch}, GA {self.ga}, ckpt {self.checkpointing}"
        return f"{words}, {self.dtype}"


def _pp(degree: int, schedule: str = "1F1B") -> dict[str, Any]:
    return {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": schedule}


# the processes it needs, a multiple of: a mixed layout is one of 2 with what the others leave -> [parallelism]
LAYOUTS: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "fsdp2": (1, lambda n: {"zero_stage": 3}),
    "fsdp2-zero2": (1, lambda n: {"zero_stage": 2}),
    "fsdp2-zero1": (1, lambda n: {"zero_stage": 1}),
    "fsdp2+pp": (4, lambda n: _pp(2)),
    "pp": (2, _pp),
    "pp-gpipe": (2, lambda n: _pp(n, "GPipe")),
    "pp-interleaved": (2, lambda n: _pp(n, "Interleaved1F1B")),
    "ddp": (1, lambda n: {"zero_stage": 0}),
    # compressed from the second step on, so that all timed steps are
    "ddp+powersgd": (1, lambda n: {"zero_stage": 0, "powersgd_rank": 1, "powersgd_start_step": 2}),
    "hsdp": (4, lambda n: {"data_parallel_replicate_degree": 2}),
    "tp": (2, lambda n: {"tensor_parallel_degree": n}),
    "fsdp2+tp": (4, lambda n: {"tensor_parallel_degree": 2}),
    "cp": (2, lambda n: {"context_parallel_degree": n}),
}


class Preset(NamedTuple):
    """Args: layouts: by the number of processes. cells: of each layout, values of AXES."""

    layouts: Callable[[int], Sequence[str]]
    cells: Sequence[Mapping[str, Any]]
    tokens: int = 0  # of a step, unless --tokens or --ga says otherwise


_MICRO = ((1, "none"), (1, "full"), (8, "full"), (16, "full"))  # B_micro and checkpointing of an empty results table
PRESETS = {
    "teff": Preset(
        lambda n: ("fsdp2", "fsdp2+pp" if n >= 4 and n % 2 == 0 else "pp"),
        [{"batch": batch, "ckpt": mode} for batch, mode in _MICRO],
        tokens=102_400,  # S 1024 x B_micro 1 x GA 50 x N 2
    ),
    "published": Preset(
        lambda n: ("pp",), [dict(zip(("batch", "ga", "ckpt", "dtype"), row, strict=True)) for row in PUBLISHED]
    ),
    "debug": Preset(lambda n: tuple(LAYOUTS), [{"batch": 2, "ga": 4, "ckpt": "none", "dtype": "float32"}]),
}


def rows_of(
    base: Config, processes: int, layouts: Sequence[str], cells: Sequence[Mapping[str, Any]],
    axes: Mapping[str, Sequence[Any]], **common: Any,
) -> dict[Row, Config]:  # fmt: skip
    """Every row with its config: each layout with each cell and each combination of the axes, the last changing first.

    Args:
        common: Row's steps and warmup.
    """
    spec, configs = base.spec(), {}
    for layout, cell, combination in product(layouts, cells, product(*axes.values())):
        chosen = {**cell, **dict(zip(axes, combination, strict=True))}
        row, config = _row(base, spec, processes, layout, chosen, common)
        configs[row] = config
    return configs


def _row(
    base: Config, spec: ModelSpec, processes: int, layout: str, axes: dict[str, Any], common: dict[str, Any]
) -> tuple[Row, Config]:
    config = base
    for axis, choice in {**axes, **{other: 0 for axis in axes if (other := EITHER.get(axis))}}.items():
        section, key = AXES[axis].split(".")
        config = with_settings(config, {section: {key: choice}})
    if layout != OWN_LAYOUT:
        config = replace(config, parallelism=ParallelismConfig(**LAYOUTS[layout][1](processes)))
    tokens, training = 0, config.training
    try:
        batch = config.batch(processes)
        ga, tokens = batch.gradient_accumulation_steps, batch.global_batch_size * training.seq_len
        config = with_settings(config, {"training": {"gradient_accumulation_steps": ga, "target_tokens_per_step": 0}})
        if layout in ("pp", "fsdp2+pp") and ga < config.parallelism.pipeline_parallel_degree:
            config = with_settings(config, {"parallelism": {"pipeline_parallel_schedule": "GPipe"}})
            layout = f"{layout}-gpipe"
        elif layout == OWN_LAYOUT:
            layout = config.layout(processes).describe()
    except ConfigError:  # the layout does not fit the processes, as `refusal` says
        ga = training.gradient_accumulation_steps
    flavor = next((name for name, shape in MODELS.items() if shape == spec), "")
    folder = Path(base.checkpoint.initial_load_path).name
    settings = [(name, attrgetter(name)(base), attrgetter(name)(Config())) for name in _SHOWN]
    changed = [f"{name} = {toml_value(setting)}" for name, setting, default in settings if setting != default]
    row = Row(
        layout=layout, processes=processes, batch=training.local_batch_size, ga=ga, tokens=tokens,
        checkpointing=config.activation_checkpoint.mode, dtype=training.mixed_precision_param,
        model=flavor or f"{folder} ({parameter_count(spec) / 1e6:,.1f}M)", seq=training.seq_len,
        settings=", ".join(changed), digest=_digest(config, spec), **common,
    )  # fmt: skip
    return row, config


def _digest(config: Config, spec: ModelSpec) -> str:
    names = ("training", "optimizer", "parallelism", "activation_checkpoint", "memory", "compile", "lora")
    about = [fingerprint(spec), config.model.attention_backend, *(asdict(getattr(config, name)) for name in names)]
    return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:12]


def refusal(row: Row, config: Config) -> str:
    """Why the trainer would not start the row; empty: it would."""
    least = LAYOUTS.get(row.layout.removesuffix("-gpipe"), (1,))[0]
    if row.processes < least or (least == 4 and row.processes % 2):
        even = ", an even number" if least == 4 else ""
        return f"{row.layout} needs at least {least} processes{even}, not {row.processes}"
    return "; ".join(map(str, check(config, row.processes, with_files=False)))


def verdict(plan: Plan) -> tuple[bool, str]:
    """Whether the trainer would start such a run, and what `titan-mi100 plan` says of its memory."""
    starts = plan.least <= plan.card or plan.config.memory.on_overflow == "warn"
    words = f"{'fits' if plan.fits else 'does not fit'}: {plan.most / GIB:.1f} of {plan.card / GIB:.1f} GiB"
    return starts, words + f"; tried, as it may be {plan.least / GIB:.1f}" * (starts and not plan.fits)
