"""How far a run has come, and how a checkpoint's trainer.json says it."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from titan_mi100.checkpoint.resume import REMEDY
from titan_mi100.errors import UserError
from titan_mi100.files.schema import checked
from titan_mi100.run.metrics import StepResult


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
    rows_consumed: int = 0  # over all ranks; the whole state of the data

    def after_step(self, result: StepResult) -> None:
        self.step += 1
        self.rows_consumed = result.next_row
        self.skipped_steps += result.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if result.skipped else 0

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
            return checked(progress, cls, "progress")
        except ValueError as error:
            raise UserError(f"{file}: {error}; {REMEDY}") from None


class _Loader(TypedDict):
    rows_consumed: int


class _TrainerState(TypedDict):
    step: int
    loader: _Loader
    progress: dict[str, Any]
