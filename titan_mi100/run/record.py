"""What a run leaves in its folder for its reader: the resolved config, what really ran, and where everything is."""

import json
import platform
import shlex
import sys
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from titan_mi100.attention.base import NO_KERNEL, Documents, Shape
from titan_mi100.attention.running import running_kernel
from titan_mi100.checkpoint.sealed import list_checkpoints
from titan_mi100.config import hardware
from titan_mi100.config.as_text import sections, to_toml
from titan_mi100.config.costs import flops_of_steps
from titan_mi100.config.model_spec import ModelSpec
from titan_mi100.config.settings import Config
from titan_mi100.data.loader import RowSource, collate
from titan_mi100.logging import log
from titan_mi100.parallel import distributed
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import World, raise_together
from titan_mi100.run.faults import FILE
from titan_mi100.run.metrics import SAMPLES, Reporter
from titan_mi100.run.progress import Progress
from titan_mi100.run.sinks import Explanation, open_sinks

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def open_record(
    folder: Path,
    config: Config,
    world: World,
    spec: ModelSpec,
    model: ParallelModel,
    rows: RowSource,
    progress: Progress,
    steps: int,
) -> Reporter | None:
    """Log what runs, and open rank 0's record of the run; None on the others. A collective.

    Args:
        steps: the run's last step.
    """
    device_words, arch, compute_units = distributed.device_name(world.device)
    dtype = _SHORT[config.training.mixed_precision_param]
    first = collate([rows.row(progress.rows_consumed)])  # to try the kernel on
    documents = Documents.from_ends(first["document_ends"])
    backend = model.parts[0].model.backend
    heads, precision = (spec.num_attention_heads, spec.num_key_value_heads), config.training.mixed_precision_param
    shape = Shape(documents.batch, documents.seq, *heads, spec.head_dim, precision)
    kernel = running_kernel(backend, shape, documents, world.device)
    log.info(f"attention kernel: {kernel}, compute in {dtype}")
    if kernel == NO_KERNEL and world.device.type != "cpu":
        log.warning("no fused attention kernel runs on this device: expect it to be slow and to take memory")
    gpu = hardware.find_gpu(arch, compute_units)
    tflops = gpu.tflops.get(config.training.mixed_precision_param) if gpu else None
    with raise_together():
        if world.rank == 0:
            layout = config.layout(world.size).describe()
            ran = {"device": device_words, "processes": world.size, "layout": layout, "attention_kernel": kernel}
            ran["compute_dtype"] = dtype
            about = _write_explanation(folder, config, progress.step, ran)
            about = replace(about, settings=_flat(config, world.size), chosen=_chosen(config, world.size))
            flags = config.metrics.enable_tensorboard, config.metrics.enable_wandb
            sinks = open_sinks(folder, *flags, about, progress.step)
            return Reporter(
                folder,
                config.metrics,
                steps,
                rows.rows_per_epoch,
                flops_of_steps(spec, config.lora),
                tflops * 1e12 * world.size if tflops else None,
                dtype,
                progress.step,
                progress.validation_due,
                sinks,
            )
    return None


def _write_explanation(folder: Path, config: Config, last_step: int, ran: dict[str, Any]) -> Explanation:
    """What a reader of the folder needs to know: the resolved config, versions, hardware, what really runs.

    Settings that an earlier start of the run had and this one changes are kept as `config-until-step-N.toml`; of
    several starts at a step those of the first, which made it. So is a config.toml that is not the run's.
    """
    of_every_start = replace(config.checkpoint, fresh=False, load_step=-1)  # who starts with the file goes on
    path, environment = folder / "config.toml", folder / "environment.json"
    text = to_toml(replace(config, checkpoint=of_every_start))
    aside = folder / f"config-until-step-{last_step}.toml"
    before = [file.read_bytes() for file in (path, environment) if file.exists()]
    if path.exists() and path.read_bytes() != text.encode() and not aside.exists():
        path.rename(aside)
    path.write_text(text, encoding="utf-8")
    record = {
        **ran,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "tiktoken", "safetensors", "numpy")},
        "hip": torch.version.hip,
        "cuda": torch.version.cuda,
        "command": sys.argv,
    }
    about = json.dumps(record, indent=1) + "\n"
    environment.write_text(about, encoding="utf-8")
    texts = {"config": text, "layout": str(ran.get("layout", "")), "environment": about}
    return Explanation({}, {}, texts, is_known=before == [text.encode(), about.encode()])


def _flat(config: Config, world_size: int) -> dict[str, bool | int | float | str]:
    """Config and layout by "section.key"; what is no number is text."""
    groups = {name: asdict(getattr(config, name)) for name, _ in sections()}
    groups["layout"] = {**asdict(config.layout(world_size)), **asdict(config.batch(world_size))}
    values = {f"{group}.{key}": value for group, own in groups.items() for key, value in own.items()}
    return {name: value if isinstance(value, bool | int | float) else str(value) for name, value in values.items()}


def _chosen(config: Config, world_size: int) -> dict[str, bool | int | float | str]:
    """The part of it that tells runs apart: what is not the default, and the layout in one text."""
    usual, left_out = _flat(Config(), 1), ("job.", "metrics.", "layout.")
    flat = _flat(config, world_size).items()
    changed = {name: value for name, value in flat if value != usual[name] and not name.startswith(left_out)}
    return {**changed, "layout": config.layout(world_size).describe()}


def log_where_everything_is(folder: Path, config: Config, progress: Progress) -> None:
    """The closing summary."""
    checkpoints = list_checkpoints(folder / "checkpoint")
    if progress.skipped_steps:
        log.warning(f"{progress.skipped_steps} steps were skipped: loss or gradients not finite; rows: {folder / FILE}")
    log.info(f"done. Everything is in {folder}:")
    log.info(f"  checkpoint/   {', '.join(path.name for path in checkpoints)}")
    if config.checkpoint.export_hf:
        what = "adapter, for peft and titan-mi100 convert merge-lora" if config.lora.rank else "for transformers, vLLM"
        log.info(f"  hf-step-{progress.step}/   {what}")
    if config.metrics.enable_tensorboard:
        log.info(f"  tensorboard/  tensorboard --logdir {folder / 'tensorboard'}")
    ledger = "ledger.csv (every row of the data), " if (folder / "ledger.csv").exists() else ""
    samples = f", {SAMPLES}" if (folder / SAMPLES).exists() else ""
    log.info(f"  {ledger}metrics.jsonl{samples}, train.log")
    log.info("  config.toml (resolved), environment.json, run_state.json")
    log.info(f"  report        python -m titan_mi100.report {shlex.quote(str(folder))}")
