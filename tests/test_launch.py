"""The launcher's parts; tests/test_scripts.py runs the whole of it."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import REPO

from titan_mi100.errors import UserError
from titan_mi100.launch import launcher as launch
from titan_mi100.watch import outcome as outcome_module
from titan_mi100.watch.heartbeat import FOLDER_FILE, WRITE_STACKS
from titan_mi100.watch.outcome import Outcome, write_run_state


@pytest.mark.parametrize("processes", ["0", "-1", "two", "1.0", " 2", "٣", "1" * 5000, "\udc80", "100"])
def test_a_senseless_number_of_processes_is_refused(processes: str) -> None:
    for arguments, ngpu in (
        (["--nproc_per_node", processes], "2"),
        ([f"--nproc-per-node={processes}"], ""),
        ([], processes),
    ):
        with pytest.raises(UserError, match="the number of processes must be 1 to 99, not"):
            launch.parse(arguments, ngpu)


def test_the_command_line_comes_before_the_environment_and_that_before_the_hardware(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "default_process_count", lambda is_rocm: 5)
    given = ["--job.config_file=a.toml", "--x.y"]
    assert launch.parse(["--nproc_per_node=3", *given], "4") == (3, given, 0)
    assert launch.parse([*given, "--nproc-per-node", "3"], "4") == (3, given, 0)
    assert launch.parse(given, "4") == (4, given, 0)
    with pytest.raises(UserError, match="the number of processes must be 1 to 99, not ''"):
        launch.parse(["--nproc_per_node=", *given], "4")
    with pytest.raises(UserError, match="--nproc_per_node needs a value"):
        launch.parse([*given, "--nproc_per_node"])
    assert launch.parse(["--max_restarts", "3", *given], "4") == (4, given, 3)
    for wrong in ("-1", "x", "", "99999"):
        with pytest.raises(UserError, match="--max_restarts must be a whole number"):
            launch.parse([f"--max_restarts={wrong}"], "4")
    with pytest.raises(UserError, match="--nproc_per_node is given twice, as '2' and '2'"):
        launch.parse(["--nproc_per_node", "2", *given, "--nproc-per-node=2"])


@pytest.mark.parametrize("option", ["--nnodes=2", "--node_rank", "--node-rank=1", "--rdzv", "--rdzv_timeout"])
def test_options_of_several_nodes_name_the_command_that_starts_them(
    option: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch.Launcher, "__init__", lambda _: None)  # it blocks signals
    assert launch.main(["--nproc_per_node", "2", option, "2", "--x.y"], {}) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{option.partition('=')[0]}: one node is started here; for several, run on each: torchrun --nnodes" in line
    assert "-m titan_mi100.train" in line and "; or: srun python -m titan_mi100.train" in line


def test_the_launcher_imports_no_torch_and_nothing_that_is_slow() -> None:
    """It runs beside the workers for as long as they do, and must listen at once."""
    code = "import sys, titan_mi100.launch.launcher; print(*{name.split('.')[0] for name in sys.modules})"
    found = subprocess.run(
        [sys.executable, "-S", "-c", code], env={"PYTHONPATH": str(REPO)}, capture_output=True, text=True, check=True
    )
    assert set(found.stdout.split()) - sys.stdlib_module_names <= {"titan_mi100", "__main__"}


def test_several_copies_of_the_launcher_are_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch.Launcher, "__init__", lambda _: None)  # it blocks signals
    assert launch.main([], {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}) == 2
    assert capfd.readouterr().err.startswith(
        "run_train: srun, or WORLD_SIZE, says that 2 processes were started, and each run_train.sh"
    )
    assert launch.main([], {"OMPI_COMM_WORLD_SIZE": "2"}) == 2
    assert "OMPI_COMM_WORLD_SIZE = 2, but RANK is not set" in capfd.readouterr().err
    for rank in ({}, {"RANK": "1"}):
        assert launch.main([], {"WORLD_SIZE": "2", **rank}) == 2
        assert "says that 2 processes were started, and each run_train.sh" in capfd.readouterr().err


INT, TERM, ALRM, USR2, LOOK = signal.SIGINT, signal.SIGTERM, signal.SIGALRM, WRITE_STACKS, None
OUT_OF_MEMORY = "it was killed by SIGKILL; most likely memory ran out (dmesg says so)"


@pytest.mark.parametrize(
    ("arrives", "ends", "does", "says"),
    [
        ([], 0, [], []),
        ([], -signal.SIGKILL, [], [OUT_OF_MEMORY]),
        ([], -signal.SIGSEGV, [], ["it was killed by SIGSEGV"]),
        ([LOOK], 0, [], []),
        ([TERM], 0, ["told"], ["stopping after the current step, which is saved; Ctrl-C ends it at once ..."]),
        ([TERM, TERM, signal.SIGHUP], -signal.SIGKILL, ["told"], None),  # batch systems send them twice
        ([INT, TERM], 0, ["told"], None),
        ([TERM, INT], -signal.SIGKILL, ["told", "killed"], None),
        ([INT, INT], -signal.SIGKILL, ["told", "killed"], None),
        ([TERM, ALRM, ALRM], 0, ["told", "told", "told"], None),  # a worker may not have listened yet
        ([signal.SIGCHLD], 0, [], []),
        ([USR2], 0, [USR2], None),
        (["over", LOOK], -signal.SIGKILL, ["killed", "killed"], []),  # until it has ended
    ],
)
def test_what_the_launcher_does_with_each_signal(
    arrives: list[Any], ends: int, does: list[Any], says: list[str] | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    done: list[Any] = []
    said: list[Any] = []
    states = iter([*(None for _ in arrives), ends])
    process = SimpleNamespace(poll=lambda: next(states), kill=lambda: done.append("killed"), stdout=None)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: process)
    monkeypatch.setattr(launch, "say", said.append)
    launcher = launch.Launcher.__new__(launch.Launcher)
    launcher._stop_signal, launcher._outcome = None, tmp_path / "outcome"
    signals, is_over = iter(arrives), "over" in arrives
    monkeypatch.setattr(launcher, "_next_signal", lambda: None if (number := next(signals)) == "over" else number)
    monkeypatch.setattr(launcher, "_signal_ranks", lambda _, number: done.append(number))
    tell = lambda _: not done.append("told")  # noqa: E731
    monkeypatch.setattr(launcher, "_tell_workers", tell)
    assert launcher._run("it", ["-c", ""], tell, {}, lambda: is_over) == (ends, b"")
    assert done == does and (says is None or said == says)
    assert launcher._stop_signal == next((number for number in arrives if number in (INT, TERM)), None)
    assert launcher._is_interrupted == ("killed" in does and not is_over)


def test_it_looks_around_while_no_signal_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = launch.Launcher.__new__(launch.Launcher)
    launcher._signals = {signal.SIGUSR2}
    monkeypatch.setattr(launch, "LOOK", 0.01)
    monkeypatch.setattr(signal, "sigwait", lambda _: TERM)
    assert launcher._next_signal() is None
    monkeypatch.delattr(signal, "sigtimedwait")  # as on macOS
    assert launcher._next_signal() == TERM


@pytest.mark.parametrize("number", [INT, TERM])
@pytest.mark.parametrize(
    ("files", "is_too_early"),
    [(["watch"], True), (["watch", "outcome"], False), (["watch/folder"], False), ([], False)],
)
def test_the_first_ctrl_c_before_a_run_has_begun_ends_it_at_once(
    number: signal.Signals, files: list[str], is_too_early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name.replace("folder", FOLDER_FILE)).mkdir(exist_ok=True)
    done: list[Any] = []
    launcher = launch.Launcher.__new__(launch.Launcher)
    launcher._stop_signal, launcher._outcome = number, tmp_path / "outcome"
    monkeypatch.setattr(launcher, "_signal_ranks", lambda _, sent: done.append(sent))
    monkeypatch.setattr(signal, "setitimer", lambda *given: done.append(given))
    is_told = launcher._tell_workers(SimpleNamespace(kill=lambda: done.append("killed")))  # type: ignore[arg-type]
    assert is_told != (number == INT and is_too_early)
    assert done == ([signal.SIGUSR1, (signal.ITIMER_REAL, 2.0)] if is_told else ["killed"])


def test_on_a_full_disk_the_state_is_written_over_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = tmp_path / "outcome"
    monkeypatch.setenv("TITAN_OUTCOME", str(outcome))
    write_run_state(tmp_path, Outcome(1, "?" * 5000, state="running", next=""))

    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(outcome_module, "replace", full)
    write_run_state(tmp_path, Outcome(1, "ä" * 5000, state="save_failed", next="again"))
    for path in (tmp_path / "run_state.json", outcome):
        assert json.loads(path.read_text())["state"] == "save_failed"
        assert path.stat().st_size < 4096
    assert launch.read_outcome(outcome) == (1, "ä" * 300, None, "save_failed", "")


def test_a_worker_that_shows_no_environment_at_first_is_ended_with_its_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process does while it is being started."""
    workers: list[subprocess.Popen] = []
    looked, look = [], launch.Launcher._signal_workers

    def run(
        _: launch.Launcher, what: str, command: list[str], pass_on: object, environment: dict, is_over: object
    ) -> tuple[int, bytes]:
        workers.append(subprocess.Popen(["sleep", "60"], env={**os.environ, **environment}))
        return -signal.SIGKILL, b""

    def look_again(self: launch.Launcher, number: int) -> None:
        looked.append(number)
        if len(looked) > 1:
            look(self, number)

    own = {"_stop_signal": None, "arguments": (), "processes": 2, "folder": tmp_path}
    monkeypatch.setattr(launch.Launcher, "__init__", lambda self: self.__dict__.update(own))  # it blocks signals
    monkeypatch.setattr(launch.Launcher, "_run", run)
    monkeypatch.setattr(launch.Launcher, "_signal_workers", look_again)
    assert launch.Launcher().attempt().code == 1
    assert workers[0].wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("devices", "given", "tunables"),
    [
        ((), "", "glibc.malloc.hugetlb=1"),
        ((), "glibc.malloc.check=1", "glibc.malloc.check=1"),
        (("/dev/kfd",), "", ""),
        (("/dev/nvidiactl",), "", ""),
    ],
)
def test_a_cpu_gets_large_pages_unless_told_otherwise(
    devices: tuple[str, ...], given: str, tunables: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7% of a step's time; of the memory that a card is fed from, nobody has measured it."""
    monkeypatch.setattr(launch.os.path, "exists", lambda path: path in devices)
    monkeypatch.setattr(launch.os, "environ", {"GLIBC_TUNABLES": given} if given else {})
    launch.set_defaults(1)
    assert launch.os.environ.get("GLIBC_TUNABLES", "") == tunables
