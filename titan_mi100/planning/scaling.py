"""The part of a step that waits: a pipeline's bubble, communication that computation does not overlap. No torch."""

from titan_mi100.config.layout import SCHEDULES


def bubble_share(schedule: str, ranks: int, microbatches: int) -> float:
    """The share of a step in which each of a pipeline's ranks waits."""
    waits = (ranks - 1) / SCHEDULES[schedule].stages_per_rank
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
