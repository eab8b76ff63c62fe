"""Some of tests/chaos/run.py: what is tried there at length holds, and is seen to fail without its protection."""

import errno
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from chaos import files, hangs, run, runs
from chaos.case import Outcome
from chaos.worker import switch_off
from conftest import REPO, torchrun

from titan_mi100.checkpoint import sealed


def tried(function: str, *arguments: Any, folder: Path) -> Outcome:
    """What one of chaos/files.py's cases found. It forks, so it runs where there are no threads: not here."""
    job = torchrun("-m", "chaos.files", function, json.dumps(arguments), str(folder), processes=1)
    return Outcome(*json.loads(job.stdout.splitlines()[-1]))


@pytest.mark.parametrize("in_background", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_save_that_is_killed_anywhere_leaves_the_one_before(in_background: bool, full: bool, tmp_path: Path) -> None:
    outcome = tried("kill_everywhere", in_background, 1 if full else 9, folder=tmp_path)
    assert outcome.count > (10 if full else 1) and not outcome.wrong


@pytest.mark.full
@pytest.mark.parametrize(("in_background", "number"), [(False, errno.EIO), (True, errno.ENOSPC)])
def test_a_write_that_is_refused_on_one_rank_ends_all_and_leaves_the_one_before(
    in_background: bool, number: int, full: bool, tmp_path: Path
) -> None:
    outcome = tried("fail_everywhere", in_background, number, 6 if full else 20, folder=tmp_path)
    assert outcome.count > (5 if full else 2) and not outcome.wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints of two processes."""
    folder = tmp_path_factory.mktemp("saved")
    assert tried("save_base", 2, folder=folder).count == 2
    return folder / "base"


def test_flipped_bits_are_found_and_only_by_their_hash(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not files.flip_bits(saved, 64).wrong
    monkeypatch.setattr(sealed, "check_file", sealed.check_file)  # put back afterwards
    switch_off(["hash check"])
    assert len(files.flip_bits(saved, 64).wrong) > 32


@pytest.mark.parametrize("kind", files._DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_file_named(kind: str, saved: Path, tmp_path: Path) -> None:
    outcome = files.damage_copies(saved, kind, 8, tmp_path)
    assert outcome.count == 8 and not outcome.wrong


@pytest.mark.parametrize(
    ("row", "name"),
    [
        pytest.param("signals", "FSDP2 x2: TERM to every rank in step", marks=pytest.mark.full),
        pytest.param("signals", "FSDP2 x2: USR1 to script in warm-up", marks=pytest.mark.full),
        pytest.param("nans", "PP2 1F1B: activation", marks=pytest.mark.full),
        pytest.param("exits", "two runs with one folder", marks=pytest.mark.full),
        pytest.param("hangs", "FSDP2 x2, script: asleep over its rows", marks=pytest.mark.full),
        pytest.param("hangs", "one process, bare: stopped in a step", marks=pytest.mark.full),
        pytest.param("slow", "0 rows, FSDP2 x2", marks=pytest.mark.full),
    ],
)
def test_a_case_of_real_runs_is_as_it_should_be(row: str, name: str, tmp_path: Path) -> None:
    rows = getattr(runs, row, None) or getattr(hangs, row)
    (case,) = [case for quick in (True, False) for case in rows(quick) if case.name.endswith(name)][:1]
    outcome = case.run(tmp_path, ())
    assert outcome.count >= 1 and not outcome.wrong


@pytest.mark.full
def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Once by hand and once by the launcher; tests/chaos/run.py kills in all phases, and makes ranks hang."""
    outcome = runs.case("killed", runs.killed, "FSDP2 x2", "async", 1, random.Random(110)).run(tmp_path, ())
    assert outcome.count == 1 and not outcome.wrong
    outcome = runs.case("restarted", hangs.restarted, "FSDP2 x2", 1, random.Random(0)).run(tmp_path / "b", ())
    assert outcome.count == 1 and not outcome.wrong


@pytest.mark.full
def test_the_table_says_what_its_file_holds_and_an_ended_case_is_not_tried_again(tmp_path: Path) -> None:
    output = tmp_path / "found.jsonl"
    command = (str(REPO / "tests" / "chaos" / "run.py"), "--rows", "4", "--quick", "--output", str(output))
    first = torchrun(*command, processes=1, check=False)
    assert first.returncode == 0 and first.stdout.splitlines()[-1].endswith("| 30 | 0 |"), first.stderr
    lines = output.read_text().splitlines()
    assert [json.loads(line)["count"] for line in lines] == [6] * 5
    bad = {**json.loads(lines[0]), "wrong": ["it was not refused"]}
    output.write_text("\n".join([json.dumps(bad), *lines[1:]]) + '\n{"row": 4, "ca')
    again = torchrun(*command, processes=1, check=False)
    assert again.returncode == 1 and again.stdout.splitlines()[-1].endswith("| 30 | 1 |")
    assert "tried, " not in again.stdout
    assert run.read(tmp_path / "nothing.jsonl") == []


def test_a_row_that_this_machine_cannot_try_is_named_first_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[int] = []
    rows = {
        1: run.ROWS[1]._replace(needs="sh"),
        2: run.ROWS[2]._replace(needs="sh no-such-program @no-such-host.invalid"),
    }
    monkeypatch.setattr(run, "ROWS", rows)
    monkeypatch.setattr(run.Row, "cases", lambda row, quick: tried.append(row.measure) or iter(()))
    monkeypatch.setattr(sys, "argv", ["run.py", "--quick", "--output", str(tmp_path / "found.jsonl")])
    assert run.main() == 3
    assert tried == [rows[1].measure]
    said = capsys.readouterr().out
    assert said.startswith("row 2 is left out: it needs no-such-program, @no-such-host.invalid") and "| 2 |" not in said
