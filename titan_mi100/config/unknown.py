"""Messages about names that are none of our settings: what the user most likely meant. Imports no torch."""

import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

from titan_mi100.config.as_text import keys_called, our_keys, table_of
from titan_mi100.doors import door
from titan_mi100.errors import UserError, did_you_mean
from titan_mi100.wording import as_key, has_control_characters, shown

Document = Mapping[str, Any]  # a parsed TOML file
LAUNCHER_OPTIONS = ("max_restarts", "nproc_per_node", "rehearse")
_STRAY = "; only a list takes several values (--job.config_file names a TOML file, --data.path data)"


class Unknown(NamedTuple):
    """A message about a name. Attributes: meant: the keys of ours that may have been meant; None: any key may be."""

    message: str
    meant: set[str] | None


def of_other_trainers(what: str, *about: Any) -> Any:
    """What the workshop knows of a name or value of another trainer; None where the workshop is missing.

    Args:
        what: a key of doors.WORKSHOP.
    """
    with suppress(UserError):
        return door(what)(*about)
    return None


def unknown_option(argument: str, words: Sequence[str]) -> Unknown:
    """An argument of the command line that is none of ours, and the words after it."""
    name, problem = argument.lstrip("-").partition("=")[0], f"command line: {shown(argument)} is not an option"
    if not argument.startswith("-"):
        return Unknown(f"{problem}{_STRAY}", None)
    if name in LAUNCHER_OPTIONS:
        return Unknown(f"{problem} here; it is one of ./run_train.sh and titan-mi100 train", set())
    same = keys_called(name.rpartition(".")[2])
    if same and all(table_of(our_keys()[key]) for key in same):
        return Unknown(f"{problem}; it is a list of tables: write [[{same[0]}]] in a TOML file", {*same})
    quoted = "" if any(map(has_control_characters, words)) else "".join(f" {shlex.quote(word)}" for word in words)
    value = list(words) if len(words) > 1 else next(iter(words), None)
    return _unknown(problem, f"command line: --{name}", name, value, None, quoted)


def unknown_key(where: str, section: str, key: str, value: Any, document: Document) -> Unknown:
    """A key that its section does not have. Args: where: "file.toml: [section] key", for the message."""
    if isinstance(value, dict):  # `data.path = ...` below [training]
        inside = {f"{key}.{name}" for name in value} & our_keys().keys()
        hint = f"; write [{key}] on a line of its own, and its keys below it" if inside else ""
        return Unknown(f"{where} is a table, and no section has one{hint}", inside or None)
    return _unknown(f"{where} is not a key", where, f"{section}.{key}", value, document)


def unknown_at_top_level(path: str, name: str, document: Document, known_sections: Collection[str]) -> Unknown:
    """What is at the top level of a file and is no section of ours: a section, or a key outside of all sections."""
    where, value = f"{path}: {as_key(name)}", document[name]
    if isinstance(value, dict):
        return _unknown_section(f"{path}: [{as_key(name)}]", name, document, known_sections)
    if name in known_sections and not of_other_trainers("advice", name, value, document):
        keys = {key for key in our_keys() if key.startswith(f"{name}.")}
        return Unknown(f"{where} = {shown(value)} must be a section, [{name}]", keys)
    return _unknown(f"{where} = {shown(value)} is outside of any section", where, name, value, document)


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


def _unknown(problem: str, where: str, name: str, value: Any, document: Document | None, typed: str = "") -> Unknown:
    """What another trainer means by the name; else the keys of ours that it names without a section, or nearly.

    Args:
        document: the file it is in; None: the command line, where `typed` follows it.
    """
    if advice := of_other_trainers("advice", name, value, document):
        return Unknown(f"{where} {advice.text}", advice.targets)
    section, _, key = name.rpartition(".")
    known = _known_names()
    own = {word: ours for word, ours in known.items() if ours.startswith(f"{section}.")}
    candidates = ((key, own), (name, known), (key, known))
    near = (names[close] for word, names in candidates for close in get_close_matches(word, names, n=1, cutoff=0.8))
    same = keys_called(key)
    if not (meant := same or [*islice(near, 1)]):
        return Unknown(f"{problem}; --help lists them", None)
    is_option = document is None or "." not in meant[0]
    after = typed if same else ""
    words = " or ".join(f"--{ours}{after}" if is_option else "[{}] {}".format(*ours.split(".")) for ours in meant)
    return Unknown(f"{problem}; write {words}" if same else f"{problem}; did you mean {words}?", {*meant})


@cache
def _known_names() -> Mapping[str, str]:
    """Names that a typing error may have changed -> what to write: our keys, those of other trainers that are ours."""
    theirs = {name: key for name, key in (of_other_trainers("names") or {}).items() if key}
    ours = {name: key for key in our_keys() for name in (key.partition(".")[2], key)}
    return {**theirs, **ours, **{name: name for name in LAUNCHER_OPTIONS}}
