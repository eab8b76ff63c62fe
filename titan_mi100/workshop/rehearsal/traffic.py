"""Communication of a step: which collective, over which mesh axis, over which link. Imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from titan_mi100.config.layout import AXES, CONTEXT_PARALLEL, Layout
from titan_mi100.planning.scaling import is_inside

WORLD = "world"
_RING = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-reduce": 2.0, "broadcast": 1.0, "all-to-all": 1.0}
OPERATIONS = (*_RING, "send", "receive", "barrier")


@dataclass(frozen=True)
class Transfer:
    """A rank's part in one collective.

    Attributes:
        axis: mesh axis; WORLD: a group along no single axis, such as all ranks.
        operation: one of OPERATIONS.
        group: the ranks that take part, at least two.
        payload: bytes: the whole result of an all-gather, the whole input of a reduce-scatter, else the tensor.
    """

    axis: str
    operation: str
    group: range
    payload: int

    @property
    def ring_bytes(self) -> float:
        """Bytes that the rank sends if the operation runs around a ring."""
        others = len(self.group) - 1
        if self.operation == "send":
            return float(self.payload)
        return _RING.get(self.operation, 0.0) * self.payload * others / len(self.group)

    def link(self, per_node: int) -> str:
        """Location of its bytes' path: the slowest link of the ring. Args: per_node: GPUs of a node."""
        return "inside a node" if is_inside(self.group, per_node) else "between nodes"


Traffic = Mapping[Transfer, int]  # transfer -> how often a rank does it in a step


@dataclass(frozen=True)
class Work:
    """Products and transfers of a rank in a step.

    Attributes:
        flops: FLOPs of its matrix products and attention, recomputation included.
        traffic: all of its transfers.
        by_microbatch: transfers of a middle microbatch, neither the first nor the last; empty if there is only one.
    """

    flops: float
    traffic: Traffic
    by_microbatch: Traffic


def axis_of(group: range, layout: Layout, operation: str) -> str:
    """The axis along which a group of several ranks lies; WORLD if it lies along no single axis of the mesh. Context
    parallel's ranks lie along dp_shard, where FSDP2 gathers and reduce-scatters.
    """
    stride = 1
    for name, size in reversed(layout.mesh().items()):
        if stride <= group.step and group[-1] - group[0] < stride * size:
            is_context = name == "dp_shard" and operation in ("all-to-all", "all-reduce")
            return CONTEXT_PARALLEL if is_context else name
        stride *= size
    return WORLD


def extrapolated(few: Traffic, more: Traffic, microbatches: tuple[int, int], wanted: int) -> Traffic:
    """The traffic of a step with `wanted` microbatches, by linear extrapolation from two counts.

    Args:
        few, more: counted with microbatches[0] and microbatches[1]; a transfer may be missing in one of them.

    Raises:
        AssertionError: the number of transfers per microbatch is not whole.
    """
    added, rest = microbatches[1] - microbatches[0], wanted - microbatches[0]
    traffic = {}
    for transfer in {**few, **more}:
        change, remainder = divmod((more.get(transfer, 0) - few.get(transfer, 0)) * rest, added)
        assert not remainder, transfer
        traffic[transfer] = few.get(transfer, 0) + change
    return traffic


def by_axis(traffic: Traffic) -> Iterator[tuple[Transfer, int, int, float]]:
    """Totals by axis, operation and group, for a table: one transfer of the group; count, payload, ring bytes."""
    rows: dict[tuple[str, str, range], list[tuple[Transfer, int]]] = {}
    for transfer, count in traffic.items():
        rows.setdefault((transfer.axis, transfer.operation, transfer.group), []).append((transfer, count))
    order = {name: index for index, name in enumerate((*AXES, WORLD))}
    for key in sorted(rows, key=lambda key: (order[key[0]], OPERATIONS.index(key[1]), key[2].start, key[2].stop)):
        transfers = rows[key]
        payload = sum(count * transfer.payload for transfer, count in transfers)
        ring = sum(count * transfer.ring_bytes for transfer, count in transfers)
        yield transfers[0][0], sum(count for _, count in transfers), payload, ring
