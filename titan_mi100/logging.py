"""Where the run's words go: rank 0 to the terminal (below the progress bar's reach) and to the run folder's log."""

import logging
import os
import sys
from pathlib import Path

from tqdm import tqdm

log = logging.getLogger("titan_mi100")


class _TerminalHandler(logging.Handler):
    """Prints a line above a progress bar, if there is one, instead of through it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stdout if record.levelno < logging.WARNING else sys.stderr)
            sys.stdout.flush()
        except BrokenPipeError:  # `| head` has seen enough; the run goes on, and its log is in the run folder
            log.removeHandler(self)
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def setup_logging(rank: int) -> None:
    """Rank 0 says everything, the others only errors: every rank comes to the same warnings."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files can be any bytes
    handler = _TerminalHandler()
    prefix = "" if rank == 0 else f"rank {rank} "
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", "%H:%M:%S"))
    log.handlers = [handler]
    log.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    log.propagate = False


def log_to_file(path: Path) -> None:
    """Also append to this file, with the date."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
