"""A run stops and saves before the scheduler ends its job."""

import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import REPO, torchrun

from titan_mi100.run import time_limit
from titan_mi100.run.time_limit import TimeLimit, end_of_job


def reasons(
    intervals: list[float], end: float, monkeypatch: pytest.MonkeyPatch, saves: dict[int, float] | None = None
) -> list[str]:
    """The reason to stop after each step; the steps end at the sums of `intervals`."""
    preemption, checkpointer, now = SimpleNamespace(reason=""), SimpleNamespace(longest_save=1e-15), [1000.0]
    monkeypatch.setattr(time_limit.time, "time", lambda: now[0])
    limit = TimeLimit(1000 + end, cast(Any, preemption), cast(Any, checkpointer))
    found = []
    for step, seconds in enumerate(intervals):
        now[0] += seconds
        checkpointer.longest_save = (saves or {}).get(step, checkpointer.longest_save)
        limit.after_step(step, cast(Any, None))
        found.append(preemption.reason)
    return found


def test_a_stop_is_requested_while_two_steps_a_save_and_a_margin_still_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reasons([10] * 30, 200, monkeypatch)
    assert [bool(reason) for reason in found] == [False] * 12 + [True] * 18  # at 130 s: 70 s are left, 80 needed
    assert found[12:] == ["the job ends in 70 s, and a stop may need 80 s"] * 18
    assert not any(reasons([500, 300, 1, 1], 1000, monkeypatch))  # the first two steps compile


def test_validation_between_two_steps_and_the_longest_save_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reasons([1, 1, 50, 1], 215, monkeypatch)[-2:] == ["", ""]
    assert reasons([1, 1, 50, 1], 212, monkeypatch)[-1].startswith("the job ends in 159 s")
    assert (
        reasons([1, 1, 1, 1], 212, monkeypatch, {2: 100.0})[-2:]
        == ["the job ends in 209 s, and a stop may need 212 s"] * 2
    )


def test_until_a_save_was_measured_two_minutes_are_kept_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = reasons([1] * 3, 183, monkeypatch, {0: 0.0})
    assert found == ["", "", "the job ends in 180 s, and a stop may need 182 s"]
    assert not any(reasons([1] * 3, 183, monkeypatch, {0: 10.0}))


@pytest.mark.parametrize(("text", "end"), [("1764000000", 1764000000.0), ("", None), ("Unknown", None), ("-1", None)])
def test_the_end_of_the_job_is_slurms(text: str, end: float | None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "titan_mi100"):
        assert end_of_job({"SLURM_JOB_END_TIME": text}) == end
    said = {"Unknown": "'Unknown' is not a time", "-1": "'-1' is not a time", "": ""}.get(text, "the job ends at 2025-")
    assert said in caplog.text and end_of_job({}) is None


@pytest.mark.full
def test_a_run_saves_before_its_jobs_end_and_the_next_job_resumes_it(tmp_path: Path) -> None:
    command = ["-m", "titan_mi100.train", "--job.config_file", str(REPO / "train_configs/debug.toml")]
    command += ["--job.run_folder", str(tmp_path / "run"), "--training.steps", "6", "--validation.freq", "0"]
    command += ["--data.validation_fraction", "0", "--validation.prompts", "0", "--checkpoint.export_hf", "false"]
    job = torchrun(*command, check=False, SLURM_JOB_END_TIME=str(int(time.time()) + 50))
    state = json.loads((tmp_path / "run/run_state.json").read_text())
    assert (job.returncode, state["state"], state["step"]) == (3, "preempted", 2), job.stderr
    assert "the job ends in" in state["message"] and state["message"].endswith("all steps are saved in step-2")
    torchrun(*command, SLURM_JOB_END_TIME=str(int(time.time()) + 5000))
    assert json.loads((tmp_path / "run/run_state.json").read_text())["step"] == 6
