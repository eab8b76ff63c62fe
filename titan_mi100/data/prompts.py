"""Held-out prompts: the beginnings of a validation set's documents, and what follows them there."""

from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

import numpy as np

from titan_mi100.config.layout import IGNORE
from titan_mi100.data.prepared import PackedDataset, RowSet


class Prompt(NamedTuple):
    ids: list[int]
    reference: list[int]  # the token ids that follow it in the data


def held_out_prompts(sets: Sequence[RowSet], count: int) -> list[Prompt]:
    """The prompts of the first documents: of each set in turn, in the order of its input. The same on every rank.

    Returns:
        `count` of them, or as many as there are documents of two tokens or more.
    """
    in_turn = (prompt for prompts in zip_longest(*map(_prompts, sets)) for prompt in prompts if prompt is not None)
    return list(islice(in_turn, count))


def prompt_of(ids: np.ndarray, supervised: np.ndarray) -> Prompt:
    """A document up to its first supervised turn, and that turn.

    A document that is learned from its beginning, as text is, has no turn to answer: there the first half is the
    prompt and the second half the reference.

    Args:
        ids: (tokens,), two at least.
        supervised: (tokens,) bool; the first one does not count, because nothing predicts it.
    """
    tokens = ids.tolist()
    learned = np.flatnonzero(supervised[1:]) + 1
    if not len(learned) or learned[0] == 1:
        return Prompt(tokens[: len(tokens) // 2], tokens[len(tokens) // 2 :])
    start = int(learned[0])
    behind = np.flatnonzero(~supervised[start:])
    return Prompt(tokens[:start], tokens[start : start + int(behind[0]) if len(behind) else None])


def _prompts(rows: RowSet) -> Iterator[Prompt]:
    return (prompt_of(ids, supervised) for ids, supervised in _documents(rows) if len(ids) > 1)


def _documents(rows: RowSet) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Ids and supervision of each document, in the order of the input."""
    if isinstance(rows, PackedDataset):  # rows begin with the longest documents, so not in their order
        for number in np.sort(rows.packing.documents):
            values = rows.documents[number]
            yield values >> 1, (values & 1).astype(bool)
        return
    for row in map(rows.row, range(len(rows))):
        supervised = np.append(False, row.labels[:-1] != IGNORE)
        for document in range(int(row.document_ids.max()) + 1):  # PADDING_DOCUMENT is below 0
            inside = row.document_ids == document
            yield row.input_ids[inside], supervised[inside]
