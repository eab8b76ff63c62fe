"""Runs parts of a certificate, each in processes of its own that may crash, hang or be killed. No torch."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_mi100.certificate.form import MEASURED, NOT_RUN, UNAVAILABLE
from titan_mi100.nodes import free_port
from titan_mi100.wording import printable, shortened

# Isolated (-I): no file of the current folder takes the place of a module.
_CODE = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from titan_mi100.measure import child; child.main()"
_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOOK = 0.05  # seconds
_GRACE = 10  # seconds for the other ranks once one has failed: their own words may say more


@dataclass(frozen=True)
class Task:
    """One part to measure.

    Attributes:
        name: of the part.
        target: "module:function", called with the arguments in every process; the first one's result counts.
        processes: ranks of one job.
        seconds: that it may take.
        refused: why it is not run; "": it is.
        optional: raising an error says that it is not available here, and is no failure.
    """

    name: str
    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    seconds: float = 120
    refused: str = ""
    optional: bool = False


@dataclass(frozen=True)
class Ended:
    """How a task ended. Attributes: said: why nothing was measured. found: what the function returned."""

    status: str
    said: str
    seconds: float
    found: Any = None


def run(task: Task, until: float) -> Ended:
    """Run a task to its end, or its limit; no process of it is left.

    Args:
        until: time.monotonic() at which the time for all tasks is over.
    """
    started = time.monotonic()
    if task.refused:
        return Ended(UNAVAILABLE, task.refused, 0.0)
    left = until - started
    if left <= 0:
        return Ended(NOT_RUN, "there was no time left for it; give more --minutes", 0.0)
    with tempfile.TemporaryDirectory(prefix="titan_mi100-certify-", ignore_cleanup_errors=True) as folder:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if task.processes > 1 else {}
            for rank in range(task.processes):
                processes.append(_start(task, rank, place, Path(folder)))
            has_ended = _wait(processes, Path(folder), started + min(task.seconds, left))
            codes = [process.poll() for process in processes]
        finally:
            stuck = [process for process in processes if not _kill(process)]
        status, said, found = _outcome(codes, Path(folder))
    took = time.monotonic() - started
    if not has_ended and left < task.seconds:
        status, said = NOT_RUN, f"stopped after {took:.0f} s, when the time for it was over; give more --minutes"
    elif not has_ended:
        status, said = "hung", f"no end after {task.seconds:g} s" + ("; not even SIGKILL ends it" if stuck else "")
    return Ended(status, said, took, found if status == MEASURED else None)


def _start(task: Task, rank: int, place: Mapping[str, str], folder: Path) -> "subprocess.Popen[bytes]":
    mine = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    environment = {name: value for name, value in mine.items() if name not in _PLACE}
    if task.processes > 1:
        size = str(task.processes)
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        environment = {"OMP_NUM_THREADS": "1", **environment, **place, **ranks}  # they share the cores, as in a run
    where = json.dumps([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    question = json.dumps([task.target, dict(task.arguments), str(_answer(folder, rank)), os.getpid()])
    with _errors(folder, rank).open("wb") as errors:
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _CODE, where, question],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment,
            start_new_session=True,  # Ctrl-C is for the command, which ends its children; theirs end with them
        )  # fmt: skip


def _answer(folder: Path, rank: int) -> Path:
    return folder / f"answer-{rank}.json"


def _errors(folder: Path, rank: int) -> Path:
    return folder / f"stderr-{rank}"


def _wait(processes: Sequence["subprocess.Popen[bytes]"], folder: Path, until: float) -> bool:
    """Whether they ended in time: all of them, or one that failed and those that ended soon after."""
    failed_at: float | None = None
    while True:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return True
        now = time.monotonic()
        if failed_at is None and any(code is not None and _failed(code, folder, r) for r, code in enumerate(codes)):
            failed_at = now
        if failed_at is not None and now > failed_at + _GRACE:
            return True
        if now > until:
            return failed_at is not None
        time.sleep(_LOOK)


def _failed(code: int, folder: Path, rank: int) -> bool:
    return code != 0 or _read(folder, rank)[0] != MEASURED


def _outcome(codes: Sequence[int | None], folder: Path) -> tuple[str, str, Any]:
    """Of all ranks: the first of those that say most about why it failed; rank 0's result if none did.

    Args:
        codes: None: the rank had not ended by itself.
    """
    ended = [(_of_process(code, folder, rank), rank) for rank, code in enumerate(codes)]
    # after a lost rank the others fail, or wait for it
    order = ("out of memory", UNAVAILABLE, "killed", "crashed", "failed", "hung")
    failed = [(order.index(status), rank, status, said) for (status, said, _), rank in ended if status != MEASURED]
    if not failed:
        return ended[0][0]
    _, rank, status, said = min(failed)
    return status, said if len(codes) == 1 else f"rank {rank}: {said}", None


def _of_process(code: int | None, folder: Path, rank: int) -> tuple[str, str, Any]:
    status, said, found = _read(folder, rank)
    if status:
        return status, said, found
    if code is None:
        return "hung", "no end", None
    last = _last_words(folder, rank)
    if code == -signal.SIGKILL:
        return "killed", f"SIGKILL, as the system does when memory runs out{last}", None
    if code < 0:
        with suppress(ValueError):
            return "killed", f"{signal.Signals(-code).name}{last}", None
        return "killed", f"signal {-code}{last}", None
    return "crashed", f"exit code {code} without a result{last}", None


def _read(folder: Path, rank: int) -> tuple[str, str, Any]:
    """What a process wrote before it ended; "": nothing."""
    try:
        status, said, found = json.loads(_answer(folder, rank).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "", "", None
    return status, said, found


def _last_words(folder: Path, rank: int) -> str:
    lines = _errors(folder, rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f": {tidy(lines[-1])}" if lines else ""


def tidy(text: str) -> str:
    """A machine's message as a certificate may show it: one short line, without the user's folder."""
    home = os.path.expanduser("~")
    return shortened(printable(" ".join(text.replace(home, "~").split())), 200)


def _kill(process: "subprocess.Popen[bytes]") -> bool:
    """End a process with all that it started; whether it ended: one that waits inside of a broken driver does not."""
    with suppress(OSError):  # its group is gone
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    return process.returncode is not None
