"""One row of a sweep, measured by every process of a job of its own: the trainer's own parts on random rows."""

import os
from typing import Any

import numpy as np
import torch.distributed as dist

from titan_mi100.config.load import load_config
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import init_distributed
from titan_mi100.planning.workload import with_settings
from titan_mi100.workshop.made_up import made_up, random_rows
from titan_mi100.workshop.measure.communication import communication
from titan_mi100.workshop.sweep.table import SUPERVISED

# what a run reads or writes beside its steps; the weights are random, which changes no time of a dense model's step
_NO_FILES: dict[str, dict[str, Any]] = {
    "checkpoint": {"initial_load_path": ""}, "lora": {"initial_load_path": ""},
    "validation": {"freq": 0, "prompts": 0, "patience": 0, "metric": "loss"},
}  # fmt: skip


def measure(config_file: str, steps: int, warmup: int) -> dict[str, Any]:
    """Times, memory and rates of the config's step, by keys of metrics.jsonl. A collective."""
    config = load_config(["--job.config_file", config_file], int(os.environ.get("WORLD_SIZE", "1")), with_files=False)
    own = config.memory.offload == "weights" or config.parallelism.powersgd_rank > 0  # as in train.py
    world = init_distributed(has_own_collectives=own)
    spec, rows = config.spec(), config.batch(world.size).global_batch_size
    # one step's rows, which every step learns again
    prepared = made_up(random_rows(rows, config.training.seq_len, spec.vocab_size, SUPERVISED))
    run = open_run(with_settings(config, _NO_FILES), world, spec=spec, data=prepared)
    results = [run.step() for _ in range(warmup + steps)][warmup:]
    milliseconds = [1000 * step.seconds for step in results]
    low, q1, median, q3, high = np.percentile(milliseconds, (0, 25, 50, 75, 100)).tolist()
    middle = min(results, key=lambda step: abs(1000 * step.seconds - median))
    shared = communication(run.trainer.step, world)
    dist.barrier()  # no rank ends while another one still communicates
    return {
        "step_ms": median, "step_ms_min": low, "step_ms_q1": q1, "step_ms_q3": q3, "step_ms_max": high,
        "tokens": middle.tokens, "tokens_per_second": 1000 * middle.tokens / median,
        "peak_memory_gib": results[-1].peak_memory_gib, "mfu": run.forecast.mfu(middle), **shared,
    }  # fmt: skip
