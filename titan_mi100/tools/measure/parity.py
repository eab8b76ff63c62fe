"""Trains on the same rows in several layouts: the losses must agree. Damaged collectives show here."""

from typing import Any

import torch.distributed as dist

from titan_mi100.config.kernels import EXPLICIT
from titan_mi100.config.settings import (
    Config,
    LRSchedulerConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from titan_mi100.data.made_up import made_up, random_rows
from titan_mi100.files.schema import if_finite
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import init_distributed
from titan_mi100.shapes.families import PRESETS

_SEQ = 128
LAYOUTS = {"fsdp2": 3, "ddp": 0}  # zero_stage


def measure(rows: int, steps: int, layouts: list[str]) -> dict[str, Any]:
    """Train a tiny model in fp32 in each layout; the result is a form.Parity. A collective.

    Args:
        rows: rows per step, one per forward; a multiple of the number of ranks.
        steps: steps per layout.
        layouts: keys of LAYOUTS.
    """
    world, spec = init_distributed(), PRESETS["debug"]
    data, runs = made_up(random_rows(rows * steps, _SEQ, spec.vocab_size, 0.5)), []
    for name in layouts:
        run = open_run(_config(LAYOUTS[name], rows // world.size, steps), world, spec=spec, data=data)
        results = [run.step() for _ in range(steps)]
        losses, norms = ([if_finite(getattr(r, value)) for r in results] for value in ("loss", "grad_norm"))
        shown = name if world.size > 1 else "one rank"
        runs.append({"layout": shown, "ranks": world.size, "losses": losses, "norms": norms})
    dist.barrier()  # no rank ends while another one still communicates
    return {"runs": runs}


def _config(zero_stage: int, accumulation: int, steps: int) -> Config:
    """Without clipping and with a large eps: clipping, and Adam with a small eps, would hide a wrong gradient scale."""
    return Config(
        model=ModelConfig(attention_backend=EXPLICIT),  # needs nothing but PyTorch; other parts compare the backends
        training=TrainingConfig(
            seq_len=_SEQ,
            gradient_accumulation_steps=accumulation,
            steps=steps,
            max_norm=0.0,
            mixed_precision_param="float32",
        ),
        optimizer=OptimizerConfig(lr=1e-3, eps=1e-3),
        lr_scheduler=LRSchedulerConfig(warmup_steps=0, decay_type="constant"),
        parallelism=ParallelismConfig(zero_stage=zero_stage),
    )
