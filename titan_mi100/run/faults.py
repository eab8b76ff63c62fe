"""Steps whose loss or gradients are not finite, and loss spikes: counted, and logged with their input rows."""

import csv
import math
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from titan_mi100.data.loader import RowStream
from titan_mi100.errors import NumericalError
from titan_mi100.log import log, write_or_say
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import World, data_sheet, gather, local_part
from titan_mi100.planning.hardware import dtype_advice
from titan_mi100.run.metrics import drop_lines
from titan_mi100.run.progress import Progress
from titan_mi100.trainer import StepResult
from titan_mi100.wording import some

FILE, SPIKES = "nonfinite_rows.csv", "loss_spikes.csv"
_SHOWN = 10  # rows in a message


class FaultWatch:
    """Logs skipped steps and spikes with their input rows. Ends the run after too many steps that are not finite."""

    def __init__(
        self, stream: RowStream, folder: Path, world: World, progress: Progress, most: int, model: ParallelModel
    ) -> None:
        """Remove what an earlier start wrote to the CSV files after its last checkpoint.

        Args:
            most: so many steps in a row that are not finite end the run.
        """
        self._model, self._cause, self._remedy = model, "", ""
        self._stream, self._folder, self._world = stream, folder, world
        self._progress, self._most_in_a_row = progress, most
        self._rows: list[str] = []  # input rows of the steps skipped in a row
        for file in (folder / FILE, folder / SPIKES) if world.rank == 0 else ():
            with write_or_say(file):
                drop_lines(file, lambda line: int(line.partition(b",")[0]) <= progress.step)

    def after_step(self, step: int, result: StepResult) -> None:
        """Log a skipped step or a spike with its input rows; for such a step a collective.

        Raises:
            NumericalError: on all ranks: too many steps in a row were not finite.
        """
        if result.measures.get("draft_skipped") and not result.measures.get("draft_overflowed"):
            log.warning(f"step {step}: the draft head's loss or gradients are not finite; it was not updated")
        if result.spike_above is not None:
            self._after_spike(step, result, result.spike_above)
            return
        if not result.skipped:
            self._rows = []
            return
        if result.overflowed:
            scale = f"the loss scale {result.loss_scale:,.0f} is halved"
            log.info(f"step {step}: gradients overflowed fp16; the step was skipped on all ranks, {scale}")
            return
        places = self._places(result.first_row, result.nonfinite_microbatches)
        if not places:  # the losses are finite, the gradients are not: any row may be the cause
            places = self._places(result.first_row, range(len(self._stream.numbers(result.first_row))))
        self._rows += places
        if self._world.rank == 0:
            self._note(FILE, step, places)
            message = f"loss {result.loss}, gradient norm {result.grad_norm}: not finite. The step was skipped on all"
            log.warning(f"step {step}: {message} ranks; rows: {some(places, _SHOWN)}")
        if result.loss_scale is not None and not math.isfinite(result.loss) and not self._cause:
            self._note_overflow(step, result)
        if (in_a_row := self._progress.skipped_in_a_row) >= self._most_in_a_row:
            raise NumericalError(
                f"loss or gradient norm not finite in {in_a_row} steps in a row, up to step {step}. No weight was "
                f"updated in them. {self._cause}Rows: {some(dict.fromkeys(self._rows), _SHOWN)}\n"
                f"all of them: {self._folder / FILE}",
                self._remedy,
            )

    def _note_overflow(self, step: int, result: StepResult) -> None:
        """Find the first layer that leaves the range of fp16, by a forward pass of rows that failed. A collective: each
        rank computes the microbatch of the same number, whichever rank's has failed.
        """
        overflows: list[tuple[int, bool]] = []  # layers whose output is not finite; whether their input and weights are

        def look(number: int, layer: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
            if not output.isfinite().all():
                before = (given[0], *(local_part(weight)[0] for weight in layer.parameters()))  # no collective here
                overflows.append((number, all(bool(x.isfinite().all()) for x in before)))

        layers = [(int(n), layer) for part in self._model.parts for n, layer in part.model.layers.items()]
        failed = sorted({index for places in gather([*result.nonfinite_microbatches]) for index in places})
        with self._model.evaluating(), ExitStack() as hooks:  # which would cost each later step a look at every layer
            for number, layer in layers:
                hooks.callback(layer.register_forward_hook(partial(look, number)).remove)
            for index in failed[:1]:
                microbatch = self._stream.numbers(result.first_row)[index]
                self._model.forward(self._stream.microbatch(result.first_row, microbatch))
        first = min((of_rank[0] for of_rank in gather(overflows) if of_rank), default=None)
        if first is not None and first[1]:
            device = self._world.device
            lacks = "has no bfloat16" in dtype_advice("bfloat16", data_sheet(device), device.type == "cpu")
            dtype = "float32" if lacks else "bfloat16"
            self._remedy = f"train with --training.mixed_precision_param {dtype}; "
            reason = "computes values beyond 65,504, the largest of float16, so the rows are not the cause"
            self._cause = f"layer {first[0]} {reason}. "
            log.warning(f"step {step}: {self._cause}To train or resume: --training.mixed_precision_param {dtype}")

    def _after_spike(self, step: int, result: StepResult, limit: float) -> None:
        """A collective."""
        self._rows = []
        places = self._places(result.first_row, result.worst_microbatches)
        if self._world.rank == 0:
            self._note(SPIKES, step, places)
            done = "the step was skipped on all ranks" if result.skipped else "the weights were updated all the same"
            message = f"loss {result.loss:.4g}, far above the steps before ({limit:.4g} is the limit); {done}"
            log.warning(f"step {step}: {message}; rows of the highest loss: {some(places, _SHOWN)}")

    def _places(self, first_row: int, microbatches: Iterable[int]) -> list[str]:
        """The input rows (file:line) in these microbatches of a step, of all ranks. A collective."""
        held = self._stream.numbers(first_row)
        gathered = gather(self._stream.row_numbers(first_row, [held[position] for position in microbatches]))
        numbers = sorted({number for ranks in gathered for number in ranks})  # ranks of a pipeline read the same rows
        return list(dict.fromkeys(position for number in numbers for position in self._stream.source.where(number)))

    def _note(self, name: str, step: int, places: Iterable[str]) -> None:
        path = self._folder / name
        with write_or_say(path), path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows((step, *position.rsplit(":", 1)) for position in places)
