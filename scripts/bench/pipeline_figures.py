"""What scripts/bench/pipeline.py computes from the intervals that it measured, and the tables of it."""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from titan_mi100.config.layout import SCHEDULES


class Operation(NamedTuple):
    """One computation of a stage; times are of the machine's monotonic clock, in seconds."""

    kind: str  # forward, backward, weight (the second half of a zero-bubble backward), reduction (of gradients)
    stage: int
    microbatch: int  # -1: the reduction, once per step
    start: float
    end: float
    on_core: float = 0.0  # seconds in which the thread had a core: less than it took where others wanted the cores too

    @property
    def seconds(self) -> float:
        return self.end - self.start


class RankStep(NamedTuple):
    """What one rank did in one step: its schedule's start and end, and the computations in order."""

    start: float
    end: float
    operations: list[Operation]


def rank_step(start: float, end: float, operations: list[list[Any]]) -> RankStep:
    """As JSON has it, a RankStep again."""
    return RankStep(start, end, [Operation(*operation) for operation in operations])


def theory(schedule: str, ranks: int, microbatches: int) -> float | None:
    """The idle share of a pipeline of equal stages and instant transfers; None: no closed form.

    (p - 1) / (v m + p - 1): Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021.
    """
    if SCHEDULES[schedule].zero_bubble:
        return None
    return (ranks - 1) / (SCHEDULES[schedule].stages_per_rank * microbatches + ranks - 1)


def idle_shares(by_rank: Sequence[RankStep]) -> list[float]:
    """Each rank's share of one step without a computation; the step lasts from the first start to the last end."""
    seconds = max(step.end for step in by_rank) - min(step.start for step in by_rank)
    return [1 - busy(step.operations) / seconds for step in by_rank]


def busy(operations: Sequence[Operation], *kinds: str) -> float:
    """Seconds of the computations of these kinds; without any, of all."""
    return sum(operation.seconds for operation in operations if not kinds or operation.kind in kinds)


def on_core_share(operations: Sequence[Operation]) -> float:
    """Of the computations' time, how much they had a core; on a GPU it says nothing."""
    return sum(operation.on_core for operation in operations) / busy(operations)


def replay(by_rank: Sequence[Sequence[Operation]]) -> float:
    """Seconds in which the ranks do their computations in their order, each as soon as its input exists anywhere."""
    last_stage = max(operation.stage for operations in by_rank for operation in operations)
    done: dict[tuple[str, int, int], float] = {}  # when
    clocks, places = [0.0] * len(by_rank), [0] * len(by_rank)
    waiting = sum(map(len, by_rank))
    while waiting:
        before = waiting
        for rank, operations in enumerate(by_rank):
            while places[rank] < len(operations):
                kind, stage, microbatch = operations[places[rank]][:3]
                source = stage - 1 if kind == "forward" else stage + 1
                input_ready = 0.0
                if kind in ("forward", "backward") and 0 <= source <= last_stage:
                    if (kind, source, microbatch) not in done:
                        break
                    input_ready = done[kind, source, microbatch]
                clocks[rank] = max(clocks[rank], input_ready) + operations[places[rank]].seconds
                done[kind, stage, microbatch] = clocks[rank]
                places[rank] += 1
                waiting -= 1
        assert waiting < before, "the operations wait for each other"
    return max(clocks)


def bubble_rows(schedule: str, microbatches: int, steps: Sequence[Sequence[RankStep]]) -> list[dict[str, Any]]:
    """The figures of each rank, medians over the steps.

    Args:
        steps: by step, then by rank.
    """
    shares = [idle_shares(step) for step in steps]
    replays = [replay([rank.operations for rank in step]) for step in steps]
    expected = theory(schedule, len(steps[0]), microbatches)
    rows = []
    for rank in range(len(steps[0])):
        mine = [step[rank].operations for step in steps]
        idle = median(share[rank] for share in shares)
        rows.append(
            {
                "schedule": schedule,
                "microbatches": microbatches,
                "rank": rank,
                "forward": median(o.seconds for operations in mine for o in operations if o.kind == "forward"),
                "backward": median(busy(operations, "backward", "weight") for operations in mine)
                / len([o for o in mine[0] if o.kind == "backward"]),
                "reduction": median(busy(operations, "reduction") for operations in mine),
                "busy": median(map(busy, mine)),
                "step": median(max(r.end for r in step) - min(r.start for r in step) for step in steps),
                "idle": idle,
                "theory": expected,
                "difference": None if expected is None else idle - expected,
                "replay": median(1 - busy(o) / seconds for o, seconds in zip(mine, replays, strict=True)),
                "on_core": median(map(on_core_share, mine)),
            }
        )
    return rows


def bubble_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| schedule | microbatches | rank | forward | backward | reduction | busy | step | idle | theory "
        "| difference | replay | on a core |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        expected, difference = "", ""
        if row["theory"] is not None:
            expected, difference = f"{row['theory']:.1%}", f"{100 * row['difference']:+.1f}"
        lines.append(
            f"| {row['schedule']} | {row['microbatches']} | {row['rank']} | {row['forward'] * 1e3:.1f} ms "
            f"| {row['backward'] * 1e3:.1f} ms | {row['reduction'] * 1e3:.1f} ms | {row['busy']:.3f} s "
            f"| {row['step']:.3f} s | {row['idle']:.1%} | {expected} | {difference} | {row['replay']:.1%} "
            f"| {row['on_core']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def stages_table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| stage | rank | layers | parameters | forward | backward | reduction | together | on a core | AdamW "
        "| peak memory |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['stage']} | {row['rank']} | {row['layers']} | {row['parameters']:,} | {row['forward']:.2f} s "
            f"| {row['backward']:.2f} s | {row['reduction']:.2f} s | {row['busy']:.2f} s | {row['on_core']:.2f} s "
            f"| {row['optimizer']:.2f} s | {row['peak_memory_gib']:.2f} GiB |"
        )
    return "\n".join(lines) + "\n"


def slower_by(seconds: Sequence[float]) -> float:
    """How much longer the slowest stage computes than the fastest, as a share of the latter."""
    return max(seconds) / min(seconds) - 1
