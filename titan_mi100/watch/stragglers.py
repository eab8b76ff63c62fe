"""Finds slow ranks, and logs their host and device.

In a collective all ranks wait for the slowest, so step times do not show which one it is. Compared are times outside of
collectives: waiting for rows, the host's work after a step, and a probe, a small matrix product of the same size on
every rank. These values are exchanged in the step's one collective.
"""

import socket
import statistics
import time
from collections import deque
from functools import partial

import torch
import torch.distributed as dist

from titan_mi100.device import accelerator
from titan_mi100.log import log
from titan_mi100.parallel.distributed import World, from_rank_zero
from titan_mi100.trainer import StepResult

_SLOW = 1.33  # slow: more than this many times the median
_SHARE = 0.05  # and, for rows and host work, slower than the median by more than this share of a step
_PROBE = 0.02  # seconds that a probe takes
_RARE = 2000  # time between probes, in multiples of a probe's duration
_REMEMBERED = 3  # probes kept per rank; the fastest counts, since other work may disturb one
_LEAST_STEPS = 20  # steps to average over, at least
_AGAIN = 1000  # steps until a warning about the same ranks is repeated
_SHOWN = 3  # ranks described in full in a warning


class Stragglers:
    """Looks for slow ranks on the steps that are logged."""

    def __init__(self, world: World, log_freq: int) -> None:
        """A collective: rank 0 measures how many products make a probe, for all."""
        self._world, self._log_freq = world, log_freq
        is_gpu = accelerator.is_gpu(world.device)
        dtype, side = (torch.bfloat16, 4096) if is_gpu else (torch.float32, 256)  # of the probe's square matrices
        self._matrix = torch.full((side, side), 1e-3, dtype=dtype, device=world.device)
        self._products = from_rank_zero(partial(self._count_products))
        self._host = self._step = self._probe = self._probed_at = 0.0
        self._probes = [deque[float](maxlen=_REMEMBERED) for _ in range(world.size)]
        self._sums, self._steps = torch.zeros(world.size, 4, dtype=torch.float64), 0
        self._named: tuple[list[int], int] = [], 0

    def own_values(self) -> list[float]:
        """Seconds on this rank: host work after the last step, the last step, the last probe; 0: not measured yet."""
        return [self._host, self._step, self._probe]

    def after_step(self, step: int, result: StepResult, host_seconds: float) -> None:
        """On every rank. A collective where a rank is newly found to be slow.

        Args:
            host_seconds: this rank's seconds of work after the step.
        """
        self._host, self._step = host_seconds, result.seconds
        # Every rank must reach the same result, so only the gathered values are used.
        self._sums += result.ranks  # of the last column, the probes, the sum is not used: one call without a slice
        self._steps += 1
        if step % self._log_freq or self._steps < _LEAST_STEPS:
            return
        for probes, probe in zip(self._probes, result.ranks[:, 3].tolist(), strict=True):
            if probe and (not probes or probes[-1] != probe):
                probes.append(probe)
        means = self._sums / self._steps
        slow = slow_ranks(means[:, :2].tolist(), means[:, 2].mean().item(), self._probes)
        self._sums.zero_()
        self._steps = 0
        before, at = self._named
        if slow and (sorted(slow) != before or step >= at + _AGAIN):
            self._named = sorted(slow), step
            self._name(step, slow)
        if time.monotonic() - self._probed_at > _RARE * max(self._probe, _PROBE):
            self._probe, self._probed_at = self._time(self._products), time.monotonic()

    def _name(self, step: int, found: dict[int, str]) -> None:
        """The same on all ranks. A collective."""
        for rank in sorted(found)[:_SHOWN]:
            box = [f"on {socket.gethostname()}, {self._world.device}" if rank == dist.get_rank() else ""]
            dist.broadcast_object_list(box, src=rank)
            log.warning(f"step {step}: rank {rank} {box[0]} is slow: {found[rank]}")
        if len(found) > _SHOWN:
            log.warning(f"step {step}: {len(found) - _SHOWN} other ranks are slow, too: {sorted(found)[_SHOWN:]}")

    def _count_products(self) -> int:
        """How many products take about as long as a probe should."""
        self._time(2)  # warm-up: the first ones load and choose kernels
        return max(1, round(8 * _PROBE / self._time(8)))

    def _time(self, products: int) -> float:
        accelerator.synchronize(self._world.device)
        began, product = time.perf_counter(), self._matrix
        for _ in range(products):
            product = self._matrix @ self._matrix
        accelerator.synchronize(self._world.device)
        del product
        return time.perf_counter() - began


def slow_ranks(means: list[list[float]], seconds: float, probes: list[deque[float]]) -> dict[int, str]:
    """Ranks that are slow, with the reason.

    Args:
        means: for each rank, seconds per step: waiting for rows, and the host's work.
        seconds: seconds per step.
        probes: for each rank, its last probes.
    """
    reasons = dict[int, str]()
    for column, activity in enumerate(("waits for rows", "works on the host after a step")):
        usual = statistics.median_low(mean[column] for mean in means)
        for rank, mean in enumerate(means):
            if mean[column] > max(_SLOW * usual, usual + _SHARE * seconds):
                reasons[rank] = f"{activity} for {mean[column]:.3f} s per step, the median is {usual:.3f} s"
    best = {rank: min(recent) for rank, recent in enumerate(probes) if len(recent) == _REMEMBERED}
    usual = statistics.median_low(best.values()) if best else 0.0
    for rank, probe in best.items():
        if probe > _SLOW * usual:
            reasons[rank] = f"a matrix product takes {probe / usual:.2f} times the median"
    return reasons
