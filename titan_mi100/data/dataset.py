"""Packed rows, read from memory-mapped arrays."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from titan_mi100.config.layout import IGNORE
from titan_mi100.data.origins import Origins
from titan_mi100.data.packing import Packing

PADDING_ROW = -1  # the index of a row without documents, which fills up a step
PADDING_DOCUMENT = -1  # document_ids of the tokens that fill a row up


@dataclass(frozen=True)
class Row:
    """One packed row; each array is (seq_len,) int64."""

    input_ids: np.ndarray
    labels: np.ndarray  # the next token where that is supervised, else layout.IGNORE
    positions: np.ndarray  # from 0 in each document
    document_ids: np.ndarray  # 0, 1, ... along the row; PADDING_DOCUMENT


class Documents(NamedTuple):
    """Tokenised documents, end to end: document d is `values[starts[d]:starts[d + 1]]`."""

    values: np.ndarray  # (tokens,) uint32, as sft.Document.values makes them
    starts: np.ndarray  # (documents + 1,) int64
    origins: Origins | None = None  # None: made up, for a test or a benchmark

    def __getitem__(self, number: int) -> np.ndarray:  # type: ignore[override]
        return self.values[self.starts[number] : self.starts[number + 1]]


class PackedDataset:
    """Documents in the rows that a packing plan gave them."""

    def __init__(self, documents: Documents, packing: Packing, seq_len: int, pad_id: int) -> None:
        self.documents, self.packing = documents, packing
        self.seq_len, self.pad_id = seq_len, pad_id

    def __len__(self) -> int:
        return len(self.packing.starts) - 1

    def documents_of(self, index: int) -> np.ndarray:
        """The numbers of the documents in a row, from left to right; none in PADDING_ROW."""
        start, stop = self.packing.starts[index : index + 2] if index >= 0 else (0, 0)
        return self.packing.documents[start:stop]

    def where(self, index: int) -> list[str]:
        """`file:line` of the documents in a row, each once; none in PADDING_ROW."""
        assert self.documents.origins is not None
        return list(dict.fromkeys(map(self.documents.origins.where, self.documents_of(index).tolist())))

    def row(self, index: int) -> Row:
        """The packed row, or PADDING_ROW."""
        input_ids = np.full(self.seq_len, self.pad_id, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE, dtype=np.int64)
        positions = np.arange(self.seq_len, dtype=np.int64)
        document_ids = np.full(self.seq_len, PADDING_DOCUMENT, dtype=np.int64)
        start = 0
        for place, number in enumerate(self.documents_of(index)):
            values = np.asarray(self.documents[number])
            ids, supervised = (values >> 1).astype(np.int64), (values & 1).astype(bool)
            stop = start + len(ids)
            input_ids[start:stop] = ids
            labels[start : stop - 1] = np.where(supervised[1:], ids[1:], IGNORE)
            positions[start:stop] -= start
            document_ids[start:stop] = place
            start = stop
        positions[start:] -= start
        return Row(input_ids, labels, positions, document_ids)
