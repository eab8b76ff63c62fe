"""Values by step, few however many there are: minimum, mean and maximum over ranges of steps. Imports no torch."""

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

MOST = 500  # bins
_RECENT = 10  # values, whose mean says where a noisy curve has come to
_LARGEST = 1e100  # a value beyond is none: sums stay finite


class Bin(NamedTuple):
    """The values of some steps in a row, `number` of them; `first` and `last` are steps that have one."""

    first: int
    last: int
    number: int
    low: float
    mean: float
    high: float


class Bins:
    """One pass over any number of (step, value), in memory for `most` bins.

    All bins have the same width, a power of two: bin n is for the steps n * width + 1 to (n + 1) * width. When there
    are too many, neighbours are joined and the width is doubled, so what a bin says is exact.

    Attributes:
        width: steps.
        first, last, lowest: (step, value), by the order in which they came; None: no value came.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most, self.width = most, 1
        self._bins: dict[int, list[float]] = {}  # number -> first step, last step, count, sum, low, high
        self.first: tuple[int, float] | None = None
        self.last: tuple[int, float] | None = None
        self.lowest: tuple[int, float] | None = None
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, step: int, value: float) -> None:
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
        """Those that hold a value, by step."""
        found = []
        for _, (first, last, count, total, low, high) in sorted(self._bins.items()):
            # the division may round to a mean beside the only value
            mean = min(max(total / count, low), high)
            found.append(Bin(int(first), int(last), int(count), low, mean, high))
        return found

    def summary(self) -> dict[str, Any]:
        """All of it, for JSON; `recent`: mean of the last values, and how many they are."""
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
    """Whether it is a number that can be drawn: not NaN, not infinite, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def half_window(count: int) -> int:
    """On either side of a point, the points that its smoothed value is a mean of."""
    return max(count // 40, min(2, count // 10))


def smoothed(bins: Sequence[Bin]) -> list[float]:
    """The mean of the values around each bin.

    At the beginning, where losses fall fast, the window is narrower on both sides alike: a one-sided mean would lag. At
    the end it is cut off on its right side only, so that the last point is no single noisy value.
    """
    half, found = half_window(len(bins)), []
    for place in range(len(bins)):
        around = bins[place - min(half, place) : place + min(half, place) + 1]
        found.append(sum(each.mean * each.number for each in around) / sum(each.number for each in around))
    return found
