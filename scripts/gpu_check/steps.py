"""Training steps of published shapes by the trainer's own code, on random rows and weights."""

import math
import os
import warnings
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from gpu_check.sections import RESULTS, Training
from titan_mi100.attention.choice import Choice
from titan_mi100.config.kernels import OWN
from titan_mi100.device import accelerator
from titan_mi100.open_run import model as opening
from titan_mi100.open_run.run import Run
from titan_mi100.parallel.distributed import init_distributed
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import PRESETS
from titan_mi100.weights import load
from titan_mi100.workshop.measure import parts
from titan_mi100.workshop.measure.training import on_random_rows, timed

_DRAWN = 1 << 22  # different random weights


def measure(**training: Any) -> dict[str, Any]:
    """Measure steps: time, memory against the plan, losses, host waits, and the largest kernels of a profiled one.

    Args:
        training: the fields of sections.Training.
    """
    asked = Training(**training)
    run = open_run(asked)
    dtype = "yes" if asked.dtype == "bfloat16" else f"no ({asked.dtype})"
    row = {"model": asked.model + f", {asked.layers} layers" * bool(asked.layers), "method": asked.method, "N": "1",
           "seq": str(asked.seq), "m": str(asked.batch), "GA": str(asked.forwards), "ckpt": asked.checkpointing,
           "attention": asked.attention, "bf16": dtype}  # fmt: skip
    first, measured = run.step().loss, timed(run, row)
    last = measured["losses"][-1] or math.inf
    lines = host_waits(run) if accelerator.is_cuda(run.world.device) else []
    lines += largest_kernels(run, measured["seconds"]) if asked.profiled else []
    run.close()
    problem = measured["problem"] or ("" if last <= first else "the loss rises")
    measured["said"] += f", loss {first:.3f} to {last:.3f}"
    return {**measured, "lines": lines, "problem": problem}


def open_run(asked: Training, *further: dict[str, Any]) -> Run:
    """Open a run on rows that every step repeats. Args: further: changes of the config."""
    torch._dynamo.reset()  # the number of compiled graphs is limited, and counts those of earlier runs
    rows = {"seq_len": asked.seq, "local_batch_size": asked.batch, "mixed_precision_param": asked.dtype}
    usual = {"training": {**rows, "gradient_accumulation_steps": asked.forwards, "steps": 1_000_000},
             "model": {"attention_backend": asked.attention}, "activation_checkpoint": {"mode": asked.checkpointing},
             "optimizer": {"lr": 1e-4}, "lr_scheduler": {"warmup_steps": 0, "decay_type": "constant"}}  # fmt: skip
    spec: Any = PRESETS[asked.model]
    if asked.layers:
        kinds = {"layer_types": spec.layer_types[: asked.layers]} if hasattr(spec, "layer_types") else {}
        spec = replace(spec, num_hidden_layers=asked.layers, **kinds)
    take_shortcuts()
    return on_random_rows([usual, dict(asked.changes), *further], init_distributed(), 1, spec)


@cache
def take_shortcuts() -> None:
    """Let this process open runs in seconds instead of minutes. Random weights come from one pool of numbers, and
    matrices of one shape are quantized once. Attention needs no trial: its launch is the fastest in the certificate.
    """
    draw, quantize, quantized = load.initial_values, load.quantize, dict[Any, Any]()
    pool = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0))

    def from_pool(spec: ModelSpec, seed: int, name: str, shape: Any, offset: Any, size: Any) -> torch.Tensor:
        if spec.parameters[name].start != "normal":
            return draw(spec, seed, name, shape, offset, size)
        elements = torch.Size(size).numel()
        return (pool * spec.initializer_range).repeat(-(-elements // _DRAWN))[:elements].view(size)

    def once(weight: torch.Tensor, dtype: torch.dtype) -> Any:
        key = weight.shape, dtype
        quantized[key] = quantized.get(key) or quantize(weight, dtype)
        return quantized[key]

    load.initial_values, load.quantize, opening.choose = from_pool, once, choose  # type: ignore[assignment]


def choose(wanted: str, shape: Any, lengths: Any, device: torch.device, arch: str, *_: Any) -> tuple[Choice, list[str]]:
    """The backend that is wanted, with its newest launch in the certificate; without one, its first candidate."""
    known = parts.measured(parts.read(Path(os.environ[RESULTS]) / parts.CERTIFICATE)[1], "attention kernels")
    launches = [part["launch"] for part in known if part["head_dim"] == shape.head_dim and wanted == OWN]
    launch = next(filter(None, reversed(launches)), "")
    return Choice(wanted, "the check names it", arch.split(":")[0], launch), []


def host_waits(run: Run) -> list[str]:
    """Where the host waits for the device in a step, by torch's own warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        run.step()
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchronizing" in str(w.message)]
    return [f"{len(waits)} host waits in a step", *(f"{n:6} at {line}" for line, n in Counter(waits).most_common(5))]


def largest_kernels(run: Run, seconds: float) -> list[str]:
    """The kernels that take most of a step; on a CPU the operators. Args: seconds: of a step without the profiler."""
    device = run.world.device
    with profile(activities=accelerator.activities(device)) as profiler:
        run.step()
        accelerator.synchronize(device)
    # on a GPU without the rows of operators, which would count their kernels a second time
    rows = [row for row in profiler.key_averages() if not accelerator.is_gpu(device) or row.device_type.name != "CPU"]
    listed = sorted(((row.self_device_time_total or row.self_cpu_time_total, row) for row in rows), key=lambda x: -x[0])
    busy, calls = sum(us for us, _ in listed) / 1e6, sum(row.count for row in rows)
    total = f"{calls:,} kernels, {1000 * busy:,.0f} ms together, in a step of {1000 * seconds:,.0f} ms"
    return [total, *(f"{us / busy / 1e6:5.1%} {row.count:6,} x {row.key[:70]}" for us, row in listed[:10])]
