"""What the trainer asks of its data: row number n of the run. Nothing outside a source knows how rows are chosen."""

from typing import Protocol

from titan_mi100.data.dataset import Row


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
