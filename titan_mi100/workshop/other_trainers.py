"""Option names of torchtitan, TRL, axolotl and LLaMA-Factory, and what to write here instead. Imports no torch.

other_trainers.txt has the names; `titan-mi100 coming-from` prints them.
"""

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args, get_origin

from titan_mi100.config.as_text import keys_called, our_keys, toml_value
from titan_mi100.config.hub import hub_name
from titan_mi100.config.toml_file import parse
from titan_mi100.config.unknown import Document
from titan_mi100.wording import as_key, has_control_characters, shown

# what may be given as OWNER/NAME elsewhere, and must be a path here
_OF_THE_HUB = ("checkpoint.initial_load_path", "model.tokenizer_path", "data.path", "data.validation_path")
_DATA = _OF_THE_HUB[2:]
_FILE = Path(__file__).with_suffix(".txt")


class Entry(NamedTuple):
    """What one of their options is here.

    Attributes:
        trainer: whose option it is.
        names: theirs, with the same meaning; "section.*" is a whole section.
        key: "section.key" of ours that takes the same value; "": there is none.
        settings: their value -> our setting as TOML, "section.key = value", or several, joined by " and "; "": nothing
            needs to be set.
        exists: whether something here does the same for other values; else `note` says what to use.
        note: what is different, or what to use instead.
    """

    trainer: str
    names: tuple[str, ...]
    key: str
    settings: Mapping[str, str]
    exists: bool
    note: str

    @property
    def targets(self) -> set[str]:
        """Each "section.key" of ours that this option is about."""
        written = [one for setting in self.settings.values() for one in setting.split(" and ")]
        named = {self.key, *(one.partition(" = ")[0] for one in written)} - {""}
        return named or set(re.findall(r"\b[a-z_]+\.[a-z_0-9]+\b", self.note)) & our_keys().keys()


class Advice(NamedTuple):
    """The end of a message about another trainer's option.

    Attributes:
        targets: the keys of ours that it is about.
        written: what it tells the user to write, by key of ours.
        is_exact: the option takes the same value as our key; it is no switch that stands for a value.
    """

    text: str
    targets: set[str]
    written: Mapping[str, str] = MappingProxyType({})
    is_exact: bool = False


@cache
def entries() -> tuple[Entry, ...]:
    all_entries, trainer = [], ""
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            trainer = line[1:-1]
        elif line and not line.startswith("#"):
            names, here, note = (part.strip() for part in f"{line} ".split(" | "))
            key, settings, parts = "", dict[str, str](), here.split("; ")
            for part in parts:
                words, is_conversion, setting = part.partition(": ")
                if is_conversion:
                    settings |= dict.fromkeys(words.split(), "" if setting == "-" else setting)
                elif part not in "-*":
                    key = part
            all_entries.append(
                Entry(
                    trainer, tuple(names.split()), key, settings, "*" in parts or any((key, *settings.values())), note
                )
            )
    return tuple(all_entries)


@cache
def names() -> Mapping[str, str]:
    """Each of their names -> our key that takes the same value; "": there is none."""
    return {name: entry.key for entry in entries() for name in entry.names}


@cache
def _values() -> Sequence[Mapping[str, Any]]:
    return parse(str(_FILE.with_suffix(".toml")))["all"]["values"]  # type: ignore[no-any-return]


def meaning(name: str, value: object) -> str:
    """The end of a message about a value of another trainer. "": it is not known.

    Args:
        name: "section.key" of ours, or an option of theirs.
    """
    word = str(value).lower()
    text = next((str(each[word]) for each in _values() if name in each["keys"] and word in each and word != "keys"), "")
    is_ours = name in our_keys() and text in our_keys()[name].metadata["choices"]
    return f'; here it is "{text}"' if is_ours else f"; {text}" * bool(text)


def setting_of(entry: Entry, value: Any) -> str | None:
    """The setting that stands for the option's value; "": nothing needs to be set; None: there is none."""
    text = "true" if value is None else (value if isinstance(value, str) else shown(value)).strip().lower()
    words = [text, *text.split()[:1]]  # "full_shard auto_wrap"
    return next((entry.settings[word] for word in words if word in entry.settings), None)


def advise(name: str, value: Any, document: Document | None, entry: Entry | None = None) -> Advice | None:
    """What to write here instead of another trainer's option; None: the name is unknown.

    Args:
        name: the option, with its section if it has one; "section." for a whole section.
        value: the option's value: a text, or the value that TOML parsed. None: it has none.
        document: the TOML file in which it was written; None: the command line. The advice has the same form.
        entry: the option's, if its trainer is known.
    """
    entry = entry or find(name.replace("-", "_"))
    if entry is None:
        return None
    if isinstance(value, int) and abs(value) >= 1 << 63:
        value = shown(value)  # Python refuses to print thousands of digits
    if isinstance(value, str) and has_control_characters(value):
        value = as_key(value)
    is_list = entry.key and get_origin(our_keys()[entry.key].type) is tuple
    if isinstance(value, list) and document is None and not is_list:
        value = " ".join(value)
    setting, fetch = setting_of(entry, value), ""
    start, note = (
        f"is {'a section' if name.endswith('.') else 'an option'} of {entry.trainer}",
        meaning(name, value)[2:] or entry.note,
    )
    if setting == "":
        return Advice(f"{start}; leave it out here{f': {note}' if note else ''}", entry.targets)
    if not entry.exists:
        remedy = note if note == "leave it out" else f"{note}; leave it out"
        return Advice(f"{start} and does not exist here: {remedy}", entry.targets)
    if entry.key == "job.config_file" and document is not None:
        return Advice(f"{start}; here, at the top of the file: base = {toml_value(str(value))}", {entry.key})
    if value is None and entry.key and our_keys()[entry.key].type is bool:
        value = True
    is_exact = setting is None
    if setting is None and entry.key and value is not None:
        if refused := _cannot_be(entry.key, value, document):
            return Advice(f"{start}; {refused}", entry.targets)
        converted, fetch = _converted(entry.key, value)
        setting = f"{entry.key} = {converted}"
    if setting is None:
        return Advice(f"{start}; here: {note or entry.key}", entry.targets)
    here = as_written(setting, document)
    pairs = (one.partition(" = ") for one in setting.split(" and "))
    written = {key: text for key, _, text in pairs}
    return Advice(f"{start}; here: {here}{f' ({note})' if note else ''}{fetch}", entry.targets, written, is_exact)


def find(name: str) -> Entry | None:
    """By its full name; else by its section; else by its last part, unless a key of ours has that name."""
    # if two entries have a name, the first counts
    known = {option: entry for entry in reversed(entries()) for option in entry.names}
    key = name.rpartition(".")[2]
    if entry := known.get(name) or known.get(f"{name.partition('.')[0]}.*"):
        return entry
    if keys_called(key):
        return None
    same = [entry for entry in entries() if any(option.endswith(f".{key}") for option in entry.names)]
    return known.get(key) or (same[0] if len(same) == 1 else None)


def as_written(setting: str, document: Document | None) -> str:
    """Settings in TOML, "section.key = value", joined by " and ", in the form in which they can be pasted."""
    if " and " in setting:
        joint = " " if document is None else " and "
        return joint.join(as_written(one, document) for one in setting.split(" and "))
    name, _, value = setting.partition(" = ")
    section, _, key = name.partition(".")
    if document is not None:
        table = document.get(section)
        is_there = isinstance(table, dict) and key in table
        return f"under [{section}] {f'change {key} to {value}' if is_there else f'write {key} = {value}'}"
    words = json.loads(value) if value[0] in '["' else value
    return (
        f"--{name} {' '.join(map(shlex.quote, map(str, words)) if isinstance(words, list) else [shlex.quote(words)])}"
    )


def _cannot_be(key: str, value: Any, document: Document | None) -> str:
    """Why our key cannot have their value, and what to write; "": it can."""
    field = our_keys()[key]
    is_list, rules = get_origin(field.type) is tuple, field.metadata
    kind = get_args(field.type)[0] if is_list else field.type
    default = f"leave it out for the default, {toml_value(field.default)}"
    if isinstance(value, dict) or (isinstance(value, list) and not is_list):
        return f"{key} takes one value here, not {shown(value)}; {default}"
    if kind is bool:
        return "" if str(value).lower() in ("true", "false") else f"{key} must be true or false here; {default}"
    if kind is str:
        wrong = rules["choices"] and value not in rules["choices"]
        return f"{key} has {', '.join(rules['choices'])} here, not {shown(value)}; {default}" if wrong else ""
    numbers = []
    for item in _items(field, value):
        try:
            numbers.append(math.nan if isinstance(item, bool) else float(item))
        except (TypeError, ValueError, OverflowError):
            numbers.append(math.nan)
    if not all(map(math.isfinite, numbers)):
        return f"{key} must be a number here, not {shown(value)}; {default}"
    number = min(numbers, default=0.0)
    if number < rules["low"]:
        return f"{key} must be at least {rules['low']} here, not {shown(value)}; {default}"
    if kind is int and 0 < number < 1 and key != "training.epochs":
        example = as_written(f"{key} = {max(1, round(1000 * number))}", document)
        return f"{value} is a share of the steps; write a number of steps: of 1,000 it is {example}"
    if key == "data.validation_fraction" and number >= 1:
        example = as_written(f"{key} = 0.05", document)
        return f"{value} is a number of rows, which cannot be given here; write a share of them, such as {example}"
    return ""


def _items(field: Any, value: Any) -> list[Any]:
    """The items of their value, which is a text or a list, for our key."""
    if isinstance(value, list) or get_origin(field.type) is not tuple:
        return value if isinstance(value, list) else [value]
    return re.split(r"\s*,\s*" if field.metadata["path"] else r"[,\s]+", str(value))


def _converted(key: str, value: Any) -> tuple[str, str]:
    """Their value as TOML of our key's type; and, for a name on the Hugging Face hub, how to fetch it first."""
    field, fetch = our_keys()[key], ""
    is_list = get_origin(field.type) is tuple
    kind = get_args(field.type)[0] if is_list else field.type
    items = _items(field, value)
    items = [item.get("path", "") if isinstance(item, dict) else item for item in items]  # axolotl's data sets
    if key in _OF_THE_HUB and len(items) == 1 and (name := hub_name(str(items[0]))):
        items[0], command = download(name.repository, is_data=key.startswith("data."))
        fetch = f"; fetch it first: {command}"
    elif key in _DATA:  # the name of a data set: a file of the user's own takes its place
        items = [item if re.search(r"[./*]", str(item)) else f"{item}.jsonl" for item in items]
    texts = []
    for item in items:
        text = str(item).lower() if isinstance(item, bool) else str(item).strip()
        if kind is int:
            with suppress(ValueError, OverflowError):
                text = str(math.ceil(float(text)))  # half an epoch is not none
        if kind is float and not re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", text, re.ASCII):
            text = repr(float(text))  # .5 is no number in TOML and JSON
        if kind is bool:
            text = text.lower()
        texts.append(toml_value(text) if kind is str else text)
    return (f"[{', '.join(texts)}]" if is_list else texts[0]), fetch


def download(name: str, is_data: bool) -> tuple[str, str]:
    """The path to name after the download of OWNER/NAME, and the command that downloads it."""
    folder = name.partition("/")[2]
    if is_data:  # a data set may have several configurations, each in a folder, and files of several splits
        config = "main" if folder == "gsm8k" else "data"
        return f"{folder}/{config}/train-*.parquet", f"hf download {name} --repo-type dataset --local-dir {folder}"
    return folder, f"hf download {name} --local-dir {folder}"
