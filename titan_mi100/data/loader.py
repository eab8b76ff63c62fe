"""Gives each rank its microbatches of packed rows. The order of rows is a pure function of (seed, row number).

A row number counts the rows that all ranks have read since the start of training. It is the whole state of the data.
"""

import functools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from titan_mi100.data.dataset import PackedDataset, Row
from titan_mi100.layout import IGNORE, Batch

# One forward's rows, on the CPU: tensors of (local_batch_size, seq), so that a pipeline can split each along dim 0.
#   input_ids, labels, positions, document_ids: int64, as in dataset.Row.
#   document_ends: int32, the column behind the last token of each document of the row (padding is a document),
#       ascending, then -1.
#   supervised_columns: int32, the columns of the row whose label is not IGNORE, ascending, then -1.
# The last two are what the model's sizes depend on: they are read on the host (model/inputs.py), never on the device.
Microbatch = dict[str, Tensor]


def rows_per_epoch(rows: int, global_batch_size: int) -> int:
    """Rows of an epoch, including the padding rows that fill its last step."""
    return -(-rows // global_batch_size) * global_batch_size


def renumber(number: int, before: tuple[int, int], now: tuple[int, int]) -> int:
    """The row number of the same place in the same epoch, after the number of rows or the global batch size changed.

    Args:
        before, now: (rows, global batch size). The padding at the end of an epoch depends on both.
    """
    epoch, place = divmod(number, rows_per_epoch(*before))
    return epoch * rows_per_epoch(*now) + min(place, now[0])


def row_at(number: int, rows: int, global_batch_size: int, seed: int) -> int:
    """The dataset's row for row number `number`; -1 for padding at the end of an epoch."""
    epoch, place = divmod(number, rows_per_epoch(rows, global_batch_size))
    return int(_epoch_order(rows, seed, epoch)[place]) if place < rows else -1


@functools.lru_cache(maxsize=2)
def _epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(rows)


class RowStream:
    """The endless microbatches of one data-parallel rank. Its state is the number of rows that all ranks consumed."""

    def __init__(self, dataset: PackedDataset, batch: Batch, dp_rank: int, seed: int) -> None:
        self.dataset, self.batch, self.dp_rank, self.seed = dataset, batch, dp_rank, seed
        self.rows_consumed = 0

    def __iter__(self) -> Iterator[Microbatch]:
        local, ranks = self.batch.local_batch_size, self.batch.dp_degree
        while True:
            first = self.rows_consumed + self.dp_rank * local
            numbers = range(first, first + local)
            self.rows_consumed += local * ranks
            yield collate(self.dataset, [self._row(number) for number in numbers])

    def rows_of_last_step(self, microbatches: Iterable[int]) -> list[int]:
        """The dataset's rows (-1 for padding) in the given microbatches of this rank in the last step."""
        local, ranks = self.batch.local_batch_size, self.batch.dp_degree
        first = self.rows_consumed - self.batch.global_batch_size + self.dp_rank * local
        return [self._row(first + m * local * ranks + place) for m in microbatches for place in range(local)]

    def _row(self, number: int) -> int:
        return row_at(number, len(self.dataset), self.batch.global_batch_size, self.seed)

    def state_dict(self) -> dict[str, int]:
        return {"rows_consumed": self.rows_consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rows_consumed = state["rows_consumed"]


def collate(dataset: PackedDataset, indices: list[int]) -> Microbatch:
    """Stack rows of the dataset; -1 is a row of padding."""
    return microbatch_of([dataset.row(index) for index in indices])


def microbatch_of(rows: Sequence[Row]) -> Microbatch:
    """Stack rows, and find where their documents end and which tokens are supervised."""
    names = ("input_ids", "labels", "positions", "document_ids")
    arrays = {name: np.stack([getattr(row, name) for row in rows]) for name in names}
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
    for start in range(dp_rank * local, rows_per_epoch(len(dataset), local * ranks), local * ranks):
        yield collate(dataset, [i if i < len(dataset) else -1 for i in range(start, start + local)])
