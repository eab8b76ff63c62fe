"""What a step costs in collectives, what it tells its observers, and how rows are read ahead."""

import itertools
import math
import resource
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from titan_mi100 import trainer
from titan_mi100.config.layout import Batch, Layout
from titan_mi100.config.settings import (
    CheckpointConfig,
    Config,
    LRSchedulerConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from titan_mi100.data.loader import RowStream, ShuffledEpochs
from titan_mi100.errors import UserError
from titan_mi100.open_run.data import log_layout
from titan_mi100.open_run.rows import fit_progress, last_step
from titan_mi100.open_run.run import Run, Supervision
from titan_mi100.open_run.start import SAVE_FAILED, STOP, open_run
from titan_mi100.optim.optimizer import build_optimizer, scale_lr
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.planning.costs import train_flops
from titan_mi100.planning.hardware import find_gpu
from titan_mi100.planning.workload import Workload
from titan_mi100.run import forecast
from titan_mi100.run.forecast import Forecast
from titan_mi100.run.progress import Progress
from titan_mi100.shapes.families import PRESETS
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.trainer import StepResult
from titan_mi100.workshop.made_up import made_up, random_rows

SPEC = Qwen3Spec(64, 16, 32, 2, 2, 1, 8, True, rope_theta=10_000.0)


def opened(world: World, wants_to_stop: Callable[[], bool] = lambda: False, rows: int = 6) -> Run:
    training = TrainingConfig(seq_len=16, local_batch_size=2, gradient_accumulation_steps=1, steps=4)
    data = made_up(random_rows(rows, 16, SPEC.vocab_size, supervised_share=0.5))
    config = Config(training=training, lr_scheduler=LRSchedulerConfig(warmup_steps=2, decay_type="constant"))
    return open_run(config, world, None, Supervision(wants_to_stop=wants_to_stop), spec=SPEC, data=data)


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[int]:
    calls, plain = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *a, **k: (calls.append(1), plain(*a, **k))[1])
    return calls


def test_the_ranks_agree_in_one_collective_per_step(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = opened(world)
    gathers = counted(monkeypatch, trainer, "gather_values")
    others = [counted(monkeypatch, dist, name) for name in ("all_reduce", "all_gather_object", "broadcast", "barrier")]
    for _ in range(3):
        run.step()
    assert len(gathers) == 3 and not any(others)


def test_much_padding_is_warned_of(world: World, caplog: pytest.LogCaptureFixture) -> None:
    factors = "local_batch_size x gradient_accumulation_steps x data-parallel ranks"
    said = f"the data fill 1 row, a step has 2 ({factors}): 50% of an epoch is padding"
    for rows, told in ((6, []), (5, []), (1, [said])):
        caplog.clear()
        opened(world, rows=rows)
        warned = [record.message for record in caplog.records if "padding" in record.message]
        assert [line.split(";")[0] for line in warned] == told


def test_microbatches_of_padding_change_nothing_and_are_not_computed(world: World) -> None:
    """Also the rows that are named for a step that is not finite are the right ones."""
    training = TrainingConfig(seq_len=16, gradient_accumulation_steps=4, steps=8)
    config = Config(training=training, lr_scheduler=LRSchedulerConfig(warmup_steps=2, decay_type="constant"))
    data = made_up(random_rows(5, 16, SPEC.vocab_size, supervised_share=0.5))
    runs = [open_run(config, world, spec=SPEC, data=data) for _ in range(2)]
    runs[1].stream._with_padding = True
    counts = []
    for run in runs:
        forward = run.model.forward_backward
        run.model.forward_backward = lambda m, *w, forward=forward: (counts.append(len(m)), forward(m, *w))[1]  # type: ignore[method-assign]
    results = [[run.step() for _ in range(4)] for run in runs]
    assert counts == [4, 1, 4, 1, 4, 4, 4, 4]
    for short, whole in zip(*results, strict=True):
        assert (short.loss, short.grad_norm, short.tokens, short.next_row) == (
            *(whole.loss, whole.grad_norm, whole.tokens, whole.next_row),
        )
    for one, other in zip(*(run.model.trained_parameters() for run in runs), strict=True):
        assert torch.equal(one[1], other[1])


class Case(NamedTuple):
    """What happens in a step, and what is set. `can_fall`: the loss scale; None: there is none."""

    loss: float
    are_finite: bool
    limit: float
    skips: bool
    max_norm: float
    update: bool
    can_fall: bool | None


def one_step(case: Case, scale: float, norm: float, count: int, device: torch.device) -> tuple[StepResult, list[Any]]:
    """A step of a model that computes nothing; its result, and what was done to model, optimizer and loss scale."""
    done: list[Any] = []

    def backward(_: Any, weight: float) -> torch.Tensor:
        done.append(("backward", weight))
        return torch.tensor([[case.loss * count]])

    gradients = SimpleNamespace(squares=torch.tensor((norm * scale) ** 2), finite=torch.tensor(case.are_finite))
    model: Any = SimpleNamespace(
        device=device, counts_rows=True, counts_loss=True, gradient_bytes=7, forward_backward=backward,
        objective=SimpleNamespace(count=lambda _: count, measures=(), means=lambda *_: {}, has_level=True),
        measure_gradients=lambda _: gradients, draft="no", outputs=1, after_update=lambda: None,
        clear_gradients=lambda: done.append("cleared"),
    )  # fmt: skip
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": 0.1}], update=lambda factor: done.append(("update", factor)))
    kept: Any = SimpleNamespace(value=scale, can_fall=lambda: case.can_fall, after_step=done.append)
    stream: Any = SimpleNamespace(
        batch=SimpleNamespace(global_batch_size=3), step=lambda _: [object()], ahead=lambda *_, **__: lambda: [object()]
    )
    hooks = trainer.Hooks()
    hooks.spike_above = lambda: case.limit  # type: ignore[method-assign]
    scale_of_run = None if case.can_fall is None else kept
    rules = trainer.UpdateRules(case.max_norm, case.skips, scale_of_run)
    steps = trainer.Trainer(model, optimizer, stream, rules, 0, hooks)
    return steps.step(case.update), done


@pytest.mark.parametrize("can_fall", [None, True, False], ids=["no loss scale", "it can fall", "it is the smallest"])
def test_what_a_step_does_in_every_case(can_fall: bool | None, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All combinations of the loss, the gradients, a limit on spikes, clipping, and a step that only looks."""
    monkeypatch.setattr(trainer, "sizes", lambda _: torch.tensor([8.0, 2.0, 36.0]))
    scale, norm, count = 1.0 if can_fall is None else 4.0, 3.0, 2
    for values in itertools.product(
        (1.0, 5.0, math.inf, math.nan), (True, False), (math.inf, 3.0), (False, True), (0.0, 1.5, 3.0), (True, False)
    ):
        case = Case(*values, can_fall)
        result, done = one_step(case, scale, norm, count, world.device)
        broken = not case.are_finite or not math.isfinite(case.loss)
        spike = not broken and case.loss > case.limit
        skipped = broken or (spike and case.skips)
        overflowed = can_fall is True and broken and math.isfinite(case.loss)
        expected: list[Any] = [("backward", scale / count)]
        expected += [("update", (0.5 if case.max_norm == 1.5 else 1.0) / scale)] if case.update and not skipped else []
        expected += [overflowed] if case.update and can_fall is not None else []
        assert done == [*expected, "cleared"], case
        assert (result.skipped, result.overflowed) == (skipped, overflowed), case
        assert result.spike_above == (case.limit if spike else None), case
        assert result.nonfinite_microbatches == ([] if math.isfinite(case.loss) else [0])
        assert result.worst_microbatches == ([0] if spike else []), case
        assert result.loss == pytest.approx(case.loss, nan_ok=True) and result.grad_norm == norm
        assert result.loss_scale == (None if can_fall is None else scale)
        assert (result.tokens, result.supervised, result.attention_pairs, result.next_row) == (8, 2, 36, 3)


def test_a_flag_that_a_rank_raises_is_in_the_steps_result(world: World) -> None:
    told = [False]
    run = opened(world, lambda: told[0])
    assert run.step().flags == frozenset()
    told[0] = True
    assert run.step().flags == {STOP}
    run.checkpointer._error = RuntimeError("the disk is full")
    assert run.step().flags == {STOP, SAVE_FAILED}


class Seen:
    def __init__(self) -> None:
        self.steps: list[tuple[int, StepResult]] = []

    def after_step(self, step: int, result: StepResult) -> None:
        self.steps.append((step, result))


def test_memory_is_the_allocators_on_a_card_and_the_processs_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 3 << 29)
    assert trainer.peak_memory_gib(torch.device("cuda", 0)) == 1.5
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=3 << 19))
    for platform, unit in (("linux", 1024), ("darwin", 1)):
        monkeypatch.setattr(sys, "platform", platform)
        assert trainer.peak_memory_gib(torch.device("cpu")) == unit * (3 << 19) / 2**30


@pytest.mark.parametrize("arch", ["gfx908", "none"])
def test_a_runs_mfu_is_a_share_of_its_cards_peak(
    arch: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "data_sheet", lambda _: find_gpu(arch, 120))
    config = Config(training=TrainingConfig(seq_len=16, mixed_precision_param="float16"))
    planned = Forecast(Workload(config, 3, PRESETS["0.6B"]), replace(world, size=3), None)
    result: Any = SimpleNamespace(tokens=2000, supervised=500, attention_pairs=10_000, seconds=0.5)
    mfu, flops = planned.mfu(result), train_flops(PRESETS["0.6B"], 2000, 500, 10_000)
    assert mfu == (pytest.approx(flops / 0.5 / (3 * 184.6e12)) if arch == "gfx908" else None)
    # 440M body parameters x 6 x 2000 tokens in half a second are 10.6 TFLOP/s
    assert mfu is None or 0.02 < 3 * mfu < 0.07


def test_a_run_ends_with_its_steps_or_with_its_rows(caplog: pytest.LogCaptureFixture) -> None:
    told: list[int] = []

    def rows_with(on_exhausted: str) -> Any:
        return SimpleNamespace(
            end=100, on_exhausted=on_exhausted, describe=lambda stop: (told.append(stop), ([], []))[1]
        )

    batch, progress = Batch(8, 1, 1), Progress(step=4, rows_consumed=32)
    for steps, on_exhausted, last, stop in (
        (9, "repeat", 9, 72), (3, "repeat", 3, 32), (99, "repeat", 99, 792), (0, "repeat", 13, 104),
        (9, "stop", 9, 72), (99, "stop", 13, 104), (0, "stop", 13, 104),
    ):  # fmt: skip
        told.clear()
        caplog.clear()
        assert last_step(steps, 3, progress, rows_with(on_exhausted), batch) == last
        assert told == [stop]
        assert len(caplog.messages) == (steps > last)
    assert last_step(0, 3, Progress(step=13, rows_consumed=104), rows_with("repeat"), batch) == 13
    with pytest.raises(UserError, match="warmup_steps = 10 is more than the run's 9 steps"):
        last_step(9, 10, progress, rows_with("repeat"), batch)


def test_observers_see_every_step_with_its_rows_and_learning_rate(world: World) -> None:
    run, seen = opened(world), Seen()
    run.observers.append(seen)
    for _ in range(4):
        run.step()
    assert [step for step, _ in seen.steps] == [1, 2, 3, 4]
    assert [(result.first_row, result.next_row) for _, result in seen.steps] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [result.lr for _, result in seen.steps] == pytest.approx([1e-5, 2e-5, 2e-5, 2e-5])
    assert (run.progress.step, run.progress.rows_consumed) == (4, 8)


def test_a_step_counts_its_own_rows_though_the_next_are_read_before_it_ends(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = opened(world)
    read, plain = [], RowStream.microbatch
    monkeypatch.setattr(RowStream, "microbatch", lambda self, *at: (read.append(at), plain(self, *at))[1])
    results = [run.step() for _ in range(3)]
    monkeypatch.undo()
    assert sorted(read)[:3] == [(2, 0), (4, 0), (6, 0)]  # the first step's were read when the run was opened
    assert len(read) == len(set(read))
    for result in results:
        labels = [microbatch["labels"] for microbatch in run.stream.step(result.first_row)]
        assert result.supervised == sum(int((part >= 0).sum()) for part in labels) > 0


def test_what_goes_wrong_in_a_thread_that_reads_ahead_is_raised_by_the_step(world: World) -> None:
    run = opened(world)
    source = run.stream.source

    def row(number: int) -> Any:
        if number == 5:
            raise OSError("shards/000/000001.bin: cannot be read")
        return source.row(number)

    run.stream.source = SimpleNamespace(row=row, is_padding=source.is_padding)
    run.step()
    with pytest.raises(OSError, match=r"^shards/000/000001.bin: cannot be read$"):
        run.step()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"target_tokens_per_step": 60}, "target_tokens_per_step = 60: one forward on all ranks has more"),
        ({"target_tokens_per_step": 70}, ""),
        ({}, ""),
    ],
)
def test_a_step_that_is_not_what_was_meant_is_warned_of(
    given: dict[str, int], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    log_layout(Layout(), Batch(10, 1, 1), TrainingConfig(seq_len=10, **given))
    assert caplog.text.count("WARNING") == bool(said) and said in caplog.text


@pytest.mark.parametrize(("free", "warned"), [(0.6, True), (40, False)])
def test_a_card_that_others_use_is_warned_of(
    free: float, warned: bool, world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gib = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free * gib), 40 * gib))
    monkeypatch.setattr(distributed, "device_name", lambda _: ("a card", "none", 1))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=40 * gib))
    config = Config(training=TrainingConfig(seq_len=1 << 14, local_batch_size=256))
    card = replace(world, device=torch.device("cuda"))
    Forecast(Workload(config, 1, SPEC), card, None)
    assert ("only 0.6 GiB of the card are free: other programs, or a display" in caplog.text) == warned


def test_a_step_without_supervision_has_a_loss_of_zero_and_changes_no_moment(world: World) -> None:
    training = TrainingConfig(seq_len=16, steps=2)
    data = made_up(random_rows(2, 16, SPEC.vocab_size, supervised_share=0.0))
    run = open_run(Config(training=training), world, spec=SPEC, data=data)
    result = run.step()
    assert (result.supervised, result.loss, result.grad_norm, result.skipped) == (0, 0.0, 0.0, False)
    moments = [tensor for name, tensor in run.optimizer.named_state() if name.endswith("exp_avg_sq")]
    assert len(moments) > 10 and not any(tensor.any() for tensor in moments)


def test_the_best_validation_is_the_first_of_equals_and_is_forgotten_with_its_rows() -> None:
    progress = Progress(step=4, plan="rows", rows_consumed=8)
    assert progress.after_validation(2.0)
    progress.step = 5
    assert not progress.after_validation(2.0) and progress.best_step == 4
    rows = ShuffledEpochs(random_rows(8, 16, SPEC.vocab_size, supervised_share=0.5), 1, 2)
    manifest = {"rows": 8, "fingerprints": {"global_batch_size": 2}}
    found = SimpleNamespace(trainer_state=progress.trainer_state(), manifest=manifest, path=Path("step-5"))
    for plan, best in (("rows", 2.0), ("others", None)):
        restored = Progress.of_trainer_state(found.trainer_state, found.path)
        fit_progress(restored, found, rows, plan)  # type: ignore[arg-type]
        assert (restored.best_loss, restored.plan, restored.rows_consumed) == (best, plan, 8)


def test_other_rows_have_another_fingerprint() -> None:
    made = [made_up(random_rows(2, 16, SPEC.vocab_size, 0.5, seed=seed)).facts.plan for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2]


def test_a_validation_of_one_microbatch_is_given_up_too(world: World) -> None:
    stops = [False]
    run = opened(world, lambda: stops[0])
    run.data = made_up(run.data.train, random_rows(1, 16, SPEC.vocab_size, supervised_share=0.5))
    assert run.validation_losses() is not None
    stops[0] = True
    assert run.validation_losses() is None


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_saves_are_in_the_background_where_the_config_says_so(world: World, mode: str) -> None:
    data = made_up(random_rows(2, 16, SPEC.vocab_size, supervised_share=0.5))
    config = Config(training=TrainingConfig(seq_len=16, steps=1), checkpoint=CheckpointConfig(async_mode=mode))
    run = open_run(config, world, spec=SPEC, data=data)
    assert (run.checkpointer._group is not None) == (mode == "async")


def test_ddp_keeps_fp32_weights_and_computes_in_bf16(world: World) -> None:
    training = TrainingConfig(seq_len=16, steps=2)
    data = made_up(random_rows(2, 16, SPEC.vocab_size, supervised_share=0.5))
    run = open_run(Config(training=training, parallelism=ParallelismConfig(zero_stage=0)), world, spec=SPEC, data=data)
    seen: list[torch.dtype] = []
    block = next(iter(run.model.parts[0].model.blocks()))
    block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    run.step()
    assert set(seen) == {torch.bfloat16}
    assert {parameter.dtype for _, parameter in run.model.named_parameters()} == {torch.float32}


def test_progress_counts_skipped_steps_and_those_in_a_row() -> None:
    progress = Progress()
    for skipped in (True, False, True, True):
        progress.after_step(
            SimpleNamespace(next_row=5, loss=1.0, skipped=skipped, overflowed=False, spike_above=None, has_level=True)
        )  # type: ignore[arg-type]
    assert (progress.step, progress.skipped_steps, progress.skipped_in_a_row, progress.rows_consumed) == (4, 3, 2, 5)


def test_the_optimizer_runs_fused_and_scales_each_groups_own_peak() -> None:
    named = [("matrix", nn.Parameter(torch.ones(2, 2))), ("vector", nn.Parameter(torch.ones(2)))]
    optimizer = build_optimizer(named, OptimizerConfig(lr=0.4, weight_decay=0.5), 0, torch.device("cpu"))
    assert optimizer.defaults["fused"] is True
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    optimizer.param_groups[1]["peak_lr"] = 0.2
    scale_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
