"""Logging: rank 0 writes to the terminal, above the progress bar, and to train.log in the run folder."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_mi100.wording import printable

log = logging.getLogger("titan_mi100")


class _TerminalHandler(logging.Handler):
    """Prints lines above the progress bar, so that they do not overwrite it."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # imported here, so that the launcher and the check of a config start faster

        with suppress(OSError):  # a closed pipe, a full disk or a closed terminal; train.log has the line too
            tqdm.write(self.format(record), file=sys.stdout if record.levelno < logging.WARNING else sys.stderr)
            sys.stdout.flush()


class _LineFormatter(logging.Formatter):
    """Puts the time, and the level of warnings and errors, before each line of a message."""

    def __init__(self, prefix: str, date_format: str | None = None, of_info: str = "") -> None:
        """Args:
        prefix: text before the level, such as "rank 3 ".
        date_format: format of the time; None: date and time.
        of_info: what is printed as the level of an info message.
        """
        super().__init__(datefmt=date_format)
        self._prefix, self._of_info = prefix, of_info

    def format(self, record: logging.LogRecord) -> str:
        level = self._of_info if record.levelno < logging.WARNING else f"{record.levelname} "
        head = f"{self.formatTime(record, self.datefmt)} {self._prefix}{level}"
        return "\n".join(head + line for line in printable(record.getMessage()).split("\n"))


@contextmanager
def write_or_say(path: object, say: Callable[[str], None] = log.warning) -> Iterator[None]:
    """Let a run go on that cannot write the file `path`: an error of the file system is only logged."""
    try:
        yield
    except OSError as error:
        say(f"{path}: cannot be written to: {error.strerror}")


class ByteProgress:
    """Progress in bytes: a bar on a terminal, else a log line every 10 seconds with the remaining time."""

    def __init__(self, what: str, total: int) -> None:
        from tqdm import tqdm

        self._what, self._total, self._done = what, total, 0
        self._bar = tqdm(total=total, unit="B", unit_scale=True, desc=what, disable=not sys.stderr.isatty())
        self._started = self._said = time.monotonic()

    def __enter__(self) -> "ByteProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, size: int) -> None:
        self._done += size
        self._bar.update(size)
        now = time.monotonic()
        if self._bar.disable and now - self._said > 10 and self._done:
            left = (now - self._started) * (self._total - self._done) / self._done
            log.info(f"{self._what}: {self._done / max(self._total, 1):.0%}, {left:,.0f} s left")
            self._said = now


def setup_logging(rank: int) -> None:
    """Log to the terminal. Rank 0 logs everything; other ranks only errors, because their warnings repeat rank 0's."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # file names can be any bytes
    handler = _TerminalHandler()
    prefix = "" if rank == 0 else f"rank {rank} "
    handler.setFormatter(_LineFormatter(prefix, "%H:%M:%S"))
    log.handlers = [handler]
    log.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    log.propagate = False
    logging.raiseExceptions = False  # a log file on a full disk must not print a traceback for each line


def log_to_file(path: Path) -> None:
    """Also append the log to this file, with the date."""
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
    handler.setFormatter(_LineFormatter("", of_info="INFO "))
    log.addHandler(handler)


def log_errors_to_file(path: Path) -> None:
    """Append errors to this file instead of printing them, because thousands of ranks may fail for the same reason.

    The file and its folder are created with the first message.
    """
    handler = _FileOnDemand(path, encoding="utf-8", errors="backslashreplace", delay=True)
    handler.setFormatter(_LineFormatter(""))
    log.handlers = [handler]


class _FileOnDemand(logging.FileHandler):
    """Creates the file's folder when the file is opened. What it cannot write goes to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file cannot be opened: a disk that has become read-only
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # logging's name; called after a failed write
        with suppress(OSError):
            print(self.format(record), file=sys.stderr, flush=True)

    def _open(self):  # type: ignore[no-untyped-def]  # logging gives it no public type
        Path(self.baseFilename).parent.mkdir(exist_ok=True)
        return super()._open()
