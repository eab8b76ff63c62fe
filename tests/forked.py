"""Jobs of several processes that are forked from one in which torch and the trainer are imported already.

Importing them takes each process of a job longer than the job itself, and the suite starts more than a hundred. The
server below imports once, starts no thread and no process group, and forks the ranks of each job; a rank then runs the
module or script as `python` would. `conftest.torchrun` uses it; some tests ask for a real launcher.
"""

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import executed

_GRACE = 20  # seconds for the other ranks to end after one has failed


def wait_for_no_disk() -> None:
    """From now on, this process and those that it forks do not wait until a file is on the disk: nobody cuts the power.
    Tests of what a failing fsync does replace it themselves."""
    os.fsync = lambda file: os.fstat(file if isinstance(file, int) else file.fileno()) and None


class ForkServer:
    """The client's end: starts the server, gives it jobs one after the other."""

    def __init__(self, environment: dict[str, str], *modules: str) -> None:
        """Args: modules: to import besides the trainer, if they are installed."""
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )  # fmt: skip

    def run(
        self, arguments: list[str], processes: int, environment: dict[str, str], cwd: Path, timeout: float
    ) -> tuple[int, str, str]:
        """Run `python ARGUMENTS` as every rank of a job; its exit code, what it wrote to stdout and to stderr.

        Raises:
            TimeoutError: it did not end; it has been killed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            job = {"arguments": arguments, "processes": processes, "environment": environment, "cwd": str(cwd)}
            self._process.stdin.write(json.dumps({**job, "folder": folder, "timeout": timeout}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, f"the fork server ended with {self._process.wait()}"
            output, errors = (Path(folder, name).read_text(errors="replace") for name in ("stdout", "stderr"))
        codes = json.loads(answer)
        if codes is None:
            raise TimeoutError(f"{arguments} did not end in {timeout:g} s: {output[-2000:]}{errors[-2000:]}")
        return next((code for code in codes if code), 0), output, errors


def serve() -> None:
    """Until stdin ends: a job per line, answered by its ranks' exit codes, or null if it did not end."""
    import torch.utils.tensorboard  # noqa: F401

    import titan_mi100.train  # noqa: F401
    from titan_mi100.workshop.measure.children import reserved_port

    for module in sys.argv[1:]:
        with suppress(ImportError):
            importlib.import_module(module)
    wait_for_no_disk()
    for line in sys.stdin:
        job = json.loads(line)
        with reserved_port() as port:
            ranks = [_fork(job, rank, port) for rank in range(job["processes"])]
            codes = _wait(ranks, job["timeout"])
        print(json.dumps(codes), flush=True)


def _fork(job: dict[str, Any], rank: int, port: int) -> int:
    child = os.fork()
    if child == 0:
        _be_rank(job, rank, port)
    return child


def _be_rank(job: dict[str, Any], rank: int, port: int) -> NoReturn:
    os.setsid()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(Path(job["folder"], name), os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["cwd"])
    size = str(job["processes"])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.clear()
    os.environ.update({**job["environment"], **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)})
    executed.context(*os.environ.get("PYTEST_CURRENT_TEST", " (").removesuffix(")").split(" ("))
    code: Any = 0
    try:
        if job["arguments"][0] == "-m":
            sys.argv = job["arguments"][1:]
            sys.modules.pop(sys.argv[0], None)  # as if it had not been imported before, or runpy warns
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = job["arguments"]
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _wait(ranks: list[int], timeout: float) -> list[int] | None:
    """The ranks' exit codes. When one has failed, the others have a while to notice; then they are killed, as all are
    when the client is gone."""
    codes: dict[int, int] = {}
    until, killed, client = time.monotonic() + timeout, False, os.getppid()
    while len(codes) < len(ranks):
        for rank in set(ranks) - set(codes):
            ended, status = os.waitpid(rank, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                if codes[rank]:
                    until = min(until, time.monotonic() + _GRACE)
        if (time.monotonic() > until or os.getppid() != client) and not killed:
            killed = True
            for rank in set(ranks) - set(codes):
                os.kill(rank, signal.SIGKILL)
        time.sleep(0.005)
    in_order = [codes[rank] for rank in ranks]
    timed_out = killed and all(code in (0, -signal.SIGKILL) for code in in_order)
    return None if timed_out else in_order


if __name__ == "__main__":
    serve()
