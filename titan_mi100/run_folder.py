"""The run's folder: taken for this run alone; and how the run stands or ended, for people and launchers."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from titan_mi100 import sealed
from titan_mi100.config import resolve_run_folder
from titan_mi100.distributed import World, from_rank_zero
from titan_mi100.durable import FolderLock, probe, replace, sync
from titan_mi100.errors import UserError
from titan_mi100.logging import log, log_to_file
from titan_mi100.settings import Config


@dataclass(frozen=True)
class RunState:
    """How a run stands or ended: `run_state.json`.

    Attributes:
        next: what to do about it.
    """

    state: str
    exit_code: int
    message: str
    next: str


class RunFolder:
    """The run's folder, for as long as this object lives."""

    def __init__(self, config: Config, world: World) -> None:
        """Make, lock and try it. A collective.

        Raises:
            UserError: another run has it, or it cannot be written to.
        """
        self._lock: FolderLock | None = None
        self.path = Path(from_rank_zero(lambda: str(self._take(config))))
        if world.rank == 0:
            write_run_state(
                self.path, RunState("running", 1, "killed, or still running", "if it was killed: start again")
            )
            log_to_file(self.path / "train.log")

    def _take(self, config: Config) -> Path:
        folder = resolve_run_folder(config)
        checkpoints = folder / "checkpoint"
        try:
            checkpoints.mkdir(parents=True, exist_ok=True)
            for made in (folder, folder.parent):
                sync(made)
            self._lock = FolderLock(folder)
            probe(checkpoints)
            sealed.clear(checkpoints)
        except OSError as error:
            raise UserError(
                f"{error.filename or folder}: cannot be written to ({error.strerror}); set job.run_folder or "
                "job.dump_folder"
            ) from None
        return folder


def launcher_is_told() -> bool:
    """Whether the launcher named a file to read the outcome from."""
    return bool(os.environ.get("TITAN_OUTCOME"))


def write_run_state(folder: Path | None, state: RunState) -> None:
    """Into the folder, and into the file that the launcher named: torchrun turns every worker's exit code into 1.

    Args:
        folder: None: it is not this run's, and nothing is written there.
    """
    paths = [folder / "run_state.json"] if folder is not None else []
    if launcher_is_told():
        paths.append(Path(os.environ["TITAN_OUTCOME"]))
    for path in paths:
        try:
            replace(path, json.dumps(asdict(state), indent=1) + "\n")
        except OSError as error:
            log.error(f"{path}: cannot be written to: {error.strerror}")
