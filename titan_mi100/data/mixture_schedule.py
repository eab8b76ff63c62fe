"""The schedule of a weighted mixture: decides which source each row comes from, with exact integer arithmetic."""

import heapq
import math
import threading
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

LONGEST_PERIOD = 2**20  # rows after which a schedule repeats at the latest; weights are rounded to multiples of 1 / it
_BLOCK = 4096  # rows computed at a time


def shares_of(weights: Sequence[float]) -> list[int]:
    """Integers in proportion to the weights, each at least 1. Their sum is the period of the schedule.

    They are exact if the decimal weights allow a period of at most `LONGEST_PERIOD`, as 0.40 and 0.01 do. Otherwise
    each weight is rounded by less than 1 / `LONGEST_PERIOD` (largest remainder method).

    Args:
        weights: above 0, in any unit.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]  # repr: 0.1 becomes 1/10, not its binary value
    common = math.lcm(*(weight.denominator for weight in exact))
    integers = [int(weight * common) for weight in exact]
    integers = [number // math.gcd(*integers) for number in integers]
    if sum(integers) <= LONGEST_PERIOD:
        return integers
    total = sum(integers)
    shares = [max(1, number * LONGEST_PERIOD // total) for number in integers]
    by_remainder = sorted(range(len(integers)), key=lambda i: -(integers[i] * LONGEST_PERIOD % total))
    for index in by_remainder[: max(0, LONGEST_PERIOD - sum(shares))]:
        shares[index] += 1
    shares[shares.index(max(shares))] -= sum(shares) - LONGEST_PERIOD  # above 0 if a tiny weight was raised to 1
    return shares


class RowSchedule:
    """A fixed order of sources. After any n rows, each source has given n * share / period rows, rounded up or down.

    With w = share / period, row k (from 0) of a source may not come before place floor(k / w) of the schedule, and must
    come before place ceil((k + 1) / w). These windows can always be met, and earliest-deadline-first meets them (Pfair
    scheduling on one processor: Baruah, Cohen, Plaxton, Varvel, "Proportionate progress", Algorithmica, 1996).
    """

    def __init__(self, shares: Sequence[int], seed: int) -> None:
        """Args: shares: see `shares_of`; seed: breaks ties between sources with the same deadline."""
        self.shares, self.period = list(shares), sum(shares)
        self._ties = np.random.Generator(np.random.PCG64(seed)).permutation(len(shares)).tolist()
        self._order = np.zeros(self.period, dtype=np.uint16)  # source of each place; valid for the first _known places
        self._known, self._lock = 0, threading.Lock()
        self._before = [[0] * len(shares)]  # per block: rows of each source before it
        self._given = [0] * len(shares)  # rows of each source among the known places
        # Two heaps hold the next row of each source: those whose window is open, and those whose window opens later.
        self._ready: list[tuple[int, int, int]] = []  # (deadline, tie, source)
        self._later = [(0, source) for source in range(len(shares))]  # (place where the window opens, source)

    def source(self, place: int) -> int:
        """The source of the row at `place` of the schedule, from 0."""
        place %= self.period
        self._compute_until(place + 1)
        return int(self._order[place])

    def count(self, source: int, places: int) -> int:
        """Rows of a source before place `places`."""
        periods, rest = divmod(places, self.period)
        self._compute_until(rest)
        start = rest - rest % _BLOCK
        here = int(np.count_nonzero(self._order[start:rest] == source))
        return periods * self.shares[source] + self._before[rest // _BLOCK][source] + here

    def place_of(self, source: int, number: int) -> int:
        """The place of row `number` of a source, from 0."""
        periods, rest = divmod(number, self.shares[source])
        low = rest * self.period // self.shares[source]  # the row's window, as in the class docstring
        high = min(-(-(rest + 1) * self.period // self.shares[source]), self.period)
        self._compute_until(high)
        positions = np.flatnonzero(self._order[low:high] == source)
        return periods * self.period + low + int(positions[rest - self.count(source, low)])

    def _compute_until(self, places: int) -> None:
        """Compute the order of the first `places` places. Locked, because several threads read rows."""
        if self._known >= places:
            return
        with self._lock:
            self._fill(places)

    def _fill(self, places: int) -> None:
        while self._known < places:
            for position in range(self._known, min(self._known + _BLOCK, self.period)):
                while self._later and self._later[0][0] <= position:
                    _, source = heapq.heappop(self._later)
                    deadline = -(-(self._given[source] + 1) * self.period // self.shares[source])
                    heapq.heappush(self._ready, (deadline, self._ties[source], source))
                deadline, _, source = heapq.heappop(self._ready)
                assert position < deadline
                self._order[position] = source
                self._given[source] += 1
                heapq.heappush(self._later, (self._given[source] * self.period // self.shares[source], source))
            self._before.append(list(self._given))
            # Set last: other threads read _known without the lock, and must then find the order complete.
            self._known = min(self._known + _BLOCK, self.period)
