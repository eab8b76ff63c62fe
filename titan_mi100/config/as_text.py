"""Settings as text: their sections and keys, a config as TOML, the help. Imports no torch."""

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_args, get_origin

from titan_mi100.cli import WIDTH, Parser, RawHelp, example_of
from titan_mi100.config.settings import Config
from titan_mi100.errors import UserError
from titan_mi100.wording import shown


def sections() -> Iterator[tuple[str, type]]:
    for section in fields(Config):
        if section.name not in ("notes", "commits"):
            yield section.name, section.default_factory  # type: ignore[misc]


def keys_of(section: type) -> tuple[Any, ...]:
    """The section's keys. Each `type` is a class, not a string: settings.py does not postpone annotations."""
    return tuple(field for field in fields(section) if field.metadata)


def table_of(key: Any) -> Any:
    """The dataclass of one table, if the key is a list of tables ([[section.key]]); else None."""
    arguments = get_args(key.type)
    return arguments[0] if arguments and is_dataclass(arguments[0]) else None


@cache
def our_keys() -> Mapping[str, Any]:
    """Every key here, by "section.key"."""
    return {f"{name}.{key.name}": key for name, section in sections() for key in keys_of(section)}


def keys_called(key: str) -> list[str]:
    """Each "section.key" of ours with this key."""
    return [name for name in our_keys() if name.partition(".")[2] == key]


def to_toml(config: Config) -> str:
    """The whole config as TOML, with each key's doc. `load_config` reads it back to an equal config."""
    lines = []
    for name, section in sections():
        lines += ["", f"[{name}]"]
        for key in keys_of(section):
            if key.name != "config_file" and not table_of(key):
                value = getattr(getattr(config, name), key.name)
                lines.append(f"{key.name} = {toml_value(value)}  # {key.metadata['doc']}")
        for key in filter(table_of, keys_of(section)):  # TOML: tables follow the section's own keys
            for table in getattr(getattr(config, name), key.name):
                lines += ["", f"[[{name}.{key.name}]]"]
                lines += [f"{own.name} = {toml_value(getattr(table, own.name))}" for own in keys_of(type(table))]
    return "\n".join(lines[1:]) + "\n"


def toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if not isinstance(value, str | bool):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML allows no DEL in a string


def help_text(which: str = "") -> str:
    """What `train --help` prints. Args: which: as for `settings_text`."""
    lines = [
        "usage: ./run_train.sh [--nproc_per_node N] [--job.config_file X.toml] [--section.key value ...]",
        "   or: titan-mi100 train ..., from any folder, where the package is installed",
        "",
        "Options of the command:",
        *_option("--nproc_per_node N", "number of processes; default: one for each GPU, one on a CPU"),
        *_option("--max_restarts N", "restart up to N times after a crash, a hang or a killed process (docs/WATCH.md)"),
        *_option("--rehearse N", "count what a run on N devices takes and sends, without the devices; see its --help"),
        *_option("--version", "print the versions of this package and its libraries"),
        *("", settings_text(), example_of("titan-mi100 train")),
    ]
    return settings_text(which) if which else "\n".join(lines)


def settings_parser(prog: str, description: str, epilog: str) -> Parser:
    """Make the parser of a command that takes settings as training does."""
    return Parser(
        prog=prog,
        usage="%(prog)s --job.config_file X.toml [--section.key value ...] [options]",
        description=description,
        epilog=f"{epilog}\n\n{settings_text()}",
        formatter_class=RawHelp,
    )


def settings_text(which: str = "") -> str:
    """What --help says about the settings, which several commands take.

    Args:
        which: a section whose keys are listed, or "all"; "": no keys.

    Raises:
        UserError: no section has this name.
    """
    names = ", ".join(name for name, _ in sections())
    if which not in ("", "all", *names.split(", ")):
        raise UserError(f"--help {shown(which)}: there is no such section; use all, {names}")
    lines = textwrap.wrap(
        "Settings: on the command line --section.key value; in a TOML file key = value under [section]. In a file, "
        'base = "other.toml" inherits all settings of another file. X.toml may be the name of a bundled config: '
        "titan-mi100 configs lists them. A relative path in a file is relative to the file; on the command line, to "
        "the current folder. A list is [a, b] in a file; on the command line it is a,b or a b, and its key may be "
        "repeated. Options of other trainers: titan-mi100 coming-from. titan-mi100 train --help all lists every key, "
        f"and --help SECTION those of a section: {names}.",
        WIDTH,
    )
    parts = [(name, f"[{name}]", f"--{name}.", section) for name, section in sections()]
    parts += [
        (name, f"[[{name}.{key.name}]], a table for each, in a TOML file only", "", table)
        for name, section in sections()
        for key in keys_of(section)
        if (table := table_of(key))
    ]
    for name, title, prefix, section in parts:
        lines += ["", title] * (which in ("all", name))
        for key in (key for key in keys_of(section) if which in ("all", name) and not table_of(key)):
            kind = f"{get_args(key.type)[0].__name__} list" if get_origin(key.type) is tuple else key.type.__name__
            choices = f" ({' | '.join(key.metadata['choices'])})" if key.metadata["choices"] else ""
            lines += _option(f"{prefix}{key.name}  {kind} = {toml_value(key.default)}", key.metadata["doc"] + choices)
    return "\n".join(lines)


def _option(head: str, doc: str) -> list[str]:
    """An option's lines: what it is called, and below it, indented, what it does."""
    heads = textwrap.wrap(f"  {head}", WIDTH, subsequent_indent=" " * 6, break_on_hyphens=False)
    return heads + textwrap.wrap(doc, WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)
