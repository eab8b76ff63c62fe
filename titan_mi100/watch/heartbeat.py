"""Each training process records what it is doing in a memory-mapped file, for a watcher in another process.

The record holds the step, the phase, and a time limit for the phase. Writing it takes a few microseconds and no system
call. `watch/watchdog.py` reads the records of a node. On a signal the process writes the Python stacks of its threads;
`faulthandler` does that below the interpreter, so it works even while a thread holds the GIL.

Imports no torch: the record must exist before torch is imported.
"""

import faulthandler
import mmap
import os
import signal
import stat
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from titan_mi100.config.settings import WatchdogConfig
from titan_mi100.wording import with_level

WATCHED = "TITAN_WATCH"  # environment variable: folder for this node's records, made by the launcher that watches
WRITE_STACKS = signal.SIGUSR2
FOLDER_FILE = "run_folder"  # in the folder: the run's folder, for a watcher that was not told it
ENDED = "ended"  # in the record of a process that has reported how it ends
START, COMPILE = "start", "first steps"
STEP, SAVE, VALIDATION = "step", "save", "validation"
_COMPILING = 2  # the first steps of a start, which compile and choose kernels
_TIMES_MEDIAN = 10  # a step may always take this many times the median of recent steps
_REMEMBERED = 64  # steps in that median
# pid, rank, step, beats, events, main thread, limit in seconds, phase, what exactly
_RECORD = struct.Struct("<6qd32s160s")


class Beat(NamedTuple):
    """A process's record.

    Attributes:
        step: the last step finished since this start; -1: none.
        beats: number of signs of progress: one at the begin of each phase, more within some.
        events: number of beats and notes. All ranks have the same ones in the same order.
        thread: identifier of the main thread.
        limit: seconds within which the next beat must come; 0: no limit.
        doing: what it does within the phase.
    """

    pid: int
    rank: int
    step: int
    beats: int
    events: int
    thread: int
    limit: float
    phase: str
    doing: str


class Heartbeat:
    """This process's record."""

    def __init__(self, config: WatchdogConfig, folder: Path | None = None, rank: int = 0) -> None:
        """Begin the phase `start`.

        Args:
            folder: folder of the records; None: not watched.

        Raises:
            OSError: the folder is gone, or cannot be written to.
        """
        self._limits = {
            START: config.start_seconds, COMPILE: config.compile_seconds, STEP: config.seconds,
            SAVE: config.save_seconds, VALIDATION: config.validation_seconds,
        }  # fmt: skip
        self._is_on, self._folder, self._rank = config.seconds > 0, folder, rank
        self._memory = mmap.mmap(-1, _RECORD.size)
        self._watcher: subprocess.Popen[bytes] | None = None
        if folder is not None:
            with open(record_file(folder, rank, "beat"), "wb+") as file:
                file.write(bytes(_RECORD.size))  # on a full disk an error here, not a SIGBUS later
                file.flush()
                self._memory = mmap.mmap(file.fileno(), _RECORD.size)
            self._stacks = open(record_file(folder, rank, "stacks"), "wb", buffering=0)  # noqa: SIM115  # kept open
            faulthandler.register(WRITE_STACKS, self._stacks, all_threads=True)
        self._thread, self._beats, self._events, self._step = threading.get_ident(), 0, 0, -1
        self._phase, self._doing, self._limit, self._steps, self._in_step = START, "", 0.0, 0, ""
        self._seconds, self._began = deque[float](maxlen=_REMEMBERED), 0.0
        self.begin(START, "importing modules")

    @classmethod
    def of_process(cls, config: WatchdogConfig) -> "Heartbeat":
        """The record of this process. If our launcher did not start it, the node's first process starts a watcher,
        which ends with the processes. If no record can be made, the run continues unwatched, with a warning.
        """
        rank = int(os.environ.get("RANK", "0"))
        faulthandler.register(WRITE_STACKS, 2, all_threads=True)  # a watched process writes them to a file
        try:
            return cls._watched(config, rank) if config.seconds or os.environ.get(WATCHED) else cls(config)
        except OSError as error:
            reason = f"{error.filename or 'the folder for temporary files'}: {error.strerror}"
            print(with_level("WARNING", f"rank {rank} is not watched for hangs: {reason}"), file=sys.stderr, flush=True)
            return cls(config)

    @classmethod
    def _watched(cls, config: WatchdogConfig, rank: int) -> "Heartbeat":
        if path := os.environ.get(WATCHED, ""):
            return cls(config, Path(path), rank)
        processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
        folder = _shared_folder(processes)
        heartbeat = cls(config, folder, rank)
        _exit_on_signal()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            command = [sys.executable, "-m", "titan_mi100.watch.watchdog", str(folder), processes]
            # the pipe tells the watcher at once that this process has ended
            heartbeat._watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        return heartbeat

    def begin(self, phase: str, doing: str = "", step: int | None = None) -> None:
        """Begin a phase, or give a sign of progress within one.

        Args:
            step: the last finished step, if it is known.
        """
        now = time.monotonic()
        if self._phase == STEP:
            self._seconds.append(now - self._began)
        self._began, self._beats = now, self._beats + 1
        self._phase, self._step = phase, self._step if step is None else step
        self._limit = self._limits[phase] if self._is_on else 0.0
        if phase == STEP and self._seconds and self._is_on:
            self._limit = max(self._limit, _TIMES_MEDIAN * statistics.median(self._seconds))
        self.note(doing)

    def begin_step(self, number: int) -> None:
        self._in_step, self._steps = f"step {number}, ", self._steps + 1
        finished = number - 1 if self._steps > 1 else None
        self.begin(COMPILE if self._steps <= _COMPILING else STEP, "forward and backward", finished)

    def note(self, doing: str) -> None:
        """Say what the process does now. The time limit of the phase does not start again."""
        self._doing = self._in_step + doing if self._phase in (COMPILE, STEP) else doing
        self._events += 1
        _RECORD.pack_into(
            self._memory, 0, os.getpid(), self._rank, self._step, self._beats, self._events, self._thread, self._limit,
            self._phase.encode(), self._doing.encode()[:160],
        )  # fmt: skip

    def allow(self, times: float) -> None:
        """Multiply the time limit of the current phase."""
        assert self._phase == START
        self._limit *= times
        self.note(self._doing)

    def is_in(self, folder: Path) -> None:
        """Write the run folder's path for a watcher that was started without it."""
        if self._folder is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            with suppress(OSError):
                (self._folder / FOLDER_FILE).write_text(str(folder), encoding="utf-8", errors="surrogateescape")


def read_beats(folder: Path) -> list[Beat]:
    """All records in the folder, sorted by rank."""
    beats = []
    for path in sorted(folder.glob("*.beat")):
        with suppress(OSError, struct.error):  # the file is being created
            content = b""
            while content != (content := path.read_bytes()):  # until equal twice: it may be written meanwhile
                pass
            *numbers, phase, doing = _RECORD.unpack(content)
            words = [text.rstrip(b"\0").decode(errors="replace") for text in (phase, doing)]
            if numbers[0]:
                beats.append(Beat(*numbers, *words))
    return beats


def record_file(folder: Path, rank: int, kind: str) -> Path:
    """A file of a process. Args: kind: beat: its record; stacks: where it writes its stacks when it is told to."""
    return folder / f"rank-{rank:05}.{kind}"


def _shared_folder(processes: str) -> Path:
    """A folder on this node that all processes of one job derive from their environment, without communication."""
    of_slurm = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    if processes == "1":
        return Path(tempfile.mkdtemp(prefix=f"titan-watch-{os.getuid()}-"))
    names = (*of_slurm, "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    job = "-".join(os.environ.get(name, "") for name in names).replace("/", "_")
    folder = Path(tempfile.gettempdir(), f"titan-watch-{os.getuid()}-{job}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()  # others can guess the name, and may have made a folder or a link before
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(0, "is a link, or others can write to it", str(folder))
    return folder


def _exit_on_signal() -> None:
    """Let SIGTRAP, number 5, end the process with exit code 5, whatever it is doing: the C library's `_exit` gets the
    signal's number as its argument.
    """
    import ctypes

    library = ctypes.CDLL(None)
    library.signal(int(signal.SIGTRAP), ctypes.cast(library._exit, ctypes.c_void_p))
