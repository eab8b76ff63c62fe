"""Collects a run folder's content into one JSON-serialisable dict. Imports no torch.

A file may be missing, truncated or hostile. Then `problems` has a line about it, and the rest is collected.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from titan_mi100.checkpoint import sealed
from titan_mi100.config.toml_file import read_toml
from titan_mi100.errors import UserError
from titan_mi100.files.plain import open_plain, plain_path, read_object
from titan_mi100.watch.outcome import STATE
from titan_mi100.wording import shortened, some
from titan_mi100.workshop.pages.long_files import read_log, read_metrics, usable, whole, words

METRICS, CONFIG, ENVIRONMENT, PLAN = "metrics.jsonl", "config.toml", "environment.json", "plan.json"
_OF_A_RUN = (CONFIG, METRICS, STATE, ENVIRONMENT, "train.log")  # every run folder has at least one of them
_MOST_RESTARTS, _MOST_KEYS = 100, 1000
_REMEDY = "it is left out of the report"

T = TypeVar("T")


def collect(folder: Path) -> dict[str, Any]:
    """Collect everything about a run. Sizes are in bytes, times in seconds.

    Raises:
        UserError: it is not a run folder.
    """
    check_is_run(folder)
    problems: list[str] = []

    def read(name: str, reader: Callable[[Path], T], without: T) -> T:
        """The file's content; `without` if the file is missing or cannot be read."""
        path = folder / name
        try:
            return reader(path) if os.path.lexists(path) else without
        except UserError as error:
            problems.append(shortened(str(error), 1000))
        except OSError as error:
            problems.append(f"{path}: cannot be read: {error.strerror}; {_REMEDY}")
        except RecursionError:
            problems.append(f"{path}: is nested too deeply; {_REMEDY}")
        return without

    def in_object(path: Path) -> dict[str, Any]:
        return read_object(path, _REMEDY)

    nothing: dict[str, Any] = {}
    state = read(STATE, in_object, nothing)
    age = read(METRICS, lambda path: time.time() - plain_path(path).stat().st_mtime, None)
    environment = read(ENVIRONMENT, in_object, nothing)
    card = read(PLAN, in_object, nothing).get("card")
    run = {
        "folder": str(folder),
        "name": Path(os.path.realpath(folder)).name,
        "collected": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "state": _state(state),
        "restarts": _restarts(state.get("restarts")),
        "metrics": read(METRICS, read_metrics, nothing),
        "metrics_age": age,
        "config": read(CONFIG, _config, nothing),
        "environment": {key: _value(environment[key]) for key in ("layout", "processes") if key in environment},
        "card": card if usable(card) else None,
        "log": read("train.log", read_log, nothing),
        "checkpoints": read("checkpoint", _checkpoints, nothing),
    }
    return {**run, "problems": problems}


def check_is_run(folder: Path) -> None:
    """Raise a UserError if the folder is not a run folder."""
    if not folder.is_dir():
        problem = "is a file; name the folder that it is in" if folder.is_file() else "no such folder"
        raise UserError(f"{folder}: {problem}; a run prints its folder when it ends")
    if not any(os.path.lexists(folder / name) for name in _OF_A_RUN):
        inside = sorted(
            path for path in folder.iterdir() if any(os.path.lexists(path / name) for name in _OF_A_RUN[:3])
        )
        remedy = f"name one of those in it: {some(inside, 3)}" if inside else "name the folder that a run printed"
        raise UserError(f"{folder}: is not a run folder: it has none of {', '.join(_OF_A_RUN)}; {remedy}")


def _value(value: object) -> str:
    """The value as text like that of TOML, of at most 1,000 characters."""
    try:
        return shortened(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), 1000)
    except (RecursionError, ValueError):  # ValueError: an integer of more than 4,300 digits
        return "(too large to show)"


def _state(found: Mapping[str, Any]) -> dict[str, Any]:
    texts = {key: words(found.get(key)) for key in ("state", "message", "next")}
    return {**texts, "exit_code": whole(found.get("exit_code"), -(2**31)), "step": whole(found.get("step"))}


def _restarts(found: object) -> list[dict[str, Any]]:
    """The restarts that the launcher recorded."""
    entries = [restart for restart in found if isinstance(restart, dict)] if isinstance(found, list) else []
    return [
        {**_state(restart), "time": words(restart.get("time"), 50), "attempt": whole(restart.get("attempt"))}
        for restart in entries[-_MOST_RESTARTS:]
    ]


def _config(path: Path) -> dict[str, str]:
    """The settings: `section.key` -> value as TOML-like text."""
    tables = ((name, table) for name, table in read_toml(plain_path(path)).items() if isinstance(table, dict))
    settings = ((f"{name}.{key}", value) for name, table in tables for key, value in table.items())
    return {shortened(key, 200): _value(value) for key, value in islice(settings, _MOST_KEYS)}


def _checkpoints(folder: Path) -> dict[str, Any]:
    """The checkpoint folders, oldest first. Tensors are not read."""
    listed = []
    for path in sealed.all_checkpoints(folder):
        with suppress(FileNotFoundError):  # a run that is still running has removed it meanwhile
            listed.append(_checkpoint(path))
    return {"listed": listed, "damaged": [shortened(path.name) for path in sealed.damaged(folder)]}


def _checkpoint(path: Path) -> dict[str, Any]:
    with os.scandir(path) as entries:
        size = sum(file.stat(follow_symlinks=False).st_size for file in entries)
    try:
        sealed.read_manifest(path)
        problem = ""
    except (sealed.DamagedError, UserError, OSError) as error:
        problem = shortened(str(error), 300)
    why = path.with_name(f"{path.name}.suspect")
    return {
        "name": path.name, "step": sealed.step_of(path), "bytes": size, "problem": problem,
        "suspect": _first_line(why) if os.path.lexists(why) else "",
        "is_best": os.path.realpath(path) == os.path.realpath(path.parent / sealed.BEST),
        "saved": datetime.fromtimestamp(path.stat().st_mtime, timezone.utc).isoformat(timespec="seconds"),
    }  # fmt: skip


def _first_line(path: Path) -> str:
    with suppress(UserError, OSError), open_plain(path) as file:
        return file.readline(500).decode("utf-8", "replace").strip() or "no reason is given"
    return "the reason cannot be read"
