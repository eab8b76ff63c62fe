"""Opens a run: everything between a checked config and the first step. Used by the trainer, the benches and the tests
with several processes.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from titan_mi100.checkpoint.resume import (
    TRAINER,
    Found,
    check_is_run_checkpoint,
    check_same_run,
    rename_later_checkpoints,
)
from titan_mi100.config.as_text import to_toml
from titan_mi100.config.layout import Batch, Layout
from titan_mi100.config.settings import Config
from titan_mi100.data.answer_store import Column
from titan_mi100.data.loader import RowStream, ShuffledEpochs
from titan_mi100.data.mixture import Mixture
from titan_mi100.data.prepare import cache_folder
from titan_mi100.data.prepared import Prepared
from titan_mi100.files import child
from titan_mi100.log import log
from titan_mi100.objectives.base import Objective
from titan_mi100.objectives.choose import choose
from titan_mi100.open_run.answers import Pass, Reference, columns_of, with_columns
from titan_mi100.open_run.data import accept_ledger, find_start, keep_global_batch, load_data, log_if_done, log_layout
from titan_mi100.open_run.fingerprints import about_run
from titan_mi100.open_run.model import choose_backend, keep_stages, open_checkpointer
from titan_mi100.open_run.record import log_machine, open_record
from titan_mi100.open_run.rows import fit_progress, last_step, open_rows, some_tokens
from titan_mi100.open_run.run import MOVED, Run, StepObserver
from titan_mi100.optim.optimizer import build_optimizer
from titan_mi100.optim.state import NamedState
from titan_mi100.parallel import distributed
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.build import build_model
from titan_mi100.parallel.distributed import World, from_rank_zero, raise_together, same_on_all_ranks
from titan_mi100.planning.memory import layers_per_stage
from titan_mi100.planning.plan import with_settings
from titan_mi100.run.answers import AnswerWatch
from titan_mi100.run.expert_load import ExpertLoad
from titan_mi100.run.faults import FaultWatch
from titan_mi100.run.forecast import Forecast
from titan_mi100.run.profiling import SNAPSHOT, open_profiler
from titan_mi100.run.progress import Progress
from titan_mi100.run.samples import open_sampler
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.trainer import Trainer
from titan_mi100.watch.heartbeat import START, VALIDATION, Heartbeat
from titan_mi100.watch.stragglers import Stragglers
from titan_mi100.weights.load import load_weights
from titan_mi100.weights.source import open_weights

STOP, SAVE_FAILED = "stop", "save failed"  # flags that ranks raise on their own


class _Start(NamedTuple):
    """Where a run begins: anew or at a checkpoint, on which data, in which layout."""

    config: Config
    spec: ModelSpec
    data: Prepared
    found: Found | None
    progress: Progress
    layout: Layout
    batch: Batch
    columns: dict[str, Column]  # further arrays of the rows, to be filled


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
    objective: Objective | None = None,
    moved: Callable[[], str] = lambda: "",
) -> Run:
    """Build everything that the first step needs. A collective.

    Args:
        folder: the run folder; None: nothing is recorded or saved.
        spec: the model's shape; None: the one that the config names.
        data: prepared data; None: those that the config names.
        checkpoint: the checkpoint to resume from; None: the newest one in the folder, if there is one.
        heartbeat: this process's record for the watcher; None: not watched.
        objective: what is learned; None: what the config names.
        moved: see Run.

    Raises:
        UserError: on all ranks: files do not fit each other or the config.
    """
    heartbeat = heartbeat or Heartbeat(config.watchdog)
    start = _start(config, world, folder, spec, data, checkpoint, heartbeat)
    config, spec, data, found, progress, layout, batch, _ = start
    forecast = Forecast(config, world, spec, folder)
    rows, about, steps = _rows(start)
    mesh, model, optimizer = _model(start, world, about, objective or choose(config.objective), forecast.plan.card)
    loaded = found.path if found else None
    dp_rank, tokens = distributed.data_parallel_rank(mesh), partial(some_tokens, rows)
    if config.objective.has_reference and objective is None:
        reading = Pass(config, world, spec, data, layout, batch, dp_rank)
        wanted = reading.about("reference", 0, about["chosen"]["attention"]["name"])
        reference = Reference(reading, folder, wanted, start.columns)
        load_weights(model, optimizer, config, spec, None if reference.needs_base else loaded, tokens)
        beat = partial(heartbeat.begin, VALIDATION, "reference")
        reference.read(model, wants_to_stop, beat, cache_folder(config.data))
        heartbeat.begin(START, "opening model and checkpoint")
    else:
        load_weights(model, optimizer, config, spec, loaded, tokens)
    checkpointer = open_checkpointer(config, world, folder, spec, data, model, optimizer, layout)
    if found is not None:
        log.info(f"loading {found.path} ...")
        checkpointer.load(found.path)
        if checkpoint is None:
            from_rank_zero(partial(rename_later_checkpoints, found.path))
    log_if_done(progress, steps)
    stream = RowStream(rows, batch, dp_rank, with_padding=layout.is_pipeline)
    reporter, profiler, observers = None, None, list[StepObserver]([forecast])

    def is_moved() -> bool:
        return world.rank == 0 and bool(moved())

    flags = {STOP: wants_to_stop, SAVE_FAILED: checkpointer.has_failed, MOVED: is_moved}
    if folder is not None:
        reporter = open_record(folder, config, world, spec, model, rows, progress, steps)
        observers += [reporter] if reporter else []
        if any(parameter.experts for parameter in spec.parameters.values()):
            freq = config.metrics.log_freq
            observers.append(ExpertLoad(folder, reporter, model, spec, freq, progress.step, steps))
        with raise_together():
            accept_ledger(data, folder, world)
            observers.append(AnswerWatch())
            most = config.training.max_nonfinite_steps
            observers.append(FaultWatch(stream, folder, world, progress, most, model))
        profiler = open_profiler(folder, config.profiling, world, steps, reporter)
    if profiler is not None:
        observers.append(profiler)
        flags[SNAPSHOT] = profiler.is_asked
    named = config.tokenizer_path(), config.checkpoint.initial_load_path
    sampler = open_sampler(config.validation, config.training.seq_len, data, *named)
    child.end()  # no more files from elsewhere are read
    stragglers = Stragglers(world, config.metrics.log_freq) if folder is not None and world.size > 1 else None
    training = config.training
    trainer = Trainer(
        model, optimizer, stream, training.max_norm, progress.rows_consumed, flags,
        loss_scale=progress.loss_scale if training.mixed_precision_param == "float16" else None,
        note=heartbeat.note, own_values=stragglers.own_values if stragglers else tuple,
        spike_above=partial(progress.spike_above, training.loss_spike_sigmas), skip_spikes=training.skip_loss_spikes,
    )  # fmt: skip
    return Run(
        config=config, world=world, folder=folder, mesh=mesh, data=data, about=about,
        model=model, optimizer=optimizer, checkpointer=checkpointer, stream=stream, trainer=trainer,
        progress=progress, steps=steps, wants_to_stop=wants_to_stop,
        reporter=reporter, forecast=forecast, observers=observers, heartbeat=heartbeat, stragglers=stragglers,
        sampler=sampler, profiler=profiler, moved=moved,
    )  # fmt: skip


def _start(
    config: Config,
    world: World,
    folder: Path | None,
    spec: ModelSpec | None,
    data: Prepared | None,
    checkpoint: Path | None,
    heartbeat: Heartbeat,
) -> _Start:
    """Find data and checkpoint. A collective."""
    distributed.seed_everything(config.training.seed)
    same_on_all_ranks(to_toml(config), "the config is not the same on all ranks; start them all with the same")
    for line in config.notes:
        log.info(line)
    log_machine(config.training.mixed_precision_param, config.compile.enable, world)
    with raise_together():
        spec = spec or config.spec()
    data = data or load_data(config, world, folder, heartbeat)
    columns = columns_of(config, world, data, spec)
    data = with_columns(data, columns) if config.objective.name in ("preference", "distill") else data
    found = find_start(checkpoint, folder, world, config.checkpoint.load_step)
    progress = Progress()
    with raise_together():  # an export will have the form of the folder that was read
        saved = found.manifest.get("fingerprints", {}).get("model", {}) if found else {}
        named = config.checkpoint.initial_load_path
        spec = spec.as_stored(open_weights(named).kinds if named and spec.of_files and not found else (), saved)
    if found is not None:
        check_is_run_checkpoint(found)
        config = keep_global_batch(config, world, found.manifest)
        progress = Progress.of_trainer_state(found.trainer_state, found.path / TRAINER)
        config = keep_stages(config, world, spec, data, found.manifest)
    layout, batch = config.layout(world.size), config.batch(world.size)
    log_layout(layout, batch, config.training, config.memory.offload)
    return _Start(config, spec, data, found, progress, layout, batch, columns)


def _rows(start: _Start) -> tuple[ShuffledEpochs | Mixture, dict[str, Any], int]:
    """The rows, the manifest's entries about the run, and its last step. A collective."""
    config, spec, data, found, progress, layout, batch, _ = start
    rows = open_rows(config.training, config.data, data, batch, progress, config.parallelism.is_pipeline)
    about = about_run(config, spec, data, layout, batch, rows.fingerprint)
    if found is not None:
        check_same_run(found, about, config.checkpoint.allow_changed)
    fit_progress(progress, found, rows, data.facts.plan)
    wanted = config.training.steps, config.data.on_exhausted, config.lr_scheduler.warmup_steps
    return rows, about, last_step(*wanted, progress, rows, batch)


def _model(
    start: _Start, world: World, about: dict[str, Any], objective: Objective, card: int
) -> tuple[DeviceMesh, ParallelModel, NamedState]:
    """The model in its layout, not filled, and the optimizer. A collective. Args: about: gets what was chosen."""
    config, spec, data, found, _, layout, batch, _ = start
    attention, head = choose_backend(config, spec, layout, world, found)
    about["chosen"] = {"attention": asdict(attention), "head": asdict(head)}
    mesh = distributed.build_mesh(layout, world.device)
    supervised_share, seed = data.train_counts.supervised_share(config.training.seq_len), config.training.seed
    wanted = attention.make(), supervised_share, head
    if layout.is_pipeline:  # rank 0 chooses for all: the memory of cards may differ a little
        layers = from_rank_zero(partial(layers_per_stage, config, spec, world.size, supervised_share, card))
        about["chosen"]["stages"] = list(layers)
        config = with_settings(config, {"parallelism": {"pipeline_parallel_layers_per_stage": tuple(layers)}})
    model = build_model(config, spec, layout, batch, mesh, world.device, *wanted, objective=objective)
    trained = model.trained_parameters()
    optimizer = build_optimizer(trained, config.optimizer, seed, model.weights_device, model.host_gradients)
    return mesh, model, optimizer
