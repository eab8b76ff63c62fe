"""Steps whose loss or gradients are not finite: counted, recorded, traced to the rows of input."""

import csv
import io
from pathlib import Path

from titan_mi100.data.loader import RowStream
from titan_mi100.errors import NumericalError, UserError
from titan_mi100.files.plain import open_plain
from titan_mi100.logging import log
from titan_mi100.parallel.distributed import World, gather
from titan_mi100.run.metrics import StepResult
from titan_mi100.run.progress import Progress
from titan_mi100.wording import some

FILE = "nonfinite_rows.csv"
_SHOWN = 10  # rows in a message


class FaultWatch:
    """Records the steps that were skipped, with their input, and ends the run after too many in a row."""

    def __init__(self, stream: RowStream, folder: Path, world: World, progress: Progress, most_in_a_row: int) -> None:
        """Begin; what an earlier start of the run noted after its last checkpoint is taken out."""
        self._stream, self._file, self._world = stream, folder / FILE, world
        self._progress, self._most_in_a_row, last_step = progress, most_in_a_row, progress.step
        self._rows: list[str] = []  # of the skipped steps in a row
        if world.rank == 0 and self._file.exists():
            try:
                with io.TextIOWrapper(open_plain(self._file), encoding="utf-8", newline="") as file:
                    kept = [row for row in csv.reader(file) if row and int(row[0]) <= last_step]
                with self._file.open("w", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerows(kept)
            except (ValueError, csv.Error) as error:
                raise UserError(f"{self._file}: is not what a run wrote: {error}; remove it") from None
            except OSError as error:
                log.warning(f"{self._file}: cannot be written to: {error.strerror}")

    def after_step(self, step: int, result: StepResult) -> None:
        """Log a step that was skipped, with the input it saw. A collective for a skipped step.

        Raises:
            NumericalError: on all ranks; there were too many of them in a row.
        """
        if not result.skipped:
            self._rows = []
            return
        if result.overflowed:
            scale = f"the loss scale {result.loss_scale:,.0f} is halved"
            log.info(f"step {step}: gradients overflowed fp16; the step was skipped on all ranks, {scale}")
            return
        found = gather(self._stream.row_numbers(result.first_row, result.nonfinite_microbatches))
        if not any(found):  # the losses are finite, the gradients are not: any row may be the cause
            everything = range(self._stream.batch.gradient_accumulation_steps)
            found = gather(self._stream.row_numbers(result.first_row, everything))
        numbers = sorted({number for ranks in found for number in ranks})  # ranks of a pipeline read the same rows
        places = list(dict.fromkeys(place for number in numbers for place in self._stream.source.where(number)))
        self._rows += places
        if self._world.rank == 0:
            try:
                with self._file.open("a", newline="", encoding="utf-8") as file:
                    csv.writer(file).writerows((step, *place.rsplit(":", 1)) for place in places)
            except OSError as error:
                log.warning(f"{self._file}: cannot be written to: {error.strerror}")
            what = f"loss {result.loss}, gradient norm {result.grad_norm}: not finite. The step was skipped on all"
            log.warning(f"step {step}: {what} ranks; rows: {some(places, _SHOWN)}")

        if (in_a_row := self._progress.skipped_in_a_row) >= self._most_in_a_row:
            raise NumericalError(
                f"loss or gradient norm not finite in {in_a_row} steps in a row, up to step {step}. No weight was "
                f"updated in them. Rows: {some(dict.fromkeys(self._rows), _SHOWN)}\nall of them: {self._file}"
            )
