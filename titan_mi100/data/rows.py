"""The arrays of a packed row. microbatch.py makes tensors of several. Imports no torch.

A row may have further arrays, which an objective declares and reads (objectives/base.py).
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from titan_mi100.config.layout import IGNORE

PADDING_DOCUMENT = -1  # document_ids of padding tokens


class Row(NamedTuple):
    """One packed row; each array is (seq_len,) int64."""

    input_ids: np.ndarray
    labels: np.ndarray  # the next token (shifted) where it is supervised, else layout.IGNORE
    positions: np.ndarray  # start at 0 in each document
    document_ids: np.ndarray  # 0, 1, ... along the row; PADDING_DOCUMENT in padding
    more: Mapping[str, np.ndarray] = MappingProxyType({})  # further arrays, (seq_len,), of any dtype

    def documents(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Token ids of each document, from left to right, and whether each token is supervised as an answer."""
        learned = self.supervised()
        for document in range(int(self.document_ids.max()) + 1):
            inside = self.document_ids == document
            yield self.input_ids[inside], learned[inside]

    def supervised(self) -> np.ndarray:
        """Whether each token is predicted by the one before it, (seq_len,) bool."""
        return np.append(False, self.labels[:-1] != IGNORE)  # labels are shifted: labels[t] is token t + 1

    def shown(self) -> dict[str, list[int] | list[bool]]:
        """Lists with one value per token, for the data page."""
        learned = self.supervised()
        assert (np.roll(self.labels, 1) == self.input_ids)[learned].all()  # a label is the next token
        shown = {"id": self.input_ids, "document": self.document_ids, "position": self.positions}
        return {name: values.tolist() for name, values in {**shown, "supervised": learned}.items()}

    def padding(self) -> np.ndarray:
        return self.document_ids == PADDING_DOCUMENT


def packed_row(ids: np.ndarray, learned: np.ndarray, first: np.ndarray, seq_len: int, pad_id: int) -> Row:
    """A row of documents from left to right, and padding behind them.

    Args:
        ids: (tokens,), at most seq_len.
        learned: (tokens,) bool, whether a token is supervised as an answer.
        first: (tokens,) bool, whether a token is the first of its document.
    """
    real = len(ids)
    input_ids, labels = np.full(seq_len, pad_id, dtype=np.int64), np.full(seq_len, IGNORE, dtype=np.int64)
    positions = np.arange(seq_len, dtype=np.int64)
    document_ids = np.full(seq_len, PADDING_DOCUMENT, dtype=np.int64)
    input_ids[:real] = ids
    if real:
        # Shifted: position t predicts token t + 1. A document's last position predicts nothing.
        labels[: real - 1] = np.where(learned[1:] & ~first[1:], input_ids[1:real], IGNORE)
        document_ids[:real] = np.cumsum(first) - 1
        positions[:real] -= np.flatnonzero(first)[document_ids[:real]]
    positions[real:] -= real
    return Row(input_ids, labels, positions, document_ids)


def document_ends(document_ids: np.ndarray) -> np.ndarray:
    """`document_ends` of a microbatch, (batch, seq) int32.

    Args:
        document_ids: (batch, seq); consecutive tokens with the same id form a document.
    """
    is_last = np.ones(document_ids.shape, dtype=bool)  # the last token of its document
    is_last[:, :-1] = document_ids[:, 1:] != document_ids[:, :-1]
    last = columns_where(is_last)
    return np.where(last < 0, last, last + 1)


def columns_where(mask: np.ndarray) -> np.ndarray:
    """The columns of each row where the mask is set, ascending, then -1; (batch, seq) bool -> (batch, seq) int32."""
    seq = mask.shape[1]
    # Unset columns become `seq`, the largest value, so that sorting moves them to the end.
    columns = np.where(mask, np.arange(seq, dtype=np.int32), np.int32(seq))
    columns.sort(axis=1)
    return np.where(columns < seq, columns, np.int32(-1))
