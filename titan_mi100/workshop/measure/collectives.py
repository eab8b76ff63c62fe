"""Measures collectives and point-to-point transfers between the devices of a node: correctness and speed."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, permutations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_mi100.device import accelerator
from titan_mi100.parallel.distributed import all_gather_tensor, gather_values, init_distributed, reduce_scatter_tensor
from titan_mi100.wording import bytes_in_words

_ROUNDS = 5
_PATTERN = 1009  # a prime, so that an element from a wrong position almost always has another value


def measure(operation: str, sizes: list[int]) -> dict[str, Any]:
    """Measure one operation. A collective.

    Args:
        operation: all_reduce, all_gather, reduce_scatter, or send_recv (from each rank to each other one).
        sizes: bytes of the larger of the two buffers, in fp32.
    """
    world, transfers = init_distributed(), []
    device, rank, ranks = world.device, world.rank, world.size
    for size in sizes:
        elements = max(1, size // 4 // ranks) * ranks
        for members in permutations(range(ranks), 2) if operation == "send_recv" else [range(ranks)]:
            wrong, times = _times(_transfer(operation, members, rank, elements, device), device)
            transfers.append({"size": 4 * elements, "ranks": list(members), "wrong": wrong, "times": times})
    return judged(operation, transfers)


def judged(operation: str, transfers: list[dict[str, Any]]) -> dict[str, Any]:
    """The verdict on measured transfers, with their bus bandwidths."""
    bandwidths, bad = [], [one for one in transfers if one["wrong"]]
    for size, same in groupby(transfers, lambda one: one["size"]):
        rates = [bus_gbs(operation, size, len(one["ranks"]), one["times"]) for one in same]
        ends = sorted({f"{rate:.3g}" for rate in (min(rates), max(rates))}, key=float)
        bandwidths.append(f"{bytes_in_words(size)}: {' to '.join(ends)} GB/s")
    problems = [f"ranks {one['ranks']}, {one['size']:,} bytes: {one['wrong']:,} elements are wrong" for one in bad]
    return {"transfers": transfers, "problem": "; ".join(problems), "said": "bus bandwidth " + ", ".join(bandwidths)}


def bus_gbs(operation: str, size: int, ranks: int, seconds: Sequence[float]) -> float:
    """Bus bandwidth in GB/s, by the formulas of nccl-tests' PERFORMANCE.md."""
    share = {"all_reduce": 2 * (ranks - 1) / ranks, "send_recv": 1.0}.get(operation, (ranks - 1) / ranks)
    return share * size / statistics.median(seconds) / 1e9


class _Transfer(NamedTuple):
    call: Callable[[], object]
    result: Tensor  # where this rank receives; empty: it only sends, or does nothing
    before: Tensor  # what `result` is set to before each call: not the result, so that an earlier one does not count
    expected: Tensor


def _times(transfer: _Transfer, device: torch.device) -> tuple[int, list[float]]:
    """Wrong elements over all ranks and rounds, and the seconds of the slowest rank per round. A collective."""
    wrong, times = 0.0, []
    for number in range(_ROUNDS + 1):
        transfer.result.copy_(transfer.before)
        dist.barrier()
        accelerator.synchronize(device)
        started = time.perf_counter()
        transfer.call()
        accelerator.synchronize(device)
        own_numbers = [time.perf_counter() - started, int((transfer.result != transfer.expected).sum())]
        ranks = gather_values(torch.tensor(own_numbers, dtype=torch.float64), device)
        wrong += ranks[:, 1].sum().item()
        if number:  # the first round connects the ranks and is not timed
            times.append(ranks[:, 0].max().item())
    return int(wrong), times


def _values(elements: int, rank: int, device: torch.device) -> Tensor:
    """A rank's values, (elements,): integers whose sum over a node's ranks is exact in fp32; they differ by rank."""
    return (torch.arange(elements, device=device) % _PATTERN + rank * _PATTERN).float()


def _transfer(operation: str, members: Sequence[int], rank: int, elements: int, device: torch.device) -> _Transfer:
    """Args: members: the ranks that take part; of send_recv the sender and the receiver."""
    sent, part = _values(elements, rank, device), elements // len(members)
    everyone = torch.stack([_values(elements, member, device) for member in members])
    total = everyone.sum(0)
    expected = {
        "all_reduce": total,
        "reduce_scatter": total[rank * part : (rank + 1) * part],
        "all_gather": everyone[:, :part].flatten(),
        "send_recv": everyone[0] if rank == members[-1] else sent[:0],
    }[operation]
    before = sent if operation == "all_reduce" else torch.full_like(expected, -1)
    buffer = before.clone()
    is_sender = operation == "send_recv" and rank == members[0]
    call = {
        "all_reduce": partial(dist.all_reduce, buffer),
        "reduce_scatter": partial(reduce_scatter_tensor, buffer, sent),
        "all_gather": partial(all_gather_tensor, buffer, sent[:part].contiguous()),
        "send_recv": partial(dist.send, sent, members[-1]) if is_sender else partial(dist.recv, buffer, members[0]),
    }[operation]
    return _Transfer(call if rank in members else lambda: None, buffer, before, expected)
