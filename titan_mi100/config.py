"""The run's settings: one dataclass per TOML section, loading, command-line overrides, checking. Imports no torch.

`python -m titan_mi100.config ARGS` checks the arguments of a run and prints its folder; `--help` lists every key.
"""

import difflib
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100 import model_spec
from titan_mi100.errors import UserError
from titan_mi100.layout import Batch, Layout, resolve_batch, resolve_layout

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def _key(default: Any, doc: str, *, choices: tuple[str, ...] = (), low: float = 0, path: bool = False) -> Any:
    """A config key. `low` is the least allowed number; `path` values in a TOML file are relative to that file."""
    return field(default=default, metadata={"doc": doc, "choices": choices, "low": low, "path": path})


@dataclass(frozen=True)
class JobConfig:
    config_file: str = _key("", "TOML file to read (command line only)")
    description: str = _key("", "free text, kept with the run")
    dump_folder: str = _key("outputs", "where run folders are made that have no name", path=True)
    run_folder: str = _key("", "this run's folder, resumed if it holds a checkpoint; empty: a new one", path=True)


@dataclass(frozen=True)
class ModelConfig:
    flavor: str = _key("", f"{', '.join(model_spec.PRESETS)}; empty: config.json in checkpoint.initial_load_path")
    tokenizer_path: str = _key("", "HF folder with the tokenizer; empty: checkpoint.initial_load_path", path=True)
    attention_backend: str = _key("sdpa", "attention implementation; eager is the reference", choices=("sdpa", "eager"))


@dataclass(frozen=True)
class DataConfig:
    path: str = _key("", "training data: a JSONL file", path=True)
    format: str = _key(
        "auto", "messages, or two named columns; auto: by the keys", choices=("auto", "messages", "columns")
    )
    prompt_column: str = _key("", "column with the user's text, for format columns")
    response_column: str = _key("", "column with the assistant's text, for format columns")
    overlong: str = _key(
        "drop", "a conversation longer than seq_len: drop (counted) or error", choices=("drop", "error")
    )
    validation_path: str = _key("", "JSONL file to validate on", path=True)
    validation_fraction: float = _key(0.0, "share of data.path kept for validation, chosen by a hash of the content")


@dataclass(frozen=True)
class TrainingConfig:
    seq_len: int = _key(1024, "tokens per packed row (S)", low=2)
    local_batch_size: int = _key(1, "rows per data-parallel rank and forward (B_micro)", low=1)
    gradient_accumulation_steps: int = _key(0, "forwards per optimizer step (GA); 0: one, or by the token target")
    target_tokens_per_step: int = _key(0, "tokens per optimizer step over all ranks, from which GA is derived; 0: off")
    steps: int = _key(0, "optimizer steps in all; 0: by epochs")
    epochs: int = _key(0, "passes over the data; 0 with steps = 0: one")
    max_norm: float = _key(1.0, "clip the gradient's global norm to this; 0: off")
    seed: int = _key(42, "seed of initial weights and row order")
    mixed_precision_param: str = _key(
        "bfloat16", "dtype of the computation; master weights are float32", choices=("bfloat16", "float32")
    )
    mixed_precision_reduce: str = _key(
        "float32", "dtype in which gradients are reduced", choices=("float32", "bfloat16")
    )


@dataclass(frozen=True)
class ValidationConfig:
    freq: int = _key(0, "optimizer steps between validations; 0: only after the last step")


@dataclass(frozen=True)
class OptimizerConfig:
    lr: float = _key(2e-5, "peak learning rate of AdamW")
    beta1: float = _key(0.9, "decay of the first moment")
    beta2: float = _key(0.95, "decay of the second moment")
    eps: float = _key(1e-8, "added to the denominator")
    weight_decay: float = _key(0.1, "decoupled weight decay of matrices; norms have none")


@dataclass(frozen=True)
class LRSchedulerConfig:
    warmup_steps: int = _key(-1, "steps of linear warmup; -1: 3% of the steps", low=-1)
    decay_type: str = _key("cosine", "shape of the decay", choices=("cosine", "linear", "sqrt", "constant"))
    decay_ratio: float = _key(1.0, "share of the steps that decay, at the end; under 1: warmup-stable-decay (WSD)")
    min_lr_factor: float = _key(0.0, "final learning rate as a share of lr")


@dataclass(frozen=True)
class ParallelismConfig:
    data_parallel_shard_degree: int = _key(-1, "FSDP2 ranks; -1: all processes", low=-1)
    fsdp_reshard_after_forward: str = _key(
        "default",
        "free gathered weights after forward; default: all blocks but the last, which backward needs first",
        choices=("default", "always", "never"),
    )
    fsdp_reduce_every_microbatch: bool = _key(
        True,
        "reduce gradients after each forward; false: once per step, less traffic, but whole fp32 gradients per rank",
    )


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    mode: str = _key(
        "selective",
        "recompute in backward: nothing, each block but its attention, or each block whole",
        choices=("none", "selective", "full"),
    )


@dataclass(frozen=True)
class CompileConfig:
    enable: bool = _key(False, "torch.compile each block, but for its attention")
    backend: str = _key("inductor", "torch.compile's backend", choices=("inductor", "aot_eager"))


@dataclass(frozen=True)
class CheckpointConfig:
    initial_load_path: str = _key("", "HF folder of weights to start from; empty: random weights", path=True)
    interval: int = _key(500, "optimizer steps between checkpoints; 0: only after the last step")
    keep_latest_k: int = _key(2, "complete checkpoints to keep; 0: all")
    fresh: bool = _key(False, "start over in a new folder beside job.run_folder instead of resuming")


@dataclass(frozen=True)
class MetricsConfig:
    log_freq: int = _key(1, "optimizer steps between printed lines", low=1)
    enable_tensorboard: bool = _key(True, "write TensorBoard events")


@dataclass(frozen=True)
class Config:
    """All settings of a run, checked. `spec`, `layout` and `batch` are what follows from them."""

    job: JobConfig = field(default_factory=JobConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)

    def spec(self) -> model_spec.ModelSpec:
        """The model's shape: the preset, or `config.json` of the folder whose weights are loaded.

        Raises:
            UserError: unknown preset, unreadable config.json, or the two disagree.
        """
        flavor, folder = self.model.flavor, self.checkpoint.initial_load_path
        if flavor and flavor not in model_spec.PRESETS:
            raise UserError(f"[model] flavor = {flavor!r} is not known{_did_you_mean(flavor, model_spec.PRESETS)}")
        if not flavor and not folder:
            raise UserError("[model] flavor is not set; name a preset, or an HF folder in checkpoint.initial_load_path")
        if not folder:
            return model_spec.PRESETS[flavor]
        spec = model_spec.read_hf_config(folder)
        if flavor and (differing := model_spec.differences(model_spec.PRESETS[flavor], spec)):
            raise UserError(
                f"[model] flavor = {flavor!r} is not the model in {folder} (preset, folder: {'; '.join(differing)}); "
                "leave flavor out to take the folder's"
            )
        return spec

    def tokenizer_folder(self) -> str:
        return self.model.tokenizer_path or self.checkpoint.initial_load_path

    def layout(self, world_size: int) -> Layout:
        return resolve_layout(self.parallelism.data_parallel_shard_degree, world_size)

    def batch(self, world_size: int) -> Batch:
        t = self.training
        return resolve_batch(
            t.local_batch_size,
            t.gradient_accumulation_steps,
            t.target_tokens_per_step,
            t.seq_len,
            self.layout(world_size).dp_degree,
        )


class _Setting(NamedTuple):
    """A value that somebody gave, and where."""

    value: Any
    where: str  # "file.toml: [section] key" or "--section.key", for messages
    folder: Path  # what a relative path is relative to
    is_text: bool  # from the command line: to be parsed


def _sections() -> Iterator[tuple[str, type]]:
    for section in fields(Config):
        yield section.name, section.default_factory  # type: ignore[misc]


def _keys(section: type) -> tuple[Any, ...]:
    """The section's fields; `type` is a class in each, for this module does not postpone annotations."""
    return fields(section)


def load_config(argv: Sequence[str], world_size: int = 1) -> Config:
    """Read the config file that `argv` names, with its `base` files, apply overrides, check everything.

    Args:
        argv: `--job.config_file x.toml`, then any `--section.key value` (or `=value`; a lone `--section.key` is true).
        world_size: number of processes of the run.

    Raises:
        UserError: all that is wrong, one line each.
    """
    errors: list[str] = []
    overrides = _parse_arguments(argv, errors)
    settings: dict[tuple[str, str], _Setting] = {}
    config_file = overrides.get(("job", "config_file"))
    if config_file is not None:
        _read_toml(Path(config_file.value), settings, errors, chain=())
    settings.update(overrides)
    built, refused = {}, set()
    for name, section in _sections():
        values = {}
        for key in _keys(section):
            if key.metadata["path"] and key.default:
                values[key.name] = os.path.abspath(key.default)
            if (setting := settings.get((name, key.name))) is not None:
                values[key.name], problem = _convert(key, setting)
                if problem:
                    errors.append(f"{setting.where} = {setting.value!r} {problem}")
                    refused.add((name, key.name))
        built[name] = section(**values)
    config = Config(**built)
    source = f"{config_file.value}: " if config_file is not None else ""
    if not config_file or os.path.isfile(config_file.value):  # else the one message that counts is there already
        for error in check(config, world_size):
            named = re.match(r"\[(\w+)\] (\w+)", error)
            key_id = (named[1], named[2]) if named else ("", "")
            if key_id in settings and named:
                error = settings[key_id].where + error[named.end() :]
            elif named:
                error = source + error
            if key_id not in refused:
                errors.append(error)
    if errors:
        raise UserError("\n".join(errors))
    return config


def _parse_arguments(argv: Sequence[str], errors: list[str]) -> dict[tuple[str, str], _Setting]:
    found: dict[tuple[str, str], _Setting] = {}
    known = {f"{name}.{key.name}": key for name, section in _sections() for key in _keys(section)}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, has_value, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name not in known:
            errors.append(f"command line: {argument!r} is not an option{_did_you_mean(name, known, '--')}")
            if rest and not rest[0].startswith("--"):
                rest.pop(0)  # its value, so that one mistake gives one message
            continue
        if not has_value:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif known[name].type is bool:
                value = "true"
            else:
                errors.append(f"command line: --{name} needs a value")
                continue
        section, key = name.split(".")
        found[section, key] = _Setting(value, f"--{name}", Path.cwd(), is_text=True)
    return found


def _read_toml(
    path: Path, settings: dict[tuple[str, str], _Setting], errors: list[str], chain: tuple[Path, ...]
) -> None:
    """Add the file's settings, its `base` first, so that the file overrides it."""
    if path.resolve() in chain:
        errors.append(f"{path}: `base` comes back to a file that is being read: {' -> '.join(map(str, chain))}")
        return
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        errors.append(f"{path}: no such file")
        return
    except (OSError, ValueError) as error:
        errors.append(f"{path}: cannot be read as TOML: {error}")
        return
    base = document.pop("base", None)
    if isinstance(base, str):
        _read_toml(path.parent / base, settings, errors, (*chain, path.resolve()))
    elif base is not None:
        errors.append(f"{path}: base = {base!r} is not the name of a TOML file")
    sections = {name: {key.name for key in _keys(section)} for name, section in _sections()}
    for section, values in document.items():
        if section not in sections:
            errors.append(f"{path}: [{section}] is not a section{_did_you_mean(section, sections)}")
        elif not isinstance(values, dict):
            errors.append(f"{path}: {section} = {values!r} must be a section, [{section}]")
        else:
            for key, value in values.items():
                where = f"{path}: [{section}] {key}"
                if key not in sections[section]:
                    elsewhere = [f"[{name}] {key}" for name, keys in sections.items() if key in keys]
                    hint = f"; did you mean {elsewhere[0]}?" if elsewhere else _did_you_mean(key, sections[section])
                    errors.append(f"{where} is not a key{hint}")
                elif (section, key) == ("job", "config_file"):
                    errors.append(f"{where} can only be given on the command line; use `base` to inherit")
                else:
                    settings[section, key] = _Setting(value, where, path.parent, is_text=False)


def _did_you_mean(word: str, known: Any, prefix: str = "") -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {prefix}{close[0]}?" if close else "; --help lists them"


def _convert(key: Any, setting: _Setting) -> tuple[Any, str]:
    """The value in the key's type and "", or the key's default and what is wrong."""
    value, rules = setting.value, key.metadata
    if setting.is_text and key.type is not str:
        try:
            value = {"true": True, "false": False}[value.lower()] if key.type is bool else key.type(value)
        except (KeyError, ValueError):
            value = setting.value  # fails the type check below
    if key.type is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    problem = ""
    if type(value) is not key.type:
        kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        problem = f"must be {kinds[key.type]}"
    elif rules["choices"] and value not in rules["choices"]:
        problem = f"must be one of: {', '.join(rules['choices'])}"
    elif key.type in (int, float) and not (math.isfinite(value) and value >= rules["low"]):
        problem = f"must be at least {rules['low']}"
    if problem:
        return key.default, problem
    if rules["path"] and value:
        value = os.path.abspath(setting.folder / os.path.expanduser(value))
    return value, ""


def check(config: Config, world_size: int) -> list[str]:
    """Everything that is wrong with the combination of settings, one message each."""
    errors = _check_paths(config)
    training, data, schedule = config.training, config.data, config.lr_scheduler
    if training.steps and training.epochs:
        errors.append("[training] steps and epochs are both set; set one of them to 0")
    if training.gradient_accumulation_steps and training.target_tokens_per_step:
        errors.append("[training] gradient_accumulation_steps and target_tokens_per_step are both set; set one to 0")
    if training.steps and schedule.warmup_steps > training.steps:
        errors.append(
            f"[lr_scheduler] warmup_steps = {schedule.warmup_steps} is more than [training] steps = "
            f"{training.steps}; lower it, or use -1 for 3%"
        )
    if config.optimizer.eps == 0:
        errors.append("[optimizer] eps = 0 divides by zero for rows that were never seen; the usual is 1e-8")
    for section, key in (
        ("lr_scheduler", "decay_ratio"),
        ("lr_scheduler", "min_lr_factor"),
        ("optimizer", "beta1"),
        ("optimizer", "beta2"),
        ("data", "validation_fraction"),
    ):
        value = getattr(getattr(config, section), key)
        below_one = key not in ("decay_ratio", "min_lr_factor")
        if value > 1 or (below_one and value == 1):
            errors.append(f"[{section}] {key} = {value} must be {'less than' if below_one else 'at most'} 1")
    if bool(data.prompt_column) != bool(data.response_column):
        errors.append("[data] prompt_column and response_column go together; set both or neither")
    if data.format == "columns" and not data.prompt_column:
        errors.append('[data] format = "columns" needs prompt_column and response_column')
    if data.format == "messages" and data.prompt_column:
        errors.append('[data] prompt_column is set, but format = "messages"; remove one of them')
    if data.validation_path and data.validation_fraction:
        errors.append("[data] validation_path and validation_fraction are both set; keep one")
    if config.validation.freq and not (data.validation_path or data.validation_fraction):
        errors.append(
            f"[validation] freq = {config.validation.freq} needs [data] validation_path or validation_fraction"
        )
    if config.checkpoint.fresh and not config.job.run_folder:
        errors.append("[checkpoint] fresh needs job.run_folder: a run without a name always starts over")
    try:
        config.layout(world_size)
    except ValueError as error:
        errors.append(str(error))
    try:
        spec = config.spec()
        if training.seq_len > spec.max_position_embeddings:
            errors.append(
                f"[training] seq_len = {training.seq_len} is more than the model's max_position_embeddings = "
                f"{spec.max_position_embeddings}"
            )
    except UserError as error:
        errors.extend(str(error).splitlines())
    return errors


def _check_paths(config: Config) -> list[str]:
    errors = []
    if not config.data.path:
        errors.append("[data] path is not set; name a JSONL file")
    for key in ("path", "validation_path"):
        value = getattr(config.data, key)
        if value and not os.path.isfile(value):
            errors.append(f"[data] {key} = {value!r} is not a file")
    load = config.checkpoint.initial_load_path
    if load and not os.path.isdir(load):
        errors.append(f"[checkpoint] initial_load_path = {load!r} is not a folder")
    folder = config.tokenizer_folder()
    key = "[model] tokenizer_path" if config.model.tokenizer_path else "[checkpoint] initial_load_path"
    if not folder:
        errors.append("[model] tokenizer_path is not set, nor is checkpoint.initial_load_path; name an HF folder")
    elif not any(os.path.isfile(os.path.join(folder, name)) for name in ("tokenizer.json", "vocab.json")):
        errors.append(
            f"{key} = {folder!r} holds neither tokenizer.json nor vocab.json with merges.txt; "
            "set model.tokenizer_path to a folder that does"
        )
    return errors


def resolve_run_folder(config: Config) -> Path:
    """The folder of this run: the named one; with checkpoint.fresh, one beside it; else a new one named by the time."""
    if not config.job.run_folder:
        stem = Path(config.job.config_file).stem or "run"
        return Path(config.job.dump_folder).resolve() / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = Path(config.job.run_folder), 1
    while config.checkpoint.fresh and folder.exists():
        number += 1
        folder = Path(f"{config.job.run_folder}-{number}")
    return folder


def to_toml(config: Config) -> str:
    """The whole config as TOML, with each key's doc; `load_config` reads it back to the same."""
    lines = []
    for name, section in _sections():
        lines += ["", f"[{name}]"]
        for key in _keys(section):
            if key.name != "config_file":
                value = getattr(getattr(config, name), key.name)
                lines.append(f"{key.name} = {_toml_value(value)}  # {key.metadata['doc']}")
    return "\n".join(lines[1:]) + "\n"


def _toml_value(value: str | bool | int | float) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)


def help_text() -> str:
    lines = [
        "usage: ./run_train.sh [--nproc_per_node N] [--job.config_file X.toml] [--section.key value ...]",
        "",
        'Every key, with its type and default. In a TOML file: [section] key = value, and base = "other.toml"',
        "inherits. Relative paths are relative to the TOML file, or on the command line to the current folder.",
    ]
    for name, section in _sections():
        lines += ["", f"[{name}]"]
        for key in _keys(section):
            choices = f" ({' | '.join(key.metadata['choices'])})" if key.metadata["choices"] else ""
            head = f"  --{name}.{key.name}  {key.type.__name__} = {_toml_value(key.default)}"
            lines += [f"{head:<64} {key.metadata['doc']}{choices}"]
    return "\n".join(lines)


def config_from_command_line() -> Config:
    """`load_config` for a program's start: prints the help and exits 0, or prints what is wrong and exits 2.

    One process of each node prints, since all of a node find the same. The world size comes from the launcher.
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if {"-h", "--help"} & set(sys.argv[1:]):
        if first:
            print(help_text())
        sys.exit(0)
    try:
        return load_config(sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1")))
    except UserError as error:
        if first:
            print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    checked = config_from_command_line()
    print(resolve_run_folder(checked))
