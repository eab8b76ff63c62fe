"""How a run has ended, as its launcher or a batch script reads it, and what follows from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

from titan_mi100.watch.outcome import LOST, RUNNING, Outcome, next_move, read_outcome

CRASH, SILENT = Outcome(1, "rank 3: a bug", None, "crashed"), Outcome(1)
GONE = Outcome(1, "closed by peer", None, LOST)


@pytest.mark.parametrize(
    ("outcome", "move"),
    [
        (Outcome(0, "", 9, "done"), "end"),
        (SILENT, "retry"),
        (CRASH, "retry"),
        (GONE, "retry"),
        (Outcome(1, "", None, RUNNING), "retry"),
        (Outcome(5, "", None, "hung"), "retry"),
        (Outcome(2, "wrong", None, "bad_input"), "end"),
        (Outcome(6, "", None, "out_of_memory"), "end"),
        (Outcome(1, "interrupted", None, "interrupted"), "end"),
        (Outcome(1, "disk", None, "save_failed"), "end"),
        (Outcome(3, "", None, "preempted"), "requeue"),
        (Outcome(3, "", 7, "preempted"), "requeue"),
        (Outcome(5, "", 7, "hung"), "requeue"),
        (Outcome(1, "", 7, RUNNING), "requeue"),
        (GONE._replace(step=7), "requeue"),
        (CRASH._replace(step=7), "end"),
        (Outcome(4, "nan", 7, "numerical_abort"), "end"),
    ],
)
def test_what_follows_from_an_outcome(outcome: Outcome, move: str) -> None:
    assert next_move(outcome) == move


def test_a_batch_script_reads_code_and_move_of_its_own_start_only(tmp_path: Path) -> None:
    def ask(*options: str) -> str:
        command = [sys.executable, "-S", "-m", "titan_mi100.watch.outcome", str(tmp_path), *options]
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout

    nothing = f"the run has left no run_state.json in {tmp_path}\n"
    assert ask("--start", "7.0.1") == f"1 retry {nothing}"
    state = {"state": "preempted", "exit_code": 3, "message": "stopped\nafter 5", "step": 5, "start": "7.0.1"}
    (tmp_path / "run_state.json").write_text(json.dumps(state))
    assert ask("--start", "7.0.1") == ask() == "3 requeue stopped after 5\n"
    assert ask("--start", "7.0.2", "--srun", "2") == f"2 end {nothing}"  # the settings are wrong


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"exit_code": null, "state": ""}', '{"exit_code": 3}'])
def test_an_outcome_that_cannot_be_read_is_none(text: str, tmp_path: Path) -> None:
    assert read_outcome(tmp_path / "outcome") is None
    (tmp_path / "outcome").write_text(text)
    assert read_outcome(tmp_path / "outcome") is None
