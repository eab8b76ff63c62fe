"""Measures collectives and point-to-point transfers between the devices of a node: correctness and speed."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import groupby, permutations
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_mi100.parallel.distributed import all_gather_tensor, gather_values, reduce_scatter_tensor
from titan_mi100.tools.measure.device import use_device, wait
from titan_mi100.wording import bytes_in_words

_ROUNDS = 5
_PATTERN = 1009  # a prime, so that an element from a wrong position almost always has another value


def measure(operation: str, sizes: list[int]) -> dict[str, Any]:
    """Measure one operation. A collective.

    Args:
        operation: all_reduce, all_gather, reduce_scatter, or send_recv (from each rank to each other one).
        sizes: bytes of the larger of the two buffers, in fp32.
    """
    device = use_device()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for size in sizes:
        elements = max(1, size // 4 // ranks) * ranks
        everyone = [tuple(range(ranks))]
        for members in permutations(range(ranks), 2) if operation == "send_recv" else everyone:
            if operation == "send_recv":
                call, check = _pair(members[0], members[1], rank, elements, device)
            else:
                call, check = _collective(operation, rank, ranks, elements, device)
            wrong, times = _times(call, check, device)
            found.append({"size": 4 * elements, "ranks": list(members), "wrong": wrong, "times": times})
    return judged(operation, found)


def judged(operation: str, transfers: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdict on measured transfers, with their bus bandwidths."""
    said, bad = [], [one for one in transfers if one["wrong"]]
    for size, same in groupby(transfers, lambda one: one["size"]):
        rates = [bus_gbs(operation, size, len(one["ranks"]), one["times"]) for one in same]
        ends = sorted({f"{rate:.3g}" for rate in (min(rates), max(rates))}, key=float)
        said.append(f"{bytes_in_words(size)}: {' to '.join(ends)} GB/s")
    problems = [
        f"ranks {one['ranks']}, {bytes_in_words(one['size'])}: {one['wrong']:,} elements are wrong" for one in bad
    ]
    return {"transfers": transfers, "problem": "; ".join(problems), "said": "bus bandwidth " + ", ".join(said)}


def bus_gbs(operation: str, size: int, ranks: int, seconds: Sequence[float]) -> float:
    """Bus bandwidth in GB/s, by the formulas of nccl-tests' PERFORMANCE.md."""
    share = {"all_reduce": 2 * (ranks - 1) / ranks, "send_recv": 1.0}.get(operation, (ranks - 1) / ranks)
    return share * size / statistics.median(seconds) / 1e9


def _times(call: Callable[[], object], check: Callable[[], int], device: torch.device) -> tuple[int, list[float]]:
    """Wrong elements over all ranks and rounds, and the seconds of the slowest rank per round. A collective."""
    wrong, times = 0.0, []
    for number in range(_ROUNDS + 1):
        dist.barrier()
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        took = time.perf_counter() - started
        ranks = gather_values(torch.tensor([took, check()], dtype=torch.float64), device)
        wrong += ranks[:, 1].sum().item()
        if number:  # the first round connects the ranks and is not timed
            times.append(ranks[:, 0].max().item())
    return int(wrong), times


def _values(elements: int, rank: int, device: torch.device) -> Tensor:
    """A rank's values, (elements,): integers whose sum over a node's ranks is exact in fp32; they differ by rank."""
    return (torch.arange(elements, device=device) % _PATTERN + rank * _PATTERN).float()


def _wrong(found: Tensor, expected: Tensor) -> int:
    """Count wrong elements. Then overwrite the buffer by -1, which no result contains, for the next round."""
    count = int((found != expected).sum())
    found.fill_(-1)
    return count


def _collective(
    operation: str, rank: int, ranks: int, elements: int, device: torch.device
) -> tuple[Callable[[], object], Callable[[], int]]:
    """The operation as a call without arguments, and a function that counts the wrong elements of its result."""
    mine, part = _values(elements, rank, device), elements // ranks
    total = sum(_values(elements, other, device) for other in range(ranks))
    assert isinstance(total, Tensor)
    if operation == "all_reduce":
        buffer = mine.clone()

        def check() -> int:
            wrong = _wrong(buffer, total)
            buffer.copy_(mine)
            return wrong

        return lambda: dist.all_reduce(buffer), check
    if operation == "all_gather":
        everyone = torch.cat([_values(part, other, device) for other in range(ranks)])
        whole = torch.empty_like(everyone)
        own = _values(part, rank, device)
        return lambda: all_gather_tensor(whole, own), lambda: _wrong(whole, everyone)
    assert operation == "reduce_scatter"
    reduced = torch.empty(part, device=device)
    expected = total[rank * part : (rank + 1) * part]
    return lambda: reduce_scatter_tensor(reduced, mine), lambda: _wrong(reduced, expected)


def _pair(
    sender: int, receiver: int, rank: int, elements: int, device: torch.device
) -> tuple[Callable[[], object], Callable[[], int]]:
    """As _collective, for one pair: one rank sends, one receives, the others do nothing."""
    if rank == sender:
        values = _values(elements, sender, device)
        return lambda: dist.send(values, receiver), lambda: 0
    if rank == receiver:
        buffer, expected = torch.empty(elements, device=device), _values(elements, sender, device)
        return lambda: dist.recv(buffer, sender), lambda: _wrong(buffer, expected)
    return lambda: None, lambda: 0
