"""How long the collectives of a step take, and how much of that time is exposed, measured with torch's profiler."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch.distributed as dist
from torch.profiler import profile, record_function, schedule

from titan_mi100.config.settings import TRACED_STEP
from titan_mi100.device import accelerator
from titan_mi100.parallel.distributed import World
from titan_mi100.trainer import StepResult
from titan_mi100.workshop.summarise_trace import summarise

PROFILED_STEPS = 2  # after the timed ones: profiling slows a step


def communication(step: Callable[[], StepResult], world: World) -> dict[str, Any]:
    """Milliseconds per step in collectives: of each rank, and the maximum over ranks. A collective.

    In flight at once counts once: a pipeline posts many receives long before it needs them.
    """
    # the profiler's first step pays for its start, and is not kept
    with profile(
        activities=accelerator.activities(world.device), schedule=schedule(wait=0, warmup=1, active=1), acc_events=True
    ) as profiler:
        step()
        profiler.step()
        dist.barrier()  # the ranks' profilers start at different times; that wait is no part of the step
        with record_function(f"{TRACED_STEP}window"):
            results = [step() for _ in range(PROFILED_STEPS)]
    with TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        summary = summarise(json.loads(Path(folder, "trace.json").read_bytes())["traceEvents"])
    by_rank: list[tuple[float, float]] = [(0.0, 0.0)] * world.size
    dist.all_gather_object(by_rank, tuple(1000 * s / PROFILED_STEPS for s in (summary.communication, summary.exposed)))
    total, exposed = ([rank[kind] for rank in by_rank] for kind in (0, 1))
    return {
        "comm_ms": max(total),
        "comm_exposed_ms": max(exposed),
        "comm_ms_by_rank": total,
        "comm_exposed_ms_by_rank": exposed,
        "profiled_step_ms": 1000 * sum(result.seconds for result in results) / PROFILED_STEPS,
    }
