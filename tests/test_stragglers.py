"""Ranks that are slow by themselves, and losses far above those before."""

import csv
import math
import socket
from collections import deque
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_ruined_weights import opened

from titan_mi100.data.loader import ShuffledEpochs
from titan_mi100.open_run.summary import log_summary
from titan_mi100.parallel.distributed import World
from titan_mi100.run.progress import Progress
from titan_mi100.watch.stragglers import Stragglers, slow_ranks


def probes(*best: float) -> list[deque[float]]:
    return [deque([value * 2, value, value * 3]) for value in best]


def test_a_rank_is_slow_by_its_rows_its_host_or_its_products() -> None:
    even = [[0.01, 0.02]] * 4
    assert slow_ranks(even, 1.0, probes(1.0, 1.1, 0.9, 1.3)) == {}
    assert list(slow_ranks(even, 1.0, probes(1.0, 1.0, 1.0, 1.4))) == [3]
    assert "1.40 times the median" in slow_ranks(even, 1.0, probes(1.0, 1.0, 1.0, 1.4))[3]
    assert list(slow_ranks([[0.0, 0.0], [0.1, 0.0]], 1.0, probes(1.0, 1.0))) == [1]
    assert slow_ranks([[0.0, 0.0], [0.04, 0.0]], 1.0, probes(1.0, 1.0)) == {}  # 4% of a step
    assert list(slow_ranks([[0.0, 0.3], [0.0, 0.1]], 1.0, probes(1.0, 1.0))) == [0]
    assert slow_ranks([[0.0, 1.0], [0.0, 1.2]], 1.0, probes(1.0, 1.0)) == {}  # less than 1.33 times
    few = [deque([1.0]), deque([9.0])]
    assert slow_ranks(even, 1.0, few) == {}


def test_a_slow_rank_is_named_with_its_host_once(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Stragglers(world, log_freq=2)
    result: Any = SimpleNamespace(seconds=1.0, ranks=torch.tensor([[0.0, 0.0, 1.0, 0.0]], dtype=torch.float64))
    monkeypatch.setattr("titan_mi100.watch.stragglers.slow_ranks", lambda *_: {0: "it sleeps"})
    for step in range(1, 99):
        found.after_step(step, result, 0.5)
    [line] = [record.getMessage() for record in caplog.records]
    assert line == f"step 20: rank 0 on {socket.gethostname()}, cpu is slow: it sleeps"
    host, seconds, probe = found.own_values()
    assert host == 0.5 and seconds == 1.0 and 0.001 < probe < 10  # taken on a logged step
    before = probe
    found.after_step(100, result, 0.5)
    assert found.own_values()[2] == before  # not again so soon


def test_all_ranks_come_to_the_same_answer_whatever_their_own_clocks_say(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They meet in a collective if a rank is slow: one that thinks otherwise would not come."""
    asked = []
    monkeypatch.setattr("titan_mi100.watch.stragglers.slow_ranks", lambda *given: asked.append(repr(given)) or {})
    gathered = torch.tensor([[0.1, 0.2, 0.5, 0.02]], dtype=torch.float64)
    for own in (0.1, 9.0):
        found = Stragglers(world, log_freq=2)
        for step in range(1, 21):
            found.after_step(step, SimpleNamespace(seconds=own, ranks=gathered), own)  # type: ignore[arg-type]
    assert asked[0] == asked[1]


def test_a_spike_is_six_deviations_above_the_last_128_steps() -> None:
    progress = Progress(recent_losses=[1.0, 3.0] * 31)
    assert progress.spike_above(6) == math.inf  # too few yet
    progress.recent_losses = [1.0, 3.0] * 64
    assert progress.spike_above(6) == pytest.approx(2 + 6 * 1) and progress.spike_above(0) == math.inf
    progress.recent_losses = [2.0] * 128
    assert progress.spike_above(6) == pytest.approx(2.02)  # equal losses: rounding is no spike


@pytest.mark.parametrize("skips", [False, True])
def test_a_spike_is_logged_with_its_rows_and_skipped_where_that_is_asked_for(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShuffledEpochs, "where", lambda _, number: [f"rows.jsonl:{number}"])
    run = opened(world, tmp_path, 4)
    run.trainer._rules = replace(run.trainer._rules, skip_spikes=skips)
    run.step()
    run.progress.recent_losses = [0.5, 0.6] * 40
    weights = {name: value.detach().clone() for name, value in run.model.named_parameters()}
    result = run.step()
    assert result.spike_above == pytest.approx(0.55 + 6 * 0.05) and result.skipped == skips
    changed = any(not torch.equal(value, weights[name]) for name, value in run.model.named_parameters())
    assert changed != skips
    assert "far above the steps before (0.85 is the limit)" in caplog.text
    assert run.progress.skipped_steps == run.progress.skipped_spikes == skips
    log_summary(run, 2)
    assert (f"skipped 1 step: the loss was a spike; rows: {tmp_path}/loss_spikes.csv" in caplog.text) == skips
    assert "nonfinite_rows.csv" not in caplog.text
    assert ("was skipped on all ranks" if skips else "updated all the same") in caplog.text
    assert list(csv.reader((tmp_path / "loss_spikes.csv").open())) == [["2", "rows.jsonl", str(result.first_row)]]
    assert run.progress.skipped_in_a_row == 0 and run.progress.recent_losses[-1] == result.loss
    assert not (tmp_path / "nonfinite_rows.csv").exists()
    run.close()
    # a resumed run does that step again
    again = opened(world, tmp_path, 4)
    assert not list(csv.reader((tmp_path / "loss_spikes.csv").open()))
    again.close()
