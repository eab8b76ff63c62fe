"""scripts/bench/pipeline.py: the arithmetic of idle shares, and one real, tiny run of it."""

import json
from pathlib import Path

import pipeline
import pipeline_figures as figures
import pytest
import torch


def sequence(stage: int, order: str, forward: float = 1.0, backward: float = 2.0) -> list:
    """One stage's operations in order ("FFBB": microbatches count up), of these lengths, at times that mean nothing."""
    counts = {"F": 0, "B": 0}
    found = []
    for letter in order:
        kind, seconds = ("forward", forward) if letter == "F" else ("backward", backward)
        found.append(figures.Operation(kind, stage, counts[letter], 100.0, 100.0 + seconds))
        counts[letter] += 1
    return found


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "idle"),
    [
        ("1F1B", 2, 4, 1 / 5),
        ("GPipe", 4, 8, 3 / 11),
        ("Interleaved1F1B", 2, 4, 1 / 9),
        ("ZBVZeroBubble", 2, 4, None),
    ],
)
def test_the_theory_is_the_published_formula(schedule: str, ranks: int, microbatches: int, idle: float | None) -> None:
    assert figures.theory(schedule, ranks, microbatches) == (None if idle is None else pytest.approx(idle))


def test_idle_is_what_computations_leave_of_the_time_from_the_first_start_to_the_last_end() -> None:
    ends = [figures.Operation("forward", 0, 0, 10.0, 12.0), figures.Operation("backward", 0, 0, 16.0, 19.0)]
    middle = [figures.Operation("forward", 1, 0, 12.0, 13.0), figures.Operation("weight", 1, 0, 13.0, 14.0)]
    first, second = figures.RankStep(10.0, 20.0, ends), figures.RankStep(11.0, 16.0, middle)
    assert figures.idle_shares([first, second]) == pytest.approx([0.5, 0.8])
    assert figures.busy(first.operations, "backward", "weight") == 3.0


@pytest.mark.parametrize("microbatches", [2, 4, 16])
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_equal_stages_replayed_are_as_idle_as_the_theory_says(schedule: str, microbatches: int) -> None:
    m = microbatches
    orders = {"1F1B": ("FF" + "BF" * (m - 2) + "BB", "FB" * m), "GPipe": ("F" * m + "B" * m,) * 2}[schedule]
    seconds = figures.replay([sequence(stage, order) for stage, order in enumerate(orders)])
    assert 1 - 3 * m / seconds == pytest.approx(figures.theory(schedule, 2, m))


def test_a_replay_waits_for_the_slower_stage_and_not_for_a_weight_gradient() -> None:
    slow = sequence(1, "FB" * 4, forward=2.0, backward=4.0)
    assert figures.replay([sequence(0, "FFBFBFBB"), slow]) == 1 + 4 * 6 + 2  # in, the slow stage's work, out
    halves = (("forward", 1), ("backward", 1), ("weight", 9))
    split = [[figures.Operation(kind, stage, 0, 0.0, seconds) for kind, seconds in halves] for stage in (0, 1)]
    assert figures.replay(split) == 4 + 9  # the weights' gradients of both stages run side by side
    assert figures.replay([split[0], sequence(1, "FB")]) == 1 + 1 + 2 + 1 + 9


def test_the_slowest_stage_is_compared_with_the_fastest() -> None:
    assert figures.slower_by([9.0, 8.0]) == pytest.approx(1 / 8)
    seconds = {"forward": 2.0, "backward": 6.0, "reduction": 0.1, "busy": 8.1, "on_core": 7.9, "optimizer": 0.5}
    row = {"stage": 0, "rank": 1, "layers": 17, "parameters": 423_008_512, **seconds, "peak_memory_gib": 10.0}
    expected = "| 0 | 1 | 17 | 423,008,512 | 2.00 s | 6.00 s | 0.10 s | 8.10 s | 7.90 s | 0.50 s | 10.00 GiB |"
    assert expected in figures.stages_table([row])


@pytest.mark.full
def test_a_real_run_reports_every_rank_and_keeps_every_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "figures.json"
    size = ["--layers", "4", "--hidden", "64", "--seq_len", "32", "--steps", "2"]
    schedules = ["1F1B", "Interleaved1F1B"]
    arguments = ["bubble", "--schedule", *schedules, "--microbatches", "2", *size, "--json", str(output)]
    assert pipeline.main(arguments) == 0
    text = capsys.readouterr().out
    found = json.loads(output.read_text())
    assert text == f"{text.splitlines()[0]}\n\n{figures.bubble_table(found['rows'])}\n"
    assert f"torch {torch.__version__}" in text
    assert [(row["schedule"], row["rank"]) for row in found["rows"]] == [(s, r) for s in schedules for r in (0, 1)]
    for row in found["rows"]:
        assert 0 < row["busy"] < row["step"]
        assert 0 <= row["replay"] < row["idle"] < 1
        assert 0 < row["on_core"] < 1.1  # two clocks
        assert row["difference"] == pytest.approx(row["idle"] - row["theory"])
    for cell, stages in zip(found["cells"], ([[0], [1]], [[0, 2], [1, 3]]), strict=True):
        assert len(cell["steps"]) == 2
        for step in cell["steps"]:
            for rank, (start, end, operations) in enumerate(step):
                expected = sorted((k, s, m) for k in ("backward", "forward") for s in stages[rank] for m in (0, 1))
                assert sorted(tuple(o[:3]) for o in operations if o[0] != "reduction") == expected
                reduced = [o[1] for o in operations if o[0] == "reduction"]
                assert sorted(reduced) in ([], stages[rank])  # torch 2.8: in the last backward
                times = [time for operation in operations for time in operation[3:5]]
                assert [start, *times, end] == sorted([start, *times, end])  # one after the other, inside the step
