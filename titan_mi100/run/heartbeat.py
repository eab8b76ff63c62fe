"""What a training process is doing, told to a watcher outside of it: through memory that is also a file.

Each process has a record: its step, its phase, and how long that phase may last. Writing it takes some microseconds, no
system call and no other process. `run/watchdog.py` reads the records of a node. A signal makes the process write the
Python stacks of its threads; `faulthandler` does that below the interpreter, also while a thread holds the GIL.

Imports no torch: it must be there before torch is imported.
"""

import faulthandler
import mmap
import os
import signal
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

WATCHED = "TITAN_WATCH"  # variable: the folder of the records of this node, made by who watches it
WRITE_STACKS = signal.SIGUSR2
FOLDER_FILE = "run_folder"  # in the folder: the run's folder, for a watcher that was not told it
ENDED = "ended"  # what a process is doing that has said how it ends
START, COMPILE, STEP, SAVE, VALIDATION = "start", "first steps", "step", "save", "validation"
_COMPILING = 2  # first steps of a start, in which kernels are compiled and chosen
_TIMES_MEDIAN = 10
_REMEMBERED = 64  # steps that the median is taken of
# pid, rank, step, beats, events, main thread, limit in seconds, phase, what exactly
_RECORD = struct.Struct("<6qd32s160s")


class Beat(NamedTuple):
    """A process's record.

    Attributes:
        step: the last one that this start is known to have finished; -1: none.
        beats: how often it has said that it goes on: with each phase, and within some.
        events: beats and notes so far. All ranks come to the same ones in the same order.
        thread: identifier of the main thread.
        limit: seconds after which a beat must have come; 0: none.
        doing: within the phase.
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
        """Begin the start's phase.

        Args:
            folder: of the records; None: nobody watches.

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
            with open(_path(folder, rank, "beat"), "wb+") as file:
                file.write(bytes(_RECORD.size))  # on a full disk an error here, not a SIGBUS later
                file.flush()
                self._memory = mmap.mmap(file.fileno(), _RECORD.size)
            self._stacks = open(_path(folder, rank, "stacks"), "wb", buffering=0)  # noqa: SIM115  # kept open
            faulthandler.register(WRITE_STACKS, self._stacks, all_threads=True)
        self._thread, self._beats, self._events, self._step = threading.get_ident(), 0, 0, -1
        self._phase, self._doing, self._limit, self._steps, self._number = START, "", 0.0, 0, 0
        self._seconds, self._began = deque[float](maxlen=_REMEMBERED), 0.0
        self.begin(START, "importing modules")

    @classmethod
    def of_process(cls, config: WatchdogConfig) -> "Heartbeat":
        """The record that this process's launcher asks for. Without one of ours, the node's first process starts a
        watcher, which ends with the processes. Where no record can be made, the run goes on unwatched, and says so.
        """
        rank = int(os.environ.get("RANK", "0"))
        try:
            return cls._watched(config, rank) if config.seconds else cls(config)
        except OSError as error:
            what = f"{error.filename or 'the folder for temporary files'}: {error.strerror}"
            print(with_level("WARNING", f"rank {rank} is not watched for hangs: {what}"), file=sys.stderr, flush=True)
            return cls(config)

    @classmethod
    def _watched(cls, config: WatchdogConfig, rank: int) -> "Heartbeat":
        if place := os.environ.get(WATCHED, ""):
            return cls(config, Path(place), rank)
        processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
        folder = _shared_folder(processes)
        heartbeat = cls(config, folder, rank)
        _exit_on_signal()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            command = [sys.executable, "-m", "titan_mi100.run.watchdog", str(folder), processes]
            # the pipe tells the watcher at once that this process has ended
            heartbeat._watcher = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        return heartbeat

    def begin(self, phase: str, doing: str = "", step: int | None = None) -> None:
        """A phase begins, or goes on in one that beats as it works.

        Args:
            step: the last finished one, where it is known.
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
        self._number, self._steps = number, self._steps + 1
        finished = number - 1 if self._steps > 1 else None
        self.begin(COMPILE if self._steps <= _COMPILING else STEP, "forward and backward", finished)

    def note(self, doing: str) -> None:
        """What it does now within the phase; the phase's time goes on."""
        in_step = self._phase in (COMPILE, STEP)
        self._doing, self._events = f"step {self._number}, {doing}" if in_step else doing, self._events + 1
        _RECORD.pack_into(
            self._memory, 0, os.getpid(), self._rank, self._step, self._beats, self._events, self._thread, self._limit,
            self._phase.encode(), self._doing.encode()[:160],
        )  # fmt: skip

    def allow(self, times: float) -> None:
        """Give the phase that has begun so many times its seconds."""
        assert self._phase == START
        self._limit *= times
        self.note(self._doing)

    def is_in(self, folder: Path) -> None:
        """Tell a watcher that does not know it the run's folder."""
        if self._folder is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            with suppress(OSError):
                (self._folder / FOLDER_FILE).write_text(str(folder), encoding="utf-8", errors="surrogateescape")


def read_beats(folder: Path) -> list[Beat]:
    """The records that are there, by rank."""
    found = []
    for path in sorted(folder.glob("*.beat")):
        with suppress(OSError, struct.error):  # just being made
            content = b""
            while content != (content := path.read_bytes()):  # not one that is half old
                pass
            *numbers, phase, doing = _RECORD.unpack(content)
            if numbers[0]:
                found.append(Beat(*numbers, *(_text(words) for words in (phase, doing))))
    return found


def stacks_file(folder: Path, rank: int) -> Path:
    """Where the process writes its stacks when it is told to."""
    return _path(folder, rank, "stacks")


def _text(words: bytes) -> str:
    return words.rstrip(b"\0").decode(errors="replace")


def _path(folder: Path, rank: int, kind: str) -> Path:
    return folder / f"rank-{rank:05}.{kind}"


def _shared_folder(processes: str) -> Path:
    """A folder on this node that its processes of one job find without a word between them."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
    job = "-".join(os.environ.get(name, "") for name in names).replace("/", "_") if processes != "1" else os.getpid()
    folder = Path(tempfile.gettempdir(), f"titan-watch-{os.getuid()}-{job}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(0, "belongs to another user", str(folder))
    return folder


def _exit_on_signal() -> None:
    """Let SIGTRAP, number 5, end the process with exit code 5, whatever it is doing: the C library's `_exit` gets the
    signal's number as its argument.
    """
    import ctypes

    library = ctypes.CDLL(None)
    library.signal(int(signal.SIGTRAP), ctypes.cast(library._exit, ctypes.c_void_p))
