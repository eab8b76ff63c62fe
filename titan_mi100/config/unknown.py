"""Messages about names that are none of our settings: what the user most likely meant. Imports no torch."""

import difflib
import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

from titan_mi100.config.as_text import keys_called, our_keys, table_of
from titan_mi100.doors import door
from titan_mi100.errors import UserError, did_you_mean
from titan_mi100.wording import as_key, has_control_characters, shown

Document = Mapping[str, Any]  # a parsed TOML file
LAUNCHER_OPTIONS = ("max_restarts", "nproc_per_node", "rehearse")
_STRAY = "; only a list takes several values (--job.config_file names a TOML file, --data.path data)"


class Unknown(NamedTuple):
    """A message about a name.

    Attributes:
        meant: the keys of ours that may have been meant; None: any key may be.
        written: what the message tells the user to write, by key of ours.
        is_exact: whether the name means just that one key, with the user's own value.
    """

    message: str
    meant: set[str] | None
    written: Mapping[str, str] = MappingProxyType({})
    is_exact: bool = False


def of_other_trainers(what: str, *about: Any) -> Any:
    """What the workshop knows of a name or value of another trainer; None where the workshop is missing.

    Args:
        what: a key of doors.WORKSHOP.
    """
    with suppress(UserError):
        return door(what)(*about)
    return None


def messages(found: Sequence[Unknown]) -> list[str]:
    """The messages. Where two of them say what to write for the same key, one refers to the other."""
    by_key: dict[str, Unknown] = {}
    for unknown in sorted(found, key=lambda unknown: not unknown.is_exact):  # a stable sort
        for key in unknown.written:
            by_key.setdefault(key, unknown)
    lines = []
    for unknown in found:
        twice = [key for key in unknown.written if by_key[key] is not unknown]
        also = [f"but {key} only once: {by_key[key].written[key]}, from another message" for key in twice]
        lines.append("; ".join([unknown.message, *also]))
    return lines


def unknown_option(argument: str, words: Sequence[str]) -> Unknown:
    """An argument of the command line that is none of ours, and the words after it."""
    name = argument.lstrip("-").partition("=")[0]
    where, value = f"command line: {shown(argument)}", list(words) if len(words) > 1 else next(iter(words), None)
    if not argument.startswith("-"):
        return Unknown(f"{where} is not an option{_STRAY}", None)
    if name in LAUNCHER_OPTIONS:
        return Unknown(f"{where} is not an option here; it is one of ./run_train.sh and titan-mi100 train", set())
    tables = {key for key, ours in our_keys().items() if table_of(ours)}
    same = keys_called(name) if name not in our_keys() else [name]
    if same and tables.issuperset(same):
        return Unknown(f"{where} is not an option; it is a list of tables: write [[{same[0]}]] in a TOML file", {*same})
    if advice := of_other_trainers("advice", name, value, None):
        return Unknown(f"command line: --{name} {advice.text}", *advice[1:])
    if same:
        quoted = "" if any(map(has_control_characters, words)) else "".join(f" {shlex.quote(word)}" for word in words)
        typed = shown(argument) if name in our_keys() else f"--{name}"
        problem = f"is not an option; write {' or '.join(f'--{key}{quoted}' for key in same)}"
        return Unknown(f"command line: {typed} {problem}", set(same))
    hint, meant = _guess(name, in_toml=False)
    return Unknown(f"command line: {shown(argument)} is not an option{hint}", meant)


def unknown_key(where: str, section: str, key: str, value: Any, document: Document) -> Unknown:
    """A key that its section does not have. Args: where: "file.toml: [section] key", for the message."""
    if isinstance(value, dict):  # `data.path = ...` below [training]
        inside = {f"{key}.{name}" for name in value} & our_keys().keys()
        hint = f"; write [{key}] on a line of its own, and its keys below it" if inside else ""
        return Unknown(f"{where} is a table, and no section has one{hint}", inside or None)
    if advice := of_other_trainers("advice", f"{section}.{key}", value, document):
        return Unknown(f"{where} {advice.text}", *advice[1:])
    if same := keys_called(key):
        listed = " or ".join("[{}] {}".format(*name.split(".")) for name in same)
        return Unknown(f"{where} is not a key; did you mean {listed}?", set(same))
    hint, meant = _guess(f"{section}.{key}", in_toml=True)
    return Unknown(f"{where} is not a key{hint}", meant)


def unknown_at_top_level(path: str, name: str, document: Document, known_sections: Collection[str]) -> Unknown:
    """What is at the top level of a file and is no section of ours: a section, or a key outside of all sections."""
    shown_name, value = as_key(name), document[name]
    if isinstance(value, dict):
        return _unknown_section(f"{path}: [{shown_name}]", name, document, known_sections)
    if advice := of_other_trainers("advice", name, value, document):
        return Unknown(f"{path}: {shown_name} {advice.text}", *advice[1:])
    where = f"{path}: {shown_name} = {shown(value)}"
    if name in known_sections:
        keys = {key for key in our_keys() if key.startswith(f"{name}.")}
        return Unknown(f"{where} must be a section, [{name}]", keys)
    if same := keys_called(name):
        listed = " or ".join("[{}]".format(key.partition(".")[0]) for key in same)
        return Unknown(f"{where} must be written under its section, {listed}", set(same))
    return Unknown(f"{where} is outside of any section{did_you_mean(name, known_sections)}", None)


def _unknown_section(where: str, name: str, document: Document, known_sections: Collection[str]) -> Unknown:
    """The message about the section, after one line for each of its keys that other trainers have."""
    theirs = [key for key in document[name] if f"{name}.{key}" in (of_other_trainers("names") or ())]
    advice_by_key = {key: of_other_trainers("advice", f"{name}.{key}", document[name][key], document) for key in theirs}
    meant = {target for advice in advice_by_key.values() for target in advice.targets}
    lines = [f"{where} {key} {advice.text}" for key, advice in advice_by_key.items()]
    for own in (f"{name}.", name):
        if of_section := of_other_trainers("advice", own, None, document):
            return Unknown("\n".join([*lines, f"{where} {of_section.text}"]), of_section.targets | meant)
    meant |= {our for key in document[name] for our in keys_called(key)}
    return Unknown("\n".join([*lines, f"{where} is not a section{did_you_mean(name, known_sections)}"]), meant or None)


@cache
def _known_names() -> Mapping[str, str]:
    """Names that a typing error may have changed -> what to write: our keys, those of other trainers that are ours."""
    theirs = {name: key for name, key in (of_other_trainers("names") or {}).items() if key}
    ours = {name: key for key in our_keys() for name in (key.partition(".")[2], key)}
    return {**theirs, **ours, **{name: name for name in LAUNCHER_OPTIONS}}


def _guess(name: str, in_toml: bool) -> tuple[str, set[str] | None]:
    """The end of a message about an unknown name, and the key of ours that was meant; None: any key may be."""
    section, _, key = name.rpartition(".")
    known = _known_names()
    own = {word: ours for word, ours in known.items() if ours.startswith(f"{section}.")}
    for word, names in ((key, own), (name, known), (key, known)):
        if close := difflib.get_close_matches(word, names, n=1, cutoff=0.8):
            meant = names[close[0]]
            spelling = f"--{meant}"
            if in_toml and "." in meant:
                spelling = meant.removeprefix(f"{section}.") if names is own else "[{}] {}".format(*meant.split("."))
            return f"; did you mean {spelling}?", {meant}
    return "; --help lists them", None
