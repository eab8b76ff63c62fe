"""From TOML files and the command line to checked settings, and back to TOML. Imports no torch.

`python -m titan_mi100.config.load ARGS` checks the arguments of a run and prints its folder; `--help` lists every key.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from titan_mi100.config.check import check
from titan_mi100.config.settings import Config
from titan_mi100.errors import UserError, did_you_mean
from titan_mi100.wording import with_level

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class _Setting(NamedTuple):
    """A value that was given, and where."""

    value: Any
    where: str  # "file.toml: [section] key" or "--section.key", for messages
    folder: Path  # what a relative path is relative to
    is_text: bool  # from the command line: to be parsed


def _sections() -> Iterator[tuple[str, type]]:
    for section in fields(Config):
        yield section.name, section.default_factory  # type: ignore[misc]


def _keys(section: type) -> tuple[Any, ...]:
    """The section's fields; `type` is a class in each, for that module has no `from __future__ import annotations`."""
    return fields(section)


def load_config(argv: Sequence[str], world_size: int | None = 1) -> Config:
    """Read the config file that `argv` names, with its `base` files, apply overrides, check everything.

    Args:
        argv: `--job.config_file x.toml`, then any `--section.key value` (or `=value`; a lone `--section.key` is true).
        world_size: number of processes of the run; None: it is not to be started, and any layout will do.

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
    built, refused = {}, set()  # refused: as check names them
    for name, section in _sections():
        values = {}
        for key in _keys(section):
            if key.metadata["path"] and key.default:
                values[key.name] = os.path.abspath(key.default)
            if (setting := settings.get((name, key.name))) is not None:
                values[key.name], problem = _convert(key, setting)
                if problem:
                    errors.append(f"{setting.where} = {setting.value!r} {problem}")
                    refused.add(f"[{name}] {key.name}")
        built[name] = section(**values)
    config = Config(**built)
    source = f"{config_file.value}: " if config_file is not None else ""
    where = {f"[{section}] {key}": setting.where for (section, key), setting in settings.items()}
    if not config_file or os.path.isfile(config_file.value):  # else the missing file is reported already
        for error in check(config, world_size):
            named = re.match(r"\[\w+\] \w+", error)
            if named is None:
                errors.append(error)
            elif named[0] not in refused:
                errors.append(where.get(named[0], source + named[0]) + error[named.end() :])
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
            errors.append(f"command line: {argument!r} is not an option{did_you_mean(name, known, '--')}")
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
        errors.append(f"{path}: `base` forms a cycle: {' -> '.join(map(str, chain))}")
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
            errors.append(f"{path}: [{section}] is not a section{did_you_mean(section, sections)}")
        elif not isinstance(values, dict):
            errors.append(f"{path}: {section} = {values!r} must be a section, [{section}]")
        else:
            for key, value in values.items():
                where = f"{path}: [{section}] {key}"
                if key not in sections[section]:
                    elsewhere = [f"[{name}] {key}" for name, keys in sections.items() if key in keys]
                    hint = f"; did you mean {elsewhere[0]}?" if elsewhere else did_you_mean(key, sections[section])
                    errors.append(f"{where} is not a key{hint}")
                elif (section, key) == ("job", "config_file"):
                    errors.append(f"{where} can only be given on the command line; use `base` to inherit")
                else:
                    settings[section, key] = _Setting(value, where, path.parent, is_text=False)


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _convert(key: Any, setting: _Setting) -> tuple[Any, str]:
    """The value in the key's type and "", or the key's default and what is wrong."""
    value, rules = setting.value, key.metadata
    if is_list := get_origin(key.type) is tuple:
        kind = get_args(key.type)[0]
        given = _items(value) if setting.is_text else value if isinstance(value, list) else [value]
        values = [_as_kind(item, kind, setting.is_text) for item in given if item != ""]
    else:
        kind = key.type
        values = [_as_kind(value, kind, setting.is_text)]
    if any(type(item) is not kind for item in values):
        return key.default, f"must be {_KINDS[kind]}{', or a list of such' if is_list else ''}"
    if rules["choices"] and value not in rules["choices"]:
        return key.default, f"must be one of: {', '.join(rules['choices'])}"
    if kind in (int, float) and not all(math.isfinite(item) and item >= rules["low"] for item in values):
        return key.default, f"must be {'at least' if kind is int else 'a finite number of at least'} {rules['low']}"
    if rules["path"]:
        values = [os.path.abspath(setting.folder / os.path.expanduser(item)) if item else item for item in values]
    return (tuple(values), "") if is_list else (values[0], "")


def _items(text: str) -> list[str]:
    """The items of `a, b` or `[a, b]`. A glob may begin or end with a bracket of its own."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [item.strip() for item in inner.split(",")]


def _as_kind(value: Any, kind: type, is_text: bool) -> Any:
    """Command-line text in the key's type. What cannot be converted is returned unchanged; the caller rejects it."""
    if is_text and kind is not str:
        with suppress(KeyError, ValueError):
            return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
    return float(value) if kind is float and type(value) is int else value


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


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else repr(value)


def help_text() -> str:
    lines = [
        "usage: ./run_train.sh [--nproc_per_node N] [--job.config_file X.toml] [--section.key value ...]",
        "",
        'Every key, with its type and default. In a TOML file: [section] key = value, and base = "other.toml"',
        "inherits. Relative paths are relative to the TOML file, or on the command line to the current folder.",
        "A list is [a, b] in TOML and a,b on the command line.",
    ]
    for name, section in _sections():
        lines += ["", f"[{name}]"]
        for key in _keys(section):
            kind = f"{get_args(key.type)[0].__name__} list" if get_origin(key.type) is tuple else key.type.__name__
            choices = f" ({' | '.join(key.metadata['choices'])})" if key.metadata["choices"] else ""
            head = f"  --{name}.{key.name}  {kind} = {_toml_value(key.default)}"
            lines += [f"{head:<64} {key.metadata['doc']}{choices}"]
    return "\n".join(lines)


def config_from_command_line(for_this_job: bool = True) -> Config:
    """`load_config` for a program's start: prints the help and exits 0, or prints what is wrong and exits 2.

    One process of each node prints, since all of a node find the same. The world size comes from the launcher.

    Args:
        for_this_job: the layout must fit the processes that were started; else it is of a job to come.
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if {"-h", "--help"} & set(sys.argv[1:]):
        if first:
            print(help_text())
        sys.exit(0)
    try:
        return load_config(sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1")) if for_this_job else None)
    except UserError as error:
        if first:
            print(with_level("ERROR", error), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    checked = config_from_command_line()
    print(resolve_run_folder(checked))
