"""Hangs, seen from outside; what a run does about them is tried by tests/chaos/hangs.py (test_chaos.py)."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO

from titan_mi100.checkpoint import sealed
from titan_mi100.config.settings import WatchdogConfig
from titan_mi100.launch import launcher as launch
from titan_mi100.watch import heartbeat as heartbeats
from titan_mi100.watch import watchdog
from titan_mi100.watch.heartbeat import COMPILE, ENDED, SAVE, START, STEP, Beat, Heartbeat, read_beats
from titan_mi100.watch.outcome import HUNG, Outcome, Restarts, note_restart, write_run_state
from titan_mi100.watch.watchdog import ProcessSnapshot, Watch, behind

CONFIG = WatchdogConfig(seconds=10, start_seconds=20, compile_seconds=30, save_seconds=40, validation_seconds=50)
PROCESS = """
import ctypes, sys, threading, time
from pathlib import Path
from titan_mi100.config.settings import WatchdogConfig
from titan_mi100.watch.heartbeat import Heartbeat
heartbeat = Heartbeat(WatchdogConfig(seconds=0.5), Path(sys.argv[1]), int(sys.argv[2]))
for number in (1, 2, 3):
    heartbeat.begin_step(number)
def reading_a_row():
    {how}
print("there", flush=True)
{does}
"""
HOLDS_THE_GIL = "ctypes.PyDLL(None).sleep(100)"


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def pass_by(self, watch: Watch, seconds: float, look: float = 0.5) -> bool:
        """Whether it is a hang before they have passed."""
        until = self.now + seconds
        while self.now < until:
            self.now += look
            if watch.look():
                return True
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(
        watchdog, "_examine", lambda folder, beats: [ProcessSnapshot(beat, "S", "", "") for beat in beats]
    )
    return Clock(monkeypatch)


def test_each_phase_has_a_limit_of_its_own_and_ten_median_steps_are_no_hang(tmp_path: Path, clock: Clock) -> None:
    heartbeat = Heartbeat(CONFIG, tmp_path)

    def limit() -> tuple[str, float]:
        [beat] = read_beats(tmp_path)
        return beat.phase, beat.limit

    assert limit() == (START, 20)
    for number, expected in ((1, (COMPILE, 30)), (2, (COMPILE, 30)), (3, (STEP, 10))):
        heartbeat.begin_step(number)
        assert limit() == expected
        clock.now += 3
    heartbeat.begin_step(4)
    assert limit() == (STEP, 30)  # 10 times the 3 seconds of the third
    heartbeat.note("reading rows")
    assert limit() == (STEP, 30)
    heartbeat.begin(SAVE, "step 4", 4)
    [beat] = read_beats(tmp_path)
    assert (beat.limit, beat.step, beat.doing, beat.pid, beat.beats) == (40, 4, "step 4", os.getpid(), 6)
    off = Heartbeat(WatchdogConfig(seconds=0), tmp_path)
    off.begin_step(1)
    assert limit()[1] == 0


def test_a_hang_is_seen_after_the_limit_and_not_before(tmp_path: Path, clock: Clock) -> None:
    heartbeat, watch = Heartbeat(CONFIG, tmp_path), Watch(tmp_path, 1, str(tmp_path / "run"))
    assert not clock.pass_by(watch, 19)
    for number in range(1, 40):  # steps that come go on for ever
        heartbeat.begin_step(number)
        assert not clock.pass_by(watch, 9)
    heartbeat.note("reading rows")  # a part of a step is no progress
    assert not clock.pass_by(watch, 80)
    assert clock.pass_by(watch, 4)
    assert watch.outcome is not None
    assert (watch.outcome.code, watch.outcome.step, watch.outcome.state) == (5, 38, HUNG)
    assert "rank 0 on" in watch.outcome.message and "in step 39, reading rows" in watch.outcome.message
    assert "step 39" in next((tmp_path / "run" / "logs").glob("hang-*.txt")).read_text()


def test_a_job_that_was_suspended_as_a_whole_is_no_hang(tmp_path: Path, clock: Clock) -> None:
    heartbeat, watch = Heartbeat(CONFIG, tmp_path), Watch(tmp_path, 1)
    heartbeat.begin_step(1)
    assert not watch.look()
    assert not clock.pass_by(watch, 3000, look=1000)  # three looks, each after a long sleep
    assert clock.pass_by(watch, 30)


def test_what_follows_the_end_of_a_process_is_its_launchers_affair(tmp_path: Path, clock: Clock) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    heartbeat, watch = Heartbeat(CONFIG, tmp_path), Watch(tmp_path, 1)
    heartbeat._memory[:8] = gone.pid.to_bytes(8, sys.byteorder)
    assert not clock.pass_by(watch, 100)


def test_processes_that_never_begin_are_a_hang(tmp_path: Path, clock: Clock) -> None:
    Heartbeat(WatchdogConfig(start_seconds=10_000), tmp_path)
    watch = Watch(tmp_path, 3, first_sign=60)
    assert not clock.pass_by(watch, 59)
    assert clock.pass_by(watch, 2) and watch.outcome is not None
    assert "2 of 3 processes did not begin in 60 s" in watch.outcome.message


def test_of_processes_that_end_the_first_to_vanish_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESS.format(how="pass", does="time.sleep(100)"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    processes = [subprocess.Popen([*command, rank], env=environment, stdout=subprocess.PIPE) for rank in ("0", "1")]
    watch = Watch(tmp_path, 2)
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    assert not watch.look() and not watch.vanished()
    for process in reversed(processes):
        process.kill()
        process.wait()
        assert not watch.look()
    [said] = watch.vanished()
    assert said.startswith("rank 1 on ") and "was killed, or ended without a word, in step 3" in said
    Heartbeat(CONFIG, tmp_path, 1).note(ENDED)  # it has said how it ends
    assert "rank 0 on" in Watch(tmp_path, 2).vanished()[0]


def test_an_unwatched_process_writes_its_stacks_to_its_errors() -> None:
    code = (
        "import os, signal; from titan_mi100.config.settings import WatchdogConfig; "
        "from titan_mi100.watch.heartbeat import Heartbeat; "
        "Heartbeat.of_process(WatchdogConfig(seconds=0)); os.kill(os.getpid(), signal.SIGUSR2)"
    )
    unwatched = {name: value for name, value in os.environ.items() if name != heartbeats.WATCHED}
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=unwatched, capture_output=True, text=True)
    assert ended.returncode == 0 and "most recent call first" in ended.stderr


@pytest.mark.parametrize("seconds", [0.0, 300.0])
def test_a_run_that_cannot_be_watched_goes_on_and_says_so(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TITAN_WATCH", str(tmp_path / "gone"))
    Heartbeat.of_process(WatchdogConfig(seconds=seconds)).begin_step(1)  # 0: no limits, but the launcher expects it
    said = f"WARNING rank 0 is not watched for hangs: {tmp_path}/gone/rank-00000.beat: No such file or directory\n"
    assert capsys.readouterr().err == said


def test_a_run_without_limits_and_one_whose_records_are_gone_raise_no_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TITAN_WATCH", str(tmp_path))
    clock = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: float(next(clock)))
    Heartbeat.of_process(WatchdogConfig(seconds=0)).begin_step(1)
    watch = Watch(tmp_path, 1)
    assert not any(watch.look() for _ in range(2000))
    for record in tmp_path.glob("*.beat"):
        record.unlink()
    assert not any(watch.look() for _ in range(2000))


def test_records_that_are_cut_or_empty_are_passed_over(tmp_path: Path) -> None:
    Heartbeat(CONFIG, tmp_path, rank=1)
    (tmp_path / "rank-00000.beat").write_bytes(b"")
    (tmp_path / "rank-00002.beat").write_bytes(b"\0" * 10)
    (tmp_path / "rank-00003.beat").write_bytes(b"\0" * (tmp_path / "rank-00001.beat").stat().st_size)
    assert [beat.rank for beat in read_beats(tmp_path)] == [1]


def seen(
    rank: int, events: int = 5, state: str = "S", stack: str = 'File "/a/rows.py", line 1 in read'
) -> ProcessSnapshot:
    beat = Beat(1, rank, 3, 1, events, 0xAB, 1.0, STEP, "step 4, rows")
    return ProcessSnapshot(beat, state, "", f"Current thread 0x{0xAB:016x} (most recent call first):\n  {stack}\n")


WAITING = 'File "/x/torch/distributed/distributed_c10d.py", line 7 in all_reduce'


def test_the_rank_that_the_others_wait_for_is_found() -> None:
    def found(*processes: ProcessSnapshot) -> list[int]:
        return [process.beat.rank for process in behind(processes)]

    assert found(seen(0), seen(1, state="T"), seen(2, events=1)) == [1]
    assert found(seen(0), seen(1, state="")) == [1]
    agreeing = 'File "/x/torch/nn/parallel/distributed.py", line 1775 in _pre_forward'
    in_forward = 'File "/x/torch/nn/parallel/distributed.py", line 1799 in forward'
    assert found(seen(0, stack=in_forward), seen(1, stack=agreeing)) == [0]
    assert found(seen(0, 6, stack=WAITING), seen(1, 5, stack=WAITING), seen(2, 6)) == [1]
    assert found(seen(0, stack=WAITING), seen(1), seen(2, stack=WAITING)) == [1]
    assert found(seen(0, stack=WAITING), seen(1, stack=WAITING)) == []
    assert found(seen(0)) == [0]
    assert seen(0).where() == "in step 4, rows: in read (rows.py:1)"
    assert seen(0, state="D").where().endswith("(state D)")


@pytest.mark.parametrize(
    ("how", "does"),
    [
        ("time.sleep(100)", "reading_a_row()"),
        (HOLDS_THE_GIL, "reading_a_row()"),
        (HOLDS_THE_GIL, "threading.Thread(target=reading_a_row).start(); time.sleep(100)"),
    ],
)
def test_a_process_writes_its_stacks_also_while_the_gil_is_held(tmp_path: Path, how: str, does: str) -> None:
    code, records = PROCESS.format(how=how, does=does), tmp_path / "records"
    records.mkdir()
    command = [sys.executable, "-c", code, str(records), "0"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPO)}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        watch, began = Watch(records, 1, str(tmp_path)), time.monotonic()
        try:
            while not watch.look():
                time.sleep(0.1)
                assert time.monotonic() < began + 120
        finally:
            process.kill()
    said = next((tmp_path / "logs").glob("hang-*.txt")).read_text()
    assert "in reading_a_row" in said and "rank 0, process" in said
    assert watch.outcome is not None and watch.outcome.step == 2


@pytest.mark.full
def test_of_a_stopped_process_its_state_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROCESS.format(how="pass", does="time.sleep(100)"), str(tmp_path), "7"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(REPO)}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        [found] = watchdog._examine(tmp_path, read_beats(tmp_path))
        process.kill()
    assert found.where() == "in step 3, forward and backward: stopped by a signal (state T)" and not found.stacks


def test_records_are_not_written_where_others_could_have_put_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "RANK": "1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(heartbeats.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(heartbeats, "_exit_on_signal", lambda: None)
    folder = heartbeats._shared_folder("2")
    assert folder.stat().st_mode & 0o777 == 0o700 and heartbeats._shared_folder("2") == folder
    folder.chmod(0o777)
    Heartbeat.of_process(CONFIG)
    assert "rank 1 is not watched for hangs: " in capsys.readouterr().err and not list(folder.iterdir())
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    Heartbeat.of_process(CONFIG)
    assert "rank 1 is not watched for hangs: " in capsys.readouterr().err and not list(folder.iterdir())
    assert heartbeats._shared_folder("1") != heartbeats._shared_folder("1")  # alone: nobody can guess it


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_watcher_ends_with_its_processes_also_if_they_ended_before_it_looked(
    is_recorded: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    if is_recorded:
        command = [sys.executable, "-c", PROCESS.format(how="pass", does="pass"), str(folder), "0"]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(REPO)}, check=True)
    command = [sys.executable, "-m", "titan_mi100.watch.watchdog", str(folder), "1"]
    subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(REPO)}, check=True, stdin=subprocess.DEVNULL, timeout=120
    )
    assert not folder.exists()


def test_without_an_intact_checkpoint_nobody_is_told_to_resume(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    said = [watchdog.how_to_start_again(None), watchdog.how_to_start_again(tmp_path)]
    (tmp_path / "checkpoint" / "step-7").mkdir()  # damaged: it has no manifest
    assert "--checkpoint.load_step N takes a suspect one" in watchdog.how_to_start_again(tmp_path)
    assert set(said) == {"no intact checkpoint was saved; start again from step 0 with the same command"}
    sealed.seal(sealed.begin(tmp_path / "checkpoint", 5), {}, {"step": 5})
    again = f"to resume, start again with job.run_folder = {tmp_path}, without checkpoint.fresh and load_step"
    assert watchdog.how_to_start_again(tmp_path) == again


@pytest.mark.parametrize("is_saved", [False, True])
def test_a_hung_runs_state_says_whether_it_can_be_resumed(
    tmp_path: Path, is_saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    if is_saved:
        (tmp_path / "checkpoint").mkdir()
        sealed.seal(sealed.begin(tmp_path / "checkpoint", 5), {}, {"step": 5})
    records = tmp_path / "records"
    records.mkdir()
    watch = Watch(records, 1, str(tmp_path))
    watch.outcome = Outcome(5, "rank 0 is behind", 3, HUNG)
    for end in (lambda: launch.conclude(watch.outcome, tmp_path), lambda: watchdog._end_all(watch)):
        end()
        state = json.loads((tmp_path / "run_state.json").read_text())
        assert state["next"].startswith("to resume") == is_saved, end
        (tmp_path / "run_state.json").unlink()


@pytest.mark.parametrize(
    ("is_here", "said", "message"),
    [
        (True, HUNG, "mine"), (True, None, "mine"), (False, None, "mine"), (False, "running", "mine"),
        (False, HUNG, "theirs"),
    ],
)  # fmt: skip
def test_the_node_that_has_the_rank_at_fault_writes_the_state(
    is_here: bool, said: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    watch = Watch(tmp_path / "records", 1, str(tmp_path))
    watch.outcome, watch.is_cause_here = Outcome(5, "mine", 3, HUNG), is_here
    if said:
        write_run_state(tmp_path, Outcome(5, "theirs", state=said, next=""))
    watchdog._end_all(watch)
    assert json.loads((tmp_path / "run_state.json").read_text())["message"] == message


def after(restarts: Restarts, *ends: tuple[int, str, int | None]) -> list[bool]:
    return [bool(restarts.next(Outcome(code, "", step, state))) for code, state, step in ends]


def test_what_is_restarted_and_what_is_not() -> None:
    for code, state in ((2, "bad_input"), (3, "preempted"), (4, "numerical_abort"), (6, "out_of_memory"), (0, "done"),
                        (1, "save_failed"), (1, "interrupted")):  # fmt: skip
        assert after(Restarts(9), (code, state, 5), (code, state, None)) == [False, False], state
    for code, state in ((1, "crashed"), (5, HUNG), (1, "running"), (1, "lost_a_process")):
        assert after(Restarts(9), (code, state, 5)) == [True], state
    lost = [(1, "running", step) for step in (3, 7, 9)]
    assert after(Restarts(2), *lost) == [True, True, False]
    assert after(Restarts(0), *lost[:1]) == [False]
    # the same step twice, also with another one between
    assert after(Restarts(9), (1, "crashed", 3), (1, "crashed", 3)) == [True, False]
    assert after(Restarts(9), (5, HUNG, 3), (1, "crashed", 4), (1, "crashed", 3)) == [True, True, False]
    # starts that fail are counted in a row, and apart
    failed = (1, "crashed", None)
    assert after(Restarts(1), failed, failed, failed, failed) == [True, True, True, False]
    assert after(Restarts(1), failed, failed, failed, (1, "running", 2), failed) == [True] * 5
    assert after(Restarts(0), failed) == [False]


def test_restarts_stay_in_the_runs_state(tmp_path: Path) -> None:
    write_run_state(tmp_path, Outcome(1, "", state="running", next=""))
    note_restart(tmp_path, Outcome(5, "rank 1 is behind\x1b[2J", 7, HUNG))
    write_run_state(tmp_path, Outcome(1, "", state="running", next=""))
    note_restart(tmp_path, Outcome(1, "killed", 9, "running"))
    write_run_state(tmp_path, Outcome(0, "", state="done", next=""))
    state = json.loads((tmp_path / "run_state.json").read_text())
    assert state["state"] == "done"
    assert [(entry["attempt"], entry["state"], entry["step"]) for entry in state["restarts"]] == [
        (1, HUNG, 7), (2, "running", 9)
    ]  # fmt: skip
    assert "\x1b" not in state["restarts"][0]["message"]
    (tmp_path / "run_state.json").write_text("[")
    note_restart(tmp_path, Outcome(1, "killed", 9, "running"))
    assert [entry["step"] for entry in json.loads((tmp_path / "run_state.json").read_text())["restarts"]] == [9]
    (tmp_path / "run_state.json").write_text('{"restarts": 3}')
    write_run_state(tmp_path, Outcome(0, "", state="done", next=""))
    assert "restarts" not in json.loads((tmp_path / "run_state.json").read_text())
