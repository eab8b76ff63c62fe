"""The trainer: `python -m titan_mi100.train --job.config_file X.toml`, under torchrun or alone.

Reads from top to bottom: what is prepared, then the loop, then one step.
"""

from titan_mi100.config import config_from_command_line, to_toml
from titan_mi100.preemption import Preemption

if __name__ == "__main__":
    preemption = Preemption()  # first of all: a run may be told to stop while torch is imported
    config = config_from_command_line()  # before torch is imported: --help and mistakes answer at once

import json
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from titan_mi100 import distributed, hardware, model_spec
from titan_mi100.assets import config_dtype, read_assets, run_assets
from titan_mi100.build import base_identity, build_model, load_weights
from titan_mi100.checkpoint import Checkpointer
from titan_mi100.convert import to_hf
from titan_mi100.data.dataset import PADDING_DOCUMENT
from titan_mi100.data.loader import Microbatch, RowStream, collate, renumber, rows_per_epoch
from titan_mi100.data.prepare import Prepared, prepare_run
from titan_mi100.distributed import (
    World,
    any_rank,
    max_over_ranks,
    measure_gradients,
    raise_together,
    same_on_all_ranks,
    sum_over_ranks,
)
from titan_mi100.errors import SaveError, UserError
from titan_mi100.evaluate import bits_per_byte, validation_loss
from titan_mi100.faults import FILE, FaultWatch, NumericalError
from titan_mi100.layout import IGNORE, Batch, Layout, accumulation_for
from titan_mi100.logging import log, setup_logging
from titan_mi100.lr_scheduler import lr_factor
from titan_mi100.metrics import Reporter, StepResult, peak_memory_gib
from titan_mi100.model.attention import Backend, Documents
from titan_mi100.model.attention_choice import NO_KERNEL, running_kernel
from titan_mi100.model_source import open_source
from titan_mi100.optimizer import build_optimizer, set_lr
from titan_mi100.parallelize import ParallelModel
from titan_mi100.resume import Found, check_same_run, find_checkpoint
from titan_mi100.run_folder import RunFolder, RunState, launcher_is_told, write_run_state
from titan_mi100.sealed import list_checkpoints
from titan_mi100.settings import Config, check, fingerprint


class Preempted(Exception):
    """The run was told to stop, and has saved; the message says where."""


def main(config: Config, preemption: Preemption) -> None:
    """Run the job and end the process with the exit code of docs/DESIGN.md."""
    rank = int(os.environ.get("RANK", "0"))
    folder: RunFolder | None = None
    again, together = "start again", True  # all ranks come to the same end
    setup_logging(rank)
    try:
        world = distributed.init_distributed()
        folder = RunFolder(config, world)
        again = f"start again with job.run_folder = {folder.path}, without checkpoint.fresh: it resumes"
        train(config, world, folder.path, preemption)
        ended = RunState("done", 0, "", "to train on, raise training.steps or epochs")
    except UserError as error:
        ended = RunState("bad_input", 2, str(error), "mend what the message names, then start again")
    except Preempted as error:
        ended = RunState("preempted", 3, str(error), again)
    except NumericalError as error:
        mend = "lower optimizer.lr, or mend the rows and allow it with checkpoint.allow_changed = data; then "
        ended = RunState("numerical_abort", 4, str(error), mend + again)
    except SaveError as error:
        ended = RunState("save_failed", 1, str(error), "mend what the message names, then " + again)
    except KeyboardInterrupt:
        ended, together = RunState("interrupted", 1, "interrupted", again), False
    except Exception as error:
        log.error(traceback.format_exc())
        ended, together = RunState("crashed", 1, f"rank {rank}: {error!r}", f"look into train.log; {again}"), False
    if together and (rank == 0 or ended.exit_code == 1):
        for line in ended.message.splitlines():
            (log.warning if ended.exit_code == 3 else log.error)(line)
    if together and rank == 0:
        write_run_state(folder.path if folder else None, ended)
    elif not together and folder is not None:
        folder.note_crash(ended, rank)
    # A launcher that reads the code from its file gets no page about failed workers from torchrun.
    distributed.leave(0 if together and launcher_is_told() else ended.exit_code, together)


@dataclass
class Progress:
    """How far the run has come, as a checkpoint's trainer.json has it."""

    step: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    best_step: int | None = None  # of the lowest validation loss
    best_loss: float | None = None
    validation_due: bool = False  # the step's validation was given up: a resume begins with it
    plan: str = ""  # fingerprint of the rows to train and to validate on: another set's losses are not to be compared


def train(config: Config, world: World, folder: Path, preemption: Preemption) -> None:
    """Everything between the checked config and the last checkpoint."""
    distributed.seed_everything(config.training.seed)
    same_on_all_ranks(to_toml(config), "the config is not the same on all ranks; start them all with the same")
    with raise_together():
        spec = config.spec()
    log.info(f"{world.size} process(es), each on {distributed.device_name(world.device)[0]}")
    data = _load_data(config, world, folder)
    found = find_checkpoint(folder / "checkpoint", world)
    if found is not None:
        config = _keep_global_batch(config, world, found.manifest)
    layout, batch = config.layout(world.size), config.batch(world.size)
    log.info(
        f"layout: {layout.describe()}; a step is {batch.global_batch_size} rows = local_batch_size "
        f"{batch.local_batch_size} x accumulation {batch.gradient_accumulation_steps} x {batch.dp_degree} ranks, "
        f"{batch.global_batch_size * config.training.seq_len:,} tokens"
    )
    if layout.tp > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        log.warning("tensor parallel reaches across nodes: every layer waits for the network; keep it inside a node")
    about = _about(config, spec, data, layout, batch)
    if found is not None:
        check_same_run(found, about, config.checkpoint.allow_changed)
    stream = RowStream(data.train, batch, 0, config.training.seed)
    progress = _go_on(found, stream, data)
    epoch_rows = rows_per_epoch(len(data.train), batch.global_batch_size)
    rows_left = (config.training.epochs or 1) * epoch_rows - stream.rows_consumed
    steps = config.training.steps or progress.step + max(0, -(-rows_left // batch.global_batch_size))
    if (warmup := config.lr_scheduler.warmup_steps) > steps:
        raise UserError(f"[lr_scheduler] warmup_steps = {warmup} is more than the run's {steps} steps; use -1 for 3%")

    mesh = distributed.build_mesh(layout, world.device)
    dp_rank = stream.dp_rank = distributed.data_parallel_rank(mesh)
    counted = data.facts["sets"]["train"]
    supervised_share = counted["supervised"] / (counted["rows"] * config.training.seq_len)
    model = build_model(config, spec, mesh, world, supervised_share)
    load_weights(model, config, spec, found.path if found else None)
    optimizer = build_optimizer((p for _, p in model.trained_parameters()), config.optimizer, world.device)
    with raise_together():
        base, tokenizer = config.checkpoint.initial_load_path, config.tokenizer_path()
        assets = run_assets(spec, base, tokenizer, config.model.chat_template) if world.rank == 0 else {}
    checkpointer = Checkpointer(
        folder / "checkpoint",
        config.checkpoint.keep_latest_k,
        model,
        optimizer,
        world,
        in_background=config.checkpoint.async_mode == "async",
        assets=assets,
    )
    if found is not None:
        checkpointer.load(found.path)
        if progress.step >= steps:
            log.info(f"step {progress.step} of {steps} was reached before; raise training.steps or epochs to train on")

    reporter = _open_record(config, spec, data, folder, world, progress, steps, model.parts[0].model.backend)

    def told_to_stop() -> bool:
        return any_rank(preemption.reason, world.device)

    def validate() -> bool:
        """Whether this was the lowest loss so far; sets `validation_due` if it was given up to stop."""
        assert data.validation is not None
        loss = validation_loss(model, data.validation, batch, layout, dp_rank, told_to_stop)
        progress.validation_due = loss is None
        if loss is None:
            return False
        if reporter is not None:
            reporter.validation(progress.step, loss, bits_per_byte(loss, data.facts["sets"]["validation"]))
        is_best = math.isfinite(loss) and (progress.best_loss is None or loss < progress.best_loss)
        if is_best:
            progress.best_step, progress.best_loss = progress.step, loss
        return is_best

    trainer = Trainer(layout, batch, config.training.max_norm, model, optimizer, iter(stream))
    faults = FaultWatch(stream, data, folder, world, progress.step)
    saved = progress.step
    if progress.validation_due and data.validation is not None and validate() and config.checkpoint.keep_best:
        checkpointer.mark_best(progress.step)
    stopping = told_to_stop()
    while progress.step < steps and not stopping:
        progress.step += 1
        lr = config.optimizer.lr * lr_factor(config.lr_scheduler, progress.step, steps)
        set_lr(optimizer, lr)
        if config.lora.dropout:
            distributed.seed_dropout(config.training.seed, progress.step, mesh)
        result = trainer.step()
        if reporter is not None:
            reporter.step(progress.step, stream.rows_consumed / epoch_rows, lr, result)
        faults.record(progress.step, result)
        progress.skipped_steps += result.skipped
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if result.skipped else 0
        if progress.skipped_in_a_row >= config.training.max_nonfinite_steps:
            checkpointer.wait()
            if reporter is not None:
                reporter.close()
            raise faults.error(progress.step, progress.skipped_in_a_row)
        is_best = False
        if data.validation is not None and _due(progress.step, steps, config.validation.freq):
            is_best = validate() and config.checkpoint.keep_best
        notes = [bool(preemption.reason), checkpointer.has_failed()]  # ranks learn of them at different times
        stopping, failed = (count > 0 for count in sum_over_ranks(notes, world.device))
        if failed:
            checkpointer.wait()
        if stopping or is_best or _due(progress.step, steps, config.checkpoint.interval):
            state = {"step": progress.step, "loader": stream.state_dict(), "progress": asdict(progress)}
            best = progress.best_step if config.checkpoint.keep_best else None
            checkpointer.save(progress.step, state, about, best)
            saved = progress.step
    checkpointer.wait()
    if reporter is not None:
        reporter.close()
    if stopping and (progress.step < steps or progress.validation_due):
        why = preemption.reason or "another process was told to stop"
        where = f"step-{saved} holds all that was trained" if saved else "nothing was trained yet"
        raise Preempted(f"{why}: stopped after step {progress.step} of {steps}; {where}")
    if config.checkpoint.export_hf:
        _export(folder, progress.step, config, world)
    if world.rank == 0:
        _say_where(folder, config, progress)


def _open_record(
    config: Config,
    spec: model_spec.ModelSpec,
    data: Prepared,
    folder: Path,
    world: World,
    progress: Progress,
    steps: int,
    backend: Backend,
) -> Reporter | None:
    """Say what runs, and open rank 0's record of the run; None on the others. A collective."""
    device_words, arch, compute_units = distributed.device_name(world.device)
    adapters = model_spec.adapter_shapes(spec, config.lora.rank, config.lora.target_modules) if config.lora.rank else {}
    gpu = hardware.find_gpu(arch, compute_units)
    tflops = gpu.tflops.get(config.training.mixed_precision_param) if gpu else None
    peak = tflops * 1e12 * world.size if tflops else None
    dtype = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}[config.training.mixed_precision_param]
    documents = Documents.from_ends(collate(data.train, [0])["document_ends"])
    compute_dtype = getattr(torch, config.training.mixed_precision_param)
    kernel = running_kernel(backend, spec, documents, compute_dtype, world.device)
    log.info(f"attention kernel: {kernel}, compute in {dtype}")
    if kernel == NO_KERNEL and world.device.type != "cpu":
        log.warning("no fused attention kernel runs on this device: expect it to be slow and to take memory")
    reporter = None
    with raise_together():
        if world.rank == 0:
            ran = {"device": device_words, "processes": world.size, "attention_kernel": kernel, "compute_dtype": dtype}
            _write_explanation(folder, config, progress.step, ran)
            reporter = Reporter(
                folder,
                config.metrics,
                progress.step,
                progress.validation_due,
                steps,
                spec,
                peak,
                dtype,
                adapter_values=sum(map(math.prod, adapters.values())),
            )
    return reporter


def _keep_global_batch(config: Config, world: World, manifest: dict[str, Any]) -> Config:
    """The config with the accumulation that keeps the run's rows per step, where the layout has changed.

    Raises:
        UserError: there is none.
    """
    rows = manifest["fingerprints"]["global_batch_size"]
    batch = config.batch(world.size)
    if batch.global_batch_size == rows or "global_batch_size" in config.checkpoint.allow_changed:
        return config
    before = Batch(**{field.name: manifest["layout"][field.name] for field in fields(Batch)})
    try:
        accumulation = accumulation_for(rows, batch, before)
    except ValueError as error:
        raise UserError(str(error)) from None
    training = replace(config.training, gradient_accumulation_steps=accumulation, target_tokens_per_step=0)
    config = replace(config, training=training)
    log.warning(
        f"gradient_accumulation_steps is {accumulation} instead of {batch.gradient_accumulation_steps}, to keep the "
        f"run's {rows} rows per step"
    )
    if problems := check(config, world.size):
        raise UserError("\n".join(problems))
    return config


def _about(config: Config, spec: model_spec.ModelSpec, data: Prepared, layout: Layout, batch: Batch) -> dict[str, Any]:
    """What the run is made of, for the manifests of its checkpoints. A collective."""
    lora = {"lora": fingerprint(config.lora), "base": base_identity(config, spec)} if config.lora.rank else {}
    source = config.checkpoint.initial_load_path
    return {
        **({"lora": {**fingerprint(config.lora), "base": source}} if lora else {}),
        "layout": {**asdict(layout), **asdict(batch)},
        "data": data.facts["made_of"],
        "rows": len(data.train),
        "fingerprints": {
            "model": asdict(spec),
            "tokenizer": data.facts["tokenizer"],
            "data": data.facts["fingerprint"],
            "seed": config.training.seed,
            "global_batch_size": batch.global_batch_size,
            **lora,
        },
    }


def _go_on(found: Found | None, stream: RowStream, data: Prepared) -> Progress:
    """How far the run has come; sets the stream to its next row."""
    progress = Progress()
    if found is not None:
        progress = Progress(**found.trainer_state["progress"])
        before = found.manifest["rows"], found.manifest["fingerprints"]["global_batch_size"]
        now = len(data.train), stream.batch.global_batch_size
        rows = renumber(found.trainer_state["loader"]["rows_consumed"], before, now)
        stream.load_state_dict({"rows_consumed": rows})
    if progress.plan != data.facts["plan"]:
        if progress.best_step is not None:
            log.warning("the rows to validate on are others: the lowest loss so far does not count any more")
        progress = replace(progress, plan=data.facts["plan"], best_step=None, best_loss=None)
    return progress


def _due(step: int, steps: int, every: int) -> bool:
    """Whether something happens after this step that happens every so many steps (0: never) and after the last."""
    return step == steps or (every > 0 and step % every == 0)


class Trainer:
    """One optimizer step after another."""

    def __init__(
        self,
        layout: Layout,
        batch: Batch,
        max_norm: float,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        microbatches: Iterator[Microbatch],
    ) -> None:
        self._layout, self._batch, self._model, self._optimizer = layout, batch, model, optimizer
        self._max_norm, self._microbatches = max_norm, microbatches

    def step(self) -> StepResult:
        """Forward and backward of the step's microbatches, then the update: skipped on all ranks, leaving weights and
        optimizer as they are, if a loss or a gradient is not finite on any.
        """
        started = time.perf_counter()
        device, tp, pp = self._model.device, self._layout.tp, self._layout.pp
        microbatches = [next(self._microbatches) for _ in range(self._batch.gradient_accumulation_steps)]
        waited = time.perf_counter() - started

        # The loss is divided by the supervised tokens of the whole step, over all ranks, before the first backward:
        # the same gradient for every split of the rows over ranks and microbatches, and nothing to rescale later.
        counts = sum_over_ranks(_counts(microbatches), device)
        tokens, supervised, pairs = (round(count / (tp * pp)) for count in counts)  # these ranks read the same rows
        losses = self._model.forward_backward(microbatches, supervised).tolist()
        parameters = [parameter for _, parameter in self._model.trained_parameters()]
        gradients = measure_gradients(parameters, self._model.copies())
        # One sum for the norm, the loss and the flag: the ranks cannot come to different ends.
        mine = [gradients.squares, sum(losses) / tp, float(not gradients.finite)]
        squares, loss_sum, not_finite = sum_over_ranks(mine, device)
        grad_norm, mean_loss = math.sqrt(squares), loss_sum / max(supervised, 1)
        skipped = not_finite > 0 or not math.isfinite(squares + loss_sum)
        if not skipped:
            if 0 < self._max_norm < grad_norm:
                gradients.scale(self._max_norm / grad_norm)
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        peak_memory = max_over_ranks(peak_memory_gib(device), device)
        seconds = time.perf_counter() - started
        sent = self._model.gradient_bytes
        odd = [number for number, loss in enumerate(losses) if not math.isfinite(loss)]
        return StepResult(
            mean_loss, grad_norm, tokens, supervised, pairs, seconds, waited, peak_memory, sent, skipped, odd
        )


def _counts(microbatches: list[Microbatch]) -> list[float]:
    """Real tokens, supervised tokens, and (query, key) pairs inside documents."""
    tokens = supervised = pairs = 0
    for microbatch in microbatches:
        real = microbatch["document_ids"] != PADDING_DOCUMENT
        tokens += int(real.sum())
        supervised += int((microbatch["labels"] != IGNORE).sum())
        pairs += int((microbatch["positions"] + 1)[real].sum())
    return [tokens, supervised, pairs]


def _load_data(config: Config, world: World, folder: Path) -> Prepared:
    """The prepared data, made by one process of each node; the ledger goes into the run folder. A collective."""
    started = time.perf_counter()
    first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
    with raise_together():
        try:
            data = prepare_run(config, folder if world.rank == 0 else None, patience=0 if first_of_node else 1)
        finally:
            distributed.wait_for_all("data prepared")
    same_on_all_ranks(data.facts["plan"], "the data files are not the same on all nodes; copy them again")
    for line in data.facts["summary"]:
        log.info(line)
    for line in data.facts["warnings"]:
        log.warning(line)
    how = "already prepared" if data.cached else "prepared"
    log.info(f"data: {how} in {data.folder} ({time.perf_counter() - started:.2f} s)")
    return data


def _write_explanation(folder: Path, config: Config, last_step: int, ran: dict[str, Any]) -> None:
    """What a reader of the folder needs to know: the resolved config, versions, hardware, what really runs.

    Settings that an earlier start of the run had and this one changes are kept as `config-until-step-N.toml`.
    """
    path, text = folder / "config.toml", to_toml(config)
    if last_step and path.exists() and path.read_text(encoding="utf-8") != text:
        path.rename(folder / f"config-until-step-{last_step}.toml")
    path.write_text(text, encoding="utf-8")
    record = {
        **ran,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "tiktoken", "safetensors", "numpy")},
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "command": sys.argv,
    }
    (folder / "environment.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _export(folder: Path, step: int, config: Config, world: World) -> None:
    """Write the last checkpoint as an HF folder, unless an earlier start has. A collective."""
    target = folder / f"hf-step-{step}"
    with raise_together():
        try:
            if world.rank == 0 and not _is_exported(target, config):
                to_hf(open_source(folder / "checkpoint" / f"step-{step}"), target, config.checkpoint.export_dtype)
        except OSError as error:
            raise SaveError(f"{target}: could not be written: {error}") from error
        finally:
            distributed.wait_for_all("exported")


def _is_exported(target: Path, config: Config) -> bool:
    """Whether an earlier start has left what this one would; raises UserError if it is something else."""
    if not target.exists():
        return False
    wanted, found = config.checkpoint.export_dtype, config_dtype(read_assets(target))
    name = "adapter_config.json" if config.lora.rank else "config.json"
    if not (target / name).exists() or (not config.lora.rank and wanted not in ("auto", found)):
        raise UserError(f"{target}: is there, but is no export in {wanted}; remove it")
    return True


def _say_where(folder: Path, config: Config, progress: Progress) -> None:
    """The closing summary."""
    checkpoints = list_checkpoints(folder / "checkpoint")
    if progress.skipped_steps:
        log.warning(f"{progress.skipped_steps} steps were skipped: loss or gradients not finite; rows: {folder / FILE}")
    log.info(f"done. Everything is in {folder}:")
    log.info(f"  checkpoint/   {', '.join(path.name for path in checkpoints)}")
    if config.checkpoint.export_hf:
        what = "adapter, for peft and checkpoint_tools/merge_lora.py" if config.lora.rank else "for transformers, vLLM"
        log.info(f"  hf-step-{progress.step}/   {what}")
    if config.metrics.enable_tensorboard:
        log.info(f"  tensorboard/  tensorboard --logdir {folder / 'tensorboard'}")
    log.info("  ledger.csv (every row of the data), metrics.jsonl, train.log")
    log.info("  config.toml (resolved), environment.json, run_state.json")


if __name__ == "__main__":
    main(config, preemption)
