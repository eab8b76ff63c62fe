"""First stages of opening a run: its data, the checkpoint to resume from, the batch size, the first log lines."""

import os
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from titan_mi100.checkpoint.resume import FoundCheckpoint, find_checkpoint, open_checkpoint
from titan_mi100.config.check_layout import check_layout
from titan_mi100.config.layout import Batch, Layout, accumulation_for
from titan_mi100.config.problem import ConfigError
from titan_mi100.config.settings import Config, TrainingConfig
from titan_mi100.data.ledger import LEDGER, copy_ledger
from titan_mi100.data.prepare import prepare_run
from titan_mi100.data.prepared import Prepared
from titan_mi100.log import log
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World, raise_together, same_on_all_ranks
from titan_mi100.run.progress import Progress
from titan_mi100.watch.heartbeat import START, WATCHED, Heartbeat
from titan_mi100.wording import plural

_PATIENCE = 24  # times watchdog.start_seconds


def find_start(checkpoint: Path | None, folder: Path | None, world: World, step: int) -> FoundCheckpoint | None:
    """The checkpoint to resume from; None: the run starts from the beginning. A collective."""
    if checkpoint is None:
        return None if folder is None else find_checkpoint(folder / "checkpoint", world, step)
    with raise_together():
        return open_checkpoint(checkpoint)


def load_data(config: Config, world: World, folder: Path | None, heartbeat: Heartbeat) -> Prepared:
    """The prepared data. One process of each node prepares it if needed; rank 0 copies the ledger into the run folder.
    A collective.
    """
    heartbeat.begin(START, "preparing data")
    if WATCHED not in os.environ:  # no launcher has prepared the data yet, which may take hours
        log.info("preparing the data ...")
        heartbeat.allow(_PATIENCE)
    started = time.perf_counter()
    with raise_together():
        try:
            prepared = prepare_run(config, folder if world.rank == 0 else None)
        finally:
            distributed.wait_for_all()
    same_on_all_ranks(prepared.facts.plan, "the data files are not the same on all nodes; copy them again")
    for line in prepared.facts.summary:
        log.info(line)
    for line in prepared.facts.warnings:
        log.warning(line)
    how = f"{'already ' * prepared.cached}prepared in {prepared.folder}" if prepared.facts.files else "corpora, opened"
    log.info(f"data: {how} ({time.perf_counter() - started:.2f} s)")
    heartbeat.begin(START, "opening model and checkpoint")
    return prepared


def accept_ledger(data: Prepared, folder: Path, world: World) -> None:
    """Put the ledger of accepted data into the run folder, on rank 0. Raises UserError: it cannot be written."""
    if world.rank == 0 and data.facts.files:  # else all sources are corpora
        copy_ledger(data.ledger(), folder / LEDGER)


def keep_global_batch(config: Config, world: World, manifest: dict[str, Any]) -> Config:
    """Adjust gradient_accumulation_steps so that a resumed run in another layout keeps its rows per step.

    Raises:
        UserError: no number of accumulation steps gives the same rows per step.
    """
    rows = manifest["fingerprints"]["global_batch_size"]
    batch = config.batch(world.size)
    if batch.global_batch_size == rows or "global_batch_size" in config.checkpoint.allow_changed:
        return config
    before = Batch(**{field.name: manifest["layout"][field.name] for field in fields(Batch)})
    accumulation = accumulation_for(rows, batch, before)
    training = replace(config.training, gradient_accumulation_steps=accumulation, target_tokens_per_step=0)
    config = replace(config, training=training)
    log.warning(
        f"gradient_accumulation_steps is {accumulation} instead of {batch.gradient_accumulation_steps}, to keep the "
        f"run's {rows} rows per step"
    )
    if problems := list(check_layout(config, world.size)):
        raise ConfigError(problems)
    return config


def log_layout(layout: Layout, batch: Batch, training: TrainingConfig) -> None:
    tokens, target = batch.global_batch_size * training.seq_len, training.target_tokens_per_step
    log.info(
        f"layout: {layout.describe()}; a step is {plural(batch.global_batch_size, 'row')} = local_batch_size "
        f"{batch.local_batch_size} x accumulation {batch.gradient_accumulation_steps} x "
        f"{plural(batch.dp_degree, 'rank')}, {tokens:,} tokens"
    )
    if 0 < 1.5 * target < tokens:  # more than rounding can explain
        log.warning(f"target_tokens_per_step = {target:,}: one forward on all ranks has more; lower local_batch_size")
    if layout.inside_a_node > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        log.warning("tensor parallel reaches across nodes: every layer waits for the network; keep it inside a node")


def log_if_done(progress: Progress, steps: int) -> None:
    if progress.step and progress.step >= steps:
        log.info(f"step {progress.step} of {steps} was reached before; raise training.steps or epochs to train on")
