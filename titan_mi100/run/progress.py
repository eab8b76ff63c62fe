"""The progress of a run, as saved in a checkpoint's trainer.json."""

import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from titan_mi100.checkpoint.resume import REMEDY
from titan_mi100.data.mixture import Segment
from titan_mi100.errors import UserError
from titan_mi100.files.schema import validated
from titan_mi100.optim.loss_scale import LossScale
from titan_mi100.trainer import StepResult

_REMEMBERED = 128  # recent losses that a new one is compared with
_SUSPECT = 3  # a loss above this many times their median makes the weights suspect
_LEAST_SPIKE = 0.01  # a spike is at least this share above the mean, also where the losses hardly vary


@dataclass
class Progress:
    """Everything that changes with each step or validation, besides weights and optimizer state. A checkpoint saves it,
    and a resumed run restores it.
    """

    step: int = 0
    skipped_steps: int = 0
    skipped_spikes: int = 0  # skipped steps whose loss was a spike
    skipped_in_a_row: int = 0
    best_step: int | None = None  # step with the best validation
    best_loss: float | None = None  # its loss
    best_match: float | None = None  # its exact match, where that decides
    validations_since_best: int = 0  # for early stopping
    validation_due: bool = False  # the step's validation was interrupted: a resumed run repeats it first
    plan: str = ""  # fingerprint of the training and validation rows: losses on other rows are not comparable
    recent_losses: list[float] = field(default_factory=list)  # losses of the last steps with a finite loss and gradient
    suspicion: str = ""  # why the weights before the last step may be ruined; empty: no reason
    loss_scale: LossScale = field(default_factory=LossScale)  # for fp16; the trainer updates it
    draft_loss_scale: LossScale = field(default_factory=LossScale)  # of a draft head that is trained along
    segments: list[Segment] = field(default_factory=list)  # segments of a mixture; the last one is in use
    rows_consumed: int = 0  # over all ranks; this is the whole state of the data loader

    def after_step(self, result: StepResult) -> None:
        self.step += 1
        self.rows_consumed = result.next_row
        self.skipped_steps += result.skipped
        self.skipped_spikes += result.skipped and result.spike_above is not None
        is_finite = not result.skipped or result.spike_above is not None
        if not result.overflowed:  # an fp16 overflow is normal: the next step has a smaller loss scale
            self.skipped_in_a_row = 0 if is_finite else self.skipped_in_a_row + 1
        if not result.skipped:
            self.suspicion = self.suspect(result)
        if is_finite:  # spikes count too: if the loss stays high, the limit rises and they stop being spikes
            self.recent_losses = [*self.recent_losses, result.loss][-_REMEMBERED:]

    def suspect(self, result: StepResult) -> str:
        """Why weights with this loss may be ruined (it is far above the recent median); empty: it is not."""
        loss = result.loss
        usual = statistics.median(self.recent_losses or [loss])
        if loss <= _SUSPECT * usual or not result.has_level:
            return ""
        return f"their loss is {loss:.4g}, the median of the {len(self.recent_losses)} steps before is {usual:.4g}"

    def spike_above(self, sigmas: float) -> float:
        """The loss above which a step is a spike: `sigmas` standard deviations above the mean of recent steps.

        Args:
            sigmas: 0: no step is a spike.

        The window and 6 deviations are those of OLMo's SkipStepOptimizer.
        """
        if not sigmas or len(self.recent_losses) < _REMEMBERED // 2:
            return math.inf
        losses, count = self.recent_losses, len(self.recent_losses)
        mean = sum(losses) / count
        deviation = math.dist(losses, [mean] * count) / math.sqrt(count)  # one call: this runs in every step
        return mean + max(sigmas * deviation, _LEAST_SPIKE * mean)

    def after_validation(self, loss: float | None, counts: bool = True, match: float | None = None) -> bool:
        """Record a validation; whether it is the best so far.

        Args:
            loss: None: it was interrupted.
            match: the exact match, of which the highest is the best; None: the lowest loss is.
            counts: false: not for the best checkpoint and early stopping.
        """
        self.validation_due = loss is None
        if loss is None or not counts:
            return False
        is_best = self.best_loss is None or loss < self.best_loss
        if match is not None:
            is_best = self.best_match is None or match > self.best_match
        if is_best := is_best and math.isfinite(loss):
            self.best_step, self.best_loss, self.best_match, self.validations_since_best = self.step, loss, match, 0
        else:
            self.validations_since_best += 1
        return is_best

    def has_stopped_improving(self, patience: int) -> bool:
        """Whether to stop early: the last `patience` validations brought nothing better. 0: never."""
        return 0 < patience <= self.validations_since_best

    @property
    def best(self) -> tuple[str, str]:
        """What the best validation was chosen by, and its value."""
        match = self.best_match
        return ("validation loss", f"{self.best_loss:.4f}") if match is None else ("exact match", f"{match:.1%}")

    def describe_early_stop(self, steps: int) -> str:
        """Args: steps: number of steps of the whole run."""
        best, is_loss = "no validation loss was finite", self.best_match is None
        if self.best_step is not None:
            best = f"step {self.best_step} has the {'lowest' if is_loss else 'highest'} {', '.join(self.best)}"
        message = f"stopped early after step {self.step:,} of {steps:,}: {best}"
        return (
            f"{message}; {self.validations_since_best} validations in a row were not {'lower' if is_loss else 'higher'}"
        )

    def trainer_state(self) -> dict[str, Any]:
        """What trainer.json holds."""
        # without what earlier versions do not know, where there is none
        unused = {"best_match": None, "draft_loss_scale": asdict(LossScale())}
        progress = {name: own for name, own in asdict(self).items() if name not in unused or own != unused[name]}
        return {"step": self.step, "loader": {"rows_consumed": progress.pop("rows_consumed")}, "progress": progress}

    @classmethod
    def of_trainer_state(cls, state: dict[str, Any], file: Path) -> "Progress":
        """Args: file: for messages. Raises UserError: it holds something else."""
        try:
            fields = validated(state, _TrainerState)
            progress = {**fields["progress"], "rows_consumed": fields["loader"]["rows_consumed"]}
            if (read := validated(progress, cls, "progress")).step != fields["step"]:
                raise ValueError(f"progress.step = {read.step} is not step = {fields['step']}")
            return read
        except ValueError as error:
            raise UserError(f"{file}: {error}; {REMEDY}") from None


class _Loader(TypedDict):
    rows_consumed: int


class _TrainerState(TypedDict):
    step: int
    loader: _Loader
    progress: dict[str, Any]
