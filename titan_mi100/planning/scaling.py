"""Predicted time of a rehearsed step: computation, and the communication that it does not hide. Imports no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_mi100.config.layout import AXES, DATA_PARALLEL, SCHEDULES, Batch, Layout
from titan_mi100.planning.cards import Gpu
from titan_mi100.planning.traffic import WORLD, Traffic, Work

# Share of a device's peak rate that a step reaches while it computes. Fitted so that the modelled step of Llama-3 8B
# (FSDP2 over 64 MI250X GCDs, one row of 8,192 tokens each, selective recomputation) takes the published time: 1,333
# tokens/s per GCD. It is the only fitted number; `scripts/bench/scaling.py fit` computes it again.
EFFICIENCY = 0.4293


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of a step go.

    Attributes:
        computing: matrix products and attention.
        bubble: waiting for other stages of a pipeline.
        sending: seconds of all transfers by axis, overlapped or not.
        exposed: seconds that are not overlapped, by axis; both data-parallel axes together are "dp".
    """

    computing: float
    bubble: float
    sending: Mapping[str, float]
    exposed: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return self.computing + self.bubble + sum(self.exposed.values())


def bubble_share(schedule: str, pp: int, microbatches: int) -> float:
    """The share of a step in which a pipeline's rank waits."""
    waits = (pp - 1) / SCHEDULES[schedule].stages_per_rank
    return waits / (microbatches + waits)


def exposed_seconds(once: float, spread: float, computing: float, microbatches: int, overlap: float) -> float:
    """Seconds of data-parallel communication that computation does not overlap.

    Args:
        once: seconds of what is sent during a single microbatch, which overlaps it.
        spread: seconds of what is sent over all microbatches.
        overlap: see Gpu.overlap.
    """
    hides = overlap * computing
    return max(0.0, once - hides / microbatches) + max(0.0, spread - hides)


def step_time(
    work: Work, gpu: Gpu, dtype: str, microbatches: int, bubble: float, efficiency: float = EFFICIENCY
) -> StepTime:
    """Time of one rank. Tensor and pipeline parallel wait for their transfers; FSDP2 overlaps them.

    Args:
        dtype: dtype of the computation; gpu.tflops must have it.
        bubble: see bubble_share.
        efficiency: see EFFICIENCY.
    """
    computing = work.flops / (gpu.tflops[dtype] * 1e12 * efficiency)
    sending, spread = _by_axis(work.traffic, gpu), _by_axis(work.by_microbatch, gpu)
    all_spread = microbatches * sum(spread[axis] for axis in DATA_PARALLEL)
    once = sum(sending[axis] for axis in DATA_PARALLEL) - all_spread
    waiting = computing * bubble / (1 - bubble)
    exposed = {axis: sending[axis] for axis in (*AXES, WORLD) if axis not in DATA_PARALLEL}
    exposed["dp"] = exposed_seconds(once, all_spread, computing + waiting, microbatches, gpu.overlap)
    return StepTime(computing, waiting, sending, exposed)


def step_of(
    schedule: str, layout: Layout, batch: Batch, dtype: str, works: Sequence[Work], gpu: Gpu,
    efficiency: float = EFFICIENCY,
) -> StepTime:  # fmt: skip
    """Time of a run's step: that of its slowest rank. Args: works: one for each pipeline stage."""
    microbatches = batch.gradient_accumulation_steps
    bubble = bubble_share(schedule, layout.pp, microbatches)
    times = [step_time(work, gpu, dtype, microbatches, bubble, efficiency) for work in works]
    return max(times, key=lambda time: time.seconds)


def _by_axis(traffic: Traffic, gpu: Gpu) -> dict[str, float]:
    found = dict.fromkeys((*AXES, WORLD), 0.0)
    for transfer, count in traffic.items():
        found[transfer.axis] += count * transfer.seconds(gpu)
    return found
