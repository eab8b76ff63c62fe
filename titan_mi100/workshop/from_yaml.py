"""Carries a YAML config of axolotl, LLaMA-Factory or TRL over, and says of each of its keys what became of it.

other_trainers.txt says what their keys are here, other_trainers.toml what is so by default there. This file
has what depends on several keys or on the data. Imports no torch.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from titan_mi100.config import bundled
from titan_mi100.config.as_text import our_keys
from titan_mi100.config.hub import hub_name
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config
from titan_mi100.config.toml_file import parse
from titan_mi100.data.formats import first_keys
from titan_mi100.data.packing import pack_rows
from titan_mi100.data.survey import Survey
from titan_mi100.errors import UserError
from titan_mi100.files.patterns import matching_files
from titan_mi100.files.plain import read_object
from titan_mi100.shapes.base import ALL_LINEAR
from titan_mi100.wording import as_key, plural, shown
from titan_mi100.workshop import other_trainers
from titan_mi100.workshop.other_trainers import Entry, advise, download, entries, setting_of
from titan_mi100.workshop.yaml_file import YamlFile, read_yaml

_MODEL, _WARMUP = "checkpoint.initial_load_path", "lr_scheduler.warmup_steps"
_FACTS = parse(str(Path(other_trainers.__file__).with_suffix(".toml")))
_ALL = _FACTS.pop("all")
_AS_THERE = "counts, as there"


@dataclass
class Carried:
    """What becomes of a YAML file.

    Attributes:
        names: their keys.
        lines: those at the top level -> their lines.
        settings: "section.key" of ours -> its value, as words of a command line.
        sources: the same -> their key, or whose default it is.
        loose: those of ours that an exact value replaces.
        shares: our key for a number of steps -> their key, its number, and what that is.
        lost: their key -> why it is not carried over.
        idle: those of them that have no effect there, either.
        fetch: commands that fetch what is not here.
        notes: further lines.
    """

    path: str
    trainer: str
    names: Sequence[str]
    lines: Mapping[str, int]
    is_packed: bool = False
    has_data: bool = True
    has_texts: bool = False
    settings: dict[str, tuple[str, ...]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    loose: set[str] = field(default_factory=set)
    shares: dict[str, tuple[str, float, str]] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    fetch: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> str:
        return os.path.abspath(os.path.expanduser(self.settings[_MODEL][0]))

    @property
    def has_model(self) -> bool:
        return os.path.isdir(self.model)

    def line(self, name: str) -> int:
        """0: the key was merged from elsewhere in the file."""
        return self.lines.get(re.split(r"[.[]", name)[0], 0)

    def place(self, name: str) -> str:
        line = self.line(name)
        return f"{self.path}:{line}: {as_key(name)}" if line else f"{self.path}: {as_key(name)}"

    def set(self, key: str, words: Sequence[Any], name: str, is_exact: bool = True) -> None:
        """The first exact value counts. Another one, such as the rank that `use_peft` stands for, gives way to it."""
        texts = tuple(map(str, words))
        if key not in self.settings or (is_exact and key in self.loose):
            self.settings[key], self.sources[key] = texts, name
            (self.loose.discard if is_exact else self.loose.add)(key)
        elif is_exact and self.settings[key] != texts:
            self.lost[name] = f"= {shown(' '.join(texts))}: {key} is set by {self.sources[key]} already"

    def checked(self, cards: int) -> Config:
        """The config. A setting that is refused is not carried over.

        Raises:
            UserError: there are other problems.
        """
        while True:
            words = {key: texts for key, texts in self.settings.items() if self.has_model or key != _MODEL}
            arguments = ["--job.config_file", str(bundled.FOLDER / "finetune.toml")]
            arguments += ["--model.flavor", "0.6B"] * (not self.has_model)  # any shape: the model's is not known yet
            for key, texts in words.items():
                arguments += [f"--{key}={texts[0]}"] if len(texts) == 1 else [f"--{key}", *texts]
            try:
                return load_config(arguments, cards, with_files=False)
            except UserError as error:
                lines = str(error).splitlines()
            refused = {key: line for line in lines for key in words if line.startswith(f"--{key} ") and key != _MODEL}
            if not refused:
                raise UserError("\n".join(f"{self.path}: {line}" for line in lines))
            for key, line in refused.items():
                del self.settings[key]
                if (name := self.sources.pop(key)) in self.lines:  # else it is a default
                    self.lost[name] = f"is refused: {line.removeprefix('--')}"

    def change(self, config: Config) -> dict[str, dict[str, Any]]:
        """The settings by section, in their types."""
        sections: dict[str, dict[str, Any]] = {"checkpoint": {"initial_load_path": self.model}}
        for key, words in self.settings.items():
            section, _, name = key.partition(".")
            is_short = name == "target_modules" and words == (ALL_LINEAR,)
            setting = words if is_short else getattr(getattr(config, section), name)
            sections.setdefault(section, {}).setdefault(name, setting)
        return sections

    def report(self) -> list[str]:
        lost, lines = sorted(self.lost, key=self.line), list[str]()
        idle = [name for name in lost if any(fnmatch(re.split(r"[.[]", name)[-1], each) for each in _ALL["harmless"])]
        idle += self.idle
        groups = [[name for name in lost if name not in idle], [name for name in lost if name in idle]]
        for title, names in zip(("which changes the result", "without effect on the result"), groups, strict=True):
            reasons = [f"  {self.place(name)} {self.lost[name]}" for name in names]
            lines += [f"not carried over, {title}:", *reasons] if reasons else []
        lines = lines or ["all keys are carried over"]
        used = {source.partition(";")[0] for source in self.sources.values()} | self.lost.keys()
        rest = [as_key(name) for name in self.names if name not in used]
        lines += [f"no setting is needed for: {', '.join(rest)}"] * bool(rest)
        return [f"from {self.path}, of {self.trainer}, with its defaults; {lines[0]}", *lines[1:], *self.notes]

    def sized(self, cards: int, found: Survey | None) -> Iterator[str]:
        """Set what depends on the number of tokens; lines about it. Args: found: None: the tokens were not counted."""
        config = self.checked(cards)
        training, batch = config.training, config.batch(cards)
        rows, seq_len = batch.global_batch_size, training.seq_len
        if self.is_packed:
            yield f"a step: {plural(rows, 'packed row')} of {seq_len:,} tokens, as there"
        elif found is None:
            hint = f"{plural(rows, 'example')} there; here as many rows of {seq_len:,} packed tokens, each with several"
            yield f"WARNING a step: {hint} examples; training.target_tokens_per_step sets the tokens"
        else:
            tokens = round(rows * float(found.lengths.mean()))
            while found.share == 1 and seq_len >= 2 * found.lengths.max() and tokens < seq_len * batch.dp_degree:
                seq_len //= 2  # it only limits the examples there, but is a row's size here
            self.settings.pop("training.gradient_accumulation_steps", None)
            for key, setting in {"seq_len": seq_len, "local_batch_size": 1, "target_tokens_per_step": tokens}.items():
                self.settings[f"training.{key}"] = (str(setting),)
                is_sum = key == "target_tokens_per_step"
                name = self.sources.get(f"training.{'gradient_accumulation_steps' if is_sum else key}", "")
                self.sources[f"training.{key}"] = f"{name}; a step has the tokens of {plural(rows, 'example')}"
            batch = self.checked(cards).batch(cards)
            yield f"a step there: {plural(rows, 'example')} of {tokens / rows:,.0f} tokens on average, one in a row"
            yield f"here: {plural(batch.global_batch_size, 'row')} of {seq_len:,} packed tokens, at least one per card"
        epoch = 0
        if found is not None:
            kept = found.lengths[found.places >= config.data.validation_fraction]
            packed = len(pack_rows(kept, seq_len).starts) - 1
            epoch = math.ceil(packed / found.share / batch.global_batch_size)
        run = training.steps or epoch * training.epochs
        for key, (name, number, unit) in self.shares.items():
            if key in self.settings and key not in self.loose:
                self.lost[name] = f"= {shown(number)}: {key} is set by {self.sources[key]} already"
            elif run if unit == "run" else epoch:
                self.set(key, [max(1, math.ceil(number * run) if unit == "run" else round(epoch / number))], name)
            else:
                self.lost[name] = f"= {shown(number)}: {key} counts steps, which are known when model and data are here"
                self.settings.pop(key, None)
        warmup = int(self.settings.get(_WARMUP, ("0",))[0])
        if run and warmup > run:  # it would be refused
            name = self.sources[_WARMUP]
            self.lost[name] = f"= {warmup}: the run has {plural(run, 'step')}, so the warmup is 3% of them"
            self.settings[_WARMUP] = ("-1",)


def carry(path: str, trainer: str, model: str, data: Sequence[str]) -> Carried:
    """Read the YAML file.

    Args:
        trainer: whose it is; "": its keys say it.
        model, data: are used instead of the YAML's; empty: they are not.

    Raises:
        UserError: it cannot be read, its trainer is not known, it is for another kind of training than those here, or
            it names a model or data that are neither here nor on the hub.
    """
    file = read_yaml(path)
    trainer = _trainer(path, file, trainer)
    values = dict(_flat(file.values, trainer))
    carried = Carried(path, trainer, [*values], file.lines)
    packs = any(values.get(name) is True for name in _ALL["overruled"][0]["keys"] if not name.startswith("eval"))
    carried.is_packed = packs or values.get("stage") == "pt"  # LLaMA-Factory's pretraining always packs
    if model:
        carried.set(_MODEL, [model], "--model")
    if data:
        carried.set("data.path", data, "--data")
    switch, default = _FACTS[trainer]["adapters"]
    has_adapter = values.get(switch, default) in (True, "lora", "qlora")
    rules = [rule for rule in _ALL["overruled"] if rule["when"].items() <= values.items()]
    overruled = {name: rule.get("why", "") for rule in rules for name in rule["keys"]}
    if isinstance(steps := values.get("max_steps"), int) and steps > 0:
        overruled |= dict.fromkeys(("num_train_epochs", "num_epochs"), f"max_steps {_AS_THERE}")
    if trainer == "TRL" and values.get("datasets"):
        overruled |= dict.fromkeys(("dataset_name", "dataset_config"), f"datasets {_AS_THERE}")
    if isinstance(values.get("loss_type"), list):
        _take_losses(carried, values)
    for name, value in values.items():
        entry = _entry(trainer, name)
        is_for_adapters = name != switch and entry and entry.targets and all("lora." in key for key in entry.targets)
        if is_for_adapters and not has_adapter:
            overruled[name] = f"all weights are trained: {switch} asks for no adapters" if value else ""
        if reason := overruled.get(name):
            carried.idle.append(name)
            carried.lost[name] = f"= {shown(value)}: {reason}"
        elif name in overruled or value is None or value in ("", [], {}):
            continue
        elif name == "datasets" or (entry and entry.key in ("data.path", "data.validation_path")):
            value = _named_files(carried, name, value, str(values.get("dataset_dir") or "data"))
            _take_data(carried, entry.key if entry else "data.path", name, value)
        elif entry:
            _take(carried, name, value, entry)
        else:
            carried.lost[name] = f"= {shown(value)}: not a key that is known here"
    if values.get("stage") == "pt" or carried.has_texts:  # a long text is cut into pieces there, and nothing is lost
        carried.set("data.overlong", ["split"], f"{trainer}'s pretraining", is_exact=False)
    for section, keys in _FACTS[trainer]["defaults"].items():
        for key, value in keys.items() if section != "lora" or has_adapter else ():
            words = value if isinstance(value, list) else [value]
            carried.set(f"{section}.{key}", words, f"{trainer}'s default", is_exact=False)
    if "training.steps" in carried.settings:
        del carried.settings["training.epochs"]  # a default
    if trainer == "LLaMA-Factory" and has_adapter:
        carried.set("lora.alpha", [2 * float(carried.settings["lora.rank"][0])], "twice the rank", False)
    for key, option in ((_MODEL, "--model"), ("data.path", "--data")):
        if key not in carried.settings:
            raise UserError(f"{path}: names no {option[2:]}; give it with {option}")
    if "data.validation_fraction" in carried.loose:  # eval_strategy is for data that are named elsewhere, or nowhere
        if "data.validation_path" in carried.settings:
            del carried.settings["data.validation_fraction"]
        else:
            name = carried.sources["data.validation_fraction"]
            carried.notes.append(f"{name}: no data for it are named: 5% of the rows are held out")
    _choose_objective(carried)
    cuts = carried.settings.get("data.overlong") == ("truncate",) and "objective.name" not in carried.settings
    if cuts and carried.sources["data.overlong"] == f"{trainer}'s default":  # the user has not asked for it
        carried.set("data.max_cut_share", ["0.5"], f"{trainer}'s default cuts rows", is_exact=False)
    return carried


def _trainer(path: str, file: YamlFile, given: str) -> str:
    trainers = {name.lower(): name for name in _FACTS}
    candidates = [name for name in trainers.values() if any(mark in file.values for mark in _FACTS[name]["marks"])]
    if given and given.lower() not in trainers:
        raise UserError(f"--trainer {given}: is none of {', '.join(trainers.values())}")
    if not given and len(candidates) != 1:
        problem = f"has keys of {' and of '.join(candidates)}" if candidates else "has no key that tells its trainer"
        raise UserError(f"{path}: {problem}; name it with --trainer: {', '.join(trainers.values())}")
    return trainers[given.lower()] if given else candidates[0]


def _entry(trainer: str, name: str) -> Entry | None:
    """The trainer's own entry, else one that it shares."""
    matching = [entry for entry in entries() if name in entry.names and trainer in entry.trainer]
    return min(matching, key=lambda entry: len(entry.trainer), default=None)


def _flat(values: Mapping[str, Any], trainer: str) -> Iterator[tuple[str, Any]]:
    """The keys with their values; instead of a key, those inside of it, if the table has one of them."""
    for name, value in values.items():
        inside = {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {}
        yield from inside.items() if any(_entry(trainer, key) for key in inside) else [(name, value)]


def _take(carried: Carried, name: str, value: Any, entry: Entry) -> None:
    """Carry over one key that has a value."""
    steps, unit = _ALL["shares"].get(name, (entry.key, "run"))
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else 0
    number = 1 if value == "epoch" and unit == "epoch" else number
    counts_steps = steps != "training.epochs" and steps in our_keys() and our_keys()[steps].type is int
    if number > 0 and (unit == "epoch" or (counts_steps and number < 1 and number != 0.03)):
        carried.shares[steps] = name, number, unit
        if value != "epoch":
            return None
        value = "steps"  # and there must be data for it
    if steps == "training.epochs" and number % 1 > 0:
        carried.notes.append(f"{name} = {value}: {math.ceil(number)} whole epochs here")
    if name == "wandb_project":
        carried.lost[name] = f"= {shown(value)}: W&B is on; the environment variable WANDB_PROJECT names the project"
        return carried.set("metrics.enable_wandb", ["true"], name)
    for choice in value if isinstance(value, list) and not entry.key else [value]:
        choice = "no" if choice is False and "no" in entry.settings else choice  # YAML reads `no` as false
        if setting_of(entry, choice) == "" or (not entry.exists and choice in (False, 0)):
            continue
        if choice in _ALL["near"]:
            carried.notes.append(f"{name} = {choice}: {entry.note}")
        advice = advise(name, choice, {}, entry)
        assert advice is not None
        text, _, command = advice.text.partition("; fetch it first: ")
        for ours, toml in advice.written.items():
            words = json.loads(toml) if toml[0] in '["' else toml
            carried.set(ours, words if isinstance(words, list) else [words], name, advice.is_exact)
            if command and carried.sources[ours] == name and not os.path.lexists(words):
                carried.fetch.append(command)
                if ours == _MODEL and "qwen3" not in str(choice).lower():
                    carried.notes.append(f"{name}: only Qwen3 and Qwen3.5 are trained here (docs/MODELS.md)")
            elif ours == _MODEL and not carried.has_model:
                raise UserError(f"{carried.place(name)} = {shown(choice)}: no such folder; name another with --model")
        if not advice.written:
            reason = re.sub(r"^is an option of [\w ,-]+?( and does not exist here)?[:;] (here: )?", "", text)
            carried.lost[name] = f"= {shown(choice)}: {reason.partition('; leave it out')[0]}"
            if name in _ALL["kinds"]:
                raise UserError(f"{carried.place(name)} {carried.lost[name]}")
    return None


def _take_losses(carried: Carried, values: dict[str, Any]) -> None:
    """TRL's sum of losses: one of pairs, and the likelihood of the chosen answers."""
    kinds, weights = values["loss_type"], values.pop("loss_weights", None)
    weights = weights if isinstance(weights, list) else [1.0] * len(kinds)
    is_known = all(isinstance(kind, str) for kind in kinds) and len(set(map(str, kinds))) == len(kinds) == len(weights)
    is_known &= all(isinstance(weight, int | float) and weight >= 0 for weight in weights)
    shares = dict(zip(kinds, weights, strict=True)) if is_known else {}
    beside = shares.pop("sft", 0)
    if len(shares) == 1 and all(shares.values()):
        [(values["loss_type"], share)] = shares.items()
        if beside:
            carried.set("objective.sft_weight", [beside / share], "loss_type")
    else:
        limitation = "one loss of pairs can be carried over, with sft beside it (objective.sft_weight)"
        carried.lost["loss_type"] = f"= {shown(values.pop('loss_type'))}: only {limitation}"


def _named_files(carried: Carried, name: str, value: Any, folder: str) -> Any:
    """LLaMA-Factory's names of data sets as the files that dataset_info.json says."""
    folders = [folder, os.path.join(os.path.dirname(carried.path), folder), os.path.dirname(carried.path) or "."]
    index = next((path for each in folders if os.path.isfile(path := os.path.join(each, "dataset_info.json"))), "")
    if carried.trainer != "LLaMA-Factory" or not index:
        return value
    info, files = read_object(Path(index), "correct it, or name the files with --data"), list[str]()
    for each in value if isinstance(value, list) else map(str.strip, str(value).split(",")):
        facts: dict[str, Any] = description if isinstance(description := info.get(str(each)), dict) else {}
        files.append(os.path.join(os.path.dirname(index), str(facts["file_name"])) if "file_name" in facts else each)
        for key in sorted(facts.keys() - {"file_name", "formatting", "ranking"}):
            reason = "the form of the rows is recognised; other columns are named in data.prompt_column and its like"
            carried.lost[f"{name}.{each}.{key}"] = f"= {shown(facts[key])}: in {index}; {reason}"
    return files


def _take_data(carried: Carried, key: str, name: str, value: Any) -> None:
    """Files, or names of data sets; of axolotl and in TRL's mixtures a table for each."""
    harmless = _ALL["data_set"]
    paths, forms, is_used, is_here = list[str](), set[str](), key not in carried.settings, True
    for number, data_set in enumerate(value if isinstance(value, list) else str(value).split(",")):
        table = data_set if isinstance(data_set, dict) else {"path": str(data_set).strip()}
        files = table.get("data_files") or table.get("path") or ""
        for path in map(str, files if isinstance(files, list) else [files]):
            of_hub = hub_name(path) if matching_files(path)[1] else None
            local, command = download(of_hub.repository, is_data=True) if of_hub else (path, "")
            paths.append(local)
            if is_used and matching_files(local)[1]:
                carried.has_data &= key != "data.path"
                is_here = False
                carried.fetch += [command] * bool(command)
                how = f"of the hub, fetch it: {command}; then name its" if of_hub else "no such file; name the"
                carried.notes.append(f"{as_key(name)}: {shown(path)}: {how} JSONL, JSON or parquet files with --data")
        if table.get("type") == "alpaca":
            note = 'its own prompt, "Below is an instruction ...", is not written: rows have the model\'s chat template'
            carried.lost[f"{name}[{number}].type"] = f"= 'alpaca': {note}"
        forms.add(harmless["type"].get(str(table.get("type")), "auto"))
        carried.has_texts |= "text" in forms
        for inner, setting in table.items():
            if inner not in ("path", "data_files") and setting not in (None, False, *harmless.get(inner, ())):
                reason = "no setting for it; files are read whole, and the form of their rows is recognised"
                carried.lost[f"{name}[{number}].{inner}"] = f"= {shown(setting)}: {reason}"
    carried.set(key, paths, name if is_here else f"{name}; not here yet")
    if len(forms) == 1 and is_used and "auto" not in forms:
        carried.set("data.format", [*forms], name)


def _choose_objective(carried: Carried) -> None:
    """Of pairs of answers, or which tokens are learned."""
    files = matching_files(carried.settings["data.path"][0])[0] if carried.has_data else []
    keys = first_keys(files[0]) if files else set()
    if {"chosen", "rejected"} <= keys or any(key.startswith("objective.") for key in carried.settings):
        default = f"{carried.trainer}'s default"
        carried.set("objective.name", ["preference"], "pairs of answers", is_exact=False)
        if float(carried.settings.get("objective.label_smoothing", ("0",))[0]):
            carried.set("objective.loss", ["cdpo"], "label smoothing")  # dpo has none
        carried.set("objective.beta", ["0.1"], default, is_exact=False)
        if carried.settings.get("objective.loss") == ("simpo",):
            carried.set("objective.gamma", ["0.5"], default, is_exact=False)
    elif carried.trainer == "TRL" and "data.loss" not in carried.settings and "completion" not in keys:
        carried.set("data.loss", ["all"], "TRL's default for conversations and texts", is_exact=False)
