"""Held-out prompts: the beginnings of a validation set's documents, with the reference answers that follow."""

from collections.abc import Iterator, Sequence
from itertools import islice, zip_longest
from typing import NamedTuple

import numpy as np

from titan_mi100.data.prepared import PackedDataset, RowSet


class Prompt(NamedTuple):
    ids: list[int]
    reference: list[int]  # the token ids that follow it in the data


def held_out_prompts(sets: Sequence[RowSet], count: int) -> list[Prompt]:
    """Prompts of the first documents, taken from the sets in turn, each in the order of its input. Same on every rank.

    Returns:
        `count` prompts; fewer if the sets have fewer documents of at least two tokens.
    """
    in_turn = (prompt for prompts in zip_longest(*map(_prompts, sets)) for prompt in prompts if prompt is not None)
    return list(islice(in_turn, count))


def prompt_of(ids: np.ndarray, supervised: np.ndarray) -> Prompt:
    """Split a document before its first supervised turn: the prompt is the text before it, the reference is the turn.

    A document that is supervised from its beginning (plain text) has no such turn. Its first half is the prompt, its
    second half the reference.

    Args:
        ids: (tokens,), at least two.
        supervised: (tokens,) bool; the first entry is ignored, because nothing predicts the first token.
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
    """(ids, supervised) of each document, in the order of the input."""
    if isinstance(rows, PackedDataset):  # packing reorders documents; their numbers keep the order of the input
        for number in np.sort(rows.packing.documents):
            labels, values = rows.documents.labels, rows.documents[number]
            if labels is not None and labels[number] < 0:
                continue  # an answer that is not wanted
            yield values >> 1, (values & 1).astype(bool)
        return
    for row in map(rows.row, range(len(rows))):
        yield from row.documents()
