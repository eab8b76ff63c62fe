"""What the trainer asks of its data: row number n of the run. Nothing outside a source knows how rows are chosen."""

import functools
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from titan_mi100.data.prepared import PADDING_ROW, PackedDataset, Row


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

    dataset: PackedDataset
    seed: int
    global_batch_size: int
    fingerprint: str = ""

    @property
    def rows_per_epoch(self) -> int:
        return with_padding_rows(len(self.dataset), self.global_batch_size)

    def row(self, number: int) -> Row:
        return self.dataset.row(self.index(number))

    def where(self, number: int) -> list[str]:
        return self.dataset.where(self.index(number))

    def index(self, number: int) -> int:
        """The row of the set that row `number` of the run is; PADDING_ROW at an epoch's end."""
        epoch, place = divmod(number, self.rows_per_epoch)
        rows = len(self.dataset)
        return int(_epoch_order(rows, self.seed, epoch)[place]) if place < rows else PADDING_ROW

    def resume_at(self, consumed: int, rows: int, global_batch_size: int) -> int:
        """The row number to resume from: the same place in the same epoch, though that has another length by now.

        Args:
            consumed: rows that the run has consumed.
            rows: of the set that they were read from.
            global_batch_size: of the run until now; it decides how many padding rows ended an epoch.
        """
        epoch, place = divmod(consumed, with_padding_rows(rows, global_batch_size))
        return epoch * self.rows_per_epoch + min(place, len(self.dataset))


@functools.lru_cache(maxsize=2)  # a step may reach into the next epoch
def _epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(rows)
