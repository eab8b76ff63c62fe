"""Opens a run: everything between a checked config and the first step. Used by the trainer, the benches and the tests
with several processes.
"""

import platform
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from titan_mi100.attention.base import Shape
from titan_mi100.attention.choice import Choice, choose
from titan_mi100.certificate.machine import describe
from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.checkpoint.resume import (
    TRAINER,
    Found,
    check_is_run_checkpoint,
    check_same_run,
    rename_later_checkpoints,
)
from titan_mi100.config.as_text import to_toml
from titan_mi100.config.assets import ending_turns, run_assets
from titan_mi100.config.hardware import compile_advice, dtype_advice, find_gpu
from titan_mi100.config.layout import Batch, Layout
from titan_mi100.config.settings import Config, TrainingConfig, lora_identity
from titan_mi100.data.loader import RowStream
from titan_mi100.data.prepare import cache_folder
from titan_mi100.data.prepared import Prepared
from titan_mi100.files import child
from titan_mi100.logging import log
from titan_mi100.model.loss import HeadMemory
from titan_mi100.objectives.base import Objective
from titan_mi100.objectives.sft import SFT
from titan_mi100.optim.optimizer import build_optimizer, lr_factor, scale_lr
from titan_mi100.optim.state import NamedState
from titan_mi100.parallel import distributed
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.build import build_model
from titan_mi100.parallel.distributed import World, any_rank, from_rank_zero, raise_together, same_on_all_ranks
from titan_mi100.run.evaluate import bits_per_byte, validation_losses
from titan_mi100.run.faults import FaultWatch
from titan_mi100.run.forecast import Forecast
from titan_mi100.run.heartbeat import SAVE, VALIDATION, Heartbeat
from titan_mi100.run.metrics import Reporter, StepResult
from titan_mi100.run.opening import accept_ledger, find_start, keep_global_batch, load_data, log_if_done, log_layout
from titan_mi100.run.profiling import SNAPSHOT, Profiler, open_profiler
from titan_mi100.run.progress import Progress
from titan_mi100.run.record import open_record
from titan_mi100.run.rows import fit_progress, last_step, open_rows
from titan_mi100.run.samples import Sampler, open_sampler
from titan_mi100.run.stragglers import Stragglers
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import fingerprint
from titan_mi100.trainer import Flags, Trainer
from titan_mi100.weights.load import base_identity, load_weights

STOP, SAVE_FAILED = "stop", "save failed"  # flags that ranks raise on their own
NO_FINITE_STEP = "no step that began with them had a finite loss and gradient"


class StepObserver(Protocol):
    def after_step(self, step: int, result: StepResult) -> None:
        """On every rank, after each step; what it raises must be raised on all ranks."""


@dataclass
class Run:
    """An open run, as the training loop uses it. Every rank has one and makes the same calls in the same order.

    Attributes:
        about: layout, data and fingerprints of the run, for the manifests of its checkpoints.
        steps: number of the run's last step.
        forecast: planned memory and time.
        observers: called with each step's result.
        wants_to_stop: whether this process was told to stop.
        sampler: answers held-out prompts at each validation; None: disabled.
        profiler: traces some steps; None: disabled.
    """

    config: Config
    world: World
    folder: Path | None
    mesh: DeviceMesh
    data: Prepared
    about: dict[str, Any]
    model: ParallelModel
    optimizer: NamedState
    checkpointer: Checkpointer
    stream: RowStream
    progress: Progress
    steps: int
    trainer: Trainer
    reporter: Reporter | None
    forecast: Forecast
    observers: list[StepObserver]
    heartbeat: Heartbeat
    stragglers: Stragglers | None
    wants_to_stop: Callable[[], bool]
    sampler: Sampler | None
    profiler: Profiler | None

    def step(self) -> StepResult:
        """Take the next step. Learning rate and dropout's seed are functions of its number."""
        number, config = self.progress.step + 1, self.config
        self.heartbeat.begin_step(number)
        scale_lr(self.optimizer, lr_factor(config.lr_scheduler, number, self.steps))
        if config.lora.dropout:
            distributed.seed_dropout(config.training.seed, number, self.mesh)
        with self.profiler.around(number) if self.profiler else nullcontext():
            result = self.trainer.step()
            if self.profiler and self.profiler.traces(number):
                self.heartbeat.begin(SAVE, f"trace of step {number}")
        self.heartbeat.note("what follows a step")
        self.progress.after_step(result)
        if not result.skipped:  # the loss is that of the weights before the update, which may just have been saved
            self.checkpointer.judge(self.progress.suspicion)
        began = time.perf_counter()
        for observer in self.observers:
            observer.after_step(number, result)
        if self.stragglers is not None:
            self.stragglers.after_step(number, result, time.perf_counter() - began)
        return result

    @property
    def is_finished(self) -> bool:
        """Whether the last step was taken, or the run stops early. The same on all ranks: they share each loss."""
        stops_early = self.progress.has_stopped_improving(self.config.validation.patience)
        return self.progress.step >= self.steps or stops_early

    @property
    def keeps_best(self) -> bool:
        """Early stopping is of use only with the checkpoint of the lowest validation loss."""
        return self.config.checkpoint.keep_best or self.config.validation.patience > 0

    def is_due(self, every: int) -> bool:
        """Whether it is time for something that happens every `every` steps (0: never) and after the last one."""
        return self.progress.step == self.steps or (every > 0 and self.progress.step % every == 0)

    def validation_losses(self) -> list[float] | None:
        """Validation loss of all sources together, then of each; None: interrupted, as a process was told to stop."""

        def is_told_to_stop() -> bool:
            return any_rank(self.wants_to_stop(), self.world.device)

        batch, dp_rank = self.stream.batch, self.stream.dp_rank
        sets = [source.rows for source in self.data.validation]
        beat = partial(self.heartbeat.begin, VALIDATION)
        return validation_losses(self.model, sets, batch, dp_rank, is_told_to_stop, beat)

    def validate(self) -> bool:
        """Validate and report, if the run has validation data; whether the loss is the lowest so far."""
        if not self.data.validation:
            return False
        losses = self.validation_losses()
        answered: list[dict[str, Any]] | None = []
        if losses and self.sampler is not None:

            def is_told_to_stop() -> bool:  # called for each token
                self.heartbeat.begin(VALIDATION, "samples")
                return self.wants_to_stop()

            answered = self.sampler.answer(self.model, self.stream.batch, self.stream.dp_rank, is_told_to_stop)
            losses = None if answered is None else losses
        loss = losses[0] if losses else None
        if losses and self.reporter is not None:
            names = [source.name for source in self.data.validation]
            each = dict(zip(names, losses[1:], strict=True)) if len(names) > 1 else {}
            bits = bits_per_byte(losses[0], self.data.validation_counts)
            self.reporter.validation(self.progress.step, losses[0], bits, each)
            if answered:
                self.reporter.samples(self.progress.step, answered)
        return self.progress.after_validation(loss)

    def save(self) -> None:
        assert self.folder is not None
        best = self.progress.best_step if self.keeps_best else None
        suspicion = self.progress.suspicion
        self.heartbeat.begin(SAVE, f"checkpoint of step {self.progress.step}", self.progress.step)
        self.checkpointer.save(self.progress.step, self.progress.trainer_state(), self.about, best, suspicion)

    def judge_last_save(self) -> None:
        """Check the last checkpoint's weights: compute the loss and gradients of one more step without an update.
        (Other checkpoints are checked by the loss of the step that follows.)
        """
        self.heartbeat.begin_step(self.progress.step + 1)
        result = self.trainer.step(update=False)
        is_broken = result.skipped and not result.overflowed and result.spike_above is None  # a spike is finite
        self.checkpointer.judge(NO_FINITE_STEP if is_broken else self.progress.suspect(result.loss))

    def close(self) -> None:
        """Wait for a save in the background, then close the metrics. A collective: not after a crash."""
        self.heartbeat.begin(SAVE, "waiting for the save in the background")
        try:
            self.checkpointer.wait()
        finally:
            if self.reporter is not None:
                self.reporter.close(stopped_early=self.is_finished)


def open_run(
    config: Config,
    world: World,
    folder: Path | None = None,
    *,
    spec: ModelSpec | None = None,
    data: Prepared | None = None,
    checkpoint: Path | None = None,
    heartbeat: Heartbeat | None = None,
    wants_to_stop: Callable[[], bool] = lambda: False,
    objective: Objective = SFT,
) -> Run:
    """Build everything that the first step needs. A collective.

    Args:
        folder: the run folder; None: nothing is recorded or saved.
        spec: the model's shape; None: the one that the config names.
        data: prepared data; None: those that the config names.
        checkpoint: the checkpoint to resume from; None: the newest one in the folder, if there is one.
        heartbeat: this process's record for the watcher; None: not watched.
        objective: what is learned.

    Raises:
        UserError: on all ranks: files do not fit each other or the config.
    """
    heartbeat = heartbeat or Heartbeat(config.watchdog)
    distributed.seed_everything(config.training.seed)
    same_on_all_ranks(to_toml(config), "the config is not the same on all ranks; start them all with the same")
    _log_machine(config, world)
    with raise_together():
        spec = spec or config.spec()
    data = data or load_data(config, world, folder, heartbeat)
    found = find_start(checkpoint, folder, world, config.checkpoint.load_step)
    progress = Progress()
    if found is not None:
        check_is_run_checkpoint(found)
        config = keep_global_batch(config, world, found.manifest)
        progress = Progress.of_trainer_state(found.trainer_state, found.path / TRAINER)
    layout, batch = config.layout(world.size), config.batch(world.size)
    log_layout(layout, batch, config.training)
    forecast = Forecast(config, world, spec, folder)
    rows = open_rows(config, data, batch, progress)
    about = _about(config, spec, data, layout, batch, rows.fingerprint)
    if found is not None:
        check_same_run(found, about, config.checkpoint.allow_changed)
    fit_progress(progress, found, rows, data.facts.plan)
    steps = last_step(config, progress, rows, batch)

    attention, head = _choose(config, spec, layout, world, found)
    about["chosen"] = {"attention": asdict(attention), "head": asdict(head)}
    mesh = distributed.build_mesh(layout, world.device)
    supervised_share, seed = data.train_counts.supervised_share(config.training.seq_len), config.training.seed
    wanted = attention.make(), supervised_share, head
    model = build_model(config, spec, layout, batch, mesh, world.device, *wanted, objective=objective)
    trained = model.trained_parameters()
    optimizer = build_optimizer(trained, config.optimizer, seed, model.weights_device, model.host_gradients)
    load_weights(model, optimizer, config, spec, found.path if found else None)
    checkpointer = _open_checkpointer(config, world, folder, spec, data, model, optimizer, layout)
    if found is not None:
        checkpointer.load(found.path)
        if checkpoint is None:
            from_rank_zero(partial(rename_later_checkpoints, found.path))
    log_if_done(progress, steps)
    stream = RowStream(rows, batch, distributed.data_parallel_rank(mesh), with_padding=layout.is_pipeline)
    reporter, profiler, observers = None, None, list[StepObserver]([forecast])
    flags = {STOP: wants_to_stop, SAVE_FAILED: checkpointer.has_failed}
    if folder is not None:
        reporter = open_record(folder, config, world, spec, model, rows, progress, steps, _code_and_machine(world))
        observers += [reporter] if reporter else []
        with raise_together():
            accept_ledger(data, folder, world)
            observers.append(FaultWatch(stream, folder, world, progress, config.training.max_nonfinite_steps))
        profiler = open_profiler(folder, config.profiling, world, steps)
    if profiler is not None:
        observers.append(profiler)
        flags[SNAPSHOT] = profiler.is_asked
    sampler = open_sampler(config, data)
    child.end()  # no more files from elsewhere are read
    stragglers = Stragglers(world, config.metrics.log_freq) if folder is not None and world.size > 1 else None
    trainer = _open_trainer(config.training, model, optimizer, stream, progress, flags, heartbeat, stragglers)
    run = (config, world, folder, mesh, data, about, model, optimizer, checkpointer, stream, progress, steps, trainer)
    return Run(*run, reporter, forecast, observers, heartbeat, stragglers, wants_to_stop, sampler, profiler)


def _open_trainer(
    config: TrainingConfig,
    model: ParallelModel,
    optimizer: NamedState,
    stream: RowStream,
    progress: Progress,
    flags: Flags,
    heartbeat: Heartbeat,
    stragglers: Stragglers | None,
) -> Trainer:
    """A collective."""
    return Trainer(
        model,
        optimizer,
        stream,
        config.max_norm,
        progress.rows_consumed,
        flags,
        loss_scale=progress.loss_scale if config.mixed_precision_param == "float16" else None,
        note=heartbeat.note,
        own_values=stragglers.own_values if stragglers else tuple,
        spike_above=partial(progress.spike_above, config.loss_spike_sigmas),
        skip_spikes=config.skip_loss_spikes,
    )


def _code_and_machine(world: World) -> dict[str, Any]:
    """What environment.json holds about the code and this node; empty on all ranks but the first."""
    if world.rank != 0:
        return {}
    cards = torch.cuda.device_count() if world.device.type == "cuda" else 0
    found = describe(world.device, cards)
    return {
        "version": import_module("titan_mi100").__version__,
        "commit": found.commit,
        "host": socket.gethostname(),
        "os": platform.platform(),
        "gpus": [torch.cuda.get_device_name(card) for card in range(cards)],
        "driver": found.driver,
        "triton": found.triton,
    }


def _log_machine(config: Config, world: World) -> None:
    """Log notes of the config, the device, and advice on the dtype and torch.compile."""
    for line in config.notes:
        log.info(line)
    words, arch, units = distributed.device_name(world.device)
    log.info(f"{world.size} process(es), each on {words}")
    dtype, is_cpu = config.training.mixed_precision_param, world.device.type == "cpu"
    if advice := dtype_advice(dtype, find_gpu(arch, units), is_cpu):
        log.warning(advice)
    if not config.compile.enable and (advice := compile_advice(dtype, is_cpu)):
        log.info(advice)


def _about(
    config: Config, spec: ModelSpec, data: Prepared, layout: Layout, batch: Batch, of_rows: str
) -> dict[str, Any]:
    """Layout, data and fingerprints of the run, for the manifests of its checkpoints. A collective."""
    lora: dict[str, Any] = {}
    if config.lora.rank:
        form = {"base": config.lora.base} if config.lora.base != "whole" else {}
        lora = {"lora": {**lora_identity(config.lora), **form}, "base": base_identity(config, spec)}
    base = {"base": config.checkpoint.initial_load_path}
    if config.lora.base_model_name_or_path:
        base["base_model_name_or_path"] = config.lora.base_model_name_or_path
    return {
        **({"lora": {**lora_identity(config.lora), **base}} if lora else {}),
        "layout": {**asdict(layout), **asdict(batch)},
        "data": data.facts.made_of,
        "rows": data.train_counts.rows,
        "optimizer": {"state": config.optimizer.state, "master": config.optimizer.master},
        "fingerprints": {
            "model": fingerprint(spec),
            "tokenizer": data.facts.tokenizer,
            "data": of_rows,
            "seed": config.training.seed,
            "global_batch_size": batch.global_batch_size,
            **lora,
        },
    }


def _choose(
    config: Config, spec: ModelSpec, layout: Layout, world: World, found: Found | None
) -> tuple[Choice, HeadMemory]:
    """Choose the attention backend and the memory of the loss head. Both decide the order of floating-point sums, so a
    resumed run on the same kind of device keeps its choice; else rank 0 chooses for all. A collective.
    """
    training, arch = config.training, distributed.device_name(world.device)[1]
    rows, dtype = (training.local_batch_size, training.seq_len), training.mixed_precision_param
    shape = Shape(*rows, *layout.local(spec.attention), dtype)
    chosen = found.manifest.get("chosen", {}) if found else {}
    before = Choice(**chosen["attention"]) if "attention" in chosen else None
    wanted, cache = config.model.attention_backend, cache_folder(config.data)
    choice, said = from_rank_zero(partial(choose, wanted, shape, world.device, arch, cache, before))
    for line in said:
        log.warning(line)
    if before and (choice.name, choice.launch) != (before.name, before.launch):
        log.warning(f"attention was {before.name} until now: sums are added in another order from here on")
    log.info(f"attention: {choice.name} ({choice.why})")
    if before and before.arch == choice.arch and "head" in chosen:
        return choice, HeadMemory(**chosen["head"])
    return choice, from_rank_zero(partial(HeadMemory.of, world.device))


def _open_checkpointer(
    config: Config,
    world: World,
    folder: Path | None,
    spec: ModelSpec,
    data: Prepared,
    model: ParallelModel,
    optimizer: NamedState,
    layout: Layout,
) -> Checkpointer:
    """A collective."""
    with raise_together():
        base, tokenizer = config.checkpoint.initial_load_path, config.tokenizer_path()
        named = base, tokenizer, config.model.chat_template
        has_assets = world.rank == 0 and folder is not None
        facts = data.facts
        prompts = facts.enable_thinking, facts.system_prompt
        assets = run_assets(spec, *named, *prompts) if has_assets else {}
        if assets and facts.end_of_turn_id is not None:
            assets = ending_turns(assets, facts.end_of_turn, facts.end_of_turn_id)
    return Checkpointer(
        (folder or Path()) / "checkpoint",
        config.checkpoint.keep_latest_k,
        model,
        optimizer,
        world,
        layout,
        in_background=config.checkpoint.async_mode == "async",
        assets=assets,
    )
