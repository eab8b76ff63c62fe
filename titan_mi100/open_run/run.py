"""An open run, as the training loop uses it."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch.distributed.device_mesh import DeviceMesh

from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.config.settings import Config, WatchdogConfig
from titan_mi100.data.loader import RowStream
from titan_mi100.data.prepared import Prepared
from titan_mi100.errors import UserError
from titan_mi100.log import log
from titan_mi100.optim.optimizer import lr_factor, scale_lr
from titan_mi100.optim.state import NamedState
from titan_mi100.parallel import distributed
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import World, any_rank, raise_together
from titan_mi100.run.evaluate import bits_per_byte, validation_losses
from titan_mi100.run.forecast import Forecast
from titan_mi100.run.metrics import Reporter
from titan_mi100.run.profiling import Profiler
from titan_mi100.run.progress import Progress
from titan_mi100.run.samples import Sampler
from titan_mi100.trainer import StepResult, Trainer
from titan_mi100.watch.heartbeat import SAVE, VALIDATION, Heartbeat

_ROWS_OF_DRAFTS = 16
_EARLY = 20  # the first validation comes after this part of the steps
MOVED = "moved"  # a flag of the trainer: the run folder's path leads elsewhere
NO_FINITE_STEP = "no step that began with them had a finite loss and gradient"


class StepObserver(Protocol):
    def after_step(self, step: int, result: StepResult) -> None:
        """On every rank, after each step; what it raises must be raised on all ranks."""


@dataclass(frozen=True)
class Supervision:
    """What watches this process, and how it is told to stop.

    Attributes:
        heartbeat: this process's record for the watcher.
        wants_to_stop: whether this process was told to stop.
        moved: why nothing may be written to the run folder any more; "": it is where it was. Only rank 0's is used.
    """

    heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(WatchdogConfig()))
    wants_to_stop: Callable[[], bool] = lambda: False
    moved: Callable[[], str] = lambda: ""


@dataclass
class Run:
    """An open run, as the training loop uses it. Every rank has one and makes the same calls in the same order.

    Attributes:
        about: layout, data and fingerprints of the run, for the manifests of its checkpoints.
        steps: number of the run's last step.
        forecast: planned memory and time.
        observers: called with each step's result.
        sampler: answers held-out prompts at each validation; None: disabled.
        profiler: traces some steps; None: disabled.
    """

    config: Config
    world: World
    folder: Path | None
    mesh: DeviceMesh
    data: Prepared
    about: dict[str, Any]
    model: ParallelModel
    optimizer: NamedState
    checkpointer: Checkpointer
    stream: RowStream
    progress: Progress
    steps: int
    trainer: Trainer
    reporter: Reporter | None
    forecast: Forecast
    observers: list[StepObserver]
    supervision: Supervision
    sampler: Sampler | None
    profiler: Profiler | None
    measured: dict[str, float] = field(default_factory=dict)  # the last validation

    def step(self) -> StepResult:
        """Take the next step. Learning rate and dropout's seed are functions of its number."""
        number, config = self.progress.step + 1, self.config
        self.supervision.heartbeat.begin_step(number)
        scale_lr(self.optimizer, lr_factor(config.lr_scheduler, number, self.steps))
        if config.lora.dropout:
            distributed.seed_dropout(config.training.seed, number, self.stream.dp_rank, self.mesh)
        with self.profiler.around(number) if self.profiler else nullcontext():
            result = self.trainer.step()
            if MOVED in result.flags:  # before anything is written, or removed, under the folder's path
                self.check_folder()
            if self.profiler and self.profiler.traces(number):
                self.supervision.heartbeat.begin(SAVE, f"trace of step {number}")
        self.supervision.heartbeat.note("what follows a step")
        self.progress.after_step(result)
        if not result.skipped:  # the loss is that of the weights before the update, which may just have been saved
            self.checkpointer.judge(self.progress.suspicion)
        for observer in self.observers:
            observer.after_step(number, result)
        return result

    @property
    def is_finished(self) -> bool:
        """Whether the last step was taken, or the run stops early. The same on all ranks: they share each loss."""
        stops_early = self.progress.has_stopped_improving(self.config.validation.patience)
        return self.progress.step >= self.steps or stops_early

    @property
    def keeps_best(self) -> bool:
        """Early stopping is of use only with the checkpoint of the best validation."""
        return self.config.checkpoint.keep_best or self.config.validation.patience > 0

    def is_due(self, every: int) -> bool:
        """Whether it is time for something that happens every `every` steps (0: never) and after the last one."""
        return self.progress.step == self.steps or (every > 0 and self.progress.step % every == 0)

    @property
    def is_early(self) -> bool:
        """Whether a validation is the first one, after 5% of the steps, for a reader who waits for what validation.freq
        brings later. It counts neither for the best checkpoint nor for early stopping: no weight depends on it.
        """
        return self.progress.step == max(1, self.steps // _EARLY) < min(self.config.validation.freq, self.steps)

    @property
    def validates(self) -> bool:
        """Whether it is time for a validation."""
        return self.is_early or self.is_due(self.config.validation.freq)

    def validation_losses(self, of_training: int = 0) -> list[dict[str, float]] | None:
        """Validation loss and measures of all sources together, then of each; None: interrupted, as a process was told
        to stop. Args: of_training: so many training rows instead.
        """

        def is_told_to_stop() -> bool:
            return any_rank(self.supervision.wants_to_stop(), self.world.device)

        batch, dp_rank = self.stream.batch, self.stream.dp_rank
        sets = [source.rows for source in (self.data.sources if of_training else self.data.validation)]
        beat = partial(self.supervision.heartbeat.begin, VALIDATION)
        return validation_losses(self.model, sets, batch, dp_rank, is_told_to_stop, beat, of_training)

    def validate(self) -> bool:
        """Validate and report, if the run has validation data; whether it is the best of those that count."""
        if not self.data.validation:
            return False
        if self.is_early:
            note = f"those that count for the best checkpoint come every {self.config.validation.freq} steps"
            log.info(f"step {self.progress.step}  a first validation, early; {note}")
        losses = self.validation_losses()
        answered: list[dict[str, Any]] | None = []
        match: float | None = None
        if losses and self.sampler is not None:

            def is_told_to_stop() -> bool:  # called for each token
                self.supervision.heartbeat.begin(VALIDATION, "samples")
                return self.supervision.wants_to_stop()

            answered = self.sampler.answer(self.model, self.stream, is_told_to_stop)
            losses = None if answered is None else losses
            match = None if answered is None else self.sampler.exact_match(answered)
        self.measured = losses[0] if losses else {}
        self.check_folder()
        loss = losses[0]["loss"] if losses else None
        if losses and self.reporter is not None:
            names = [source.name for source in self.data.validation]
            each = {name: own["loss"] for name, own in zip(names, losses[1:], strict=True)} if len(names) > 1 else {}
            bits = bits_per_byte(losses[0]["loss"], self.data.validation_counts)
            self.reporter.validation(self.progress.step, losses[0], bits, each, match)
            if answered:
                self.reporter.samples(self.progress.step, answered)
        return self.progress.after_validation(loss, counts=not self.is_early, match=match)

    def log_drafts(self, when: str) -> None:
        """Log how many of the draft head's drafts the model accepts, on validation rows, or else on the first rows of
        training. A collective.
        """
        count = 0 if self.data.validation else _ROWS_OF_DRAFTS
        if self.model.draft == "no":
            return
        # the last step's validation has measured it already
        losses = [self.measured] if self.measured else self.validation_losses(count)
        if losses is None:
            return
        which = f"the first {count} training rows of each source" if count else "the validation rows"
        share, slots = losses[0]["draft_acceptance"], losses[0]["draft_slots"]
        error = math.sqrt(share * (1 - share) / slots) if slots else math.nan
        text = f"{share:.1%} +- {error:.1%} of {slots:,.0f} drafts of one token are accepted"
        log.info(f"draft head {when} training: {text} (greedily, on the given text of {which})")

    def check_folder(self) -> None:
        """Raise UserError, on all ranks, if the run folder was moved: a save would make a new one. A collective."""
        with raise_together():
            if self.world.rank == 0 and (why := self.supervision.moved()):
                raise UserError(why)

    def save(self) -> None:
        assert self.folder is not None
        self.check_folder()
        best = self.progress.best_step if self.keeps_best else None
        suspicion = self.progress.suspicion
        self.supervision.heartbeat.begin(SAVE, f"checkpoint of step {self.progress.step}", self.progress.step)
        self.checkpointer.save(self.progress.step, self.progress.trainer_state(), self.about, best, suspicion)

    def judge_last_save(self) -> None:
        """Check the last checkpoint's weights: compute the loss and gradients of one more step without an update.
        (Other checkpoints are checked by the loss of the step that follows.)
        """
        self.supervision.heartbeat.begin_step(self.progress.step + 1)
        result = self.trainer.step(update=False)
        is_broken = result.skipped and not result.overflowed and result.spike_above is None  # a spike is finite
        self.checkpointer.judge(NO_FINITE_STEP if is_broken else self.progress.suspect(result))

    def close(self) -> None:
        """Wait for a save in the background, then close the metrics. A collective: not after a crash."""
        self.supervision.heartbeat.begin(SAVE, "waiting for the save in the background")
        try:
            self.checkpointer.wait()
        finally:
            if self.reporter is not None:
                self.reporter.close(stopped_early=self.is_finished)
