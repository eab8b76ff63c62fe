"""The trainer: `python -m titan_mi100.train --job.config_file X.toml`, under torchrun or alone.

Reads from top to bottom: what is prepared, then the loop, then one step.
"""

from titan_mi100.config import config_from_command_line, resolve_run_folder, to_toml

if __name__ == "__main__":
    config = config_from_command_line()  # before torch is imported: --help and mistakes answer at once

import json
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_mi100 import distributed, hardware, model_spec
from titan_mi100.checkpoint import Checkpointer, list_checkpoints
from titan_mi100.data.dataset import PADDING_DOCUMENT
from titan_mi100.data.loader import Microbatch, RowStream, build_loader, rows_per_epoch
from titan_mi100.data.prepare import Prepared, prepare_run
from titan_mi100.ddp import ReplicatedModel
from titan_mi100.distributed import World, max_over_ranks, raise_together, same_on_all_ranks, sum_over_ranks
from titan_mi100.errors import UserError
from titan_mi100.evaluate import validation_loss
from titan_mi100.hf_io import HFWeights
from titan_mi100.layout import IGNORE, Batch, Layout
from titan_mi100.logging import log, log_to_file, setup_logging
from titan_mi100.lr_scheduler import lr_factor
from titan_mi100.metrics import Reporter, StepResult, peak_memory_gib
from titan_mi100.model import attention
from titan_mi100.model.qwen3 import Qwen3, initial_values
from titan_mi100.optimizer import build_optimizer, set_lr
from titan_mi100.parallelize import ParallelModel, ShardedModel
from titan_mi100.pipeline import PipelinedModel, layers_per_stage
from titan_mi100.settings import Config


class NumericalError(RuntimeError):
    """Loss or gradient is not finite: going on would ruin the weights."""


def main(config: Config) -> None:
    """Run the job and end the process with the exit code of docs/DESIGN.md."""
    rank = int(os.environ.get("RANK", "0"))
    world, folder = World(rank, 1, torch.device("cpu")), None
    setup_logging(rank)
    try:
        world = distributed.init_distributed()
        folder = Path(distributed.from_rank_zero(lambda: str(_make_run_folder(config))))
        _write_run_state(world, folder, "running", 1, "killed, or still running")
        if world.rank == 0:
            log_to_file(folder / "train.log")
        train(config, world, folder)
    except (UserError, NumericalError) as error:
        state, code = ("bad_input", 2) if isinstance(error, UserError) else ("numerical_abort", 4)
        if world.rank == 0:
            for line in str(error).splitlines():
                log.error(line)
        if folder is None and "TITAN_LAUNCH_ID" in os.environ:  # the launcher named it, and reads the code from it
            folder = Path(config.job.run_folder)
        if folder is not None:
            _write_run_state(world, folder, state, code, str(error))
        distributed.leave(code)
    except KeyboardInterrupt:
        if folder is not None:
            _write_run_state(
                world, folder, "interrupted", 1, "interrupted; start again to go on from the last checkpoint"
            )
        distributed.leave(1)
    except Exception as error:
        log.error(traceback.format_exc())
        if folder is not None:
            _write_run_state(world, folder, "crashed", 1, repr(error))
        distributed.leave(1)
    _write_run_state(world, folder, "done", 0, "")
    distributed.leave(0)


def train(config: Config, world: World, folder: Path) -> None:
    """Everything between the checked config and the last checkpoint."""
    distributed.seed_everything(config.training.seed)
    with raise_together():
        spec = config.spec()
    layout, batch = config.layout(world.size), config.batch(world.size)
    device_words, arch, compute_units = distributed.device_name(world.device)
    log.info(f"{world.size} process(es), each on {device_words}")
    log.info(
        f"layout: {layout.describe()}; a step is {batch.global_batch_size} rows = local_batch_size "
        f"{batch.local_batch_size} x accumulation {batch.gradient_accumulation_steps} x {batch.dp_degree} ranks, "
        f"{batch.global_batch_size * config.training.seq_len:,} tokens"
    )

    if layout.tp > int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        log.warning("tensor parallel reaches across nodes: every layer waits for the network; keep it inside a node")

    data = _load_data(config, world, folder)
    steps_per_epoch = rows_per_epoch(len(data.train), batch.global_batch_size) // batch.global_batch_size
    steps = config.training.steps or (config.training.epochs or 1) * steps_per_epoch
    if (warmup := config.lr_scheduler.warmup_steps) > steps:
        raise UserError(f"[lr_scheduler] warmup_steps = {warmup} is more than the run's {steps} steps; use -1 for 3%")

    mesh = distributed.build_mesh(layout, world.device)
    dp_rank = distributed.data_parallel_rank(mesh)
    newest = distributed.from_rank_zero(lambda: next(reversed(list_checkpoints(folder / "checkpoint")), None))
    counted = data.facts["sets"]["train"]
    supervised_share = counted["supervised"] / (counted["rows"] * config.training.seq_len)
    model = build_model(config, spec, mesh, world, supervised_share)
    load_weights(model, config, spec, newest)
    optimizer = build_optimizer((p for _, p in model.named_parameters()), config.optimizer, world.device)
    loader = build_loader(RowStream(data.train, batch, dp_rank, config.training.seed))
    checkpointer = Checkpointer(folder / "checkpoint", config.checkpoint.keep_latest_k, model, optimizer, world)
    identity = {
        "model": spec.__dict__,
        "tokenizer": data.facts["tokenizer"],
        "data": data.facts["fingerprint"],
        "seed": config.training.seed,
        "global_batch_size": batch.global_batch_size,
    }
    last_step = 0
    if newest is not None:
        state = checkpointer.load(newest, identity)
        last_step = state["step"]
        loader.load_state_dict(state["loader"])
        if last_step >= steps:
            log.info(f"step {last_step} of {steps} was reached before; raise training.steps or epochs to train on")

    gpu = hardware.find_gpu(arch, compute_units)
    tflops = gpu.tflops.get(config.training.mixed_precision_param) if gpu else None
    peak = tflops * 1e12 * world.size if tflops else None
    dtype = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}[config.training.mixed_precision_param]
    kernel = _attention_kernel(config, spec, data.train, world.device)
    log.info(f"attention kernel: {kernel}, compute in {dtype}")
    if kernel == attention.NO_KERNEL and world.device.type != "cpu":
        log.warning("no fused attention kernel runs on this device: expect it to be slow and to take memory")
    reporter = None
    if world.rank == 0:
        ran = {"device": device_words, "processes": world.size, "attention_kernel": kernel, "compute_dtype": dtype}
        _write_explanation(folder, config, last_step, ran)
        reporter = Reporter(folder, config.metrics, last_step + 1, steps, steps_per_epoch, spec, peak, dtype)
    trainer = Trainer(layout, batch, config.training.max_norm, model, optimizer, iter(loader))
    for step in range(last_step + 1, steps + 1):
        lr = config.optimizer.lr * lr_factor(config.lr_scheduler, step, steps)
        set_lr(optimizer, lr)
        result = trainer.step()
        if reporter is not None:
            reporter.step(step, lr, result)
        if data.validation is not None and _due(step, steps, config.validation.freq):
            loss = validation_loss(model, data.validation, batch, layout, dp_rank)
            if reporter is not None:
                reporter.validation(step, loss)
        if _due(step, steps, config.checkpoint.interval):
            state = {"step": step, "loader": loader.state_dict(), "identity": identity}
            log.info(f"checkpoint {checkpointer.save(step, state)}")

    if reporter is not None:
        reporter.close()
        _say_where(folder, config)


def _due(step: int, steps: int, every: int) -> bool:
    """Whether something happens after this step that happens every so many steps (0: never) and after the last."""
    return step == steps or (every > 0 and step % every == 0)


def build_model(
    config: Config, spec: model_spec.ModelSpec, mesh: DeviceMesh, world: World, supervised_share: float
) -> ParallelModel:
    """The model in the config's layout, on this rank's device; its weights hold nothing yet.

    Args:
        supervised_share: of the training data's tokens, by which a pipeline's stages are balanced.
    """
    layout = config.layout(world.size)
    backend = attention.choose_backend(config.model.attention_backend, world.device.type)
    log.info(f"attention: {backend} ({attention.describe_choice(backend, world.device.type)})")
    if layout.pp > 1:
        layers = layers_per_stage(config, spec, layout.pp, supervised_share)
        microbatches = config.batch(world.size).gradient_accumulation_steps
        log.info(
            f"pipeline: {config.parallelism.pipeline_parallel_schedule}, {microbatches} microbatches, "
            f"layers per stage {', '.join(map(str, layers))}"
        )
        return PipelinedModel(spec, backend, layers, mesh, config, layout, microbatches, world.device)
    with torch.device("meta"):
        model = Qwen3(spec, backend)
    if layout.zero_stage == 0:
        return ReplicatedModel(model, mesh, config, world.device)
    return ShardedModel(model, mesh, config, layout, world.device)


def load_weights(model: ParallelModel, config: Config, spec: model_spec.ModelSpec, checkpoint: Path | None) -> None:
    """Each rank fills its own parts, from the HF folder or at random, unless a checkpoint will."""
    source = config.checkpoint.initial_load_path
    read: distributed.Read = partial(initial_values, spec, config.training.seed)
    origin = f"random weights, seed {config.training.seed}"
    if source and checkpoint is None:
        with raise_together():
            weights = HFWeights(source)
            weights.check(model_spec.parameter_shapes(spec))
        read, origin = weights.read, f"weights from {source}"
    if checkpoint is None:
        distributed.fill_parameters(model.named_parameters(), read)
    else:
        origin = f"resumed from {checkpoint}"
    name = config.model.flavor or Path(source).name
    log.info(f"Qwen3 {name}: {model_spec.parameter_count(spec):,} parameters, {origin}")


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
        """Forward and backward of the step's microbatches, then the update.

        Raises:
            NumericalError: loss or gradient norm is not finite; the weights are as before.
        """
        started = time.perf_counter()
        device, tp, pp = self._model.device, self._layout.tp, self._layout.pp
        microbatches = [next(self._microbatches) for _ in range(self._batch.gradient_accumulation_steps)]
        waited = time.perf_counter() - started

        # The loss is divided by the supervised tokens of the whole step, over all ranks, before the first backward:
        # the same gradient for every split of the rows over ranks and microbatches, and nothing to rescale later.
        counts = sum_over_ranks(_counts(microbatches), device)
        tokens, supervised, pairs = (round(count / (tp * pp)) for count in counts)  # these ranks read the same rows
        loss_sum = self._model.forward_backward(microbatches, supervised).item()
        parameters = [parameter for _, parameter in self._model.named_parameters()]
        grad_norm = distributed.clip_gradients(parameters, self._max_norm, self._model.copies())
        mean_loss = sum_over_ranks([loss_sum / tp], device)[0] / max(supervised, 1)
        if not (math.isfinite(mean_loss) and math.isfinite(grad_norm)):
            raise NumericalError(
                f"loss {mean_loss}, gradient norm {grad_norm}: not finite. The weights were not updated. "
                "Lower optimizer.lr or look at the data, and start again: it resumes from the newest checkpoint. If it "
                "stops at once, that one is ruined already: remove it"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        peak_memory = max_over_ranks(peak_memory_gib(device), device)
        seconds = time.perf_counter() - started
        sent = self._model.gradient_bytes
        return StepResult(mean_loss, grad_norm, tokens, supervised, pairs, seconds, waited, peak_memory, sent)


def _counts(microbatches: list[Microbatch]) -> list[float]:
    """Real tokens, supervised tokens, and (query, key) pairs inside documents."""
    tokens = supervised = pairs = 0
    for microbatch in microbatches:
        real = microbatch["document_ids"] != PADDING_DOCUMENT
        tokens += int(real.sum())
        supervised += int((microbatch["labels"] != IGNORE).sum())
        pairs += int((microbatch["positions"] + 1)[real].sum())
    return [tokens, supervised, pairs]


def _make_run_folder(config: Config) -> Path:
    folder = resolve_run_folder(config)
    try:
        (folder / "checkpoint").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); set job.run_folder or job.dump_folder") from None
    return folder


def _write_run_state(world: World, folder: Path, state: str, exit_code: int, message: str) -> None:
    """How the run stands, for the launcher: torchrun turns every worker's exit code into 1."""
    if world.rank == 0:
        record = {
            "state": state,
            "exit_code": exit_code,
            "message": message,
            "launch_id": os.environ.get("TITAN_LAUNCH_ID", ""),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            aside = folder / "run_state.tmp"
            aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            aside.replace(folder / "run_state.json")
        except OSError as error:
            log.error(f"{folder}: cannot be written to: {error.strerror}")


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
        **{name: version(name) for name in ("torch", "torchdata", "tiktoken", "safetensors", "numpy")},
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "command": sys.argv,
    }
    (folder / "environment.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _attention_kernel(config: Config, spec: model_spec.ModelSpec, rows: Any, device: torch.device) -> str:
    """The kernel that the run's shapes and dtype lead to, tried on the first row's documents."""
    backend = attention.choose_backend(config.model.attention_backend, device.type)
    dtype = getattr(torch, config.training.mixed_precision_param)
    documents = attention.prepare(backend, torch.from_numpy(rows.row(0).document_ids)[None].to(device))

    def heads(number: int) -> Tensor:
        shape = (1, config.training.seq_len, number, spec.head_dim)
        return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)

    q, k, v = heads(spec.num_attention_heads), heads(spec.num_key_value_heads), heads(spec.num_key_value_heads)
    return attention.kernel_name(backend, q, k, v, documents)


def _say_where(folder: Path, config: Config) -> None:
    """The closing summary."""
    checkpoints = list_checkpoints(folder / "checkpoint")
    log.info(f"done. Everything is in {folder}:")
    log.info(f"  checkpoint/   {', '.join(path.name for path in checkpoints)}")
    if config.metrics.enable_tensorboard:
        log.info(f"  tensorboard/  tensorboard --logdir {folder / 'tensorboard'}")
    log.info("  ledger.csv (every row of the data), metrics.jsonl, train.log")
    log.info("  config.toml (resolved), environment.json, run_state.json")


if __name__ == "__main__":
    main(config)
