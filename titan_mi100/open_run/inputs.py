"""What a run is made of, before its model is built."""

from dataclasses import dataclass
from pathlib import Path

from titan_mi100.checkpoint.resume import FoundCheckpoint
from titan_mi100.data.answer_store import Column
from titan_mi100.data.prepared import Prepared
from titan_mi100.parallel.distributed import World
from titan_mi100.planning.workload import Workload
from titan_mi100.run.progress import Progress


@dataclass(frozen=True)
class RunInputs(Workload):
    """A run's workload, its data and the checkpoint that it resumes from.

    Attributes:
        config: with what a resumed run keeps of its checkpoint: rows per step, stages.
        folder: the run folder; None: nothing is recorded or saved.
        columns: further arrays of the rows; those of a reference are filled in by Reference.read.
        found: the checkpoint; None: the run starts from the beginning.
    """

    world: World
    folder: Path | None
    data: Prepared
    columns: dict[str, Column]
    found: FoundCheckpoint | None
    progress: Progress

    @property
    def supervised_share(self) -> float:
        """Supervised tokens per token of the training data."""
        return self.data.train_counts.supervised_share(self.config.training.seq_len)
