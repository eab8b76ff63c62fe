"""How long a step takes that was rehearsed: computation, what of the communication it hides, and the rest. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_mi100.config.hardware import Gpu
from titan_mi100.config.layout import SCHEDULES
from titan_mi100.config.settings import Config
from titan_mi100.config.traffic import AXES, WORLD, Traffic, Work

# Of a device's peak rate, that a step reaches while it computes: so chosen that the modelled step of Llama-3 8B (FSDP2
# over 64 MI250X GCDs, one row of 8,192 tokens each, selective recomputation) takes the published time, 1,333 tokens/s
# per GCD. Nothing else is fitted. scripts/bench/scaling.py fit computes it anew.
EFFICIENCY = 0.4293
_DATA_PARALLEL = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class StepTime:
    """Where the seconds of a step go.

    Attributes:
        computing: matrix products and attention.
        bubble: waiting for other stages of a pipeline.
        sending: by axis, all transfers, hidden or not.
        exposed: those that nothing hides: by axis, both of data parallel as "dp".
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
    """What remains of data parallel's communication behind the computation.

    Args:
        once: seconds of what is sent during one of the forwards and backwards, which hides it.
        spread: of what is sent during all of them.
        overlap: of the hardware, see Gpu.
    """
    hides = overlap * computing
    return max(0.0, once - hides / microbatches) + max(0.0, spread - hides)


def step_time(
    work: Work, gpu: Gpu, dtype: str, microbatches: int, bubble: float, efficiency: float = EFFICIENCY
) -> StepTime:
    """Of one rank. Tensor parallel and a pipeline wait for what they send; FSDP2 sends ahead.

    Args:
        dtype: of the computation, whose peak rate the device must have.
        bubble: share of the step without its communication, see bubble_share.
        efficiency: see EFFICIENCY.
    """
    computing = work.flops / (gpu.tflops[dtype] * 1e12 * efficiency)
    sending, spread = _by_axis(work.traffic, gpu), _by_axis(work.by_microbatch, gpu)
    all_spread = microbatches * sum(spread[axis] for axis in _DATA_PARALLEL)
    once = sum(sending[axis] for axis in _DATA_PARALLEL) - all_spread
    waiting = computing * bubble / (1 - bubble)
    exposed = {axis: sending[axis] for axis in (*AXES, WORLD) if axis not in _DATA_PARALLEL}
    exposed["dp"] = exposed_seconds(once, all_spread, computing + waiting, microbatches, gpu.overlap)
    return StepTime(computing, waiting, sending, exposed)


def step_of(config: Config, ranks: int, works: Sequence[Work], gpu: Gpu, efficiency: float = EFFICIENCY) -> StepTime:
    """Of a run, by its slowest rank. Args: works: of a rank of each pipeline stage."""
    layout, microbatches = config.layout(ranks), config.batch(ranks).gradient_accumulation_steps
    bubble = bubble_share(config.parallelism.pipeline_parallel_schedule, layout.pp, microbatches)
    dtype = config.training.mixed_precision_param
    times = [step_time(work, gpu, dtype, microbatches, bubble, efficiency) for work in works]
    return max(times, key=lambda time: time.seconds)


def _by_axis(traffic: Traffic, gpu: Gpu) -> dict[str, float]:
    found = dict.fromkeys((*AXES, WORLD), 0.0)
    for transfer, count in traffic.items():
        found[transfer.axis] += count * transfer.seconds(gpu)
    return found
