"""Reduces any number of (step, value) to at most 500 means, with first, last, lowest and extreme values. No torch."""

import math
from collections import deque
from typing import Any

MOST = 500  # bins
_RECENT = 10  # number of last values; their mean is the current level of a noisy curve
_LARGEST = 1e100  # larger values are ignored, so that sums stay finite


class Bins:
    """Collects (step, value) in one pass, with memory for `most` bins.

    All bins have the same width, a power of two: bin n covers the steps n * width + 1 to (n + 1) * width. If there are
    too many bins, pairs of neighbours are joined and the width is doubled.

    Attributes:
        width: steps per bin.
        first, last, lowest: (step, value) of the first, last and lowest value; None: there is no value.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most, self.width = most, 1
        self._bins: dict[int, tuple[int, float]] = {}  # number -> how many values, and their sum
        self.first: tuple[int, float] | None = None
        self.last: tuple[int, float] | None = None
        self.lowest: tuple[int, float] | None = None
        self._highest = -math.inf
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, step: int, value: float) -> None:
        """Add the value of a step (counted from 1)."""
        self.last = (step, value)
        if self.first is None or self.lowest is None:
            self.first = self.lowest = self.last
        elif value < self.lowest[1]:
            self.lowest = self.last
        self._highest = max(self._highest, value)
        self._recent.append(value)
        self._join((step - 1) // self.width, 1, value)
        while len(self._bins) > self._most:
            narrow, self._bins, self.width = self._bins, {}, 2 * self.width
            for number, (count, total) in narrow.items():
                self._join(number // 2, count, total)

    def _join(self, number: int, count: int, total: float) -> None:
        before = self._bins.get(number, (0, 0.0))
        self._bins[number] = before[0] + count, before[1] + total

    def means(self) -> list[tuple[float, float]]:
        """The middle step and the mean of each bin that has a value, ordered by step."""
        middle = (self.width + 1) / 2
        return [(number * self.width + middle, total / count) for number, (count, total) in sorted(self._bins.items())]

    def summary(self) -> dict[str, Any]:
        """Everything as a dict for JSON. `recent`: (mean of the last values, their number)."""
        assert self.lowest is not None
        count, total = (sum(column) for column in zip(*self._bins.values(), strict=True))
        return {
            "count": count, "first": self.first, "last": self.last, "lowest": self.lowest,
            "min": self.lowest[1], "max": self._highest, "mean": total / count, "sum": total,
            "recent": (sum(self._recent) / len(self._recent), len(self._recent)),
            "bin_steps": self.width, "means": self.means(),
        }  # fmt: skip


def usable(value: object) -> bool:
    """Whether a value can be drawn: a number that is not a bool, NaN, infinite or huge."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
