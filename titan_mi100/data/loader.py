"""The loader: which rows a rank reads in a step, and the tensors made of them.

A `RowSource` maps a row number of the run to the row's tokens. A `RowStream` computes a rank's row numbers for a step.
microbatch.py makes the tensors.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from titan_mi100.config.layout import Batch
from titan_mi100.data.microbatch import Microbatch, collate
from titan_mi100.data.mixture import Mixture, Segment
from titan_mi100.data.prepared import PADDING_ROW, RowSet
from titan_mi100.data.rows import Row
from titan_mi100.device import accelerator
from titan_mi100.files.pool import check_shared_memory

# Threads that read ahead, each two microbatches (torchdata's prefetch). One makes tensors while the other waits for the
# disk.
_THREADS = 2


def with_padding_rows(rows: int, multiple: int) -> int:
    """`rows` rounded up to a multiple, such as the rows of a step; padding rows fill the difference."""
    return -(-rows // multiple) * multiple


@dataclass(frozen=True)
class ShuffledEpochs:
    """A `RowSource` that repeats a packed set epoch after epoch, each in another order.

    Padding rows fill the last step of an epoch, so that no step reaches into the next one. Only the number of padding
    rows depends on the global batch size; the order of the rows does not.

    Attributes:
        fingerprint: a hash of the content of all rows. It must not change on resume, unless the user allows it.
        segments: parts of the run with different sources, which a checkpoint stores; here there is one part.
        on_exhausted: "repeat": the run's number of steps decides where it ends; else it ends with the data at latest.
    """

    dataset: RowSet
    seed: int
    global_batch_size: int
    fingerprint: str = ""
    epochs: int = 1
    segments: ClassVar[Sequence[Segment]] = ()
    on_exhausted: ClassVar[str] = "repeat"

    @property
    def rows_per_epoch(self) -> int:
        """Row numbers per epoch, including padding rows."""
        return with_padding_rows(len(self.dataset), self.global_batch_size)

    @property
    def end(self) -> int:
        """The row number at which the data end, for a run that sets no number of steps."""
        return self.epochs * self.rows_per_epoch

    def row(self, number: int) -> Row:
        """The tokens of row `number`."""
        return self.dataset.row(self.index(number))

    def where(self, number: int) -> list[str]:
        """`file:line` of each document in the row, from left to right, each once; empty for a padding row."""
        return self.dataset.where(self.index(number))

    def is_padding(self, number: int) -> bool:
        """Whether row `number` is a padding row."""
        return number % self.rows_per_epoch >= len(self.dataset)

    def index(self, number: int) -> int:
        """The index in the set of row `number` of the run; PADDING_ROW at the end of an epoch."""
        epoch, position = divmod(number, self.rows_per_epoch)
        return PADDING_ROW if self.is_padding(number) else self.dataset.shuffled((self.seed,), epoch, position)

    def resume_at(self, consumed: int, rows: int, global_batch_size: int) -> int:
        """The row number to resume from: the same place in the same epoch, although its length may have changed.

        Args:
            consumed: row numbers that the run has consumed.
            rows: rows of the set that they were read from.
            global_batch_size: the run's until now. It determines the padding rows at the end of epochs until now.
        """
        epoch, position = divmod(consumed, with_padding_rows(rows, global_batch_size))
        return epoch * self.rows_per_epoch + min(position, len(self.dataset))

    def describe(self, stop: int) -> tuple[list[str], list[str]]:
        """See `Mixture.describe`."""
        return [], []


# The rows of a run. Each row is a pure function of its number, which counts from the start of training, over all ranks.
# The source maps a number to content; it handles shuffling, epochs, mixture weights and padding rows. So the number of
# consumed rows is the whole state of the data, any rank can read any row, and steps can be read in any order.
RowSource = ShuffledEpochs | Mixture


class RowStream:
    """The microbatches of one data-parallel rank. It has no state: a step's first row number determines its rows."""

    def __init__(self, source: RowSource, batch: Batch, dp_rank: int, with_padding: bool = False) -> None:
        """Args: with_padding: give microbatches of padding, too, because every step must have as many (pipelines)."""
        self.source, self.batch, self.dp_rank, self._with_padding = source, batch, dp_rank, with_padding

    def step(self, first_row: int) -> list[Microbatch]:
        """This rank's microbatches of the step that begins with row number `first_row`."""
        return [self.microbatch(first_row, number) for number in self.numbers(first_row)]

    def numbers(self, first_row: int) -> list[int]:
        """The numbers of a step's microbatches, without those that are padding on all ranks; the same on all ranks."""
        every, rows = range(self.batch.gradient_accumulation_steps), self.batch.local_batch_size * self.batch.dp_degree
        starts = range(first_row, first_row + self.batch.global_batch_size, rows)
        held = [not all(map(self.source.is_padding, range(start, start + rows))) for start in starts]
        return [number for number in every if self._with_padding or held[number]] or [0]

    def microbatch(self, first_row: int, number: int) -> Microbatch:
        """Microbatch `number` of this rank in the step that begins with row number `first_row`."""
        return collate([self.source.row(row) for row in self.row_numbers(first_row, [number])])

    def ahead(self, first_row: int, pinned: bool) -> Callable[[], list[Microbatch]]:
        """A function that returns the microbatches of one step per call, beginning with the step at row `first_row`.

        Args:
            pinned: put them into page-locked memory, for asynchronous copies to a GPU.
        """
        return ReadAhead(self, first_row, pinned).step

    def row_numbers(self, first_row: int, microbatches: Iterable[int]) -> list[int]:
        """The row numbers of some of this rank's microbatches, in the step that begins with row `first_row`.

        The rows of a step are numbered: microbatch 0 of rank 0, microbatch 0 of rank 1, ..., microbatch 1 of rank 0,
        ... So a step reads the same rows however its global batch is split over ranks and microbatches.
        """
        local, ranks = self.batch.local_batch_size, self.batch.dp_degree
        starts = (first_row + (microbatch * ranks + self.dp_rank) * local for microbatch in microbatches)
        return [number for start in starts for number in range(start, start + local)]


class ReadAhead:
    """The steps of a stream in order, read ahead by threads of torchdata; for a GPU into page-locked memory.

    Its only state is the next step, which follows from the number of consumed rows. So a checkpoint stores nothing of
    it.
    """

    def __init__(self, stream: RowStream, first_row: int, pinned: bool) -> None:
        """Begin to read the step that begins with row number `first_row`."""
        self._stream, self._row = stream, first_row
        self._microbatches: Iterator[Microbatch | Exception] | None = None
        self._failure: Exception | None = None
        self._opening = threading.Thread(target=self._open, args=(stream, first_row, pinned), daemon=True)
        self._opening.start()  # importing torchdata takes time, so it happens in this thread, beside other set-up

    def step(self) -> list[Microbatch]:
        """The next step's microbatches. Raises whatever failed in the threads."""
        self._opening.join()
        if self._failure is not None:
            raise self._failure
        assert self._microbatches is not None
        microbatches = [next(self._microbatches) for _ in self._stream.numbers(self._row)]
        self._row += self._stream.batch.global_batch_size
        for microbatch in microbatches:
            if isinstance(microbatch, Exception):
                raise microbatch
        return microbatches  # type: ignore[return-value]

    def _open(self, stream: RowStream, first_row: int, pinned: bool) -> None:
        try:
            self._microbatches = self._read(stream, first_row, pinned)
        except Exception as error:
            self._failure = error

    def _read(self, stream: RowStream, first_row: int, pinned: bool) -> Iterator[Microbatch | Exception]:
        from torchdata import nodes

        check_shared_memory()  # here, and not in torchdata, whose clean-up would print a traceback

        # `read` must not refer to self: the threads would keep this object alive, and this object keeps the threads.
        def read(place: tuple[int, int]) -> Microbatch | Exception:
            try:
                return stream.microbatch(*place)
            except Exception as error:  # returned, not raised: torchdata would wrap it in an exception of its own
                return error

        firsts = itertools.count(first_row, stream.batch.global_batch_size)
        places = nodes.IterableWrapper((first, number) for first in firsts for number in stream.numbers(first))
        node = nodes.ParallelMapper(places, read, num_workers=_THREADS)
        if pinned:
            kind = accelerator.kind()
            # CUDA is not named: torchdata's thread would make a context on the first card
            node = nodes.PinMemory(node, "" if accelerator.is_cuda(torch.device(kind)) else kind)
        return iter(nodes.Loader(node))


def validation_batches(dataset: RowSet, batch: Batch, dp_rank: int, most: int = 0) -> Iterator[Microbatch]:
    """This rank's microbatches of one pass over a set, in order. Args: most: read so many rows at most; 0: all.

    Every rank gets the same number, because each forward has collectives; padding rows fill the last ones.
    """
    local, ranks, count = batch.local_batch_size, batch.dp_degree, min(len(dataset), most or len(dataset))
    for start in range(dp_rank * local, with_padding_rows(count, local * ranks), local * ranks):
        indices = (i if i < count else PADDING_ROW for i in range(start, start + local))
        yield collate([dataset.row(index) for index in indices])
