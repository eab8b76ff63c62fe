"""Rows to the ranks that train on them: what row number n of the run holds, who reads it, and the tensors.

A `RowSource` alone knows how rows are chosen. A `RowStream` gives a rank its row numbers of a step. `collate` makes the
tensors.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from titan_mi100.config.layout import IGNORE, Batch
from titan_mi100.data.prepared import PADDING_ROW, Row, RowSet

_THREADS = 2  # that read rows, two microbatches ahead each: one makes tensors while another waits for the disk


class RowSource(Protocol):
    """The rows of a run, each a pure function of its number.

    A row number counts rows from the start of training over all ranks. The source alone decides which content a number
    has: shuffling, epochs, the weights of a mixture and padding rows are its own. So the number of consumed rows is the
    whole state of the data, any rank can read any row, and a step can be read before or after others.
    """

    @property
    def fingerprint(self) -> str:
        """A hash of the content of all rows. A run resumes only with the same one, unless the user allows another."""

    @property
    def rows_per_epoch(self) -> int | None:
        """Row numbers of an epoch, padding rows included; None for a stream without epochs."""

    @property
    def end(self) -> int:
        """The row number at which the data end, for a run without a number of steps."""

    def row(self, number: int) -> Row:
        """The row's tokens."""

    def where(self, number: int) -> list[str]:
        """`file:line` of each document in the row, from left to right, each once; none of a padding row."""


def with_padding_rows(rows: int, multiple: int) -> int:
    """Rows after a set was filled up with padding rows to a multiple, such as the rows of a step."""
    return -(-rows // multiple) * multiple


@dataclass(frozen=True)
class ShuffledEpochs:
    """A `RowSource`: epoch after epoch of a packed set, each in another order.

    Each epoch ends with a whole step, so padding rows fill its last one. Hence the global batch size, which the order
    does not depend on otherwise.
    """

    dataset: RowSet
    seed: int
    global_batch_size: int
    fingerprint: str = ""
    epochs: int = 1

    @property
    def rows_per_epoch(self) -> int:
        return with_padding_rows(len(self.dataset), self.global_batch_size)

    @property
    def end(self) -> int:
        return self.epochs * self.rows_per_epoch

    def row(self, number: int) -> Row:
        return self.dataset.row(self.index(number))

    def where(self, number: int) -> list[str]:
        return self.dataset.where(self.index(number))

    def index(self, number: int) -> int:
        """The row of the set that row `number` of the run is; PADDING_ROW at an epoch's end."""
        epoch, place = divmod(number, self.rows_per_epoch)
        rows = len(self.dataset)
        return self.dataset.shuffled((self.seed,), epoch, place) if place < rows else PADDING_ROW

    def resume_at(self, consumed: int, rows: int, global_batch_size: int) -> int:
        """The row number to resume from: the same place in the same epoch, though that has another length by now.

        Args:
            consumed: rows that the run has consumed.
            rows: of the set that they were read from.
            global_batch_size: of the run until now; it decides how many padding rows ended an epoch.
        """
        epoch, place = divmod(consumed, with_padding_rows(rows, global_batch_size))
        return epoch * self.rows_per_epoch + min(place, len(self.dataset))


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
        return [self.microbatch(first_row, number) for number in range(self.batch.gradient_accumulation_steps)]

    def microbatch(self, first_row: int, number: int) -> Microbatch:
        """One of them."""
        return collate([self.source.row(row) for row in self.row_numbers(first_row, [number])])

    def ahead(self, first_row: int, pinned: bool) -> Callable[[], list[Microbatch]]:
        """A function that gives the microbatches of the step that begins with row `first_row`, then of the next ...

        Args:
            pinned: in page-locked memory.
        """
        return ReadAhead(self, first_row, pinned).step

    def row_numbers(self, first_row: int, microbatches: Iterable[int]) -> list[int]:
        """The row numbers in these of this rank's microbatches, of the step that begins with row `first_row`.

        A step is microbatch 0 of rank 0, microbatch 0 of rank 1, ..., microbatch 1 of rank 0, ...: so every split of a
        global batch over ranks and microbatches reads the same rows.
        """
        local, ranks = self.batch.local_batch_size, self.batch.dp_degree
        starts = (first_row + (microbatch * ranks + self.dp_rank) * local for microbatch in microbatches)
        return [number for start in starts for number in range(start, start + local)]


class ReadAhead:
    """The steps of a stream in their order, read ahead by threads of torchdata; on a GPU into page-locked memory.

    Its only state is which step comes next, and that follows from the rows consumed: nothing of it is saved.
    """

    def __init__(self, stream: RowStream, first_row: int, pinned: bool) -> None:
        """Begin to read the step that begins with row number `first_row`."""
        self._count = stream.batch.gradient_accumulation_steps
        self._microbatches: Iterator[Microbatch | Exception] | None = None
        self._opening = threading.Thread(target=self._open, args=(stream, first_row, pinned), daemon=True)
        self._opening.start()  # torchdata is imported there, so that the first step need not wait for it

    def step(self) -> list[Microbatch]:
        """The next step's microbatches."""
        self._opening.join()
        assert self._microbatches is not None
        found = [next(self._microbatches) for _ in range(self._count)]
        for microbatch in found:
            if isinstance(microbatch, Exception):
                raise microbatch
        return found  # type: ignore[return-value]

    def _open(self, stream: RowStream, first_row: int, pinned: bool) -> None:
        from torchdata import nodes

        count = self._count  # no more of this object: the threads would keep it, and so themselves, alive

        def read(place: int) -> Microbatch | Exception:
            step, number = divmod(place, count)
            try:
                return stream.microbatch(first_row + step * stream.batch.global_batch_size, number)
            except Exception as error:  # torchdata would wrap it into another one
                return error

        places = nodes.IterableWrapper(itertools.count())
        node = nodes.ParallelMapper(places, read, num_workers=_THREADS)
        if pinned:
            node = nodes.PinMemory(node)
        self._microbatches = iter(nodes.Loader(node))


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


def validation_batches(dataset: RowSet, batch: Batch, dp_rank: int) -> Iterator[Microbatch]:
    """This rank's microbatches of the whole set, in order. Every rank gets equally many; padding rows fill the last."""
    local, ranks = batch.local_batch_size, batch.dp_degree
    for start in range(dp_rank * local, with_padding_rows(len(dataset), local * ranks), local * ranks):
        indices = (i if i < len(dataset) else PADDING_ROW for i in range(start, start + local))
        yield collate([dataset.row(index) for index in indices])
