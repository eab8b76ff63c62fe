"""Which documents share a row. Pure integers."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack_rows(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Assign documents to rows by best-fit decreasing.

    Args:
        lengths: tokens per document; each 1 <= length <= capacity.
        capacity: tokens per row (the sequence length).

    Returns:
        One list of document indices per row, in a deterministic order (ties by index).

    Raises:
        ValueError: a document longer than `capacity`; the caller decides whether to drop or truncate it.

    Best-fit decreasing uses at most 11/9 of the optimal number of rows plus a constant (Johnson, 1973).
    """
    rows: list[list[int]] = []
    rows_with: dict[int, list[int]] = {}  # free tokens -> rows that have them
    free_sizes: list[int] = []  # the keys of rows_with, sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if not 1 <= length <= capacity:
            raise ValueError(f"document {index} has {length} tokens; a row takes 1 to {capacity}")
        place = bisect_left(free_sizes, length)
        if place == len(free_sizes):
            row, free = len(rows), capacity
            rows.append([])
        else:
            free = free_sizes[place]
            row = rows_with[free].pop()
            if not rows_with[free]:
                del rows_with[free], free_sizes[place]
        rows[row].append(index)
        if free > length:
            if free - length not in rows_with:
                rows_with[free - length] = []
                insort(free_sizes, free - length)
            rows_with[free - length].append(row)
    return rows
