"""From TOML files and the command line to checked settings, and back to TOML. Imports no torch.

`python -m titan_mi100.config.load ARGS` checks the arguments of a run and prints its folder; `--help` lists every key.
"""

import errno
import glob
import itertools
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from titan_mi100 import cli
from titan_mi100.config import bundled
from titan_mi100.config.as_text import help_text, keys_of, our_keys, sections, table_of
from titan_mi100.config.check import ALTERNATIVES, check, check_start
from titan_mi100.config.hub import COMMITS_FILE, HubNames, hub_name, known_commits, one_at_a_node
from titan_mi100.config.problem import Problem
from titan_mi100.config.settings import Config, JobConfig
from titan_mi100.config.srun import ASKS_COMMITS, RUN_FOLDER, check_place, srun_ranks
from titan_mi100.config.toml_file import read_toml
from titan_mi100.config.unknown import (
    Unknown,
    of_other_trainers,
    unknown_at_top_level,
    unknown_key,
    unknown_option,
)
from titan_mi100.errors import UserError, did_you_mean
from titan_mi100.wording import as_key, first_of, has_control_characters, is_utf8, shown

_Name = tuple[str, str]  # section and key

# If one of these is set, the default config is finetune.toml: debug.toml works only with its own model and data.
_OWN_MODEL_OR_DATA = (
    *(("model", "flavor"), ("model", "tokenizer_path"), ("checkpoint", "initial_load_path")),
    *(("lora", "initial_load_path"), ("data", "path")),
)
_LONGEST_CHAIN = 10  # files, each the `base` of the one before
_COMMAND_LINE, _DEFAULT = -1, _LONGEST_CHAIN  # depths of settings that no file gives, see _Setting
_PLACES = ("LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")  # rank variables; the first that is set counts
TEACHER_CONFIG = "teach.toml"  # of a teacher's pass, in the teacher's folder
_OURS = (
    *("train.log", "config.toml", "environment.json", "metrics.jsonl", "run_state.json"),
    *("ledger.csv", "ledger.refused.csv", ".lock", "wandb_id", COMMITS_FILE, "mlflow_id", "trackio_id", "swanlab_id"),
)


class _Setting(NamedTuple):
    """A value that was given, and where."""

    value: Any  # from the command line: a text; for a list key a list of texts
    where: str  # "file.toml: [section] key" or "--section.key", for messages
    folder: Path  # what a relative path is relative to
    depth: int = _COMMAND_LINE  # 0: from the config file, 1: from its base, 2: from that one's base, ...

    @property
    def is_text(self) -> bool:
        """Whether the value is still to be parsed."""
        return self.depth == _COMMAND_LINE


def load_config(argv: Sequence[str], world_size: int | None = 1, with_files: bool = True) -> Config:
    """Read the config file that `argv` names, with its `base` files, apply overrides, check everything.

    Without a name it is the bundled debug.toml, or finetune.toml where `argv` names a model or data.

    Args:
        argv: `--job.config_file x.toml`, then any `--section.key value` (or `=value`; a lone `--section.key` is true;
            a list takes several values, and its key may be repeated).
        world_size: number of processes of the run; None: it is not to be started, and any layout will do.
        with_files: whether data and tokenizer must exist.

    Raises:
        UserError: every problem, one line each.
    """
    errors, unknown = list[str](), list[Unknown]()
    overrides = _parse_arguments(argv, errors, unknown)
    shipped = "finetune" if any(map(overrides.get, _OWN_MODEL_OR_DATA)) else "debug"
    default = _Setting(str(bundled.FOLDER / f"{shipped}.toml"), "default config file", Path())
    named = overrides.get(("job", "config_file"), default)
    config_file = overrides["job", "config_file"] = named._replace(value=bundled.or_bundled(named.value))
    settings: dict[_Name, _Setting] = {}
    is_read = _read_toml(Path(config_file.value), settings, errors, unknown, chain=())
    settings.update(overrides)
    names = HubNames(with_files)
    values, problems, refused = _values(settings, names)
    errors += problems
    if names.left and not (errors or unknown):  # nothing is fetched for a config that is refused anyway
        folder = "" if values["checkpoint", "fresh"] else os.environ.get(RUN_FOLDER) or values["job", "run_folder"]
        with one_at_a_node(known_commits(str(folder), os.environ), os.environ) as names.commits:
            values, errors, refused = _values(settings, names)
            if errors:
                raise UserError(first_of(errors, "config"))
    if with_files:
        errors += _moved_run(config_file.value, settings.get(("job", "run_folder")), str(values["job", "run_folder"]))
    notes = _replace_alternatives(values, settings)
    if named is default:
        notes.append(f"no --job.config_file is given: settings from {config_file.value}")
    elif named.value != config_file.value:
        notes.append(f"no {named.value} is here: settings from the bundled {config_file.value}")
    built = {
        name: section(**{key.name: values[name, key.name] for key in keys_of(section)}) for name, section in sections()
    }
    if made := os.environ.get(RUN_FOLDER):
        built["job"] = replace(built["job"], run_folder=made)
    config = Config(**built, notes=tuple(notes), commits=names.commits or {})
    origins = {f"{section}.{key}": setting.where for (section, key), setting in settings.items()}
    for issue in check(config, world_size, with_files) if is_read else ():  # else what is missing may be in the file
        where = origins.get(issue.key)
        if not _may_follow(issue, refused, unknown, is_given=where is not None):
            errors.append(issue.at(where) if where else f"{config_file.value}: {issue}" if issue.key else issue.text)
    errors = [*(name.message for name in unknown), *errors]
    if errors:
        raise UserError(first_of(errors, "config"))
    return config


def _values(settings: dict[_Name, _Setting], names: HubNames) -> tuple[dict[_Name, Any], list[str], set[str]]:
    """The value of each key; what is wrong; each "section.key" that was refused, or whose name on the hub was left."""
    read, errors, refused, here = dict[_Name, Any](), list[str](), set[str](), Path.cwd()
    for name, section in sections():
        for key in keys_of(section):
            setting, left = settings.get((name, key.name)) or _Setting(key.default, "", here, _DEFAULT), len(names.left)
            if table := table_of(key):
                read[name, key.name], problems = _convert_tables(table, setting, names)
            else:
                read[name, key.name], problem = _convert(key, setting, names)
                problems = [f"{setting.where} = {shown(setting.value)} {problem}"] if problem else []
            errors += problems
            refused.update([f"{name}.{key.name}"] if problems or len(names.left) > left else [])
    return read, errors, refused


def _moved_run(config_file: str, given: _Setting | None, run_folder: str) -> list[str]:
    """The message about a run's own config.toml that names another run folder: a start would leave this one alone."""
    here = os.path.dirname(os.path.abspath(config_file))
    is_own = given is not None and not given.is_text and os.path.lexists(os.path.join(here, "run_state.json"))
    if not is_own or os.path.realpath(here) == os.path.realpath(run_folder):
        return []
    problem = f"[job] run_folder is {shown(run_folder)}, but the file is in another run's folder; to resume the run"
    return [f"{config_file}: {problem} that is here: --job.run_folder {shlex.quote(here)}"]


def _may_follow(problem: Problem, refused: set[str], unknown: Sequence[Unknown], is_given: bool) -> bool:
    """Whether a problem may only be a consequence of a setting that was refused; then it is not printed.

    Args:
        refused: each "section.key" whose value was refused: the checks saw its default.
        unknown: names that are none of ours: the checks saw the defaults of what they stand for.
        is_given: whether the user has set the problem's key.
    """
    doubtful = refused.union(*(name.meant or () for name in unknown))
    any_key = bool(problem.key) and not is_given and any(name.meant is None for name in unknown)
    return any_key or not doubtful.isdisjoint((problem.key, *problem.about))


def _replace_alternatives(values: dict[_Name, Any], settings: dict[_Name, _Setting]) -> list[str]:
    """Unset keys that exclude a key which was set closer to the user: the command line, then the config file, then its
    base. Returns a line for the log about each.
    """
    notes = []
    for pair in ALTERNATIVES:
        for kept, other in (pair, pair[::-1]):
            depths = [settings[name].depth if name in settings else _DEFAULT for name in (kept, other)]
            if depths[0] < depths[1] and values[kept] and values[other]:
                notes.append(f"{settings[kept].where} replaces [{other[0]}] {other[1]} = {shown(values[other])}")
                values[other] = type(values[other])()
    return notes


def _parse_arguments(argv: Sequence[str], errors: list[str], unknown: list[Unknown]) -> dict[_Name, _Setting]:
    settings, known = dict[_Name, _Setting](), our_keys()
    tables = {name for name, key in known.items() if table_of(key)}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, has_value, value = argument.removeprefix("--").partition("=")
        words = [value] if has_value else []
        is_known = argument.startswith("--") and name in known.keys() - tables
        is_list = is_known and get_origin(known[name].type) is tuple
        while rest and not rest[0].startswith("--") and (is_list or not words):
            words.append(rest.pop(0))
        if not is_known:  # its values belong to it, so that one mistake gives one message
            while argument.startswith("--") and rest and not rest[0].startswith("--"):
                words.append(rest.pop(0))
            unknown.append(unknown_option(argument, words))
            continue
        section, key = name.split(".")
        before = settings.get((section, key))
        if not words and known[name].type is bool:
            words = ["true"]
        if not words:
            errors.append(f"command line: --{name} needs a value")
        elif is_list:
            items = [item for word in words for item in _items(word, known[name].metadata["path"])]
            settings[section, key] = _Setting([*(before.value if before else ()), *items], f"--{name}", Path.cwd())
        elif before:
            twice = f"{shown(before.value)} and {shown(words[0])}"
            errors.append(f"command line: --{name} is given twice, as {twice}; keep one of them")
        else:
            settings[section, key] = _Setting(words[0], f"--{name}", Path.cwd())
    return settings


def _read_toml(
    path: Path, settings: dict[_Name, _Setting], errors: list[str], unknown: list[Unknown], chain: tuple[Path, ...]
) -> bool:
    """Add the settings of the file, after those of its `base`, which it overrides; whether it could be read."""
    if problem := _refused_path(str(path)):
        errors.append(f"{shown(str(path))}: {problem}")
        return False
    problem = "" if os.path.lexists(path) else bundled.no_such_file(str(path))
    document: dict[str, Any] = {}
    if not problem and (real := Path(os.path.realpath(path))) in chain:
        problem = f"`base` forms a cycle: {' -> '.join(map(str, chain))}"
    if not problem and len(chain) == _LONGEST_CHAIN:
        problem = f"is one `base` too many: {_LONGEST_CHAIN} files already inherit from another"
    if not problem:
        try:
            document = read_toml(path)
        except UserError as error:
            problem = str(error).removeprefix(f"{path}: ")
    if problem:
        errors.append(f"{path}: {problem}")
        return False
    base, is_read = document.pop("base", None), True
    if isinstance(base, str):
        inherited = bundled.or_bundled(base, str(path.parent))
        before = len(errors)
        is_read = _read_toml(Path(inherited), settings, errors, unknown, (*chain, real))
        if not is_read and len(errors) == before + 1:
            errors[-1] = f"{path}: base = {shown(base)}: {errors[-1]}"
    elif base is not None:
        errors.append(f"{path}: base = {shown(base)} is not the name of a TOML file")
    known = {name: {key.name for key in keys_of(section)} for name, section in sections()}
    for section, values in document.items():
        if section not in known or not isinstance(values, dict):
            unknown.append(unknown_at_top_level(str(path), section, document, known))
            continue
        for key, value in values.items():
            where = f"{path}: [{section}] {as_key(key)}"
            if key not in known[section]:
                unknown.append(unknown_key(where, section, key, value, document))
            elif (section, key) == ("job", "config_file"):
                errors.append(f"{where} can only be given on the command line; use `base` to inherit")
            else:
                settings[section, key] = _Setting(value, where, path.parent, len(chain))
    return is_read


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _convert(key: Any, setting: _Setting, names: HubNames) -> tuple[Any, str]:
    """The value in the key's type and "", or the key's default and what is wrong."""
    value, rules = setting.value, key.metadata
    if isinstance(value, bool) and "true" in rules["choices"]:  # of three: true, false, not set
        value = str(value).lower()
    is_list = get_origin(key.type) is tuple
    kind = get_args(key.type)[0] if is_list else key.type
    inputs = value if is_list and isinstance(value, list | tuple) else [value]
    if is_list and len(inputs) > 1 and "" in inputs:
        return key.default, "has an empty item; leave it out"
    may_be_empty = is_list and (setting.is_text or kind is str)
    values = [_as_kind(item, kind, setting.is_text) for item in inputs if not may_be_empty or item != ""]
    if any(type(item) is not kind for item in values):
        is_quoted = not is_list and isinstance(value, str) and not setting.is_text
        hint = "; write it without quotes" if is_quoted and type(_as_kind(value, kind, True)) is kind else ""
        return key.default, f"must be {_KINDS[kind]}{', or a list of such' if is_list else ''}{hint}"
    if rules["choices"] and (others := [item for item in values if item not in rules["choices"]]):
        name = next((name for name, ours in our_keys().items() if ours is key), "")
        hint = of_other_trainers("meaning", name, others[0])
        hint = hint or did_you_mean(others[0], rules["choices"], otherwise="", cutoff=0.52)
        return key.default, f"must be one of: {', '.join(filter(None, rules['choices']))}{hint}"
    problems = [problem for item in values if (problem := _refused(item, rules))]
    if rules["path"] and not problems:
        try:
            values = [path for item in values for path in _paths(item, setting.folder, is_list, rules["hub"], names)]
        except UserError as error:
            return key.default, str(error)
        problems = [f"stands for {shown(item)}, which {why}" for item in values if (why := _refused(item, rules))]
    return (key.default, problems[0]) if problems else (tuple(values) if is_list else values[0], "")


def _paths(item: str, folder: Path, is_list: bool, kind: str, names: HubNames) -> list[str]:
    """The absolute path of a value, or what its name on the hub stands for. Args: kind: see hub.fetch; "": no name."""
    if kind and (name := hub_name(item, folder)):
        return names.paths(item, name, kind)
    return [_absolute(item, folder, is_list) if item else item]


def _convert_tables(table: type, setting: _Setting, names: HubNames) -> tuple[tuple[Any, ...], list[str]]:
    """The tables as dataclasses, and what is wrong with them."""
    if not isinstance(setting.value, list | tuple) or any(not isinstance(item, dict) for item in setting.value):
        return (), [f"{setting.where} must be a list of tables, each under [[section.key]]"]
    instances, errors, keys = [], list[str](), {key.name: key for key in keys_of(table)}
    for number, content in enumerate(setting.value, 1):
        where, values = f"{setting.where}, table {number}", {}
        for name, value in content.items():
            if name not in keys:
                errors.append(f"{where}: {as_key(name)} is not a key{did_you_mean(name, keys)}")
                continue
            values[name], problem = _convert(keys[name], _Setting(value, where, setting.folder, setting.depth), names)
            errors += [f"{where}: {name} = {shown(value)} {problem}"] if problem else []
        instances.append(table(**values))
    return tuple(instances), errors


def _absolute(path: str, folder: Path, is_glob: bool) -> str:
    """The absolute path. `..` is resolved by the system: after a symbolic link it is not the parent in the text."""
    path = os.path.expanduser(path)
    full_path = os.path.join(folder, path)
    if is_glob and not os.path.isabs(path) and glob.has_magic(path) and not os.path.lexists(full_path):
        while path.startswith("../"):
            folder, path = Path(os.path.realpath(folder / "..")), path[3:]
        full_path = os.path.join(glob.escape(os.path.abspath(folder)), path)
    elif ".." in Path(path).parts:
        full_path = os.path.join(os.path.realpath(os.path.dirname(full_path)), os.path.basename(full_path))
    return os.path.abspath(full_path)


def _refused(value: Any, rules: Any) -> str:
    """Why a value of the right type is refused; "": it is accepted."""
    if isinstance(value, str):
        return _refused_path(value) if rules["path"] else "" if is_utf8(value) else "is not UTF-8"
    if isinstance(value, float) and not rules["low"] <= value < rules["below"]:  # products beyond 1e100 are infinite
        return f"must be a finite number of at least {rules['low']}, below {rules['below']}"
    if value < rules["low"]:
        return f"must be at least {rules['low']}"
    high = rules["high"] or (value if isinstance(value, float) else 2**31 - 1)
    return "" if value <= high else f"must be at most {high}"


def _refused_path(path: str) -> str:
    if not is_utf8(path):
        with suppress(UnicodeEncodeError):  # surrogates that stand for no byte
            if is_utf8(os.fsencode(path).decode("utf-8", "surrogateescape")):
                return "is UTF-8, but the locale is not: start with LC_ALL=C.UTF-8 (or PYTHONUTF8=1)"
    if not is_utf8(path) or has_control_characters(path):
        return "holds control characters or is not UTF-8; rename it"
    try:
        os.lstat(path)
    except OSError as error:
        return f"cannot be a path: {error.strerror}" if error.errno == errno.ENAMETOOLONG else ""
    return ""


def _items(text: str, is_path: bool = False) -> list[str]:
    """The items of `a, b` or `[a, b]`. A glob may begin or end with a bracket; a file name may contain commas."""
    if is_path and os.path.lexists(text):
        return [text]
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [item.strip() for item in inner.split(",")]


def _as_kind(value: Any, kind: type, is_text: bool) -> Any:
    """Command-line text in the key's type. What cannot be converted is returned unchanged; the caller rejects it."""
    if is_text and kind is not str:
        with suppress(KeyError, ValueError):
            return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
    if kind is float and type(value) is int:
        return float(value) if abs(value) < 1e308 else float("inf")
    return value


def make_run_folder(job: JobConfig, fresh: bool) -> Path:
    """Make a run's folder and return it. Args: fresh: see checkpoint.fresh.

    It is the named folder, which may exist; with checkpoint.fresh a new one beside it; without a name a new one, named
    by the time. Two runs that start at the same time never get the same new folder.

    Raises:
        UserError: it cannot be made, or a name that the run needs in it is taken.
    """
    if made := os.environ.get(RUN_FOLDER):
        return Path(made)
    base = job.run_folder
    if not base:
        stem = Path(job.config_file).stem or "run"
        base = os.path.join(os.path.realpath(job.dump_folder), f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    for number in itertools.count(1):
        folder = Path(base if number == 1 else f"{base}-{number}")
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            if not folder.is_dir():  # the error may also be about a folder above it
                where = f"{error.filename or folder}: cannot be made ({error.strerror})"
                raise UserError(f"{where}; set job.run_folder or job.dump_folder") from None
            if not job.run_folder or fresh:
                continue
        _check_ours(folder)
        return folder
    raise AssertionError


def _check_ours(folder: Path) -> None:
    """Refuse a link, a folder or a pipe that has the name of one of the run's files. Raises UserError."""
    for path in (folder / name for name in _OURS):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            problem = "is a link, a folder or a pipe, where the run writes a file of its own"
            raise UserError(f"{path}: {problem}; move it away, or name another job.run_folder")


def config_from_command_line(for_this_job: bool = True) -> Config:
    """`load_config` with sys.argv. Prints the help or the version and exits 0, or prints the errors and exits 2.

    Only one process of each node prints: all of them find the same. The world size comes from the launcher; srun's
    variables are translated into torchrun's.

    Args:
        for_this_job: whether the layout must fit the processes that were started now; False: it is for a later job.
    """
    configs = list[Config]()
    answers = {"-h": help_text, "--help": help_text, "--version": lambda *_: cli.versions()}
    index = next((index for index, argument in enumerate(sys.argv) if argument in answers), 0)

    def is_first() -> bool:
        index = next((os.environ[name] for name in _PLACES if for_this_job and name in os.environ), "0")
        return not re.fullmatch("0*[1-9][0-9]*", index, re.ASCII)

    def answer() -> None:
        if for_this_job:
            os.environ.update(srun_ranks(os.environ))
            check_place(os.environ)
        if not index:
            config = load_config(sys.argv[1:], int(os.environ.get("WORLD_SIZE", "1")) if for_this_job else None)
            if for_this_job:
                check_start(config)
            configs.append(config)
        elif is_first():
            print(answers[sys.argv[index]](*(word for word in sys.argv[index + 1 : index + 2] if word[:1] != "-")))

    def say(message: object) -> None:
        if is_first():
            cli.say(message)

    code = cli.exit_code(answer, say)
    return configs[0] if configs else sys.exit(code)


if __name__ == "__main__":
    checked = config_from_command_line()
    sys.stdout.reconfigure(encoding=sys.getfilesystemencoding())  # type: ignore[union-attr]  # whatever the terminal's
    commits = json.dumps(dict(checked.commits), separators=(",", ":"))  # without a space
    facts = [commits] if os.environ.get(ASKS_COMMITS) else []
    sys.exit(cli.exit_code(lambda: print(*facts, make_run_folder(checked.job, checked.checkpoint.fresh))))
