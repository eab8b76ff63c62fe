"""A process that is told to stop remembers why, and does not outlive its launcher."""

import signal
import subprocess
import sys
import time

import pytest
from conftest import REPO

WAIT = """
import os, sys, time
from titan_mi100.run import preemption
preemption._GRACE = 0.5 if float(sys.argv[1]) else 60
told = preemption.Preemption()
assert "torch" not in sys.modules
print("ready", flush=True)
while not told.reason:
    time.sleep(0.01)
print(told.reason, flush=True)
time.sleep(float(sys.argv[1]))
"""


def start(linger: float, **environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT, str(linger)],
        env={"PYTHONPATH": str(REPO), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_remembered_and_ends_nothing(number: signal.Signals) -> None:
    process = start(0)
    process.send_signal(number)
    assert process.communicate(timeout=60)[0] == f"{number.name}\n"
    assert process.returncode == 0


@pytest.mark.parametrize("linger", [0, 30])
def test_a_process_whose_launcher_is_gone_is_told_and_ends(linger: float) -> None:
    launcher = subprocess.Popen(["sleep", "60"])
    process = start(linger, TITAN_LAUNCHER_PID=str(launcher.pid))
    time.sleep(1.2)  # more than a look at it
    assert process.poll() is None
    launcher.kill()  # it stays as a zombie until it is waited for
    said, errors = process.communicate(timeout=60)
    launcher.wait()
    assert said == "the launcher is gone\n"
    assert process.returncode == (1 if linger else 0), errors
    assert ("did not come to its next step" in errors) == bool(linger)


@pytest.mark.parametrize("launcher", ["one", "-1", "9" * 30, ""])
def test_what_is_no_process_is_no_launcher(launcher: str) -> None:
    process = start(0, TITAN_LAUNCHER_PID=launcher)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("SIGTERM\n", "")


def test_a_shell_that_ends_is_no_launcher() -> None:
    script = f'{sys.executable} -c "$0" 0 & echo $!; sleep 0.5'
    process = subprocess.Popen(
        ["bash", "-c", script, WAIT], env={"PYTHONPATH": str(REPO)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    process.wait()
    time.sleep(1.2)
    subprocess.run(["kill", "-s", "TERM", str(pid)], check=True)
    assert process.stdout.readline() == "SIGTERM\n"
