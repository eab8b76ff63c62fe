"""Packing: decides which documents share a row. Works on lengths only."""

from typing import NamedTuple

import numpy as np

# The number of distinct lengths tried when a row is filled. More do not help: on GSM8K with rows of 1,024 tokens, 256
# lengths left 0.19% of the positions empty, 512 left 0.26%, and 64 left 0.68%.
_WIDTH = 256


class Packing(NamedTuple):
    """A packing plan: row r holds the documents `documents[starts[r]:starts[r + 1]]`, from left to right."""

    starts: np.ndarray  # (rows + 1,) int64
    documents: np.ndarray  # (documents,) int64


def pack_together(lengths: np.ndarray, capacity: int, together: int) -> Packing:
    """As pack_rows, for records of so many consecutive documents each: those of a record share a row, side by side."""
    starts, records = pack_rows(lengths.reshape(-1, together).sum(1), capacity)
    return Packing(starts * together, (records[:, None] * together + np.arange(together)).ravel())


def pack_rows(lengths: np.ndarray, capacity: int) -> Packing:
    """Assign documents to rows. The longest document that is left opens a row; a subset sum of the others fills it.

    Args:
        lengths: (documents,) int, tokens per document; each 1 <= length <= capacity.
        capacity: tokens per row (the sequence length).

    Returns:
        The rows, in a deterministic order (documents of the same length are taken by index).

    Raises:
        ValueError: a document is longer than `capacity`; the caller decides whether to drop or truncate it.

    Only the count of each length matters. So the composition of one row is repeated until one of its lengths runs out
    (histogram packing: Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021), and millions of
    documents take as long as thousands. Best-fit decreasing uses up the short documents early and then lacks them to
    fill the last gaps: it fills 98.3% of the positions on GSM8K with rows of 1,024 tokens, the subset sum 99.8%.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    wrong = np.flatnonzero((lengths < 1) | (lengths > capacity))
    if wrong.size:
        raise ValueError(f"document {wrong[0]} has {lengths[wrong[0]]} tokens; a row takes 1 to {capacity}")
    by_length = np.argsort(lengths, kind="stable")
    distinct, first, counts = np.unique(lengths[by_length], return_index=True, return_counts=True)
    left = dict(zip(distinct.tolist(), counts.tolist(), strict=True))  # length -> documents not assigned yet
    taken = dict(zip(distinct.tolist(), first.tolist(), strict=True))  # length -> index in by_length of its next one
    sizes: list[int] = distinct[::-1].tolist()  # lengths that have documents left, the longest first

    sizes_of_rows, documents = [np.zeros(1, dtype=np.int64)], [by_length[:0]]
    while sizes:
        longest = sizes[0]
        left[longest] -= 1
        row = {longest: 1}  # length -> number of such documents in the row
        for size, number in _best_sum(capacity - longest, sizes, left):
            row[size] = row.get(size, 0) + number
        left[longest] += 1
        repeats = min(left[size] // number for size, number in row.items())  # how many such rows can be filled
        columns = []
        for size, number in row.items():
            start, stop = taken[size], taken[size] + number * repeats
            columns.append(by_length[start:stop].reshape(repeats, number))
            taken[size], left[size] = stop, left[size] - number * repeats
        documents.append(np.concatenate(columns, axis=1).ravel())
        sizes_of_rows.append(np.full(repeats, sum(row.values()), dtype=np.int64))
        sizes = [size for size in sizes if left[size]]
    return Packing(np.cumsum(np.concatenate(sizes_of_rows)), np.concatenate(documents))


def _best_sum(free: int, sizes: list[int], left: dict[int, int]) -> list[tuple[int, int]]:
    """Choose documents whose sum is as close to `free` tokens as possible, but not above it.

    Args:
        free: tokens to fill.
        sizes: lengths to choose from, descending.
        left: length -> documents available.

    Returns:
        (length, number of documents) pairs, long ones first.

    Subset sum over bit sets: bit t of the integer `reachable` is set if some choice has exactly t tokens.
    """
    fitting = [size for size in sizes if size <= free and left[size]]
    if len(fitting) > _WIDTH:
        fitting = fitting[: _WIDTH // 2] + fitting[-_WIDTH // 2 :]  # the longest and the shortest
    reachable, reachable_before, mask = 1, [], (1 << (free + 1)) - 1  # the mask drops sums above `free`
    for size in reversed(fitting):
        reachable_before.append(reachable)
        number, power = min(left[size], free // size), 1
        while number > 0:  # allow 0 to `number` documents of this size, adding them in powers of two
            step = min(power, number)
            reachable |= (reachable << (size * step)) & mask
            number, power = number - step, power * 2
    total = reachable.bit_length() - 1  # the largest reachable sum
    chosen = []
    # Walk back through the bit sets: take the most documents of a size for which the rest was reachable before it.
    for size, before in zip(fitting, reversed(reachable_before), strict=True):
        number = min(left[size], total // size)
        while not before >> (total - number * size) & 1:
            number -= 1
        if number:
            chosen.append((size, number))
            total -= number * size
    assert total == 0
    return chosen
