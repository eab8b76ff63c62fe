"""Checks settings against each other, and returns the problems. Imports no torch."""

import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from titan_mi100.config import settings
from titan_mi100.config.as_text import toml_value
from titan_mi100.config.check_layout import MODEL_KEYS, check_layout, check_offload, check_split
from titan_mi100.config.hub import is_hub_name, no_such_model
from titan_mi100.config.problem import ConfigError, Problem
from titan_mi100.config.settings import (
    FINGERPRINTS,
    KL_FORMS,
    OF_POLICY,
    Config,
    DataConfig,
    DraftHeadConfig,
    LoRAConfig,
    ObjectiveConfig,
    ParallelismConfig,
    ProfilingConfig,
    TrainingConfig,
    ValidationConfig,
)
from titan_mi100.errors import UserError, did_you_mean
from titan_mi100.files.model import DRAFT_FILE, check_weights
from titan_mi100.files.patterns import matching_files, nearby
from titan_mi100.shapes.base import ALL_LINEAR, EXPERTS, ModelSpec, draft_shapes, parameter_shapes
from titan_mi100.shapes.families import ADAPTED, FAMILIES, LINEARS, known_fields
from titan_mi100.text import assets
from titan_mi100.text.judge import judge_of
from titan_mi100.wording import bytes_in_words, has_control_characters, some

# Pairs of keys that exclude each other. One on the command line replaces the other in the file.
ALTERNATIVES = (
    (("training", "steps"), ("training", "epochs")),
    (("training", "gradient_accumulation_steps"), ("training", "target_tokens_per_step")),
    (("data", "weights"), ("data", "repeats")),
    (("data", "path"), ("data", "source")),
    (("data", "validation_path"), ("data", "validation_fraction")),
)
# what every run imports, and the oldest version; as in pyproject.toml
_PACKAGES = {
    "torch": "2.8", "torchdata": "0.11", "tiktoken": "0.13", "tokenizers": "0.21", "jinja2": "3.1.6",
    "safetensors": "0.4.5", "tqdm": "4.66.3", "numpy": "1.26",
}  # fmt: skip
_TAKEN = ("checkpoint", "tensorboard", "logs")  # names that the run folder needs itself
_OF_TEMPLATES = ("system_prompt", "special_in_content", "empty_think", "earlier_thinking", *assets.VARIABLES)  # [data]
# key, values of it (none: its default) -> keys of its section that have no effect with them
_IDLE: tuple[tuple[str, tuple[Any, ...], tuple[str, ...]], ...] = (
    ("parallelism.pipeline_parallel_degree", (), ("pipeline_parallel_schedule", "pipeline_parallel_layers_per_stage")),
    ("parallelism.powersgd_rank", (), ("powersgd_start_step", "powersgd_warm_start", "powersgd_error_feedback")),
    ("model.yarn_factor", (), ("yarn_original_max_position_embeddings",)),
    ("training.mixed_precision_param", ("float64",), ("mixed_precision_reduce",)),
    ("training.loss_spike_sigmas", (0,), ("skip_loss_spikes",)),
    ("validation.prompts", (), ("prompt_tokens",)),
    ("validation.metric", (), ("judge",)),
    ("lr_scheduler.decay_type", ("constant",), ("decay_ratio", "min_lr_factor")),
    ("profiling.enable_profiling", (), ("profile_freq", "profile_steps", "save_traces_folder")),
    ("profiling.enable_memory_snapshot", (), ("save_memory_snapshot_folder",)),
    ("lora.rank", (), ("alpha", "dropout", "target_modules", "base", "base_model_name_or_path")),
    ("lora.rank", (), ("expert_rank", "expert_alpha", "scaling", "b_lr_ratio", "trainable_tokens")),
    ("compile.enable", (), ("backend",)),
    ("draft_head.train", (), ("lr", "weight", "fresh")),
    ("draft_head.train", ("after",), ("weight",)),
    ("checkpoint.export_hf", (), ("export_dtype",)),
    ("watchdog.seconds", (0,), ("start_seconds", "compile_seconds", "save_seconds", "validation_seconds")),
    ("data.on_bad_row", (), ("max_bad_rows",)),
    ("data.format", ("text", "tokens"), ("loss", "null_arguments", *_OF_TEMPLATES)),
    ("objective.name", ("sft", "distill", "policy"), ("loss", "beta", "label_smoothing", "gamma", "sft_weight")),
    ("objective.name", ("sft", "preference", "policy"), ("top_k", "teacher_weight", "rest")),
    ("objective.name", ("sft", "preference"), ("teacher",)),
    ("objective.name", ("sft", "preference", "distill"), OF_POLICY),
    ("objective.cut_off", ("mask", "keep"), ("cut_off_tokens",)),
    ("objective.kl_weight", (0,), ("kl",)),
    ("objective.ratio", ("cispo",), ("clip_low",)),
    ("objective.correction", ("auto", "none"), ("correction_cap",)),
)
_HELD_OUT = ("data.validation_path", "data.validation_fraction")
# a setting, those of which one must be set beside it, and what that is
_NEEDS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("data.system_column", ("data.prompt_column",), ", and data.response_column"),
    ("validation.freq", _HELD_OUT, ""),
    ("validation.prompts", _HELD_OUT, ""),
    ("validation.patience", _HELD_OUT, ""),
    ("validation.metric", _HELD_OUT, ""),
    ("checkpoint.keep_best", _HELD_OUT, ""),
    ("validation.patience", ("validation.freq",), ", the steps between validations"),
    ("validation.metric", ("validation.freq",), ", the steps between validations"),
    ("validation.metric", ("validation.prompts",), ", the number of held-out prompts to answer"),
    ("lora.initial_load_path", ("lora.rank",), "; set it to the adapter's"),
    ("checkpoint.fresh", ("job.run_folder",), ": a run without a name always starts over"),
    ("checkpoint.load_step", ("job.run_folder",), ", the run that is to be resumed from that step"),
)
# The largest beta1 and beta2 that moments of these formats follow within 5%; slower ones freeze in the end.
SLOWEST = {"bf16": 0.9999, "8bit": 0.999}


def check(config: Config, world_size: int | None, with_files: bool = True) -> list[Problem]:
    """All problems. Args: world_size: processes; None: not known, so layouts are not checked."""
    problems = dict.fromkeys(_problems(config, world_size, with_files))
    try:
        lora, training, spec = config.lora, config.training, config.spec()
        problems |= dict.fromkeys(_check_model(lora, training, spec))
        problems |= dict.fromkeys(check_split(config.parallelism, lora, training, spec))
    except ConfigError as error:
        problems |= dict.fromkeys(error.problems)
    except UserError as error:  # of a file, which it names
        problems |= {Problem("", line): None for line in str(error).splitlines()}
    return list(problems)


def _problems(config: Config, world_size: int | None, with_files: bool) -> Iterator[Problem]:
    """As `check`, but for the model."""
    if with_files:
        yield from _check_paths(config)
    training, data, schedule = config.training, config.data, config.lr_scheduler
    for (section, one), (_, other) in ALTERNATIVES:
        if all(getattr(getattr(config, section), key) for key in (one, other)):
            yield Problem(f"{section}.{one}", f"and {other} are both set; keep one of them", (f"{section}.{other}",))
    if training.steps and schedule.warmup_steps > training.steps:
        text = f"= {schedule.warmup_steps} is more than [training] steps = {training.steps}; lower it, or use -1 for 3%"
        yield Problem("lr_scheduler.warmup_steps", text, ("training.steps",))
    if config.optimizer.eps == 0:
        yield Problem("optimizer.eps", "= 0 divides by zero where a gradient was always 0; the usual is 1e-8")
    for key in ("beta1", "beta2"):
        if (value := getattr(config.optimizer, key)) > (most := SLOWEST.get(state := config.optimizer.state, 1.0)):
            text = f'= {value}: moments with state = "{state}" would freeze; use at most {most}, or state = "fp32"'
            yield Problem(f"optimizer.{key}", text, ("optimizer.state",))
    if schedule.decay_ratio == 0:
        yield Problem("lr_scheduler.decay_ratio", '= 0 leaves no decay; use decay_type = "constant"')
    optional = [("report_to", name, "leave it out") for name in dict.fromkeys(config.metrics.report_to)]
    optional += [("enable_wandb", "wandb", "set it to false")] * config.metrics.enable_wandb
    for key, name, other in optional if with_files else ():
        # a folder `wandb`, which wandb writes to, looks like a package: an installed one has an origin
        if not getattr(find_spec(name), "origin", None):
            text = (
                f"= {toml_value(getattr(config.metrics, key))}: {name} is not installed; pip install {name}, or {other}"
            )
            yield Problem(f"metrics.{key}", text)
    yield from _check_data(data, config.objective.name)
    yield from (*_check_lora(config.lora), *_check_effects(config), *check_offload(config))
    yield from _check_objective(config)
    if config.draft_head.train != "no":
        name, lora, rounds = config.objective.name, config.lora, config.rounds.count
        yield from _check_draft_head(config.draft_head, name, lora, rounds, config.parallelism)
    yield from _check_profiling(config.profiling, world_size)
    if config.validation.metric != "loss":
        yield from _check_metric(config.validation, data, config.objective.answers)
    known = [*FINGERPRINTS, *(f"model.{name}" for name in known_fields())]
    known += [f"lora.{name}" for name in settings.lora_identity(config.lora, (EXPERTS,))]
    known += [f"objective.{name}" for name in config.objective.identity] + ["draft_head.weight"]
    for name in config.checkpoint.allow_changed:
        if name not in known:
            listed = f"{', '.join(FINGERPRINTS)}{did_you_mean(name, known)}"
            yield Problem("checkpoint.allow_changed", f"names {name!r}, which is none of {listed}")
    if config.checkpoint.load_step != -1 and config.checkpoint.fresh:
        yield Problem("checkpoint.load_step", "and fresh exclude each other; keep one of them", ("checkpoint.fresh",))
    if world_size is not None:
        yield from check_layout(config, world_size)


def check_start(config: Config) -> None:
    """Check what would otherwise fail after the data are prepared, or at the end of a new run on this machine.

    Raises:
        UserError: a package that is missing or too old, weights that are not complete, files that an export refuses, or
            a disk that is too small; or the config is of rounds.
    """
    if config.rounds.count:
        raise UserError(f"[rounds] count = {config.rounds.count} is for titan-mi100 rounds; start that, or set it to 0")
    check_packages({"tensorboard": "2.15"} if config.metrics.enable_tensorboard else {})
    save, lora, spec = config.checkpoint, config.lora, config.spec()
    load, folder = save.initial_load_path, os.path.abspath(config.job.run_folder or config.job.dump_folder)
    if any(Path(folder, "checkpoint").glob("step-*")) and not save.fresh:  # it resumes
        return
    if config.draft_head.train == "after" and not load:
        raise UserError('[draft_head] train = "after": name the head\'s model in checkpoint.initial_load_path')
    if load:
        draft, adapter = config.draft_head, lora.initial_load_path
        is_elsewhere = draft.fresh or (bool(adapter) and os.path.lexists(os.path.join(adapter, DRAFT_FILE)))
        read = spec.with_draft_head(spec.has_draft_head and not is_elsewhere)
        shapes = lambda names: read.as_stored(names, {}).in_files(parameter_shapes(read))  # noqa: E731
        check_weights(Path(load), shapes, read.own_name, read.passes_through)
        if spec.has_draft_head:
            instead = f'instead of draft_head.train = "{draft.train}" set "no"'
            assets.check_draft_keys(assets.folder_of(load), instead, is_elsewhere)
        assets.check_generation(assets.folder_of(load))
    if save.export_hf and os.environ.get("RANK", "0") == "0":
        assets.check_export(spec, load, config.tokenizer_path(), config.model.chat_template)
    trained = lora.shapes(spec) | draft_shapes(spec) if lora.rank else parameter_shapes(spec)
    trained = draft_shapes(spec) if config.draft_head.train == "after" else trained
    count = sum(map(math.prod, trained.values()))
    saved = count * (sum(config.optimizer.master_bytes) + config.optimizer.state_bytes)
    exported = count * (4 if save.export_dtype == "float32" else 2) if save.export_hf else 0  # at least
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if (free := shutil.disk_usage(folder).free) < saved + exported:
        needs = f"a checkpoint takes {bytes_in_words(round(saved))}, the export {bytes_in_words(exported)}"
        raise UserError(f"{folder}: {bytes_in_words(free)} are free, but {needs}; free some, or set job.run_folder")


def check_packages(also: Mapping[str, str]) -> None:
    """Look for the packages that a run needs, without importing them. Raises UserError: what to install.

    Args:
        also: names of packages that not every run needs, and their oldest versions.
    """
    needed, wrong = {**_PACKAGES, **also}, []
    for name, least in needed.items():
        try:
            there = version(name) if getattr(find_spec(name), "origin", None) else ""
        except PackageNotFoundError:  # it is there, without a version
            continue
        numbers = [tuple(map(int, re.findall(r"\d+", text)[:3])) for text in (there, least)]
        if numbers[0] < numbers[1]:
            wrong.append(f"{name} {f'{there} is older than {least}' if there else 'is not installed'}")
    if wrong:
        quoted = " ".join(f"'{name}>={needed[name]}'" for name in (text.split()[0] for text in wrong))
        raise UserError(f"{'; '.join(wrong)}; pip install {quoted}")


def _check_metric(validation: ValidationConfig, data: DataConfig, answers: str) -> Iterator[Problem]:
    """Args: answers: of the objective."""
    is_text = any(
        source.format in ("text", "tokens") or any(map(assets.is_corpus, source.path)) for source in data.sources
    )
    if answers or is_text or data.loss == "all":
        text = '= "exact_match" judges answers, and pairs, labels, texts and loss = "all" have no right one; use "loss"'
        yield Problem("validation.metric", text, ("objective.name", "data.format", "data.loss"))
    try:
        judge_of(validation.judge)
    except ValueError as error:
        yield Problem("validation.judge", f"= {validation.judge!r} {error}")


def _check_model(lora: LoRAConfig, training: TrainingConfig, spec: ModelSpec) -> Iterator[Problem]:
    """Problems with the model's shape."""
    for key, rank in (("rank", lora.rank), ("expert_rank", lora.expert_rank)):
        if rank > spec.hidden_size:
            yield Problem(
                f"lora.{key}", f"= {rank} is more than hidden_size = {spec.hidden_size}; lower it", MODEL_KEYS
            )
    targets = lora.target_modules
    if lora.rank and targets != LINEARS and (absent := [name for name in targets if name not in spec.adapted]):
        text = f"names {some(absent)}, which this model does not have; it has {', '.join(spec.adapted)}"
        yield Problem("lora.target_modules", text, MODEL_KEYS)
    if training.train_router and (lora.rank or EXPERTS not in spec.adapted):
        text = "adapters leave it as it is" if lora.rank else "this model has none"
        text = f"= true has no effect: {text}; set it to false"
        yield Problem("training.train_router", text, (*MODEL_KEYS, "lora.rank"))


def _check_paths(config: Config) -> Iterator[Problem]:
    if not (config.data.path or config.data.source):
        text = "is not set; name a file or a glob, or several, or [[data.source]]"
        yield Problem("data.path", text, ("data.source",))
    named = [("path", config.data.path), ("validation_path", config.data.validation_path)]
    for key, patterns in named + [("source", source.path) for source in config.data.source]:
        for pattern in patterns:
            if os.path.exists(os.path.join(pattern, assets.PLAN)) and not assets.is_corpus(pattern):
                text = "is a corpus that is not complete; finish titan-mi100 prepare"
                yield Problem(f"data.{key}", f": {pattern}: {text}")
            elif key == "validation_path" or not assets.is_corpus(pattern):
                yield from (Problem(f"data.{key}", f": {wrong}") for wrong in matching_files(pattern)[1])
    if (template := config.model.chat_template) and not os.path.isfile(template):
        yield Problem("model.chat_template", f"= {template!r} is not a file")
    if (load := config.checkpoint.initial_load_path) and not os.path.exists(load):
        yield no_such_model(load)
    path = config.tokenizer_path()
    key = "model.tokenizer_path" if config.model.tokenizer_path else "checkpoint.initial_load_path"
    if load and not os.path.exists(load) and not config.model.tokenizer_path:
        pass  # that folder's tokenizer: its absence is reported above
    elif not path:
        text = "is not set, nor is checkpoint.initial_load_path; name an HF folder, or take the tiny model: "
        text += "--job.config_file train_configs/debug.toml"
        yield Problem("model.tokenizer_path", text, ("checkpoint.initial_load_path",))
    elif not os.path.exists(path):
        yield Problem(key, f"= {path!r}: no such folder or file{nearby(path)}")
    elif not os.path.isfile(path) and not assets.has_tokenizer(path):
        text = f"= {path!r} has neither tokenizer.json nor a sentencepiece .model; "
        yield Problem(key, f"{text}set model.tokenizer_path to a folder that does, or to such a file")


def _check_data(data: DataConfig, objective: str) -> Iterator[Problem]:
    if bool(data.prompt_column) != bool(data.response_column) and objective != "preference":
        text = "and response_column go together; set both or neither"
        yield Problem("data.prompt_column", text, ("data.response_column",))
    if data.prompt_column and data.format not in ("auto", "columns"):
        text = f'is set, but format = "{data.format}"; remove one of them'
        yield Problem("data.prompt_column", text, ("data.format",))
    if data.prompt_column and data.prompt_column in (data.response_column, data.system_column):
        text = f"= {data.prompt_column!r} is another text's column, too; name one for each"
        yield Problem("data.prompt_column", text, ("data.response_column", "data.system_column"))
    yield from _check_sources(data)
    for key in ("weights", "repeats"):
        numbers = getattr(data, key)
        if numbers and len(numbers) != len(data.path):
            text = f"has {len(numbers)} values for {len(data.path)} paths; give one for each path"
            yield Problem(f"data.{key}", text, ("data.path",))
        if any(number <= 0 for number in numbers):
            yield Problem(f"data.{key}", f"= {list(numbers)} must all be above 0; leave a path out instead")


def _check_sources(data: DataConfig) -> Iterator[Problem]:
    names = [source.name or source.stem for source in data.source]
    for number, source in enumerate(data.source, 1):
        problems = []
        if not source.path:
            problems.append("path is not set; name files, globs or a folder of titan-mi100 prepare")
        if source.name and names.count(source.name) > 1:
            problems.append(f"name = {source.name!r} is another's too; each needs its own")
        elif not source.name and names.count(source.stem) > 1:
            problems.append(f"it would be called {source.stem!r} like another; give it a name")
        if bool(source.weight) != bool(data.source[0].weight):
            problems.append(f"weight = {source.weight}: either all sources have one, above 0, or none")
        if not source.epochs:
            problems.append("epochs = 0: it would never be read; leave the source out")
        yield from (Problem("data.source", f", table {number}: {problem}") for problem in problems)
    for source in data.sources if all(source.path for source in data.source) else ():
        if any(map(assets.is_corpus, source.path)) and (len(source.path) > 1 or source.format != "auto"):
            text = f"{source.path[0]}: a folder of titan-mi100 prepare is a source of its own, with format = 'auto'; "
            text += "give each path a [[data.source]], or set data.weights"
            yield Problem("data.source" if data.source else "data.path", f": {text}", ("data.weights",))


def _check_effects(config: Config) -> Iterator[Problem]:
    """Settings that were changed without another that they need, or that have no effect because of another: of several
    reasons the first.
    """
    data, o, defaults, named = config.data, config.objective, Config(), set[str]()
    for name, needed, meaning in _NEEDS:
        changed = [each for each in (name, *needed) if attrgetter(each)(config) != attrgetter(each)(defaults)]
        if changed == [name]:
            text = f"= {toml_value(attrgetter(name)(config))} needs {' or '.join(needed)}{meaning}"
            yield Problem(name, text, needed)
    idle = list[tuple[str, str, tuple[str, ...]]]()  # why, the setting that is the reason, those without effect
    for name, with_these, keys in _IDLE:
        value, default = (attrgetter(name)(settings) for settings in (config, defaults))
        if value in (with_these or (default,)):
            idle.append((f"{name.partition('.')[2]} = {toml_value(value)}", name, keys))
    if config.profiling.profile_steps:
        idle.append(("profile_steps", "profiling.profile_steps", ("profile_freq",)))
    if len(data.path) == 1:
        idle.append(("one path", "data.path", ("weights",)))
    if data.source:
        idle.append(("[[data.source]]", "data.source", ("weights", "repeats", "format")))
    if not data.is_mixture:
        idle.append(("a single source", "data.path", ("weights_in", "on_exhausted")))
    elif not any(source.weight for source in data.sources):
        idle.append(("no weights", "data.weights", ("weights_in",)))
    corpora = [assets.is_corpus(path) for source in data.sources for path in source.path]
    if not any(corpora):
        idle.append(("no source that titan-mi100 prepare has made", "data.path", ("concatenate",)))
    if corpora and all(corpora) and not data.validation_path:
        idle.append(("corpora only, which are plain text", "data.path", ("system_prompt", *assets.VARIABLES)))
    if data.format not in ("auto", "text") or data.prompt_column:
        idle.append((f'format = "{data.format}" or prompt_column', "data.format", ("text_column",)))
    of_texts = ("format", "response_column", "system_column", "text_column", "loss")
    if o.name == "policy":
        idle.append(("sampled answers, which are token ids", "data.path", ("prompt_column", *of_texts, *_OF_TEMPLATES)))
        if o.cut_off != "shape" and o.divisor != "length":
            idle.append((f'divisor = "{o.divisor}"', "objective.divisor", ("longest_answer",)))
        if o.advantage != "teacher":
            idle.append((f'advantage = "{o.advantage}"', "objective.advantage", ("teacher",)))
    if o.name == "preference":
        unused = [("label_smoothing", o.preference.defaults.e), ("gamma", o.preference.defaults.gamma)]
        idle.append((f'loss = "{o.loss}"', "objective.loss", tuple(key for key, usual in unused if not usual)))
        if o.preference.is_paired:
            idle.append(("pairs of answers, which are read by their keys", "data.path", of_texts))
    if o.answers != "pairs":
        idle.append(("an objective that reads no pairs", "data.path", ("chosen_column", "rejected_column")))
    if o.answers != "labels":
        idle.append(("an objective that reads no labels", "data.path", ("label_column",)))
    of_data = ("data.path", "data.source", "data.weights", "data.prompt_column")  # decide several of these
    for why, reason, keys in idle:
        section = reason.partition(".")[0]
        for name in (f"{section}.{key}" for key in keys):
            value, default = (attrgetter(name)(settings) for settings in (config, defaults))
            if value != default and name not in named:
                text = f"= {toml_value(value)} has no effect with {why}; delete it"
                yield Problem(name, text, (reason, *(of_data if section == "data" else ())))
                named.add(name)


def _check_objective(config: Config) -> Iterator[Problem]:
    o, dropout = config.objective, config.lora.dropout
    if (o.name == "distill" or (o.name == "policy" and o.advantage == "teacher")) and not o.teacher:
        text = "is not set; name the folder that titan-mi100 teach has written, or writes"
        yield Problem("objective.teacher", text, ("objective.name", "objective.advantage"))
    if o.name != "sft" and any(assets.is_corpus(path) for source in config.data.sources for path in source.path):
        text = f'= "{o.name}" learns from rows, and a source is a corpus of titan-mi100 prepare; name its files instead'
        yield Problem("objective.name", text, ("data.path", "data.source"))
    if o.name == "policy":
        for key in ("checkpoint.keep_best", "validation.patience", "training.skip_loss_spikes"):
            if attrgetter(key)(config):
                text = "has no meaning: the loss of a policy has no level; judge exports: "
                yield Problem(key, f"{text}titan-mi100 evaluate exact-match", ("objective.name",))
        yield from _check_policy(o, config.data)
    if (o.answers == "pairs" or o.name == "policy") and any(source.format != "auto" for source in config.data.source):
        yield Problem("data.source", ": format has no effect: answers are read by their keys; delete it")
    if o.answers and dropout:
        text = "disturbs the sums of log p that are compared; set it to 0"
        yield Problem("lora.dropout", f"= {dropout} {text}", ("objective.name",))
    if o.answers and config.data.overlong in ("truncate", "split"):
        text = f'= "{config.data.overlong}" would cut answers, which are compared as wholes; use drop or error'
        yield Problem("data.overlong", text, ("objective.name",))
    if o.answers and config.data.earlier_thinking == "unroll":
        text = '= "unroll" makes several documents of an answer; use template, mask or context'
        yield Problem("data.earlier_thinking", text, ("objective.name",))


def _check_draft_head(
    draft: DraftHeadConfig, name: str, lora: LoRAConfig, rounds: int, p: ParallelismConfig
) -> Iterator[Problem]:
    """Problems of a draft head that is trained. Args: name: of the objective."""
    is_after, degree = draft.train == "after", p.context_parallel_degree
    merge = "merge yours first (titan-mi100 convert merge-lora), start from the result, and set rank = 0"
    for is_wrong, text, other in (
        (not is_after and name not in ("sft", "distill"),
         f'would learn rejected answers of name = "{name}", too; train it "after" that run', "objective.name"),
        (is_after and name != "sft", f'learns from text alone: set name = "sft", not "{name}"', "objective.name"),
        (is_after and lora.rank > 0, f"trains no adapter; {merge}", "lora.rank"),
        (rounds > 0, 'is not for rounds; train it "after" them', "rounds.count"),
        (degree > 1, f"is not supported with context_parallel_degree = {degree}; set that to 1",
         "parallelism.context_parallel_degree"),
        (lora.trainable_tokens and p.is_pipeline,
         "is not supported with lora.trainable_tokens in a pipeline; leave one of the three out",
         "lora.trainable_tokens"),
    ):  # fmt: skip
        if is_wrong:
            yield Problem("draft_head.train", f'= "{draft.train}" {text}', (other,))
    if not draft.weight:
        yield Problem("draft_head.weight", "= 0 would never train it; the usual is 0.1")


def _check_policy(o: ObjectiveConfig, data: DataConfig) -> Iterator[Problem]:
    for key, needed in (("longest_answer", o.divisor == "length" or o.cut_off == "shape"),
                        ("cut_off_tokens", o.cut_off == "shape")):  # fmt: skip
        if needed and not getattr(o, key):
            text = 'is not set; divisor = "length" and cut_off = "shape" need it'
            yield Problem(f"objective.{key}", text, ("objective.divisor", "objective.cut_off"))
    if o.cut_off == "shape" and o.cut_off_tokens > o.longest_answer:
        text = f"= {o.cut_off_tokens} must be at most longest_answer = {o.longest_answer}"
        yield Problem("objective.cut_off_tokens", text, ("objective.longest_answer",))
    if o.advantage == "teacher" and o.cut_off == "shape":
        text = '= "shape" changes scores, and a teacher gives none; use mask or keep'
        yield Problem("objective.cut_off", text, ("objective.advantage",))
    if o.is_corrected and o.cap <= 1:
        yield Problem("objective.correction_cap", f"= {o.cap:g} must be above 1; the usual is 2")
    if o.kl not in KL_FORMS:
        wrong = {
            "k1": "k1 in the loss has no gradient on average",
            "k3": "the gradient of k3 in the loss is that of the KL the other way round",
        }
        reason = f"; {wrong[o.kl]}" if o.kl in wrong else ""
        yield Problem("objective.kl", f"= {toml_value(o.kl)} must be one of {', '.join(KL_FORMS)}{reason}")
    if data.duplicates == "drop":
        text = '= "drop" has no meaning for sampled answers: equal ones are samples too; use keep'
        yield Problem("data.duplicates", text, ("objective.name",))


def _check_profiling(profiling: ProfilingConfig, world_size: int | None) -> Iterator[Problem]:
    for key in ("save_traces_folder", "save_memory_snapshot_folder"):
        name = getattr(profiling, key)
        if name != os.path.basename(name) or name in ("", ".", "..", *_TAKEN) or has_control_characters(name):
            text = f"must be a name for a folder in the run folder, other than {', '.join(_TAKEN)}"
            yield Problem(f"profiling.{key}", f"= {name!r} {text}")
    is_on, ranks = profiling.enable_profiling or profiling.enable_memory_snapshot, "profiling.profile_ranks"
    switches = ("profiling.enable_profiling", "profiling.enable_memory_snapshot")
    if is_on and not profiling.profile_ranks:
        yield Problem(ranks, "is empty; name at least one rank, or set enable_profiling to false", switches)
    if not is_on and profiling.profile_ranks != (0,):
        text = "has no effect with enable_profiling and enable_memory_snapshot = false; delete it"
        yield Problem(ranks, f"= {list(profiling.profile_ranks)} {text}", switches)
    if world_size is not None and (beyond := [rank for rank in profiling.profile_ranks if rank >= world_size]):
        yield Problem(ranks, f"names {beyond[0]}, but the ranks are 0 to {world_size - 1}")


def _check_lora(lora: LoRAConfig) -> Iterator[Problem]:
    known = (*ADAPTED, ALL_LINEAR)
    if ALL_LINEAR in lora.target_modules:
        yield Problem("lora.target_modules", f'names "{ALL_LINEAR}" beside others; it stands alone, for all of them')
    elif wrong := [name for name in lora.target_modules if name not in ADAPTED]:
        for name in wrong:
            text = f"names {name!r}, which is none of {', '.join(known)}{did_you_mean(name, known)}"
            reasons = (family.not_adapted[name] for family in FAMILIES.values() if name in family.not_adapted)
            text = next((f"names {name!r}: {why}; leave it out" for why in reasons), text)
            yield Problem("lora.target_modules", text)
    if lora.rank and not lora.target_modules:
        text = f"is empty, but rank = {lora.rank}; name some, or set rank to 0"
        yield Problem("lora.target_modules", text, ("lora.rank",))
    for key in ("expert_rank", "expert_alpha") if EXPERTS not in lora.target_modules else ():
        if value := getattr(lora, key):
            text = f'= {value} has no effect: target_modules does not name "{EXPERTS}"; add it, or leave {key} out'
            yield Problem(f"lora.{key}", text, ("lora.target_modules",))
    if lora.rank and not lora.alpha:
        text = "= 0 switches the adapters off: nothing would be learned; the usual is 2 x rank"
        yield Problem("lora.alpha", text, ("lora.rank",))
    if not lora.b_lr_ratio:
        yield Problem("lora.b_lr_ratio", "= 0 would never train B, and so nothing; the usual are 1 and 16")
    for token in (t for t in set(lora.trainable_tokens) if not t or lora.trainable_tokens.count(t) > 1):
        yield Problem("lora.trainable_tokens", f"names {token!r} {'twice' if token else ''}; name each token once")
    if (load := lora.initial_load_path) and not os.path.isdir(load):
        yield Problem("lora.initial_load_path", f"= {load!r} is not a folder{nearby(load)}")
    if (name := lora.base_model_name_or_path) and not (os.path.isabs(name) or is_hub_name(name)):
        text = f"= {name!r} is neither OWNER/NAME on the hub nor an absolute path"
        yield Problem("lora.base_model_name_or_path", text)
