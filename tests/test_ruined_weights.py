"""An update may ruin the weights: to NaN, or to finite and useless numbers. No good checkpoint is lost to it."""

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_trainer import SPEC
from torch.distributed.tensor import DTensor

from titan_mi100.checkpoint import sealed
from titan_mi100.config.settings import CheckpointConfig, Config, LRSchedulerConfig, OptimizerConfig, TrainingConfig
from titan_mi100.data.loader import ShuffledEpochs
from titan_mi100.errors import NumericalError, UserError
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.run.progress import Progress
from titan_mi100.train import train
from titan_mi100.workshop.made_up import made_up, random_rows


def opened(world: World, folder: Path, steps: int, lr: float = 1e-3, state: str = "fp32", **options: Any) -> Run:
    folder.mkdir(exist_ok=True)
    checkpoint = CheckpointConfig(**{"interval": 1, "keep_latest_k": 1, **options})
    training = TrainingConfig(seq_len=16, steps=steps, max_nonfinite_steps=2)
    scheduler = LRSchedulerConfig(warmup_steps=0, decay_type="constant")
    config = Config(
        training=training, optimizer=OptimizerConfig(lr=lr, state=state), lr_scheduler=scheduler, checkpoint=checkpoint
    )
    data = made_up(random_rows(8, 16, SPEC.vocab_size, supervised_share=0.5))
    return open_run(config, world, folder, spec=SPEC, data=data)


def trained(*arguments: Any, **options: Any) -> None:
    train(opened(*arguments, **options), SimpleNamespace(reason=""))  # type: ignore[arg-type]


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").glob("[!.]*"))


@pytest.mark.parametrize("mode", ["disabled", pytest.param("async", marks=pytest.mark.full)])
def test_weights_that_are_not_finite_are_never_saved(world: World, tmp_path: Path, mode: str) -> None:
    trained(world, tmp_path, 3, async_mode=mode)
    assert there(tmp_path) == ["step-3"]
    with pytest.raises(NumericalError, match=r"step 4: model\.\S+ is not finite; no checkpoint was made of it"):
        trained(world, tmp_path, 6, 1e300, async_mode=mode)
    assert there(tmp_path) == ["step-3"]
    trained(world, tmp_path, 4, async_mode=mode)  # as the message advises
    assert there(tmp_path) == ["step-4"]


def test_neither_is_optimizer_state_that_is_not_finite(world: World, tmp_path: Path) -> None:
    run = opened(world, tmp_path, 3)
    run.step()
    state = dict(run.optimizer.named_state())
    name = next(name for name in state if name.endswith("exp_avg_sq"))
    moment = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
    moment.view(-1)[-1] = torch.inf
    with pytest.raises(NumericalError, match=f"step 1: optimizer.{name} is not finite"):
        run.save()
    assert there(tmp_path) == []


def test_finite_values_whose_sum_is_not_are_finite(world: World, tmp_path: Path) -> None:
    run = opened(world, tmp_path, 4)
    run.step()
    weights = run.model.named_parameters()
    (large, first), (small, second) = ((name, weight.detach().view(-1)) for name, weight in list(weights)[:2])
    first.fill_(3e38)
    run.save()
    assert there(tmp_path)[0] == "step-1"
    for name, weight, values in ((small, second, (torch.inf, -torch.inf)), (large, first, (torch.nan, 1.0))):
        before = weight[:2].clone()
        weight[:2] = torch.tensor(values)
        with pytest.raises(NumericalError, match=f"step 1: {re.escape(name)} is not finite"):
            run.save()
        weight[:2] = before
    run = opened(world, tmp_path / "bf16", 4, state="bf16")
    run.step()
    name, moment = next(
        (name, moment) for name, moment in run.optimizer.named_state() if moment.dtype == torch.bfloat16
    )
    moment.view(-1)[-1] = torch.nan
    with pytest.raises(NumericalError, match=re.escape(f"step 1: optimizer.{name} is not finite")):
        run.save()


@pytest.mark.parametrize("mode", [pytest.param("disabled", marks=pytest.mark.full), "async"])
def test_finite_but_useless_weights_push_no_good_checkpoint_out(world: World, tmp_path: Path, mode: str) -> None:
    trained(world, tmp_path, 3, async_mode=mode)
    trained(world, tmp_path, 6, 30.0, async_mode=mode)  # the update of step 4 is the first of this size
    assert there(tmp_path)[0] == "step-3" and "step-4.suspect" in there(tmp_path)
    why = (tmp_path / "checkpoint" / "step-4.suspect").read_text()
    assert why.startswith("their loss is ") and "the median of the 4 steps before" in why
    # the run goes on from the last good one; what came later is set aside, not lost
    run = opened(world, tmp_path, 6)
    assert run.progress.step == 3
    names = there(tmp_path)
    assert names[-1] == "step-3" and {name[: len("later-step-4")] for name in names[:-1]} >= {"later-step-4"}


def test_neither_do_weights_whose_gradients_are_not_finite(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ShuffledEpochs, "where", lambda *_: ["made-up.jsonl:1"])
    trained(world, tmp_path, 3)
    for _ in range(2):  # what the message advises does not lead back to it
        with pytest.raises(NumericalError, match="2 steps in a row"):
            trained(world, tmp_path, 9, 1e10)
        assert set(there(tmp_path)) >= {"step-3", "step-4", "step-4.suspect"}
    trained(world, tmp_path, 5)
    assert [name for name in there(tmp_path) if not name.startswith("later")] == ["step-5"]


@pytest.mark.parametrize("lr", [30.0, pytest.param(1e10, marks=pytest.mark.full)])
def test_the_last_update_is_judged_too(world: World, tmp_path: Path, lr: float) -> None:
    trained(world, tmp_path, 3)
    trained(world, tmp_path, 4, lr)
    assert there(tmp_path) == ["step-3", "step-4", "step-4.suspect"]


def test_a_skipped_step_saves_only_at_the_runs_end(world: World, tmp_path: Path) -> None:
    run = opened(world, tmp_path, 3, keep_latest_k=0)
    forward_backward, steps = run.trainer._model.forward_backward, iter([False, True, True])

    def sometimes_nan(*arguments: Any) -> torch.Tensor:
        losses = forward_backward(*arguments)
        return losses * torch.nan if next(steps, False) else losses

    run.trainer._model.forward_backward = sometimes_nan  # type: ignore[method-assign]
    run.observers.clear()  # the watch would end the run
    train(run, SimpleNamespace(reason=""))  # type: ignore[arg-type]
    assert there(tmp_path) == ["step-1", "step-3"]


def test_load_step_goes_back_and_sets_later_ones_aside(world: World, tmp_path: Path) -> None:
    trained(world, tmp_path, 4, keep_latest_k=0)
    sealed.mark_suspect(tmp_path / "checkpoint" / "step-2", "by hand")
    before = json.loads((tmp_path / "checkpoint" / "step-3" / "manifest.json").read_text())["files"]
    with pytest.raises(UserError, match=r"load_step = 7: .* has no step-7; it has step-1, step-2, step-3, step-4"):
        opened(world, tmp_path, 5, load_step=7)
    (tmp_path / "checkpoint" / "step-1" / "trainer.json").write_text("{}")
    with pytest.raises(UserError, match=r"damaged checkpoint: (.|\n)*name another step in checkpoint.load_step"):
        opened(world, tmp_path, 5, load_step=1)
    trained(world, tmp_path, 3, load_step=2, keep_latest_k=0)
    names = there(tmp_path)
    assert [name.rsplit("-", 1)[0] for name in names[:2]] == ["later-step-3", "later-step-4"]
    assert names[2:] == ["step-1", "step-2", "step-3"]  # step-2 was chosen: it is not suspect any more
    after = json.loads((tmp_path / "checkpoint" / "step-3" / "manifest.json").read_text())["files"]
    assert all(before[name] == after[name] for name in before if name != ".metadata")  # the same run again


def test_a_run_of_suspect_checkpoints_alone_does_not_start_over(world: World, tmp_path: Path) -> None:
    trained(world, tmp_path, 1)
    sealed.mark_suspect(tmp_path / "checkpoint" / "step-1", "by hand")
    with pytest.raises(UserError, match=r"only suspect checkpoints, .* --checkpoint\.load_step 1"):
        opened(world, tmp_path, 2)


def test_suspicion_is_three_times_the_median_of_up_to_128_steps_that_were_not_skipped() -> None:
    progress = Progress()
    of_step: Any = partial(SimpleNamespace, next_row=0, overflowed=False, spike_above=None, has_level=True)
    assert not progress.suspect(of_step(loss=1e9))  # nothing to compare with

    def after(loss: float, skipped: bool = False) -> str:
        progress.after_step(of_step(loss=loss, skipped=skipped))
        return progress.suspicion

    for loss in (5.0, 1.0, 2.0):
        assert not after(loss)
    after(torch.nan, skipped=True)
    assert not after(6.0) and after(12.1)  # medians 2 and 3.5
    for _ in range(128):
        after(10.0)
    assert progress.recent_losses == [10.0] * 128 and after(31.0) and not after(30.0)
