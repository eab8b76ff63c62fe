"""Messages about names that are none of our settings: what the user most likely meant. Imports no torch."""

import re
import shlex
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from titan_mi100.config.other_trainers import advise, keys_called, our_keys
from titan_mi100.errors import did_you_mean
from titan_mi100.wording import shortened, shown

LAUNCHER_OPTIONS = ("max_restarts", "nproc_per_node", "nnodes", "node_rank", "rdzv", "rehearse")


class Unknown(NamedTuple):
    """A message, and the keys of ours that may have been meant; None: nobody can tell, any key may be."""

    message: str
    meant: set[str] | None


def unknown_option(argument: str, words: Sequence[str]) -> Unknown:
    """An argument of the command line that is none of ours, and the words after it."""
    name = argument.lstrip("-").partition("=")[0]
    where, value = f"command line: {shown(argument)}", " ".join(words) if words else None
    if not argument.startswith("-"):
        return Unknown(f"{where} is not an option{_stray(argument)}", None)
    if name in LAUNCHER_OPTIONS:
        return Unknown(f"{where} is not an option here; it is one of ./run_train.sh and titan-mi100 train", set())
    if name in our_keys():
        return Unknown(f"{where} is not an option; it is a list of tables: write [[{name}]] in a TOML file", {name})
    if advice := advise(name, value, in_toml=False):
        return Unknown(f"command line: --{name} {advice.text}", advice.targets)
    if same := keys_called(name):
        given = f" {shlex.quote(value)}" if value else ""
        what = f"is not an option; write {' or '.join(f'--{key}{given}' for key in same)}"
        return Unknown(f"command line: --{name} {what}", set(same))
    hint = did_you_mean(name, [*our_keys(), *LAUNCHER_OPTIONS], "--")
    return Unknown(f"command line: {shown(argument)} is not an option{hint}", _guessed(hint))


def unknown_key(where: str, section: str, key: str, value: Any) -> Unknown:
    """A key that its section does not have. Args: where: "file.toml: [section] key", for the message."""
    if isinstance(value, dict):  # `data.path = ...` below [training]
        inside = {f"{key}.{name}" for name in value} & our_keys().keys()
        hint = f"; write [{key}] on a line of its own, and its keys below it" if inside else ""
        return Unknown(f"{where} is a table, and no section has one{hint}", inside or None)
    if advice := advise(f"{section}.{key}", value, in_toml=True):
        return Unknown(f"{where} {advice.text}", advice.targets)
    if same := keys_called(key):
        listed = " or ".join("[{}] {}".format(*name.split(".")) for name in same)
        return Unknown(f"{where} is not a key; did you mean {listed}?", set(same))
    hint = did_you_mean(key, [name.partition(".")[2] for name in our_keys() if name.startswith(f"{section}.")])
    return Unknown(f"{where} is not a key{hint}", _guessed(hint, f"{section}."))


def unknown_at_top_level(path: str, name: str, value: Any, known_sections: Collection[str]) -> Unknown:
    """What is at the top level of a file and is no section of ours: a section, or a key outside of all sections."""
    shown_name = shortened(repr(name)[1:-1])
    if isinstance(value, dict):
        where = f"{path}: [{shown_name}]"
        if advice := advise(f"{name}.", None, in_toml=True) or advise(name, None, in_toml=True):
            return Unknown(f"{where} {advice.text}", advice.targets)
        inside = {our for key in value for our in keys_called(key)}
        hint = did_you_mean(name, known_sections)
        return Unknown(f"{where} is not a section{hint}", inside or None)
    if advice := advise(name, value, in_toml=True):
        return Unknown(f"{path}: {shown_name} {advice.text}", advice.targets)
    where = f"{path}: {shown_name} = {shown(value)}"
    if name in known_sections:
        keys = {key for key in our_keys() if key.startswith(f"{name}.")}
        return Unknown(f"{where} must be a section, [{name}]", keys)
    if same := keys_called(name):
        listed = " or ".join("[{}]".format(key.partition(".")[0]) for key in same)
        return Unknown(f"{where} must be written under its section, {listed}", set(same))
    return Unknown(f"{where} is outside of any section{did_you_mean(name, known_sections)}", None)


def _guessed(hint: str, prefix: str = "") -> set[str] | None:
    """The key that the end of a message names, if it names one."""
    found = re.search(r"did you mean (?:--)?([\w.]+)\?", hint)
    return {prefix + found[1]} if found else None


def _stray(argument: str) -> str:
    """What to do about a word of the command line that belongs to no option."""
    ending = argument.rpartition(".")[2].lower()
    if ending == "toml":
        return f"; name the config with --job.config_file {argument}"
    if ending in ("yaml", "yml", "py"):
        return (
            "; a config is a TOML file here: --job.config_file X.toml (docs/COMING_FROM.md has other trainers' names)"
        )
    if ending in ("jsonl", "json", "parquet"):
        return f"; name data with --data.path {argument}"
    return "; only a list takes several values"
