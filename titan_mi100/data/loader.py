"""Rows to the ranks that train on them: which row numbers each rank reads in a step, and their tensors."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from titan_mi100.config.layout import IGNORE, Batch
from titan_mi100.data.prepared import PADDING_ROW, PackedDataset, Row
from titan_mi100.data.source import RowSource, with_padding_rows

# One forward's rows, on the CPU: tensors of (local_batch_size, seq), so that a pipeline can split each along dim 0.
#   input_ids, labels, positions, document_ids: int64, as in prepared.Row.
#   document_ends: int32, the column behind the last token of each document of the row (padding is a document),
#       ascending, then -1.
#   supervised_columns: int32, the columns of the row whose label is not IGNORE, ascending, then -1.
# The last two are what the model's sizes depend on: they are read on the host (parallel/base.py), never on the device.
Microbatch = dict[str, Tensor]


class RowStream:
    """The microbatches of one data-parallel rank. Without state: a step's rows follow from the row it begins with."""

    def __init__(self, source: RowSource, batch: Batch, dp_rank: int) -> None:
        self.source, self.batch, self.dp_rank = source, batch, dp_rank

    def step(self, first_row: int) -> list[Microbatch]:
        """This rank's microbatches of the step that begins with row number `first_row`."""
        return [
            collate([self.source.row(number) for number in self.row_numbers(first_row, [microbatch])])
            for microbatch in range(self.batch.gradient_accumulation_steps)
        ]

    def row_numbers(self, first_row: int, microbatches: Iterable[int]) -> list[int]:
        """The row numbers in these of this rank's microbatches, of the step that begins with row `first_row`.

        A step is microbatch 0 of rank 0, microbatch 0 of rank 1, ..., microbatch 1 of rank 0, ...: so every split of a
        global batch over ranks and microbatches reads the same rows.
        """
        local, ranks = self.batch.local_batch_size, self.batch.dp_degree
        starts = (first_row + (microbatch * ranks + self.dp_rank) * local for microbatch in microbatches)
        return [number for start in starts for number in range(start, start + local)]


def collate(rows: Sequence[Row]) -> Microbatch:
    """Stack rows, and find where their documents end and which tokens are supervised."""
    arrays = dict(zip(Row._fields, map(np.stack, zip(*rows, strict=True)), strict=True))
    arrays["document_ends"] = document_ends(arrays["document_ids"])
    arrays["supervised_columns"] = columns_where(arrays["labels"] != IGNORE)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def document_ends(document_ids: np.ndarray) -> np.ndarray:
    """`document_ends` of a microbatch, (batch, seq) int32; neighbours with the same id are one document."""
    is_last = np.ones(document_ids.shape, dtype=bool)  # the last token of its document
    is_last[:, :-1] = document_ids[:, 1:] != document_ids[:, :-1]
    last = columns_where(is_last)
    return np.where(last < 0, last, last + 1)


def columns_where(mask: np.ndarray) -> np.ndarray:
    """The columns of each row where the mask is set, ascending, then -1; (batch, seq) bool -> (batch, seq) int32."""
    seq = mask.shape[1]
    columns = np.where(mask, np.arange(seq, dtype=np.int32), np.int32(seq))
    columns.sort(axis=1)
    return np.where(columns < seq, columns, np.int32(-1))


def validation_batches(dataset: PackedDataset, batch: Batch, dp_rank: int) -> Iterator[Microbatch]:
    """This rank's microbatches of the whole set, in order. Every rank gets equally many; padding rows fill the last."""
    local, ranks = batch.local_batch_size, batch.dp_degree
    for start in range(dp_rank * local, with_padding_rows(len(dataset), local * ranks), local * ranks):
        indices = (i if i < len(dataset) else PADDING_ROW for i in range(start, start + local))
        yield collate([dataset.row(index) for index in indices])
