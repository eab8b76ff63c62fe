"""Which documents share a row: pure integers."""

from typing import NamedTuple

import numpy as np

# Distinct lengths tried when a row is filled. All of them is no better: 256 left 0.19% of GSM8K's rows at 1024 empty,
# 512 left 0.26%, 64 left 0.68%.
_WIDTH = 256


class Packing(NamedTuple):
    """Row r holds the documents `documents[starts[r]:starts[r + 1]]`."""

    starts: np.ndarray  # (rows + 1,) int64
    documents: np.ndarray  # (documents,) int64


def pack_rows(lengths: np.ndarray, capacity: int) -> Packing:
    """Assign documents to rows: the longest that is left opens a row, and the best sum of the others fills it.

    Args:
        lengths: (documents,) int, tokens of each; each 1 <= length <= capacity.
        capacity: tokens per row (the sequence length).

    Returns:
        The rows, in a deterministic order (documents of a length are taken by index).

    Raises:
        ValueError: a document longer than `capacity`; the caller decides whether to drop or cut it.

    Only how often each length occurs matters, so one composition of a row is repeated for as long as its lengths last
    (histogram packing: Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021): millions of
    documents take as long as thousands. Best-fit decreasing leaves rows open that only short documents could fill, and
    uses those up elsewhere: 98.3% of GSM8K's rows at 1024 where filling each row by a subset sum gives 99.8%.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    wrong = np.flatnonzero((lengths < 1) | (lengths > capacity))
    if wrong.size:
        raise ValueError(f"document {wrong[0]} has {lengths[wrong[0]]} tokens; a row takes 1 to {capacity}")
    by_length = np.argsort(lengths, kind="stable")
    distinct, first, counts = np.unique(lengths[by_length], return_index=True, return_counts=True)
    left = dict(zip(distinct.tolist(), counts.tolist(), strict=True))
    taken = dict(zip(distinct.tolist(), first.tolist(), strict=True))  # length -> where its next document stands
    sizes: list[int] = distinct[::-1].tolist()  # of which documents are left, the longest first

    sizes_of_rows, documents = [np.zeros(1, dtype=np.int64)], [by_length[:0]]
    while sizes:
        longest = sizes[0]
        left[longest] -= 1
        row = {longest: 1}  # length -> how many of it
        for size, number in _best_sum(capacity - longest, sizes, left):
            row[size] = row.get(size, 0) + number
        left[longest] += 1
        repeats = min(left[size] // number for size, number in row.items())
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
    """The (size, number) of those left that fill `free` tokens best, large sizes first; `sizes` is descending.

    Subset sum over bit sets: bit t of an integer says that t tokens can be filled.
    """
    fitting = [size for size in sizes if size <= free and left[size]]
    if len(fitting) > _WIDTH:
        fitting = fitting[: _WIDTH // 2] + fitting[-_WIDTH // 2 :]
    reachable, reachable_before, mask = 1, [], (1 << (free + 1)) - 1
    for size in reversed(fitting):
        reachable_before.append(reachable)
        number, power = min(left[size], free // size), 1
        while number > 0:  # 0 to `number` of them, by powers of two
            step = min(power, number)
            reachable |= (reachable << (size * step)) & mask
            number, power = number - step, power * 2
    total = reachable.bit_length() - 1
    chosen = []
    for size, before in zip(fitting, reversed(reachable_before), strict=True):
        number = min(left[size], total // size)
        while not before >> (total - number * size) & 1:
            number -= 1
        if number:
            chosen.append((size, number))
            total -= number * size
    assert total == 0
    return chosen
