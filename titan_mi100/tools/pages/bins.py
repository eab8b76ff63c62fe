"""Reduces any number of (step, value) to at most 500 bins with minimum, mean and maximum. Imports no torch."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

MOST = 500  # bins
_RECENT = 10  # number of last values; their mean is the current level of a noisy curve
_LARGEST = 1e100  # larger values are ignored, so that sums stay finite


class Bin(NamedTuple):
    """The values of a range of steps.

    Attributes:
        first, last: the first and the last step that has a value.
        number: how many values.
        low, mean, high: minimum, mean and maximum of the values.
    """

    first: int
    last: int
    number: int
    low: float
    mean: float
    high: float


class Bins:
    """Collects (step, value) in one pass, with memory for `most` bins.

    All bins have the same width, a power of two: bin n covers the steps n * width + 1 to (n + 1) * width. If there are
    too many bins, pairs of neighbours are joined and the width is doubled. So the numbers of a bin are exact.

    Attributes:
        width: steps per bin.
        first, last, lowest: (step, value) of the first, last and lowest value; None: there is no value.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most, self.width = most, 1
        self._bins: dict[int, list[float]] = {}  # number -> first step, last step, count, sum, low, high
        self.first: tuple[int, float] | None = None
        self.last: tuple[int, float] | None = None
        self.lowest: tuple[int, float] | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, step: int, value: float) -> None:
        """Add the value of a step (counted from 1)."""
        self.last = (step, value)
        if self.first is None or self.lowest is None:
            self.first = self.lowest = self.last
        elif value < self.lowest[1]:
            self.lowest = self.last
        self._recent.append(value)
        number = (step - 1) // self.width
        self._join(number, [step, step, 1, value, value, value])
        while len(self._bins) > self._most:
            self._widen()

    def _join(self, number: int, new: list[Any]) -> None:
        if (old := self._bins.get(number)) is None:
            self._bins[number] = new
            return
        old[0], old[1] = min(old[0], new[0]), max(old[1], new[1])
        old[2] += new[2]
        old[3] += new[3]
        old[4], old[5] = min(old[4], new[4]), max(old[5], new[5])

    def _widen(self) -> None:
        narrow, self._bins, self.width = self._bins, {}, 2 * self.width
        for number, content in narrow.items():
            self._join(number // 2, content)

    def bins(self) -> list[Bin]:
        """The bins that have a value, ordered by step."""
        found = []
        for _, (first, last, count, total, low, high) in sorted(self._bins.items()):
            # Rounding of the division can move the mean outside [low, high].
            mean = min(max(total / count, low), high)
            found.append(Bin(int(first), int(last), int(count), low, mean, high))
        return found

    def summary(self) -> dict[str, Any]:
        """Everything as a dict for JSON. `recent`: (mean of the last values, their number)."""
        bins = self.bins()
        count = sum(each.number for each in bins)
        return {
            "count": count,
            "first": self.first, "last": self.last, "lowest": self.lowest,
            "min": min(each.low for each in bins), "max": max(each.high for each in bins),
            "mean": sum(each.mean * each.number for each in bins) / count,
            "recent": (sum(self._recent) / len(self._recent), len(self._recent)),
            "bin_steps": self.width, "bins": bins,
        }  # fmt: skip


def usable(value: object) -> bool:
    """Whether a value can be drawn: a number that is not a bool, NaN, infinite or huge."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def half_window(count: int) -> int:
    """How many points on each side enter the smoothed value of a point."""
    return max(count // 40, min(2, count // 10))


def smoothed(bins: Sequence[Bin]) -> list[float]:
    """Smooth a curve: for each bin the mean of the values in a window around it.

    At the beginning the window is narrower on both sides: losses fall fast there, and a one-sided mean would lag. At
    the end the window is cut on the right side only; otherwise the last point would be a single noisy value.
    """
    half, found = half_window(len(bins)), []
    for place in range(len(bins)):
        around = bins[place - min(half, place) : place + min(half, place) + 1]
        found.append(sum(each.mean * each.number for each in around) / sum(each.number for each in around))
    return found
