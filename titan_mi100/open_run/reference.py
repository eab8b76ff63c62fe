"""What a model thinks of the answers before training: the reference of preferences, the log p of sampled answers."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from titan_mi100.config.settings import ObjectiveConfig
from titan_mi100.data.answer_store import SAMPLED, ByLearnedToken, Column, LogprobStore, by_document, placed
from titan_mi100.data.answers import ADVANTAGE, BASE, OLD, REFERENCE, SAMPLER, TEACHER
from titan_mi100.errors import UserError
from titan_mi100.files.durable import replace
from titan_mi100.log import log
from titan_mi100.open_run.inputs import RunInputs
from titan_mi100.open_run.logprob_pass import LogprobPass
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import from_rank_zero, raise_together

APART = "apart.json"  # in a sampler's folder: the mean difference of its log p
_FAR = 0.01  # mean difference of the sampler's log p that is warned of


class Reference:
    """The reference of a run: opens its store, decides whether a pass is needed, and gives the rows its values.

    The store's folder in the run folder has the name of its kind.

    Attributes:
        is_complete: nothing is left to read; else the weights that training starts from must be loaded.
    """

    def __init__(self, inputs: RunInputs, dp_rank: int, attention: str) -> None:
        """A collective. Args: attention: name of the backend."""
        self._columns, self._objective = inputs.columns, inputs.config.objective
        self._pass = LogprobPass(inputs, dp_rank)
        of_samples = self._objective.name == "policy"
        self._about = about = self._pass.about(int(of_samples), attention, SAMPLED * of_samples)
        self._store: LogprobStore | None = None
        with raise_together():
            if inputs.folder is not None:
                own = inputs.folder / about.kind
                remedy = f"delete {own}: it is made again from the weights that training starts from"
                self._store = LogprobStore(own, about, remedy)
        self.is_complete = from_rank_zero(lambda: self._store is not None and self._store.is_complete)
        asked = self._pass.wanted
        self._starts = asked.starts if of_samples else np.arange(asked.count + 1)

    def read(self, model: ParallelModel, stop: Callable[[], bool], beat: Callable[[], None], cache: Path) -> None:
        """Make what the store lacks, and give the rows its values. A collective.

        Unless it `is_complete`, the model must hold the weights that training starts from.

        Raises:
            UserError: on all ranks; from check_sampler, or the store cannot be read or written.
        """
        store, reading = self._store, self._pass
        if store is None:  # nothing is recorded: kept in memory
            arrays = reading.read(model, range(self._about.rows), self._about, beat)
            log_p = from_rank_zero(lambda: placed([arrays] if arrays else (), self._starts))
        else:
            if not self.is_complete:
                reading.fill(model, store, stop, beat, cache)

            def read() -> np.ndarray:
                again = LogprobStore(store.folder, store.about, "start again")
                again.verify(reading.wanted, cache)
                return placed(map(again.load, again.parts), self._starts)

            log_p = from_rank_zero(read)
        if self._about.kind != SAMPLED:
            self._columns[REFERENCE] = by_document(log_p)
            return
        sampler = self._columns[SAMPLER]
        assert isinstance(sampler, ByLearnedToken)
        with raise_together():
            mean = check_sampler(log_p, sampler.values, self._objective.most_apart)
        if store is not None:
            from_rank_zero(partial(replace, store.folder / APART, json.dumps({"mean": mean}), is_synced=True))
        self._columns[OLD] = self._columns[BASE] = ByLearnedToken(log_p, self._starts)
        finish_advantages(self._columns, log_p, self._objective)


def finish_advantages(columns: dict[str, Column], own: np.ndarray, objective: ObjectiveConfig) -> None:
    """Give the advantages what needs the trainer's log p of the sampled tokens.

    A teacher's are log p of the teacher - own, per token: the gradient is that of KL(student || teacher), with the
    texts fixed. A correction is a factor, because every form of the loss is linear in a factor of the advantage that is
    not negative: pi_old / pi_sampler of the token, at most the cap (TIS), or 0 for an answer whose ratio, the product
    of its tokens', is beyond the cap on either side.

    Args:
        columns: ADVANTAGE, SAMPLER and with a teacher TEACHER.
        own: (learned tokens,).
    """
    advantage, sampler = columns[ADVANTAGE], columns[SAMPLER]
    assert isinstance(advantage, ByLearnedToken) and isinstance(sampler, ByLearnedToken)
    final, log_cap, change = advantage.values, float(np.log(objective.cap)), own - sampler.values
    if objective.advantage == "teacher":
        teacher = columns[TEACHER]
        assert isinstance(teacher, ByLearnedToken)
        final = teacher.values - own
    if objective.correction == "truncate":
        final = final * np.exp(np.minimum(change, log_cap))
        log.info(f"correction: {np.mean(change > log_cap):.2%} of the tokens weigh {objective.cap:g}, the cap")
    elif objective.correction == "leave_out":
        is_far = np.abs(np.add.reduceat(change, advantage.starts[:-1])) > log_cap  # of each answer
        final = np.where(np.repeat(is_far, np.diff(advantage.starts)), 0.0, final)
        log.info(f"correction: {int(is_far.sum()):,} of {len(is_far):,} answers are left out")
    columns[ADVANTAGE] = ByLearnedToken(final, advantage.starts)


def check_sampler(own: np.ndarray, sampler: np.ndarray, most: float) -> float:
    """Compare the log p that the trainer computes for sampled tokens with those that the sampler has said. Returns the
    mean difference.

    Args:
        own, sampler: (learned tokens,); NaN in `own`: of no row.
        most: mean difference above which the sampler was another model.

    Raises:
        UserError: they are further apart.
    """
    apart = np.abs(own - sampler)[np.isfinite(own)]
    mean, largest = (float(apart.mean()), float(apart.max())) if len(apart) else (0.0, 0.0)
    message = f"log p of {len(apart):,} sampled tokens, the sampler's against the trainer's: "
    message += f"{mean:.2g} apart on average, {largest:.2g} at most"
    if mean > most:
        remedy = (
            "train the weights that have sampled (checkpoint.initial_load_path, lora.initial_load_path), sample again"
        )
        raise UserError(f"{message}; the mean is above objective.most_apart = {most:g}; {remedy}, or raise it")
    if mean > _FAR:
        log.warning(f"{message}: are they quite the same weights? in fp32 it is below 1e-5, in bf16 about 1e-3")
    else:
        log.info(message)
    return mean
