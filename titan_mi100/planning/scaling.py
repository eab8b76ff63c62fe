"""The part of a step that waits: a pipeline's bubble, communication that computation does not overlap. No torch."""

from collections import Counter
from math import inf

from titan_mi100.config.layout import SCHEDULES
from titan_mi100.planning.cards import Gpu

REACHED = 0.5  # share of a link's rate that collectives reach: assumed, not measured


def bubble_share(schedule: str, ranks: int, microbatches: int) -> float:
    """The share of a step in which each of a pipeline's ranks waits."""
    waits = (ranks - 1) / SCHEDULES[schedule].stages_per_rank
    return waits / (microbatches + waits)


def exposed_seconds(once: float, spread: float, computing: float, microbatches: int) -> float:
    """Seconds of data-parallel communication that computation does not overlap.

    Args:
        once: seconds of what is sent during a single microbatch, which overlaps it.
        spread: seconds of what is sent over all microbatches.
    """
    return max(0.0, once - computing / microbatches) + max(0.0, spread - computing)


def reached(group: range, gpu: Gpu) -> float:
    """Bytes per second that a rank sends around the ring of a group.

    Between nodes, a group gets only its ranks' share of the node's network: other groups use the rest at the same
    time.
    """
    ranks = max(Counter(rank // gpu.per_node for rank in group).values())
    inside = gpu.link_gbs if ranks > 1 or len(group) == 1 else inf
    between = inf if is_inside(group, gpu.per_node) else gpu.node_gbs * ranks
    return min(inside, between) * 1e9 * REACHED


def is_inside(group: range, per_node: int) -> bool:
    """Whether the ranks of a group are on one node. Args: per_node: GPUs of a node."""
    return group[0] // per_node == group[-1] // per_node
