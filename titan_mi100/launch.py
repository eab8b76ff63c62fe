"""Starts a run and supervises it: `python -m titan_mi100.launch ARGS`, which run_train.sh calls.

Checks the config, prepares the data, runs the trainer (several processes under torchrun; one alone, which starts
sooner), passes signals on, and ends with an exit code of docs/DESIGN.md.
Imports little and no torch, to start fast. Signals are blocked and waited for, not handled: so none interrupts anything
else, and none is lost. run_train.sh blocks them before it starts Python.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from titan_mi100.config.hardware import default_process_count
from titan_mi100.config.scheduler import PLACE, RUN_FOLDER, srun_tasks
from titan_mi100.errors import UserError
from titan_mi100.streams import open_streams

TRAINER = ("-m", "titan_mi100.train")
_CONFIG = ("-m", "titan_mi100.config.load")
_REHEARSAL = ("-m", "titan_mi100.rehearse")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--log-dir", os.devnull)
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_AGAIN = 2.0  # seconds until workers are told again: some may not listen yet
_MEANING = {
    2: "the config or the input is wrong",
    3: "stopped early and saved; with --job.run_folder '{}' and without --checkpoint.fresh and load_step it goes on",
    4: "stopped because of the numbers (loss or gradients)",
    5: "a process hung",
    6: "out of memory; python -m titan_mi100.planner shows what takes less",
}
Process = subprocess.Popen[bytes]
PassOn = Callable[[Process], None]  # a signal that has come


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """Launch a run; its exit code."""
    launcher = Launcher()
    open_streams()
    try:
        if any(argument.partition("=")[0] == "--rehearse" for argument in arguments):
            launcher.run_first("the rehearsal", *_REHEARSAL, *arguments)
            return 0
        if {"-h", "--help"} & set(arguments):
            return len(launcher.run_first("the help", *_CONFIG, "--help"))  # 0: it is printed
        if (copies := environ.get("WORLD_SIZE") or str(srun_tasks(environ))) != "1":
            raise UserError(
                f"srun, or WORLD_SIZE, says that {copies} processes were started, and each run_train.sh would train a "
                "model of its own; start one (srun --ntasks=1, or none; unset RANK and WORLD_SIZE), or without it: "
                "srun python -m titan_mi100.train ..."
            )
        processes, trainer = parse(arguments, environ.get("NGPU", ""))
        for name in (*PLACE, RUN_FOLDER):
            os.environ.pop(name, None)  # of a job that has started this one
        # checked once, before any process starts; prints the folder, so that all processes share it
        check, size = (*_CONFIG, *trainer), str(processes)
        first = {"RANK": "0", "WORLD_SIZE": size, "MASTER_ADDR": "", "MASTER_PORT": "0"}  # as its first process is
        found = launcher.run_first("the check of the config", *check, stdout=subprocess.PIPE, **first)
        folder = os.fsdecode(found).removesuffix("\n")
        os.environ[RUN_FOLDER] = folder
        set_defaults(processes)
        # also without torch: bad rows end here, before a GPU is touched, and the processes find the data ready
        try:
            launcher.run_first("the preparation of the data", "-m", "titan_mi100.data.prepare", *trainer)
        except BaseException:
            with suppress(OSError):
                os.rmdir(folder)  # unless there is something in it; not earlier, or another run could get its name
            raise
        torchrun = (*_TORCHRUN, "--nproc_per_node", size) if processes > 1 else ()
        return launcher.train(torchrun, (*TRAINER, *trainer), folder)
    except UserError as error:
        say(error)
        return 2
    except OSError as error:  # no folder for temporary files, no memory for another process
        say(f"cannot start: {error}")
        return 1


def parse(arguments: Sequence[str], ngpu: str = "") -> tuple[int, list[str]]:
    """The number of processes, and the trainer's arguments.

    Args:
        ngpu: the number of processes where the command line has none.

    Raises:
        UserError: there is no such number.
    """
    rest, trainer, given = list(arguments), list[str](), list[str]()
    while rest:
        name, has_value, value = rest[0].partition("=")
        argument = rest.pop(0)
        if name not in ("--nproc_per_node", "--nproc-per-node"):
            trainer.append(argument)
        elif has_value or rest:
            given.append(value if has_value else rest.pop(0))
        else:
            raise UserError(f"{name} needs a number, e.g. --nproc_per_node 2")
    if len(given) > 1:
        raise UserError(f"--nproc_per_node is given twice, as {given[0]!r} and {given[1]!r}; keep one of them")
    ngpu = given[0] if given else ngpu
    if not re.fullmatch("[1-9][0-9]?", ngpu or "1", re.ASCII):
        raise UserError(f"the number of processes must be 1 to 99, not {ngpu!r} (--nproc_per_node, NGPU)")
    return int(ngpu or default_process_count()), trainer


def set_defaults(processes: int) -> None:
    """Set what the processes find in their environment, where it is not set."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # the processes share the cores; torchrun's own default is one thread each, and a paragraph of warning
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(cores // processes, 1))
    if os.path.exists("/dev/kfd"):  # peer access over PCIe between MI100s needs it
        os.environ["HSA_FORCE_FINE_GRAIN_PCIE"] = os.environ.get("HSA_FORCE_FINE_GRAIN_PCIE") or "1"


def say(words: object) -> None:
    with suppress(OSError):  # its reader is gone; the run goes on
        os.write(2, f"run_train: {words}\n".encode(errors="backslashreplace"))


class Launcher:
    """Runs one process after the other, and listens to signals from its construction on."""

    def __init__(self) -> None:
        self._told: signal.Signals | None = None
        self._outcome, self._under_torchrun = Path(), True
        # what is ignored stays so: nohup ignores SIGHUP
        heard = {number for number in _STOP if signal.getsignal(number) != signal.SIG_IGN}
        self._signals = heard | {signal.SIGCHLD, signal.SIGALRM}
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # ignored, as some parents leave it, it would hide exit codes

    def run_first(self, what: str, *command: str, stdout: int | None = None, **environment: str) -> bytes:
        """Run what comes before the run; what it printed to a pipe. Exits if it fails, or is told to stop."""
        status, output = self._run(what, command, Process.terminate, environment, stdout)
        self._leave_if_told()
        if status:
            sys.exit(status if status in _MEANING else 1)
        return output

    def train(self, torchrun: Sequence[str], trainer: Sequence[str], folder: str) -> int:
        """Run the trainer, or torchrun with it, to its end; the exit code of the run."""
        self._under_torchrun = bool(torchrun)
        with tempfile.TemporaryDirectory(prefix="titan-launch-", ignore_cleanup_errors=True) as temporary:
            self._outcome = Path(temporary, "outcome")  # the run makes it
            environment = {"TITAN_OUTCOME": str(self._outcome), "TITAN_LAUNCHER_PID": str(os.getpid())}
            what = "torchrun" if torchrun else "the trainer"
            status, _ = self._run(what, (*torchrun, *trainer), self._tell_workers, environment)
            for _ in range(3 if status else 0):  # a process that is just being started shows no environment yet
                self._signal_workers(signal.SIGKILL)  # those that a killed torchrun has left
                time.sleep(0.1)
            outcome = read_outcome(self._outcome)
        if outcome is None:
            self._leave_if_told()
        code, message = outcome or (1, "")
        # what the run itself said last, which may be above a page of torchrun's about its workers
        for line in message.splitlines() if status else ():
            say(line)
        if code := code or int(status != 0):
            meaning = _MEANING.get(code, "did not finish").format(folder)
            say(f"exit code {code}: {meaning}. Run folder: {folder}")
        return code

    def _run(
        self, what: str, command: Sequence[str], pass_on: PassOn, environment: dict[str, str], stdout: int | None = None
    ) -> tuple[int, bytes]:
        """Run Python to its end; its exit status, negative for a signal, and what it printed to a pipe.

        A first signal is passed on. Ctrl-C after it ends everything at once; others are often sent twice, and must not.
        """
        process = subprocess.Popen(
            [sys.executable, *command], env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=stdout,
            start_new_session=True,  # Ctrl-C must arrive once, from here, not from the terminal as well
            preexec_fn=_before_exec,
        )  # fmt: skip
        while (status := process.poll()) is None:
            number = signal.sigwait(self._signals)
            if number in _STOP and self._told is None:
                self._told = signal.Signals(number)
                say("stopping (Ctrl-C ends it at once) ...")
                pass_on(process)
            elif number == signal.SIGINT:
                process.kill()
            elif number == signal.SIGALRM:
                pass_on(process)
        signal.setitimer(signal.ITIMER_REAL, 0)
        if status < 0 and not self._told:
            remedy = "; most likely memory ran out (dmesg says so)" if status == -signal.SIGKILL else ""
            say(f"{what} was killed by {signal.Signals(-status).name}{remedy}")
        return status, process.stdout.read() if process.stdout else b""

    def _tell_workers(self, process: Process) -> None:
        """Tell workers with USR1: torchrun would pass TERM on, but give them only half a minute to save."""
        if self._told != signal.SIGINT:
            if self._under_torchrun:
                self._signal_workers(signal.SIGUSR1, process.pid)
            else:
                process.send_signal(signal.SIGUSR1)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        elif read_outcome(self._outcome) is None:
            process.kill()  # nothing can be lost yet, and while modules are imported Ctrl-C would be a traceback
        else:
            process.send_signal(signal.SIGINT)

    def _signal_workers(self, number: int, parent: int | None = None) -> None:
        """Signal this launch's processes, which are in sessions of their own: their environment names the launch.

        Args:
            parent: signal its children only: what a worker itself has started may not know the signal.
        """
        mark = os.fsencode(f"TITAN_OUTCOME={self._outcome}")
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # gone, or another user's
                state = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if parent in (None, int(state[1])) and mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), number)

    def _leave_if_told(self) -> None:
        if self._told:
            say(f"{self._told.name}: stopped before the run began; nothing was trained; exit code 3")
            sys.exit(3)


def _before_exec() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until a worker listens: it would die, and the others wait for it
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def read_outcome(path: Path) -> tuple[int, str] | None:
    """The exit code and message that the run has left; None: nothing that can be read."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        message = "killed, or ended without a word" if state["state"] == "running" else state.get("message", "")
        return int(state["exit_code"]), str(message)
    except (OSError, ValueError, KeyError, TypeError):
        return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
