"""Starts a run and supervises it: `python -m titan_mi100.launch.launcher ARGS`, as run_train.sh and `train` do.

It checks the config, prepares the data, runs the trainer, forwards signals, and ends with an exit code of
docs/DESIGN.md. Several processes run under torchrun; a single one runs without it, which starts sooner. Several nodes
are started without this module (docs/CLUSTER.md). It imports little, and no torch, to start fast.

Signals are blocked and read by sigwait; there are no signal handlers. So no signal interrupts other code, and no signal
is lost. run_train.sh blocks them before it starts Python.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from titan_mi100.config.hub import COMMITS
from titan_mi100.config.srun import ASKS_COMMITS, PLACE, RUN_FOLDER, srun_tasks
from titan_mi100.errors import UserError
from titan_mi100.launch.machine_checks import before_start
from titan_mi100.launch.torch_build import installed
from titan_mi100.planning.hardware import default_process_count
from titan_mi100.streams import open_streams
from titan_mi100.watch.heartbeat import FOLDER_FILE, WATCHED, WRITE_STACKS
from titan_mi100.watch.outcome import (
    HUNG,
    INTERRUPTED,
    LOST,
    RUNNING,
    STATE,
    Outcome,
    Restarts,
    append_to_log,
    note_restart,
    read_outcome,
)
from titan_mi100.watch.watchdog import LOOK, Watch, write_end
from titan_mi100.wording import command_name, printable

TRAINER, TEACHER = ("-m", "titan_mi100.train"), ("-m", "titan_mi100.teacher")
_CONFIG = ("-m", "titan_mi100.config.load")
_REHEARSAL = ("-m", "titan_mi100", "plan")
_PREPARE = ("-m", "titan_mi100.data.prepare")
_TORCHRUN = ("-m", "torch.distributed.run", "--log-dir", os.devnull, "--standalone", "--local-addr", "127.0.0.1")
_SRUN = "srun python -m titan_mi100.train ..."
_ON_EACH = (
    "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint FIRST_HOST:29400 "
    "-m titan_mi100.train --job.run_folder SHARED_FOLDER ..."
)
_OF_NODES = ("nnodes", "node_rank", "rdzv", "rdzv_timeout", "rdzv_backend", "rdzv_endpoint", "rdzv_id")
_RECORDS = "watch"  # folder of the processes' records, beside the outcome file
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # signals that stop a run
SIGNALS = (*_STOP, signal.SIGUSR2)  # that must be blocked when `main` begins
_KILLED = 10.0  # seconds to wait for a killed process to end; a process that hangs in the kernel never ends
_AGAIN = 2.0  # seconds between signals to the workers, which are repeated: a worker may not listen yet
_MEANING = {
    2: "the config or the input is wrong",
    3: "stopped on request and saved",
    4: "stopped because of the numbers (loss or gradients)",
    5: "a process hung",
    6: "out of memory; titan-mi100 plan shows layouts that need less",
}
Process = subprocess.Popen[bytes]
PassOn = Callable[[Process], bool | None]  # forwards a stop signal; true: the process ends after its current step
IsOver = Callable[[], bool]  # whether the process must be killed


def main(arguments: Sequence[str], environ: Mapping[str, str] = os.environ, program: Sequence[str] = TRAINER) -> int:
    """Launch a run and return its exit code. Args: program: what each process runs."""
    launcher = Launcher()
    launcher.program = program
    open_streams()
    try:
        if any(argument.partition("=")[0] == "--rehearse" for argument in arguments):
            launcher.run_first("the rehearsal", *_REHEARSAL, *arguments)
            return 0
        if asked := [place for place, word in enumerate(arguments) if word in ("-h", "--help", "--version")]:
            launcher.run_first("the help", *_CONFIG, *arguments[asked[0] : asked[0] + 2])
            return 0
        if file := environ.get("CONFIG_FILE", ""):  # torchtitan's run_train.sh reads it
            raise UserError(f"CONFIG_FILE is not read here; unset it, and write --job.config_file {shlex.quote(file)}")
        launcher.processes, launcher.arguments, restarts = parse(arguments, environ.get("NGPU", ""))
        copies = environ.get("WORLD_SIZE") or str(srun_tasks(environ))
        if copies != "1":
            raise UserError(
                f"srun, or WORLD_SIZE, says that {copies} processes were started, and each run_train.sh would train a "
                "model of its own; start one (srun --ntasks=1, or none; unset RANK and WORLD_SIZE), or without it: "
                f"{_SRUN}"
            )
        for name in (*PLACE, RUN_FOLDER, COMMITS):
            os.environ.pop(name, None)  # may come from a job that has started this one
        set_defaults(launcher.processes)
        before_start(launcher.processes, say)
        return launcher.run(restarts)
    except UserError as error:
        say(error)
        return 2
    except OSError as error:  # no temporary folder, or no memory for another process
        say(f"cannot start: {error}")
        return 1


def parse(arguments: Sequence[str], ngpu: str = "") -> tuple[int, list[str], int]:
    """The number of processes, the trainer's arguments, and how often the run is restarted.

    Args:
        ngpu: the number of processes where the command line has none.

    Raises:
        UserError: an option has no such value, or is for several nodes.
    """
    rest, trainer, options = list(arguments), list[str](), dict[str, str]()
    while rest:
        argument = rest.pop(0)
        name, has_value, value = argument.partition("=")
        option = name.removeprefix("--").replace("-", "_")
        if name.startswith("--") and option in _OF_NODES:
            raise UserError(f"{name}: one node is started here; for several, run on each: {_ON_EACH}; or: {_SRUN}")
        if not name.startswith("--") or option not in ("nproc_per_node", "max_restarts"):
            trainer.append(argument)
            continue
        if not has_value and not rest:
            raise UserError(f"{name} needs a value, e.g. {name} 2")
        value = value if has_value else rest.pop(0)
        if option in options:
            raise UserError(f"--{option} is given twice, as {options[option]!r} and {value!r}; keep one of them")
        options[option] = value
    count, restarts = options.get("nproc_per_node", ngpu or None), options.get("max_restarts", "0")
    if not re.fullmatch("[0-9]{1,4}", restarts, re.ASCII):
        raise UserError(f"--max_restarts must be a whole number from 0 to 9999, not {restarts!r}")
    if count is None:
        count = str(default_process_count(bool(installed(wants_blas=False, environ=os.environ).hip)))
    elif not re.fullmatch("[1-9][0-9]?", count, re.ASCII):
        raise UserError(f"the number of processes must be 1 to 99, not {count!r} (--nproc_per_node, NGPU)")
    return int(count), trainer, int(restarts)


def conclude(outcome: Outcome, folder: Path) -> int:
    """Print how the run has ended, and return its exit code."""
    for line in outcome.message.splitlines():
        say(line)
    if outcome.state in (HUNG, LOST, INTERRUPTED) and folder.is_dir():
        write_end(folder, outcome)
    if outcome.code:
        say(f"exit code {outcome.code}: {_MEANING.get(outcome.code, 'did not finish')}. Run folder: {folder}")
    return outcome.code


def set_defaults(processes: int) -> None:
    """Set defaults of environment variables for the processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # Share the cores among the processes. Without this torchrun sets one thread each and prints a long warning.
    os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(cores // processes, 1))
    if os.path.exists("/dev/kfd"):  # peer access over PCIe between MI100 cards needs it
        os.environ["HSA_FORCE_FINE_GRAIN_PCIE"] = os.environ.get("HSA_FORCE_FINE_GRAIN_PCIE") or "1"
    elif not os.path.exists("/dev/nvidiactl"):  # tensors in large pages: 7% of the time of a step on a CPU
        os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")


def say(words: object) -> None:
    """Print a line to standard error."""
    with suppress(OSError):  # standard error is closed; the run continues
        os.write(2, f"{command_name('run_train')}: {printable(str(words))}\n".encode(errors="backslashreplace"))


class Launcher:
    """Runs one process after the other. Signals are blocked from its construction on, and read while a process runs.

    Attributes:
        program: what each process of the run is started with.
        arguments: of that program.
        processes: number of processes of the run.
        folder: the run folder.
    """

    program: Sequence[str] = TRAINER
    _is_interrupted = False  # by a Ctrl-C after the first stop signal

    def __init__(self) -> None:
        self.arguments: Sequence[str] = ()
        self.processes, self.folder = 1, Path()
        self._stop_signal: signal.Signals | None = None  # the first stop signal
        self._outcome = Path()
        # Signals that the parent has set to be ignored stay ignored: nohup ignores SIGHUP.
        heard = {number for number in _STOP if signal.getsignal(number) != signal.SIG_IGN}
        self._signals = heard | {signal.SIGCHLD, signal.SIGALRM, WRITE_STACKS}
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        # Some parents leave SIGCHLD ignored; the kernel would then discard the children's exit codes.
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self, most_restarts: int) -> int:
        """Check the config, prepare the data, and run the trainer, with restarts. Returns the exit code."""
        self._check()
        self._prepare()
        restarts = Restarts(most_restarts)
        while True:
            outcome = self.attempt()
            if not outcome.state:  # the trainer ended before it wrote a state
                self._exit_if_stopped()
                outcome = outcome._replace(code=1)
            if self._stop_signal or not (words := restarts.next(outcome)):
                return conclude(outcome, self.folder)
            self._restart(outcome, words)

    def _check(self) -> None:
        """Check the config once, before any process starts, and make the run folder, which all processes share."""
        os.environ.pop(RUN_FOLDER, None)
        first_rank = {"RANK": "0", "WORLD_SIZE": str(self.processes), "MASTER_ADDR": "", "MASTER_PORT": "0"}
        label, environment, pipe = "the check of the config", {**first_rank, ASKS_COMMITS: "1"}, subprocess.PIPE
        output = self.run_first(label, *_CONFIG, *self.arguments, stdout=pipe, environment=environment)
        os.environ[COMMITS], folder = os.fsdecode(output).removesuffix("\n").split(" ", 1)
        self.folder = Path(folder)
        os.environ[RUN_FOLDER] = folder

    def _prepare(self) -> None:
        """Prepare the data in a process without torch: bad rows are reported here, before a GPU is used."""
        try:
            self.run_first("the preparation of the data", *_PREPARE, *self.arguments)
        except BaseException:
            with suppress(OSError):  # it is not empty
                self.folder.rmdir()  # only now: if it were removed earlier, another run could get the same name
            raise

    def run_first(
        self, what: str, *command: str, stdout: int | None = None, environment: Mapping[str, str] = MappingProxyType({})
    ) -> bytes:
        """Run a step before the training itself. Exits this process if the step fails, or after a stop signal.

        Args:
            what: name of the step, for messages.
            environment: variables to add.

        Returns:
            What the step printed, if `stdout` is a pipe.
        """
        environment = {"PYTHONFAULTHANDLER": "1", **environment}  # stacks of what crashes
        status, output = self._run(what, command, Process.terminate, environment, lambda: False, stdout)
        self._exit_if_stopped()
        if status:
            sys.exit(status if status in _MEANING else 1)
        return output

    def attempt(self) -> Outcome:
        """Run the trainer until it ends. Returns the outcome; a run that succeeded has no message."""
        program, command = "the trainer", (*self.program, *self.arguments)
        if self.processes > 1:
            program, command = "torchrun", (*_TORCHRUN, "--nproc_per_node", str(self.processes), *command)
        with tempfile.TemporaryDirectory(prefix="titan-launch-", ignore_cleanup_errors=True) as temporary:
            self._outcome = Path(temporary, "outcome")  # the trainer creates the file
            records = Path(temporary, _RECORDS)
            records.mkdir()
            state_file = self.folder / STATE
            state_before = _stamp(state_file)
            watch = Watch(records, self.processes, str(self.folder))
            environment = {
                "TITAN_OUTCOME": str(self._outcome), "TITAN_LAUNCHER_PID": str(os.getpid()), WATCHED: str(records)
            }  # fmt: skip

            def hangs() -> bool:
                return watch.outcome is not None or watch.look()

            status, _ = self._run(program, command, self._tell_workers, environment, hangs)
            watch.vanished()  # finds the first ones, before the next lines kill what is left
            # Kill workers that a killed torchrun has left. Repeat it: a process that is just being started does not
            # show its environment yet, so it is not found.
            for _ in range(3 if status else 0):
                self._signal_workers(signal.SIGKILL)
                time.sleep(0.1)
            outcome = read_outcome(self._outcome)
            if not records.is_dir() and _stamp(state_file) != state_before:  # a cleaner of /tmp has removed it
                outcome = read_outcome(state_file)
            outcome = outcome or Outcome(0)
            last_step, vanished = watch.last_step(), watch.vanished()
        if watch.outcome is not None:
            append_to_log(self.folder, watch.outcome.message.splitlines())
            return watch.outcome
        if status and last_step is not None:  # a killed process could not write its last step
            outcome = outcome._replace(step=max(last_step, outcome.step or 0))
        if self._is_interrupted:
            return Outcome(1, "Ctrl-C came again: ended at once, without saving", outcome.step, INTERRUPTED)
        # state "": rank 0 has not written it yet
        if status and vanished and (outcome.state in (RUNNING, LOST) or not (outcome.state or self._stop_signal)):
            append_to_log(self.folder, vanished)
            message = outcome.message if outcome.state == LOST else ""
            outcome = outcome._replace(state=LOST, message="\n".join(filter(None, [*vanished, message])))
        # Repeat the message of a failed run: the trainer has printed it, but above torchrun's long report.
        return outcome._replace(code=outcome.code or 1) if status else outcome._replace(message="")

    def _restart(self, outcome: Outcome, words: str) -> None:
        """Print why a run is restarted, and record it in run_state.json and train.log."""
        for line in [*outcome.message.splitlines(), words]:
            say(line)
        append_to_log(self.folder, [words])
        note_restart(self.folder, outcome)
        if outcome.step is not None:
            # Continue with the settings of the run: the user's file may have changed since, and options such as
            # load_step must not apply a second time.
            self.arguments = ("--job.config_file", str(self.folder / "config.toml"))

    def _run(
        self,
        what: str,
        command: Sequence[str],
        pass_on: PassOn,
        environment: Mapping[str, str],
        is_over: IsOver,
        stdout: int | None = None,
    ) -> tuple[int, bytes]:
        """Run a Python process until it ends.

        The first stop signal is forwarded. A Ctrl-C after it kills the process at once. Later signals of other kinds
        are ignored: batch systems often send them twice.

        Returns:
            The exit status, negative for a signal; and what the process printed, if `stdout` is a pipe.
        """
        process = subprocess.Popen(
            [sys.executable, *command], env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=stdout,
            start_new_session=True,  # otherwise Ctrl-C would arrive twice: from the terminal and from here
            preexec_fn=_before_exec,
        )  # fmt: skip
        is_ended, until = False, float("inf")  # whether this launcher killed it; when to stop waiting for that
        while (status := process.poll()) is None and time.monotonic() < until:
            number = self._next_signal()
            if number is None and is_over():
                is_ended, until = True, min(until, time.monotonic() + _KILLED)
                process.kill()
            if number in _STOP and self._stop_signal is None:
                self._stop_signal = signal.Signals(number)
                waits = pass_on(process)
                say(f"stopping{' after the current step, which is saved' * bool(waits)}; Ctrl-C ends it at once ...")
            elif number == signal.SIGINT:
                self._is_interrupted = True
                process.kill()
            elif number == signal.SIGALRM:
                pass_on(process)
            elif number == WRITE_STACKS and pass_on == self._tell_workers:
                self._signal_ranks(process, number)
                say(f"the training processes write their stacks: {self._outcome.with_name(_RECORDS)}/rank-*.stacks")
        signal.setitimer(signal.ITIMER_REAL, 0)
        if status is None:
            status = -signal.SIGKILL
        if status < 0 and not self._stop_signal and not is_ended:
            remedy = "; most likely memory ran out (dmesg says so)" if status == -signal.SIGKILL else ""
            say(f"{what} was killed by {signal.Signals(-status).name}{remedy}")
        return status, process.stdout.read() if process.stdout else b""

    def _next_signal(self) -> int | None:
        """Wait for the next signal. None: none came within LOOK seconds, and `is_over` must be asked."""
        if not hasattr(signal, "sigtimedwait"):  # macOS has none: there `is_over` is never asked
            return signal.sigwait(self._signals)
        signal_info = signal.sigtimedwait(self._signals, LOOK)
        return None if signal_info is None else signal_info.si_signo

    def _tell_workers(self, process: Process) -> bool:
        """Tell the workers to save and stop, by SIGUSR1. torchrun would forward SIGTERM, but kill them 30 s later.

        Returns:
            False: Ctrl-C came before a run was opened, and the process was killed.
        """
        records = self._outcome.with_name(_RECORDS)
        has_begun = self._outcome.exists() or (records / FOLDER_FILE).exists() or not records.is_dir()
        if self._stop_signal == signal.SIGINT and not has_begun:
            process.kill()
            return False
        self._signal_ranks(process, signal.SIGUSR1)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN)
        return True

    def _signal_ranks(self, process: Process, number: int) -> None:
        """Signal the training processes: the process itself, or torchrun's children."""
        if self.processes > 1:
            self._signal_workers(number, process.pid)
        else:
            process.send_signal(number)

    def _signal_workers(self, number: int, parent: int | None = None) -> None:
        """Signal this launch's processes. They are found by their environment, which names the outcome file.

        Args:
            parent: signal only the children of this process: a worker's own children may not handle the signal.
        """
        mark = os.fsencode(f"TITAN_OUTCOME={self._outcome}")
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended, or belongs to another user
                state = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if parent in (None, int(state[1])) and mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), number)

    def _exit_if_stopped(self) -> None:
        """Exit with code 3 after a stop signal."""
        if self._stop_signal:
            say(f"{self._stop_signal.name}: stopped before the run began; nothing was trained; exit code 3")
            sys.exit(3)


def _stamp(path: Path) -> tuple[int, int] | None:
    """Changes with each write of a file; None: there is no file."""
    with suppress(OSError):
        return path.stat().st_ino, path.stat().st_mtime_ns
    return None


def _before_exec() -> None:
    """Runs in the child before Python starts: ignore SIGUSR1 and SIGUSR2, and unblock all signals."""
    for number in (signal.SIGUSR1, WRITE_STACKS):
        signal.signal(number, signal.SIG_IGN)  # a worker that does not listen yet would die of them
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
