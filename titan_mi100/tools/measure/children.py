"""Runs the parts of a certificate, each in its own processes, which may crash, hang or be killed. Imports no torch."""

import importlib
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

from titan_mi100.errors import UserError
from titan_mi100.files import durable, isolated
from titan_mi100.files.pool import end_with_parent
from titan_mi100.launch.links import free_port
from titan_mi100.tools.measure.parts import FAIL, NOT_RUN, PASS, UNAVAILABLE, Part
from titan_mi100.wording import printable, shortened

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MEASURED = "measured"
_LOOK = 0.05  # seconds between two looks at the processes
_GRACE = 10  # seconds that the other ranks get after one has failed: their errors may explain more


@dataclass(frozen=True)
class Task:
    """One part to measure.

    Attributes:
        name: name of the part.
        target: "module:function", called with the arguments in every process; rank 0's result counts. It returns the
            numbers, with "problem" (what is wrong with them; "": nothing) and "said" (the numbers in words).
        processes: number of ranks of the job.
        seconds: time limit.
        refused: why it is not run; "": it is run.
        optional: an error means "not available here", not "failed".
    """

    name: str
    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    seconds: float = 120
    refused: str = ""
    optional: bool = False


def run(task: Task, until: float) -> Part:
    """Run a task until it ends or reaches its time limit, and kill all its processes.

    Args:
        until: value of time.monotonic() at which the time for all tasks ends.
    """
    started = time.monotonic()
    if task.refused:
        return Part(task.name, UNAVAILABLE, task.refused)
    left = until - started
    if left <= 0:
        return Part(task.name, NOT_RUN, "no time was left; give more --minutes")
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
        words = f"stopped after {took:.0f} s, because the time for this kind of part ended; give more --minutes"
        return Part(task.name, NOT_RUN, words, took)
    if not has_ended:
        status, said = "hung", f"did not end within {task.seconds:g} s"
        said += "; SIGKILL does not end it either" if stuck else ""
    if status == UNAVAILABLE or (status == "failed" and task.optional):
        return Part(task.name, UNAVAILABLE, said, took)
    if status != _MEASURED:
        return Part(task.name, FAIL, f"{status}: {said}", took)
    problem, words = (found.pop(key, "") for key in ("problem", "said"))
    return Part(task.name, FAIL if problem else PASS, "; ".join(filter(None, (problem, words))), took, found)


def _start(task: Task, rank: int, place: Mapping[str, str], folder: Path) -> "subprocess.Popen[bytes]":
    mine = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    environment = {name: value for name, value in mine.items() if name not in _PLACE}
    if task.processes > 1:
        size = str(task.processes)
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        environment = {"OMP_NUM_THREADS": "1", **environment, **place, **ranks}  # the ranks share the cores
    question = json.dumps([task.target, dict(task.arguments), str(_answer(folder, rank)), os.getpid()])
    with _errors(folder, rank).open("wb") as errors:
        return subprocess.Popen(
            isolated.command("tools.measure.children:main", question),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment,
            start_new_session=True,  # Ctrl-C goes to the command only; it kills each child's process group
        )  # fmt: skip


def _answer(folder: Path, rank: int) -> Path:
    return folder / f"answer-{rank}.json"


def _errors(folder: Path, rank: int) -> Path:
    return folder / f"stderr-{rank}"


def _wait(processes: Sequence["subprocess.Popen[bytes]"], folder: Path, until: float) -> bool:
    """Wait for the processes; when one has failed, wait only _GRACE seconds longer.

    Returns:
        False: the time limit was reached and no process had failed.
    """
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
    return code != 0 or _read(folder, rank)[0] != _MEASURED


def _outcome(codes: Sequence[int | None], folder: Path) -> tuple[str, str, Any]:
    """Combine the ranks: rank 0's result, or the failure that explains most.

    Args:
        codes: exit code by rank; None: the rank did not end by itself.

    Returns:
        (status, message, result).
    """
    ended = [(_of_process(code, folder, rank), rank) for rank, code in enumerate(codes)]
    # Causes before consequences: when one rank dies, the others fail in a collective or hang.
    order = ("out of memory", UNAVAILABLE, "killed", "crashed", "failed", "hung")
    failed = [(order.index(status), rank, status, said) for (status, said, _), rank in ended if status != _MEASURED]
    if not failed:
        return ended[0][0]
    _, rank, status, said = min(failed)
    return status, said if len(codes) == 1 else f"rank {rank}: {said}", None


def _of_process(code: int | None, folder: Path, rank: int) -> tuple[str, str, Any]:
    status, said, found = _read(folder, rank)
    if status:
        return status, said, found
    if code is None:
        return "hung", "did not end", None
    last = _last_words(folder, rank)
    if code == -signal.SIGKILL:
        return "killed", f"SIGKILL, most likely because memory ran out{last}", None
    if code < 0:
        return "killed", f"{isolated.ended(code)}{last}", None
    return "crashed", f"{isolated.ended(code)} without a result{last}", None


def _read(folder: Path, rank: int) -> tuple[str, str, Any]:
    """(status, message, result) that a process wrote; ("", "", None): it wrote nothing."""
    try:
        status, said, found = json.loads(_answer(folder, rank).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "", "", None
    return status, said, found


def _last_words(folder: Path, rank: int) -> str:
    lines = _errors(folder, rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f": {tidy(lines[-1])}" if lines else ""


def tidy(text: str) -> str:
    """An error message for the certificate: one line of at most 200 characters, with ~ for the user's home folder."""
    home = os.path.expanduser("~")
    return shortened(printable(" ".join(text.replace(home, "~").split())), 200)


def _kill(process: "subprocess.Popen[bytes]") -> bool:
    """Kill a process and everything it started.

    Returns:
        Whether the process ended. A process that waits inside a broken driver does not.
    """
    with suppress(OSError):  # the process group has ended
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE)
    return process.returncode is not None


def main() -> None:
    """The child: run the task of sys.argv[3], [function, arguments, result file, parent's process id] as JSON."""
    target, arguments, path, parent = json.loads(sys.argv[3])
    end_with_parent(parent)
    durable.replace(Path(path), json.dumps(_call(target, arguments)))
    sys.stderr.flush()
    # Skip the interpreter's teardown: jobs of several processes sometimes abort there, and a broken library can hang.
    os._exit(0)


def _call(target: str, arguments: dict[str, Any]) -> tuple[str, str, Any]:
    module, name = target.split(":")
    try:
        return _MEASURED, "", getattr(importlib.import_module(module), name)(**arguments)
    except UserError as error:
        return UNAVAILABLE, tidy(str(error)), None
    except Exception as error:
        status = "out of memory" if _is_out_of_memory(error) else "failed"
        return status, tidy(f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"), None


def _is_out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:  # do not import torch, which takes seconds, for a part that did not use it
        return isinstance(error, MemoryError)
    from titan_mi100.run.forecast import is_out_of_memory

    return is_out_of_memory(error)
