"""The reference of preferences: sums of log p of each answer under the weights that training starts from."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from titan_mi100.data.answer_store import Column, Identity, LogprobStore, by_document
from titan_mi100.data.answers import REFERENCE
from titan_mi100.log import log
from titan_mi100.open_run.logprob_pass import LogprobPass
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import from_rank_zero, raise_together

FOLDER = "reference"  # in a run folder
_COMPARED = 64  # rows that another layout's reference is compared in
_APART = 1e-3  # difference of a sum of log p above which another layout's reference is warned of


class Reference:
    """The reference of a run: opens its store, decides whether a pass is needed, and gives the rows its sums."""

    def __init__(self, reading: LogprobPass, folder: Path | None, about: Identity, columns: dict[str, Column]) -> None:
        """A collective."""
        self._pass, self._columns, self._about = reading, columns, about
        self._store: LogprobStore | None = None
        with raise_together():
            if folder is not None:
                remedy = f"delete {folder / FOLDER}: it is made again from the weights that training starts from"
                self._store = LogprobStore(folder / FOLDER, about, remedy)
        before = self._store.about if self._store else about
        self._is_elsewhere = (before.layout, before.attention) != (about.layout, about.attention)
        self._is_complete = from_rank_zero(lambda: self._store is not None and self._store.is_complete)

    @property
    def needs_base(self) -> bool:
        """Whether the weights that training starts from must be loaded: to read the reference, or to compare."""
        return not self._is_complete or self._is_elsewhere

    def read(self, model: ParallelModel, stop: Callable[[], bool], beat: Callable[[], None], cache: Path) -> None:
        """Make what the store lacks, and give the rows their sums. A collective.

        If `needs_base`, the model must hold the weights that training starts from.
        """
        store, reading = self._store, self._pass
        if store is None:  # nothing is recorded: kept in memory
            arrays = reading.read(model, range(self._about.rows), 0, beat)
            sums = np.full(self._about.documents, np.nan)
            if arrays:
                sums[arrays["documents"]] = arrays["sums"]
            sums = from_rank_zero(lambda: sums)
        else:
            if not self._is_complete:
                reading.fill(model, store, stop, beat, cache)

            def read() -> np.ndarray:
                again = LogprobStore(store.folder, store.about, "start again")
                again.verify(reading.wanted, cache)
                return again.sums()

            sums = from_rank_zero(read)
            if self._is_elsewhere:
                self._compare(model, store.about, sums, beat)
        self._columns[REFERENCE] = by_document(sums)

    def _compare(self, model: ParallelModel, before: Identity, sums: np.ndarray, beat: Callable[[], None]) -> None:
        first = range(min(before.rows, _COMPARED))
        arrays = self._pass.read(model, first, 0, beat)
        if arrays:
            apart = float(np.abs(arrays["sums"] - sums[arrays["documents"]]).max(initial=0.0))
            message = f"the reference was made in another layout ({before.layout}, {before.attention}): "
            message += f"log p of the first answers differs by at most {apart:.2g} there"
            if apart > _APART:
                log.warning(f"{message}; delete {FOLDER}/ in the run folder to make it again here")
            else:
                log.info(message)
