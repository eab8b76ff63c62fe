"""Opens a run: everything between a checked config and the first step. Used by the trainer, the benches and the tests
with several processes.
"""

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.checkpoint.resume import (
    TRAINER,
    check_is_run_checkpoint,
    check_same_run,
    rename_later_checkpoints,
)
from titan_mi100.config.as_text import to_toml
from titan_mi100.config.settings import Config, LoRAConfig
from titan_mi100.data.loader import RowSource, RowStream
from titan_mi100.data.prepare import cache_folder
from titan_mi100.data.prepared import Prepared
from titan_mi100.errors import UserError
from titan_mi100.files import child
from titan_mi100.log import log
from titan_mi100.objectives.choose import choose
from titan_mi100.open_run.columns import columns_of, with_columns
from titan_mi100.open_run.data import accept_ledger, find_start, keep_global_batch, load_data, log_if_done, log_layout
from titan_mi100.open_run.fingerprints import about_run
from titan_mi100.open_run.inputs import RunInputs
from titan_mi100.open_run.model import choose_backend, choose_fused, keep_stages, open_checkpointer
from titan_mi100.open_run.record import log_machine, open_record
from titan_mi100.open_run.reference import Reference
from titan_mi100.open_run.rows import fit_progress, last_step, open_rows, some_tokens
from titan_mi100.open_run.run import MOVED, Run, StepObserver, Supervision
from titan_mi100.optim.optimizer import build_optimizer
from titan_mi100.parallel import distributed
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.build import Computation, Placement, build_model
from titan_mi100.parallel.distributed import World, from_rank_zero, raise_together, same_on_all_ranks
from titan_mi100.planning.memory import layers_per_stage
from titan_mi100.run.answers import PolicyWatch, PreferenceWatch
from titan_mi100.run.expert_load import ExpertLoad
from titan_mi100.run.faults import FaultWatch
from titan_mi100.run.forecast import Forecast
from titan_mi100.run.metrics import Reporter
from titan_mi100.run.profiling import open_profiler
from titan_mi100.run.progress import Progress
from titan_mi100.run.samples import open_sampler
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.text.load import load_tokenizer
from titan_mi100.trainer import Hooks, Trainer, UpdateRules
from titan_mi100.watch.heartbeat import START, VALIDATION, Heartbeat
from titan_mi100.weights.load import load_weights
from titan_mi100.weights.source import open_weights, read_manifest

STOP, SAVE_FAILED = "stop", "save failed"  # flags that ranks raise on their own


def open_run(
    config: Config,
    world: World,
    folder: Path | None = None,
    supervision: Supervision | None = None,
    *,
    spec: ModelSpec | None = None,
    data: Prepared | None = None,
    checkpoint: Path | None = None,
) -> Run:
    """Build everything that the first step needs. A collective.

    Args:
        folder: the run folder; None: nothing is recorded or saved.
        supervision: None: not watched, and never told to stop.
        spec: the model's shape; None: the one that the config names.
        data: prepared data; None: those that the config names.
        checkpoint: the checkpoint to resume from; None: the newest one in the folder, if there is one.

    Raises:
        UserError: on all ranks: files do not fit each other or the config.
    """
    supervision = supervision or Supervision()
    heartbeat = supervision.heartbeat
    inputs = add_columns(read_inputs(config, world, folder, spec, data, checkpoint, heartbeat))
    config, spec, progress = inputs.config, inputs.spec, inputs.progress
    forecast = Forecast(inputs, world, folder)
    rows = open_rows(config.training, config.data, inputs.data, inputs.batch, progress, config.parallelism.is_pipeline)
    about = about_run(inputs, rows.fingerprint)
    steps = fit_to_rows(inputs, rows, about)
    attention, head = choose_backend(inputs)
    stages, fused = choose_stages(inputs, forecast.plan.card), choose_fused(inputs, attention.arch)
    about = {**about, "chosen": {"attention": asdict(attention), "head": asdict(head), **stages, **fused}}
    mesh = distributed.build_mesh(inputs.layout, world.device)
    computation = Computation(attention.make(), head, choose(config.objective, config.draft_head.train))
    placement = Placement(mesh, world.device, forecast.plan.card)
    model = build_model(inputs, computation, placement, stages.get("stages", ()))
    trained, seed = model.trained_parameters(), config.training.seed
    own_lr, ratio = config.draft_head.lr or config.optimizer.lr, config.lora.b_lr_ratio
    settings = replace(config.optimizer, lr=own_lr) if model.draft == "after" else config.optimizer
    own_lr = own_lr if model.draft == "along" else 0.0
    optimizer = build_optimizer(trained, settings, seed, model.weights_device, model.host_gradients, ratio, own_lr)
    dp_rank = distributed.data_parallel_rank(mesh, inputs.layout)
    stream = RowStream(rows, inputs.batch, dp_rank, with_padding=inputs.layout.is_pipeline)
    reference = Reference(inputs, dp_rank, attention.name) if config.objective.has_reference else None
    resumed = inputs.found.path if inputs.found and (not reference or reference.is_complete) else None
    load_weights(model, optimizer, inputs, resumed, partial(some_tokens, rows))
    if reference is not None:
        beat = partial(heartbeat.begin, VALIDATION, "reference")
        reference.read(model, supervision.wants_to_stop, beat, cache_folder(config.data))
        heartbeat.begin(START, "opening model and checkpoint")
    checkpointer = open_checkpointer(inputs, model, optimizer)
    if inputs.found is not None:
        log.info(f"loading {inputs.found.path} ...")
        checkpointer.load(inputs.found.path)
        if checkpoint is None:
            from_rank_zero(partial(rename_later_checkpoints, inputs.found.path))
    log_if_done(progress, steps)
    reporter = open_record(inputs, model, rows, steps, forecast.mfu)
    observers = [forecast, *open_observers(inputs, model, stream, reporter, steps)]
    profiler = open_profiler(folder, config.profiling, world, steps) if folder else None
    tokenizer, base = config.tokenizer_path(), config.checkpoint.initial_load_path
    sampler = open_sampler(config.validation, config.training.seq_len, inputs.data, tokenizer, base)
    child.end()  # no more files from elsewhere are read
    hooks = RunHooks(inputs, supervision, checkpointer)
    scale = progress.loss_scale if config.training.mixed_precision_param == "float16" else None
    own_scale = progress.draft_loss_scale if scale else None
    rules = UpdateRules(
        config.training.max_norm, config.training.skip_loss_spikes, scale, config.draft_head.weight, own_scale
    )
    trainer = Trainer(model, optimizer, stream, rules, progress.rows_consumed, hooks)
    return Run(
        config=config, world=world, folder=folder, mesh=mesh, data=inputs.data, about=about,
        model=model, optimizer=optimizer, checkpointer=checkpointer, stream=stream, trainer=trainer,
        progress=progress, steps=steps, supervision=supervision,
        reporter=reporter, forecast=forecast, observers=observers,
        sampler=sampler, profiler=profiler,
    )  # fmt: skip


class RunHooks(Hooks):
    """What a step asks of this run."""

    def __init__(self, inputs: RunInputs, supervision: Supervision, checkpointer: Checkpointer) -> None:
        self._progress, self._sigmas = inputs.progress, inputs.config.training.loss_spike_sigmas
        self._is_first, self._supervision = inputs.world.rank == 0, supervision
        self._checkpointer = checkpointer

    def begin(self, part: str) -> None:
        self._supervision.heartbeat.note(part)

    def flags(self) -> dict[str, bool]:
        has_moved = self._is_first and bool(self._supervision.moved())
        return {STOP: self._supervision.wants_to_stop(), SAVE_FAILED: self._checkpointer.has_failed(), MOVED: has_moved}

    def spike_above(self) -> float:
        return self._progress.spike_above(self._sigmas)


def read_inputs(
    config: Config,
    world: World,
    folder: Path | None,
    spec: ModelSpec | None,
    data: Prepared | None,
    checkpoint: Path | None,
    heartbeat: Heartbeat,
) -> RunInputs:
    """Find data and checkpoint, and what a resumed run keeps of its checkpoint. Args: as of open_run. A collective."""
    otherwise = "the config is not the same on all ranks; start them all with the same, and with one HF_HUB_CACHE"
    same_on_all_ranks(to_toml(config), otherwise)
    for line in config.notes:
        log.info(line)
    log_machine(config.training.mixed_precision_param, world)
    with raise_together():
        spec = spec or config.spec()
    data = data or load_data(config, world, folder, heartbeat)
    with raise_together():
        lora = with_token_ids(config.lora, config.tokenizer_path(), spec.vocab_size)
        config = replace(config, lora=lora)
    start = find_start(checkpoint, folder, world, config.checkpoint.load_step)
    progress = Progress()
    with raise_together():  # an export will have the form of the folder that was read
        named = config.checkpoint.initial_load_path
        manifest = start.manifest if start else read_manifest(Path(named)) if named else {}
        saved = manifest.get("fingerprints", {}).get("model", {})
        spec = spec.as_stored(open_weights(named).kinds if named and spec.of_files and not start else (), saved)
    if start is not None:
        check_is_run_checkpoint(start)
        config = keep_global_batch(config, world, start.manifest)
        progress = Progress.of_trainer_state(start.trainer_state, start.path / TRAINER)
        config = keep_stages(config, world, spec, data, start.manifest)
    inputs = RunInputs(config, world.size, spec, world, folder, data, columns={}, found=start, progress=progress)
    log_layout(inputs.layout, inputs.batch, config.training)
    return inputs


def with_token_ids(lora: LoRAConfig, tokenizer: str, vocabulary: int) -> LoRAConfig:
    """The settings with the ids of trainable_tokens. Raises UserError: the tokenizer or the model lacks one."""
    if not lora.trainable_tokens:
        return lora
    id_of = load_tokenizer(tokenizer).id_of
    ids = {token: id_of(token) for token in lora.trainable_tokens}
    if lacking := [token for token, number in ids.items() if not 0 <= number < vocabulary]:
        text = f"{', '.join(map(repr, lacking))}: no single token of {tokenizer} with a row in the model"
        raise UserError(f"[lora] trainable_tokens names {text}; take a token as tokenizer.json spells it")
    return replace(lora, token_ids=tuple(sorted({*ids.values()})))


def add_columns(inputs: RunInputs) -> RunInputs:
    """The inputs with the arrays that the objective needs beside the rows. A collective."""
    objective = inputs.config.objective
    if objective.name == "sft":
        return inputs
    columns = columns_of(objective, inputs.config.data, inputs.world, inputs.data, inputs.spec)
    return replace(inputs, columns=columns, data=with_columns(inputs.data, columns))


def fit_to_rows(inputs: RunInputs, rows: RowSource, about: dict[str, Any]) -> int:
    """Check that a resumed run is the same, and fit its progress to the rows. Returns the run's last step.

    Args:
        about: see about_run.
    """
    config, progress = inputs.config, inputs.progress
    if inputs.found is not None:
        check_same_run(inputs.found, about, config.checkpoint.allow_changed)
    plan, by = inputs.data.facts.plan, config.validation  # what is compared in search of the best
    plan += "" if by.metric == "loss" else f" {by.judge} {by.prompts} {by.prompt_tokens}"
    fit_progress(progress, inputs.found, rows, plan)
    return last_step(config.training.steps, config.lr_scheduler.warmup_steps, progress, rows, inputs.batch)


def choose_stages(inputs: RunInputs, card: int) -> dict[str, Any]:
    """The layers of each pipeline stage, as a checkpoint's manifest has them; empty without a pipeline. A collective.

    Rank 0 chooses for all: the memory of cards may differ a little.
    """
    if not inputs.layout.is_pipeline:
        return {}
    cut = partial(layers_per_stage, inputs, inputs.supervised_share, card)
    return {"stages": list(from_rank_zero(cut))}


def open_observers(
    inputs: RunInputs, model: ParallelModel, stream: RowStream, reporter: Reporter | None, steps: int
) -> list[StepObserver]:
    """What follows each step of a run with a folder, in order. A collective."""
    config, folder, progress = inputs.config, inputs.folder, inputs.progress
    if folder is None:
        return []
    observers: list[StepObserver] = [reporter] if reporter else []
    if any(parameter.experts for parameter in inputs.spec.parameters.values()):
        observers.append(ExpertLoad(reporter, model, inputs.spec, config.metrics.log_freq, steps))
    with raise_together():
        accept_ledger(inputs.data, folder, inputs.world)
        most = config.training.max_nonfinite_steps
        observers += [PreferenceWatch(), PolicyWatch(), FaultWatch(stream, folder, inputs.world, progress, most, model)]
    return observers
