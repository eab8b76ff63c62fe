"""Union and difference of time intervals. Imports no torch."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as sorted disjoint intervals; touching ones are merged."""
    merged: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def subtract(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The difference: the union of `intervals` minus the union of `others`, sorted."""
    remaining, taken, index = [], union(others), 0
    for start, end in union(intervals):
        while index < len(taken) and taken[index][0] < end:
            if start < taken[index][0]:
                remaining.append((start, taken[index][0]))
            start = max(start, taken[index][1])
            if taken[index][1] > end:  # it also overlaps the next interval
                break
            index += 1
        if start < end:
            remaining.append((start, end))
    return remaining
