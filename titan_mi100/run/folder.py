"""The run folder: locked for one run at a time. It holds run_state.json, which says how the run stands or ended."""

import errno
import fcntl
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_mi100.checkpoint import sealed
from titan_mi100.config.load import TEACHER_CONFIG, make_run_folder
from titan_mi100.config.settings import JobConfig
from titan_mi100.errors import UserError
from titan_mi100.files.durable import LOCK, FolderLock, probe, sync
from titan_mi100.files.plain import read_plain
from titan_mi100.log import log_errors_to_file, log_to_file
from titan_mi100.parallel.distributed import World, from_rank_zero, raise_together
from titan_mi100.watch.outcome import RUNNING, STATE, Outcome, read_state, write_run_state

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_LOG = "logs/rank-{:05}.log"  # the log of each rank except 0


class RunFolder:
    """The run folder, locked as long as this object lives.

    Attributes:
        step: the last step finished since this start; None: none.
    """

    step: int | None = None

    def __init__(self, job: JobConfig, fresh: bool, world: World, of_teacher: bool = False) -> None:
        """Create the folder, lock it, and check that it can be written. A collective.

        Args:
            fresh: see make_run_folder.
            of_teacher: it is a teacher's, where no run trains.

        Raises:
            UserError: another run uses it, it is of the other kind, or it cannot be written.
        """
        path, nonce = from_rank_zero(lambda: self._take(job, fresh, of_teacher))
        self.path, self._rank = Path(path), world.rank
        if world.rank:
            log_errors_to_file(self.path / _LOG.format(world.rank))
        with raise_together():
            if os.environ.get("LOCAL_RANK", "0") == "0":
                _check_shared(self.path, nonce, world.rank)
            self._held = os.open(self.path, os.O_RDONLY)  # kept open, so that it is found again after a rename
            self._status = os.fstat(self._held)

    def own_log(self) -> Path | None:
        """The path of this rank's log; its folder is created. None: the run folder is gone."""
        if (folder := self.place()) is None:
            return None
        path = folder / (_LOG.format(self._rank) if self._rank else "train.log")
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
        return path

    def after_step(self, step: int, _: object) -> None:
        """Remember the step. Write the first one to run_state.json: launchers retry a start that fails before it."""
        is_first, self.step = self.step is None, step
        if is_first and self._rank == 0:
            with self._alone():
                if self._is_running():  # else another rank has failed and has written why
                    self._write_running()

    def note_crash(self, outcome: Outcome) -> bool:
        """Write the state of a rank that failed alone. Only the first such rank writes: it has the cause, while the
        errors of the others follow from it.

        Returns:
            Whether this rank was the first.
        """
        with self._alone():
            if is_first := self._is_running():
                write_run_state(self.place(), outcome)
        return is_first

    def place(self) -> Path | None:
        """Where the folder is now: its path, or the one that it was renamed to. None: it is gone, or not known."""
        try:
            if os.path.samestat(os.stat(self.path), self._status):
                return self.path
        except OSError as error:
            if error.errno not in _GONE:  # its file system fails at the moment; what is written there says so
                return self.path
        with suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{self._held}"))  # Linux; others do not know the new name
            if os.path.samestat(os.stat(path), self._status):
                return path
        return None

    def moved(self) -> str:
        """Why nothing may be written under the folder's path any more; "": it still leads to the locked folder."""
        if (path := self.place()) == self.path:
            return ""
        reason = f"{self.path}: is no longer the folder that this run has locked, so nothing more is written there"
        if path is None:
            return f"{reason}; it was moved or deleted. Put it back to resume from its newest checkpoint"
        return (
            f"{reason}; it is now {path}. Rename it back, or start again with --job.run_folder {shlex.quote(str(path))}"
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other rank writes the state between this one's reading and writing, where the file system has locks."""
        folder = os.open(self.place() or os.curdir, os.O_RDONLY)  # the folder is gone: any that exists
        try:
            with suppress(OSError):
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _is_running(self) -> bool:
        """Whether run_state.json says `running`. If it cannot be read, the caller should replace it: true."""
        return bool(read_state((self.place() or self.path) / STATE).get("state", RUNNING) == RUNNING)

    def _write_running(self) -> None:
        again = f"if it was killed, start again with job.run_folder = {self.path}"
        message = f"It runs if the process named in {LOCK} exists; otherwise it was killed, or its disk was full"
        write_run_state(self.path, Outcome(1, message, self.step, RUNNING, again))

    def _take(self, job: JobConfig, fresh: bool, of_teacher: bool) -> tuple[str, str]:
        folder = Path(job.run_folder or job.dump_folder)
        try:
            folder = make_run_folder(job, fresh)
            if not of_teacher and (folder / TEACHER_CONFIG).exists():
                reason = "is a teacher's folder, which titan-mi100 teach continues"
                raise UserError(f"{folder}: {reason}; name another job.run_folder")
            checkpoints = folder / "checkpoint"
            checkpoints.mkdir(exist_ok=True)  # not its parents: the launcher's folder may have been renamed since
            sync(folder)
            with suppress(PermissionError):  # another user's folder that we may only pass through
                sync(folder.parent)
            self._lock = FolderLock(folder)
            probe(checkpoints)
            sealed.clear(checkpoints)
            log_to_file(folder / "train.log")
        except OSError as error:
            raise UserError(
                f"{error.filename or folder}: cannot be written to ({error.strerror}); set job.run_folder or "
                "job.dump_folder"
            ) from None
        self.path = folder
        self._write_running()
        return str(folder), self._lock.nonce


def _check_shared(path: Path, nonce: str, rank: int) -> None:
    """Check that this node sees the folder that rank 0 has locked, and can write to it. Raises UserError: it cannot."""
    is_same = False
    with suppress(OSError):
        is_same = nonce.encode() in read_plain(path / LOCK)
    if not is_same:
        raise UserError(
            f"{path}: rank {rank} on {socket.gethostname()} does not see what rank 0 wrote there; job.run_folder "
            "must be on a file system that all nodes share"
        )
    probe(path / "checkpoint")
