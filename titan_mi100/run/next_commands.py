"""The commands that make sense after a run: to ask the model, export, report, look at the data, or resume.

Each is printed as it can be pasted into a shell: with the run's paths, quoted where needed. A command that cannot work
for this run is left out.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_mi100.config.settings import Config, LoRAConfig
from titan_mi100.text.assets import is_corpus

CONFIG = "config.toml"  # in the run folder: the resolved settings


def after_run(folder: Path, config: Config, step: int) -> list[tuple[str, str]]:
    """Purpose and command, for a run that is done.

    Args:
        step: step of the checkpoint to use, and of the export if there is one.
    """
    checkpoint, export = folder / "checkpoint" / f"step-{step}", folder / f"hf-step-{step}"
    base = config.checkpoint.initial_load_path
    model = _model_options(config.lora, base, checkpoint, export)
    commands = []
    if model:
        commands.append(("ask", command("generate", *model, "--prompt", "Hello")))
    if export.exists():
        commands.append(("serve", _serve(config.lora, base, shown_path(export))))
        repository = re.sub(r"[^\w.-]", "-", folder.name, flags=re.ASCII)  # of the user who is logged in
        commands.append(("upload", shlex.join(["hf", "upload", repository, shown_path(export), "--private"])))
    else:
        commands.append(("export", to_export(folder, step)))
    commands.append(("report", command("report", shown_path(folder))))
    sources = [source.name for source in config.data.sources if not any(map(is_corpus, source.path))]
    if sources:
        which = ["--source", sources[0]] if len(config.data.sources) > 1 else []
        page = shown_path(folder / "data.html")
        commands.append(("data page", command("inspect", *_config_of(folder), *which, "--html", page)))
    if config.metrics.enable_tensorboard:
        program = _program("tensorboard", "tensorboard.main")
        commands.append(("curves", shlex.join([*program, "--logdir", shown_path(folder / "tensorboard")])))
    return commands


def to_measure_drafts(folder: Path, lora: LoRAConfig, base: str, step: int, data: str) -> str:
    """The command that measures a draft head behind a run. Args: step: as in after_run. data: a file with prompts."""
    checkpoint, export = folder / "checkpoint" / f"step-{step}", folder / f"hf-step-{step}"
    model = _model_options(lora, base, checkpoint, export)
    return command("evaluate acceptance", *model, "--data", shown_path(data), "--limit", "64")


def to_export(folder: Path, step: int, dtype: str = "auto") -> str:
    """The command that exports a checkpoint of the run. Args: dtype: of checkpoint.export_dtype."""
    named = shown_path(folder / "checkpoint" / f"step-{step}"), shown_path(folder / f"hf-step-{step}")
    options = ["--dtype", dtype] if dtype != "auto" else []
    return command("convert dcp-to-hf", "--input_dir", named[0], "--output_dir", named[1], *options)


def to_resume(folder: Path, processes: int, local_processes: int) -> str:
    """How to resume the run in this folder: the command, or in words where it was started on several nodes.

    Args:
        processes: number of processes of the run.
        local_processes: number of processes on this node.
    """
    if processes != local_processes or not (folder / CONFIG).exists():  # the first start has not come to writing it
        return f"to resume, start again with job.run_folder = {folder}, without checkpoint.fresh and load_step"
    where = ["--job.run_folder", shown_path(folder), "--nproc_per_node", str(processes)]
    return f"to resume: {command('train', *_config_of(folder), *where)}"


def shown_path(path: str | Path) -> str:
    """The path as a user would type it: relative where it is below the current folder."""
    path = str(path)
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):  # the current folder is gone
        return path
    return path if relative.startswith(("..", "-")) else relative


def command(words: str, *arguments: str) -> str:
    """A command of ours for the shell. Args: words: of doors.COMMANDS."""
    return shlex.join([*_program("titan-mi100", "titan_mi100"), *words.split(), *arguments])


def _program(name: str, module: str) -> list[str]:
    """How to start a program of this environment. Where it is not active, its path is written."""
    ours = Path(sys.executable).parent / name
    if shutil.which(name) == str(ours):
        return [name]
    return [shown_path(ours)] if ours.exists() else [shown_path(sys.executable), "-m", module]


def _config_of(folder: Path) -> tuple[str, str]:
    return "--job.config_file", shown_path(folder / CONFIG)


def _model_options(lora: LoRAConfig, base: str, checkpoint: Path, export: Path) -> Sequence[str]:
    """Options of `generate` that name what the run has trained; none: adapters whose base has no weights of its own."""
    trained = shown_path(export if export.exists() else checkpoint)
    if not lora.rank:
        return ("--model", trained)
    return ("--model", shown_path(base), "--adapter", trained) if base else ()


def _serve(lora: LoRAConfig, base: str, export: str) -> str:
    """vLLM's command. An adapter's folder is the tokenizer, too: so stop token and prompts are its own."""
    if not lora.rank:
        return shlex.join(["vllm", "serve", export])
    # --max-lora-rank takes powers of two from 8 to 512
    rank = min(max(8, 1 << (max(lora.rank, lora.expert_rank) - 1).bit_length()), 512)
    adapter = ("--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"tuned={export}")
    return shlex.join(["vllm", "serve", shown_path(base), "--tokenizer", export, *adapter])
