"""Losses far above those before."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_ruined_weights import opened

from titan_mi100.data.loader import ShuffledEpochs
from titan_mi100.open_run.summary import log_summary
from titan_mi100.parallel.distributed import World
from titan_mi100.run.progress import Progress


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
