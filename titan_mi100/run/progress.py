"""How far a run has come, and how a checkpoint's trainer.json says it."""

import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from titan_mi100.checkpoint.resume import REMEDY
from titan_mi100.data.mixture import Segment
from titan_mi100.errors import UserError
from titan_mi100.files.schema import checked
from titan_mi100.optim.loss_scale import LossScale
from titan_mi100.run.metrics import StepResult

_REMEMBERED = 128  # losses of steps that a new one is compared with
_SUSPECT = 3  # times their median
_LEAST_SPIKE = 0.01  # of the mean: losses that hardly differ have no spikes


@dataclass
class Progress:
    """Changes with every step and validation; a resume continues from it."""

    step: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    best_step: int | None = None  # of the lowest validation loss
    best_loss: float | None = None
    validation_due: bool = False  # the step's validation was given up: a resume begins with it
    plan: str = ""  # fingerprint of the rows to train and to validate on: losses on other rows are not comparable
    recent_losses: list[float] = field(default_factory=list)  # of the last steps with a finite loss and gradient
    suspicion: str = ""  # why the weights that the last step began with may be ruined; empty: no reason
    loss_scale: LossScale = field(default_factory=LossScale)  # of fp16; the trainer moves it
    segments: list[Segment] = field(default_factory=list)  # of a mixture, the last one now
    rows_consumed: int = 0  # over all ranks; the whole state of the data

    def after_step(self, result: StepResult) -> None:
        self.step += 1
        self.rows_consumed = result.next_row
        self.skipped_steps += result.skipped
        is_finite = not result.skipped or result.spike_above is not None
        if not result.overflowed:  # that is no fault: the next step has a smaller loss scale
            self.skipped_in_a_row = 0 if is_finite else self.skipped_in_a_row + 1
        if not result.skipped:
            self.suspicion = self.suspect(result.loss)
        if is_finite:  # spikes too: where the loss stays high, they soon are none
            self.recent_losses = [*self.recent_losses, result.loss][-_REMEMBERED:]

    def suspect(self, loss: float) -> str:
        """Why weights with this loss may be ruined; empty: no reason."""
        usual = statistics.median(self.recent_losses or [loss])
        if loss <= _SUSPECT * usual:
            return ""
        return f"their loss is {loss:.4g}, the median of the {len(self.recent_losses)} steps before is {usual:.4g}"

    def spike_above(self, sigmas: float) -> float:
        """The loss from which a step is a spike: so many standard deviations above the mean of the last steps.

        Args:
            sigmas: 0: none is.

        The window and 6 deviations are those of OLMo's SkipStepOptimizer.
        """
        if not sigmas or len(self.recent_losses) < _REMEMBERED // 2:
            return math.inf
        losses, count = self.recent_losses, len(self.recent_losses)
        mean = sum(losses) / count
        deviation = math.sqrt(sum([(loss - mean) ** 2 for loss in losses]) / count)
        return mean + max(sigmas * deviation, _LEAST_SPIKE * mean)

    def after_validation(self, loss: float | None) -> bool:
        """Whether this is the lowest loss so far. Args: loss: None: the validation was given up."""
        self.validation_due = loss is None
        is_best = loss is not None and math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss)
        if is_best:
            self.best_step, self.best_loss = self.step, loss
        return is_best

    def trainer_state(self) -> dict[str, Any]:
        """What trainer.json holds."""
        progress = asdict(self)
        return {"step": self.step, "loader": {"rows_consumed": progress.pop("rows_consumed")}, "progress": progress}

    @classmethod
    def of_trainer_state(cls, state: dict[str, Any], file: Path) -> "Progress":
        """Args: file: for messages. Raises UserError: it holds something else."""
        try:
            found = checked(state, _TrainerState)
            progress = {**found["progress"], "rows_consumed": found["loader"]["rows_consumed"]}
            if (read := checked(progress, cls, "progress")).step != found["step"]:
                raise ValueError(f"progress.step = {read.step} is not step = {found['step']}")
            return read
        except ValueError as error:
            raise UserError(f"{file}: {error}; {REMEDY}") from None


class _Loader(TypedDict):
    rows_consumed: int


class _TrainerState(TypedDict):
    step: int
    loader: _Loader
    progress: dict[str, Any]
