"""fp16: the loss scale, steps whose gradients overflow, and what a run learns with it."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ending_of, torchrun
from gloo.job_overflow import WHERE, leave_the_range, let_step_overflow
from packed_rows import packed

from titan_mi100.config.settings import Config, LRSchedulerConfig, TrainingConfig
from titan_mi100.data.prepared import PackedDataset
from titan_mi100.errors import NumericalError
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.optim.loss_scale import LARGEST, LossScale
from titan_mi100.parallel.distributed import World
from titan_mi100.run import faults
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.workshop.made_up import made_up, random_rows

SPEC = Qwen3Spec(64, 16, 32, 2, 2, 1, 8, True, rope_theta=10_000.0)


def opened(world: World, folder: Path | None = None, **training: object) -> Run:
    options = {"seq_len": 16, "local_batch_size": 2, "steps": 8, "max_nonfinite_steps": 2, **training}
    config = Config(training=TrainingConfig(mixed_precision_param="float16", **options))  # type: ignore[arg-type]
    return open_run(config, world, folder, spec=SPEC, data=made_up(random_rows(6, 16, 64, supervised_share=0.5)))


def test_the_scale_is_halved_at_an_overflow_and_doubled_after_2000_steps_without() -> None:
    scale = LossScale()
    scale.after_step(overflowed=True)
    assert (scale.value, scale.steps_since) == (LARGEST / 2, 0)
    for _ in range(1999):
        scale.after_step(overflowed=False)
    assert scale.value == LARGEST / 2
    scale.after_step(overflowed=False)
    assert (scale.value, scale.steps_since) == (LARGEST, 0)
    for _ in range(2000):
        scale.after_step(overflowed=False)
    assert scale.value == LARGEST  # and no more
    for _ in range(40):
        scale.after_step(overflowed=True)
    assert scale.value == 1 and not scale.can_fall()


@pytest.mark.parametrize("value", [0.0, 0.5, -1.0, 2.0**17])
def test_no_checkpoint_brings_another_scale(value: float) -> None:
    with pytest.raises(ValueError, match=r"loss_scale.value = .* must be from 1 to 65536"):
        LossScale(value)


def test_the_scale_changes_no_number_but_by_rounding(world: World) -> None:
    """A power of two: nothing at all, as long as nothing is lost at either end."""
    runs = [opened(world), opened(world)]
    runs[1].progress.loss_scale.value = 1024.0
    results = [run.step() for run in runs]
    assert results[0].loss == results[1].loss
    assert math.isclose(results[0].grad_norm, results[1].grad_norm, rel_tol=1e-3)
    assert [result.loss_scale for result in results] == [65536.0, 1024.0]


def test_an_overflow_is_skipped_and_counts_as_a_fault_only_at_the_smallest_scale(world: World) -> None:
    run = opened(world)
    let_step_overflow(run, step=1, rank=0)
    before = [parameter.detach().clone() for _, parameter in run.model.named_parameters()]
    result = run.step()
    assert result.skipped and result.overflowed and math.isfinite(result.loss)
    assert all(map(torch.equal, before, (p.detach() for _, p in run.model.named_parameters())))
    assert (run.progress.skipped_steps, run.progress.skipped_in_a_row) == (1, 0)
    assert run.progress.loss_scale.value == LARGEST / 2
    run.step()
    run.progress.loss_scale.value = 1.0
    let_step_overflow(run, step=3, rank=0)
    result = run.step()
    assert result.skipped and not result.overflowed and run.progress.skipped_in_a_row == 1
    assert run.progress.loss_scale.value == 1


def test_an_overflow_names_no_rows(world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = opened(world, tmp_path)
    let_step_overflow(run, step=1, rank=0)
    caplog.set_level("INFO")
    run.step()
    said = "step 1: gradients overflowed fp16; the step was skipped on all ranks, the loss scale 65,536 is halved"
    assert said in caplog.messages
    assert not (tmp_path / "nonfinite_rows.csv").exists()


def test_an_overflow_after_the_last_save_is_no_suspicion(world: World, tmp_path: Path) -> None:
    run = opened(world, tmp_path, steps=1)
    run.step()
    run.save()
    let_step_overflow(run, step=2, rank=0)
    run.judge_last_save()
    assert run.progress.loss_scale.value == LARGEST  # the trial changes nothing
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-1"]


def test_a_loss_that_is_not_finite_is_no_overflow_of_gradients(world: World) -> None:
    run = opened(world)
    with torch.no_grad():
        run.model.parts[0].model.norm.weight.fill_(torch.inf)  # type: ignore[union-attr]
    result = run.step()
    assert result.skipped and not result.overflowed and run.progress.skipped_in_a_row == 1
    assert run.progress.loss_scale.value == LARGEST


def test_a_layer_beyond_the_range_of_fp16_is_named_at_the_first_step_and_not_the_rows(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedDataset, "where", lambda *_: ["rows:1"])  # made-up rows are in no file
    monkeypatch.setattr(faults, "dtype_advice", lambda *_: "this CPU has no bfloat16 instructions")
    run = opened(world, tmp_path)
    leave_the_range(run, 1)
    run.step()
    cause = "layer 1 computes values beyond 65,504, the largest of float16, so the rows are not the cause. "
    remedy = "--training.mixed_precision_param float32"
    assert f"step 1: {cause}To train or resume: {remedy}" in caplog.messages
    with pytest.raises(NumericalError, match=re.escape(cause)) as caught:
        run.step()
    assert caught.value.remedy == f"train with {remedy}; "
    state = ending_of(caught.value, world, tmp_path / "ended")
    assert state["next"].startswith(f"train with {remedy}; no sound checkpoint")
    assert caplog.text.count(cause) == 1  # it is looked for once


def test_weights_that_are_not_finite_are_no_overflow_of_fp16(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackedDataset, "where", lambda *_: ["rows:1"])
    run = opened(world, tmp_path)
    with torch.no_grad():
        dict(run.model.named_parameters())["model.layers.1.mlp.down_proj.weight"][0, 0] = torch.nan
    run.step()
    assert "step 1: loss nan" in caplog.text and "65,504" not in caplog.text


@pytest.mark.full
def test_every_rank_skips_what_overflows_on_one_and_resumes_to_the_bit(tmp_path: Path) -> None:
    job = Path(__file__).parent / "gloo" / "job_overflow.py"
    torchrun(str(job), str(tmp_path), processes=2)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in (0, 1)]
    for name in WHERE:
        first, second = (found[name] for found in ranks)
        assert str(first["steps"]) == str(second["steps"])  # as text: the norm of step 2 is not a number
        assert [step[2:] for step in first["steps"]] == [
            (False, False, 65536.0),
            (True, True, 65536.0),
            (False, False, 32768.0),
            (False, False, 32768.0),
        ]
        assert first["progress"] == second["progress"] == (1, 0)
        for rank in (first, second):
            assert rank["again"] == rank["steps"][3:] and rank["same"], name
            assert rank["cause"].startswith("layer 1 computes values beyond 65,504"), name


@pytest.mark.full
def test_fp16_learns_as_bf16_does(world: World) -> None:
    """100 steps on a task that can be learned in part: to add two digits modulo 10, where every other sum is wrong."""
    random = np.random.default_rng(0)
    documents = []
    for a, b, noise in random.integers(0, 10, (6_400, 3)):
        total = a + b + (noise if random.random() < 0.5 else 0)
        ids = np.array([a, b, 10, total % 10], dtype=np.int32)
        documents.append((ids, np.array([False, False, False, True])))
    spec = Qwen3Spec(16, 64, 128, 2, 4, 2, 16, True, rope_theta=10_000.0)
    losses = {}
    for dtype in ("bfloat16", "float16"):
        training = TrainingConfig(seq_len=16, local_batch_size=16, steps=100, mixed_precision_param=dtype)
        # decays: at a constant rate the end depends on rounding by 1%, in the same dtype too
        schedule = LRSchedulerConfig(warmup_steps=10, decay_type="linear")
        config = Config(training=training, lr_scheduler=schedule)
        run = open_run(config, world, spec=spec, data=made_up(packed(documents, 16)))
        for group in run.optimizer.param_groups:
            group["peak_lr"] = 3e-3
        results = [run.step() for _ in range(100)]
        losses[dtype] = sum(result.loss for result in results[-20:]) / 20
        assert results[0].loss > 2.5 > 2.2 > losses[dtype] > 1.2
        assert sum(result.skipped for result in results) <= (2 if dtype == "float16" else 0)
    assert math.isclose(losses["float16"], losses["bfloat16"], rel_tol=0.01), losses
