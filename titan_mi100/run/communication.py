"""How long the collectives of a step take, and how much of that time is exposed, measured with torch's profiler."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from titan_mi100.parallel.distributed import World
from titan_mi100.run.intervals import Interval, subtract, union
from titan_mi100.run.trace_summary import COLLECTIVE_KERNEL
from titan_mi100.trainer import StepResult

PROFILED_STEPS = 2  # after the timed ones: profiling slows a step
WINDOW = "titan_mi100: profiled steps"
COPY = re.compile("^Mem(cpy|set)|^Copy(Host|Device)|^FillBuffer")  # on the device, but no kernel


def communication(step: Callable[[], StepResult], world: World) -> dict[str, Any]:
    """Milliseconds per step in collectives: of each rank, and the maximum over ranks. A collective."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (world.device.type == "cuda")
    # the profiler's first step pays for its start, and is not kept
    with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=1), acc_events=True) as profiler:
        step()
        profiler.step()
        dist.barrier()  # the ranks' profilers start at different times; that wait is no part of the step
        with record_function(WINDOW):
            results = [step() for _ in range(PROFILED_STEPS)]
    found = collective_times(profiler.events() or [], on_device=world.device.type == "cuda")
    by_rank: list[tuple[float, float]] = [(0.0, 0.0)] * world.size
    dist.all_gather_object(by_rank, tuple(microseconds / 1000 / PROFILED_STEPS for microseconds in found))
    total, exposed = ([rank[kind] for rank in by_rank] for kind in (0, 1))
    return {
        "comm_ms": max(total),
        "comm_exposed_ms": max(exposed),
        "comm_ms_by_rank": total,
        "comm_exposed_ms_by_rank": exposed,
        "profiled_step_ms": 1000 * sum(result.seconds for result in results) / PROFILED_STEPS,
    }


def collective_times(events: Iterable[Any], on_device: bool) -> tuple[float, float]:
    """Time in collectives inside the profiled window, in the events' unit: total, and exposed.

    Args:
        events: torch.autograd.profiler_util.FunctionEvent.
        on_device: count GPU kernels; else events on the host.

    A collective is exposed while no computation runs at the same time.

    On a GPU: communication is the sum of NCCL's or RCCL's kernels; computation is any other kernel on any stream,
    without copies. The profiler also shows kernel names as annotations, which span the gaps between kernels: ignored.

    On the host: a `gloo:*` event, on gloo's own threads, lasts from posting an operation until it is done, including
    the wait for other ranks. `c10d::*` and `FSDP::*` events mostly just post operations. Computation is `aten::*` on
    the main thread, without `wait_tensor` inside it. A pipeline schedule posts many receives long before it needs them,
    and their sum would be many times the step. So here communication is the time in which any operation is in flight.
    """
    events = list(events)
    (window,) = (e for e in events if e.name == WINDOW and e.device_type == DeviceType.CPU)
    if on_device:
        kernels = [e for e in events if e.device_type != DeviceType.CPU and not e.is_user_annotation]
        kernels = [e for e in kernels if not COPY.match(e.name)]
        comm = _intervals(e for e in kernels if COLLECTIVE_KERNEL.search(e.name))
        compute = _intervals(e for e in kernels if not COLLECTIVE_KERNEL.search(e.name))
    else:
        comm = union(_intervals(e for e in events if e.name.startswith("gloo:")))
        mine = [e for e in events if e.thread == window.thread]
        waits = _intervals(e for e in mine if e.name.endswith("::wait_tensor"))
        compute = subtract(_intervals(e for e in mine if e.name.startswith("aten::")), waits)
    (span,) = _intervals([window])
    comm = [cut for interval in comm if (cut := (max(interval[0], span[0]), min(interval[1], span[1])))[0] < cut[1]]
    return sum(end - start for start, end in comm), sum(end - start for start, end in subtract(comm, compute))


def _intervals(events: Iterable[Any]) -> list[Interval]:
    return [(e.time_range.start, e.time_range.end) for e in events]
