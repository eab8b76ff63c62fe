"""Union and difference of time intervals. Imports no torch."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as sorted disjoint intervals; touching ones are merged."""
    found: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def subtract(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The difference: the union of `intervals` minus the union of `others`, sorted."""
    found, taken, place = [], union(others), 0
    for start, end in union(intervals):
        while place < len(taken) and taken[place][0] < end:
            if start < taken[place][0]:
                found.append((start, taken[place][0]))
            start = max(start, taken[place][1])
            if taken[place][1] > end:  # it also overlaps the next interval
                break
            place += 1
        if start < end:
            found.append((start, end))
    return found
