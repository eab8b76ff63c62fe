"""Runs measurements, each in its own processes, which may crash, hang or be killed. Imports no torch."""

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_mi100.errors import UserError, is_out_of_memory
from titan_mi100.files import durable, isolated
from titan_mi100.files.pool import end_with_parent
from titan_mi100.wording import printable, shortened
from titan_mi100.workshop.measure.parts import FAIL, PASS, UNAVAILABLE, Part

_PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MEASURED = "measured"
# What can become of a process. Causes before consequences: when one rank dies, the others fail in a collective or hang.
_FAILURES = ("out of memory", UNAVAILABLE, "killed", "crashed", "failed", "hung")
_LOOK = 0.05  # seconds between two looks at the processes
_GRACE = 10  # seconds that the other ranks get after one has failed: their errors may explain more

Outcome = tuple[str, str, Any]  # status, message, result


@dataclass(frozen=True)
class Task:
    """One part to measure.

    Attributes:
        name: name of the part.
        target: "module:function", called with the arguments in every process; rank 0's result counts. It returns the
            numbers, with "problem" (what is wrong with them; "": nothing) and "said" (the numbers in words).
        processes: number of ranks of the job.
        seconds: time limit.
        optional: an error means "not available here", not "failed".
    """

    name: str
    target: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1
    seconds: float = 120
    optional: bool = False


# in a child process, because asking a device for its name can hang
MACHINE = Task("machine", "titan_mi100.workshop.measure.device:machine")


def run(task: Task) -> Part:
    """Run a task until it ends or reaches its time limit, and kill all its processes."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="titan_mi100-measure-", ignore_cleanup_errors=True) as folder:
        ranks: list[_Rank] = []
        try:
            with reserved_port() as port:
                for number in range(task.processes):
                    ranks.append(_Rank(task, number, str(port), Path(folder)))
                has_ended = _wait(ranks, started + task.seconds)
            outcomes = [rank.outcome() for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    outcome = _worst(outcomes) if has_ended else ("hung", f"did not end within {task.seconds:g} s", None)
    return part_of(task, outcome, time.monotonic() - started)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port of this host that the kernel gives to nobody else meanwhile; a server that names it can listen on it.

    A socket that is bound and does not listen keeps it: the kernel then chooses it for no other program's socket or
    connection. SO_REUSEADDR, which servers (those of torch, too) set, lets a second socket be bound beside it.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("", 0))
        yield kept.getsockname()[1]


def part_of(task: Task, outcome: Outcome, took: float) -> Part:
    """The line of the certificate. Args: took: seconds."""
    status, message, measured = outcome
    if status == UNAVAILABLE or (status == "failed" and task.optional):
        return Part(task.name, UNAVAILABLE, message, took)
    if status != MEASURED:
        return Part(task.name, FAIL, f"{status}: {message}", took)
    problem, words = (measured.pop(key, "") for key in ("problem", "said"))
    return Part(task.name, FAIL if problem else PASS, "; ".join(filter(None, (problem, words))), took, measured)


class _Rank:
    """One process of a task."""

    def __init__(self, task: Task, rank: int, port: str, folder: Path) -> None:
        self._answer, self._errors = folder / f"answer-{rank}.json", folder / f"stderr-{rank}"
        outer = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        environment = {name: value for name, value in outer.items() if name not in _PLACE}
        environment["LOCAL_RANK"] = str(rank)
        if (size := str(task.processes)) != "1":
            environment |= {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores
        question = json.dumps([task.target, dict(task.arguments), str(self._answer), os.getpid()])
        with self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                isolated.command("workshop.measure.children:main", question),
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment,
                start_new_session=True,  # Ctrl-C goes to the command only; it kills each child's process group
            )  # fmt: skip

    def outcome(self) -> Outcome:
        """What it wrote, or how it ended."""
        with suppress(OSError, ValueError):
            status, message, measured = json.loads(self._answer.read_text(encoding="utf-8"))
            return status, message, measured
        code = self.process.returncode
        if code is None:
            return "hung", "did not end", None
        lines = self._errors.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = f": {_tidy(lines[-1])}" if lines else ""
        if code < 0:
            why = ", most likely because memory ran out" if code == -signal.SIGKILL else ""
            return "killed", f"{isolated.ended(code)}{why}{last}", None
        return "crashed", f"{isolated.ended(code)} without a result{last}", None

    def kill(self) -> None:
        """Kill it and all that it started. One that waits inside a broken driver does not end."""
        with suppress(OSError):  # the process group has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_GRACE)


def _wait(ranks: Sequence[_Rank], until: float) -> bool:
    """Wait for the processes; when one has failed, at most _GRACE seconds longer. False: a limit came first."""
    has_failed = False
    while running := [rank for rank in ranks if rank.process.poll() is None]:
        if not has_failed and any(rank not in running and rank.outcome()[0] != MEASURED for rank in ranks):
            has_failed, until = True, min(until, time.monotonic() + _GRACE)
        if time.monotonic() > until:
            return has_failed
        time.sleep(_LOOK)
    return True


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    """Rank 0's result, or the failure that explains most."""
    failed = [(_FAILURES.index(s), rank, why) for rank, (s, why, _) in enumerate(outcomes) if s != MEASURED]
    if not failed:
        return outcomes[0]
    number, rank, message = min(failed)
    return _FAILURES[number], message if len(outcomes) == 1 else f"rank {rank}: {message}", None


def _tidy(text: str) -> str:
    """An error message for the certificate: one line of at most 200 characters, with ~ for the user's home folder."""
    return shortened(printable(" ".join(text.replace(os.path.expanduser("~"), "~").split())), 200)


def main() -> None:
    """The child: run the task of sys.argv[3], [function, arguments, result file, parent's process id] as JSON."""
    target, arguments, path, parent = json.loads(sys.argv[3])
    end_with_parent(parent)
    # a NaN is no JSON; a function that returns one has a fault, which must not spoil the file of all parts
    durable.replace(Path(path), json.dumps(call(target, arguments), allow_nan=False))
    sys.stderr.flush()
    # Skip the interpreter's teardown: jobs of several processes sometimes abort there, and a broken library can hang.
    os._exit(0)


def call(target: str, arguments: dict[str, Any]) -> Outcome:
    """Call "module:function" with the arguments; its errors are outcomes, too."""
    module, name = target.split(":")
    try:
        return MEASURED, "", getattr(importlib.import_module(module), name)(**arguments)
    except UserError as error:
        return UNAVAILABLE, _tidy(str(error)), None
    except Exception as error:
        traceback.print_exc()
        message = _tidy(f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}")
        return "out of memory" if is_out_of_memory(error) else "failed", message, None
