"""What a run is made of, before its model is built."""

from dataclasses import dataclass
from pathlib import Path

from titan_mi100.checkpoint.resume import FoundCheckpoint
from titan_mi100.config.layout import Batch, Layout
from titan_mi100.config.settings import Config
from titan_mi100.data.answer_store import Column
from titan_mi100.data.prepared import Prepared
from titan_mi100.parallel.distributed import World
from titan_mi100.run.progress import Progress
from titan_mi100.shapes.base import ModelSpec


@dataclass(frozen=True)
class RunInputs:
    """A run's config, its data and the checkpoint that it resumes from.

    Attributes:
        config: with what a resumed run keeps of its checkpoint: rows per step, stages.
        folder: the run folder; None: nothing is recorded or saved.
        columns: further arrays of the rows; those of a reference are filled in by `load_model`.
        found: the checkpoint; None: the run starts from the beginning.
    """

    config: Config
    world: World
    folder: Path | None
    spec: ModelSpec
    data: Prepared
    columns: dict[str, Column]
    found: FoundCheckpoint | None
    progress: Progress
    layout: Layout
    batch: Batch

    @property
    def supervised_share(self) -> float:
        """Supervised tokens per token of the training data."""
        return self.data.train_counts.supervised_share(self.config.training.seq_len)
