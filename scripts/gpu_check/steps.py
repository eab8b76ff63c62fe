"""Training steps of published shapes by the trainer's own code, on random rows and weights."""

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from gpu_check.sections import Training
from titan_mi100.attention.choice import Choice
from titan_mi100.device import accelerator
from titan_mi100.open_run import model as opening
from titan_mi100.open_run.run import Run
from titan_mi100.parallel.distributed import init_distributed
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import PRESETS
from titan_mi100.weights import load
from titan_mi100.workshop.measure.training import on_random_rows, timed

_DRAWN = 1 << 22  # different random weights
_LARGEST, _WIDTH = 10, 70  # kernels that are listed, characters of a name


def measure(**training: Any) -> dict[str, Any]:
    """Measure steps: time, memory against the plan, losses, host waits, and the largest kernels of a profiled one.

    Args:
        training: the fields of sections.Training.
    """
    asked, world = Training(**training), init_distributed()
    torch._dynamo.reset()  # the number of compiled graphs is limited, and counts those of earlier runs
    with pooled_weights(), attention_without_trial(asked.attention):
        run = on_random_rows(changes_of(asked), world, 1, spec_of(asked.model, asked.layers))
    spec = f"{asked.model}, {asked.layers} layers" if asked.layers else asked.model
    row = {
        "model": spec, "method": asked.method, "layout": "one card", "N": "1", "m": str(asked.batch),
        "GA": str(asked.forwards), "ckpt": asked.checkpointing, "seq": str(asked.seq), "attention": asked.attention,
        "bf16": "yes" if asked.dtype == "bfloat16" else f"no ({asked.dtype})",
    }  # fmt: skip
    first = run.step()
    measured = timed(run, row)
    if not measured["losses"][-1] < first.loss:
        measured["problem"] = f"the loss does not fall: {first.loss:.3f} to {measured['losses'][-1]:.3f}"
    measured["said"] += f", loss {first.loss:.3f} to {measured['losses'][-1]:.3f}"
    lines = host_waits(run) if accelerator.is_cuda(world.device) else []
    if asked.is_profiled:
        lines += largest_kernels(run, measured["seconds"])
    run.close()
    return {**measured, "lines": lines}


def spec_of(model: str, layers: int) -> ModelSpec:
    """The shape of a model. Args: layers: its first layers only; 0: all."""
    spec: Any = PRESETS[model]
    if not layers:
        return spec  # type: ignore[no-any-return]
    kinds = {"layer_types": spec.layer_types[:layers]} if hasattr(spec, "layer_types") else {}
    return replace(spec, num_hidden_layers=layers, **kinds)  # type: ignore[no-any-return]


def changes_of(training: Training) -> list[dict[str, Any]]:
    """The changes of the default config."""
    rows = {"seq_len": training.seq, "local_batch_size": training.batch, "mixed_precision_param": training.dtype}
    return [
        {
            "model": {"attention_backend": training.attention},
            "training": {**rows, "gradient_accumulation_steps": training.forwards, "steps": 1_000_000},
            "activation_checkpoint": {"mode": training.checkpointing},
            "optimizer": {"lr": 1e-4}, "lr_scheduler": {"warmup_steps": 0, "decay_type": "constant"},
        },
        training.changes,
    ]  # fmt: skip


@contextmanager
def pooled_weights() -> Iterator[None]:
    """Random weights are taken from one pool of numbers, and matrices of one shape are quantized once: to draw and
    quantize those of 8B on the host takes minutes.
    """
    draw, quantize = load.initial_values, load.quantize
    pool = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0))
    quantized: dict[Any, Any] = {}

    def from_pool(spec: ModelSpec, seed: int, name: str, shape: Any, offset: Any, size: Any) -> torch.Tensor:
        if spec.parameters[name].start != "normal":
            return draw(spec, seed, name, shape, offset, size)
        elements = torch.Size(size).numel()
        return (pool * spec.initializer_range).repeat(-(-elements // _DRAWN))[:elements].view(size)

    def once(weight: torch.Tensor, dtype: torch.dtype) -> Any:
        key = weight.shape, dtype
        if key not in quantized:
            quantized[key] = quantize(weight, dtype)
        return quantized[key]

    load.initial_values, load.quantize = from_pool, once
    try:
        yield
    finally:
        load.initial_values, load.quantize = draw, quantize


@contextmanager
def attention_without_trial(name: str) -> Iterator[None]:
    """The attention backend of this name, with the launch that `attention.speed` found fastest: the trials of all
    backends for each shape of a run would take minutes.
    """
    choose = opening.choose

    def chosen(_: str, shape: Any, device: Any, arch: str, *__: Any) -> tuple[Choice, list[str]]:
        return Choice(name, "the check names it", arch.split(":")[0], fastest_launch(name, shape.head_dim)), []

    opening.choose = chosen
    try:
        yield
    finally:
        opening.choose = choose


def fastest_launch(name: str, head_dim: int) -> str:
    """What an earlier task has found for the backend; "": the first candidate."""
    note = Path(os.environ["TITAN_GPU_CHECK"]) / f"{name}-{head_dim}"
    return note.read_text() if note.exists() else ""


def host_waits(run: Run) -> list[str]:
    """Where the host waits for the device in a step, by torch's own warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchronizing" in str(warning.message)]
    places = Counter(f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits)
    return [f"{len(waits)} host waits a step: " + ", ".join(f"{n} at {place}" for place, n in places.most_common(5))]


def largest_kernels(run: Run, seconds: float) -> list[str]:
    """The kernels that take most of a step; on a CPU the operators. Args: seconds: of a step without the profiler."""
    device = run.world.device
    with profile(activities=accelerator.activities(device)) as profiler:
        run.step()
        accelerator.synchronize(device)
    # microseconds on the device; an operator's own row would count its kernels a second time
    rows = [row for row in profiler.key_averages() if not accelerator.is_gpu(device) or row.device_type.name != "CPU"]
    times = {row.key: row.self_device_time_total or row.self_cpu_time_total for row in rows}
    calls, busy = {row.key: row.count for row in rows}, sum(times.values()) / 1e6
    total = f"{sum(calls.values()):,} kernels of {1000 * busy:,.0f} ms in a step of {1000 * seconds:,.0f} ms"
    largest = sorted(times, key=lambda key: -times[key])[:_LARGEST]
    return [total, *(f"{times[key] / busy / 1e6:5.1%} {calls[key]:6,} x {key[:_WIDTH]}" for key in largest)]
