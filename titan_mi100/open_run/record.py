"""Files that describe a run to its reader (config.toml, environment.json), and the closing summary in the log."""

import json
import platform
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from titan_mi100.attention.base import NO_KERNEL, Documents, Shape
from titan_mi100.attention.running import running_kernel
from titan_mi100.config.as_text import sections, to_toml
from titan_mi100.config.hub import COMMITS_FILE
from titan_mi100.config.layout import Batch, Layout
from titan_mi100.config.settings import Config
from titan_mi100.data.loader import RowSource
from titan_mi100.data.microbatch import ENDS, collate
from titan_mi100.data.rows import Row
from titan_mi100.device import accelerator
from titan_mi100.files import durable
from titan_mi100.files.plain import LARGEST_CONFIG, read_plain
from titan_mi100.log import log
from titan_mi100.open_run.inputs import RunInputs
from titan_mi100.parallel import distributed
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import World, raise_together
from titan_mi100.planning import hardware
from titan_mi100.run.machine import describe
from titan_mi100.run.metrics import Reporter, RunFigures
from titan_mi100.run.sinks import Explanation, open_sinks
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.trainer import StepResult
from titan_mi100.wording import plural

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def open_record(
    inputs: RunInputs, model: ParallelModel, rows: RowSource, steps: int, mfu: Callable[[StepResult], float | None]
) -> Reporter | None:
    """Write the describing files and open rank 0's Reporter; None on other ranks, and without a run folder.
    A collective.

    Args:
        steps: the run's last step.
        mfu: of a step, see Forecast.mfu.
    """
    config, world, spec, progress, folder = inputs.config, inputs.world, inputs.spec, inputs.progress, inputs.folder
    if folder is None:
        return None
    device_words = distributed.device_name(world.device)[0]
    precision = config.training.mixed_precision_param
    kernel, dtype = _log_kernel(world, spec, model, rows.row(progress.rows_consumed), precision), _SHORT[precision]
    with raise_together():
        if world.rank == 0:
            layout = inputs.layout.describe()
            ran = {"device": device_words, "processes": world.size, "layout": layout, "attention_kernel": kernel}
            ran["compute_dtype"] = dtype
            about = _write_explanation(folder, config, progress.step, ran | code_and_machine(world))
            about = replace(about, settings=_flat(asdict(config), inputs.layout, inputs.batch))
            sinks = open_sinks(folder, config.metrics, about, progress.step)
            printed = (*model.objective.printed, *["draft_loss"] * (model.draft == "along"))
            figures = RunFigures(steps, rows.rows_per_epoch, mfu, dtype, printed)
            return Reporter(folder, config.metrics, figures, progress.step, progress.validation_due, sinks)
    return None


def _log_kernel(world: World, spec: ModelSpec, model: ParallelModel, row: Row, dtype: str) -> str:
    """The attention kernel that runs. Args: row: to try it on."""
    documents = Documents.from_ends(collate([row])[ENDS])
    shape = Shape(documents.batch, documents.seq, *spec.attention, dtype)
    kernel = running_kernel(model.parts[0].model.backend, shape, documents, world.device)
    log.info(f"attention kernel: {kernel}, compute in {_SHORT[dtype]}")
    if kernel == NO_KERNEL and world.device.type != "cpu":
        log.warning("no fused attention kernel runs on this device: expect it to be slow and to take memory")
    return kernel


def _write_explanation(folder: Path, config: Config, last_step: int, ran: dict[str, Any]) -> Explanation:
    """Write config.toml (resolved) and environment.json (versions, hardware, what really runs).

    If the settings have changed since an earlier start, its config.toml is kept as `config-until-step-N.toml`. If
    several starts failed at the same step, the file of the first one is kept: it made the run's steps so far. A
    config.toml that the user put there is kept in the same way.
    """
    of_every_start = replace(config.checkpoint, fresh=False, load_step=-1)  # a start with this file resumes the run
    path, environment = folder / "config.toml", folder / "environment.json"
    text = to_toml(replace(config, checkpoint=of_every_start))
    aside = folder / f"config-until-step-{last_step}.toml"
    before = [read_plain(file, LARGEST_CONFIG) for file in (path, environment) if file.exists()]
    made = folder / ".config.toml.new"
    durable.replace(made, text)  # first: a full disk must not cost the file that a restart reads
    if before and path.exists() and before[0] != text.encode() and not aside.exists():
        path.rename(aside)
    made.replace(path)
    record = {
        **ran,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "tiktoken", "safetensors", "numpy")},
        **accelerator.runtimes(),
        "command": sys.argv,
    }
    about = json.dumps(record, indent=1) + "\n"
    durable.replace(environment, about)
    if config.commits:
        durable.replace(folder / COMMITS_FILE, json.dumps(dict(config.commits), indent=1) + "\n")
    texts = {"config": text, "layout": str(ran.get("layout", "")), "environment": about}
    return Explanation({}, texts, is_known=before == [text.encode(), about.encode()])


def _flat(settings: dict[str, Any], layout: Layout, batch: Batch) -> dict[str, bool | int | float | str]:
    """Settings and layout, by "section.key"; values that are no numbers become text. Args: settings: all sections."""
    groups = {name: settings[name] for name, _ in sections()} | {"layout": {**asdict(layout), **asdict(batch)}}
    fields = {f"{group}.{key}": field for group, own in groups.items() for key, field in own.items()}
    return {name: field if isinstance(field, bool | int | float) else str(field) for name, field in fields.items()}


def code_and_machine(world: World) -> dict[str, Any]:
    """What environment.json holds about the code and this node."""
    cards = accelerator.count()
    machine = describe(world.device, cards)
    return {
        "version": import_module("titan_mi100").__version__,
        "commit": machine.commit,
        "host": socket.gethostname(),
        "os": platform.platform(),
        "gpus": [accelerator.properties(torch.device(world.device.type, card)).name for card in range(cards)],
        "driver": machine.driver,
        "triton": machine.triton,
    }


def log_machine(dtype: str, world: World) -> None:
    """Log the device, and advice on the dtype of the computation."""
    log.info(f"{plural(world.size, 'process')}, each on {distributed.device_name(world.device)[0]}")
    is_cpu = world.device.type == "cpu"
    if advice := hardware.dtype_advice(dtype, distributed.data_sheet(world.device), is_cpu):
        log.warning(advice)
