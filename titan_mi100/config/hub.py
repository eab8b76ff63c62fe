"""Names of the Hugging Face hub where a path is wanted: how to fetch what they name. Imports no torch."""

import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from titan_mi100.config.problem import Problem
from titan_mi100.config.srun import PLACE
from titan_mi100.errors import UserError
from titan_mi100.files import durable
from titan_mi100.files.hub import fetch
from titan_mi100.files.hub_files import MODEL, SHAPE, HubName, parse_name
from titan_mi100.files.patterns import nearby
from titan_mi100.files.plain import read_object

_FILES = (".json", ".jsonl", ".parquet", ".gz", ".zst", ".csv", ".txt", ".toml", ".jinja", ".model")
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_FOLDERS = ("models", "model", "weights", "checkpoints", "assets", "outputs", "data", "runs")  # no owner's name
COMMITS = "TITAN_HUB"  # environment variable: the commits of names that the launcher has asked for, as JSON
COMMITS_FILE = "hub.json"  # the same, in the run folder
_PATIENCE, _RECENT = 3600.0, 600.0  # seconds: to wait for a node's first process; since when it may have been ready


def hub_name(text: str, folder: str | os.PathLike[str] = "") -> HubName | None:
    """The name on the hub that a value is; None: it is a path. What exists, or nearly, is a path.

    Args:
        folder: what a path is relative to.
    """
    if (name := parse_name(text)) is None:
        return None
    path = os.path.join(folder, text)
    is_path = text.endswith((*_FILES, *_WEIGHTS)) or text.partition("/")[0] in _FOLDERS or os.path.lexists(path)
    return None if is_path or (text == name.repository and nearby(path).startswith("; did you")) else name


class HubNames:
    """Puts paths in the place of names on the hub.

    Attributes:
        commits: of the names, see hub.fetch; None: nothing is fetched yet, and names are left.
        left: names that were left.
    """

    def __init__(self, with_files: bool = True, commits: dict[str, str] | None = None) -> None:
        """Args: with_files: false: only the shape of a model is wanted."""
        self.commits, self.left = commits, list[str]()
        self._with_files = with_files

    def paths(self, text: str, name: HubName, kind: str) -> list[str]:
        """What a name stands for. Args: as hub.fetch. Raises UserError: it cannot be had."""
        if self.commits is None or not (self._with_files or kind == MODEL):
            self.left.append(text)
            return [text]
        try:
            return fetch(name, kind if self._with_files else SHAPE, self.commits)
        except UserError as error:
            raise UserError(f"is no path here, and on the hub it {error}") from None


@contextmanager
def one_at_a_node(commits: dict[str, str], environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Let a node's first process fetch names, and the others wait for the commits that it has fetched.

    A launcher has fetched before it starts them. Without one the first process writes what the others read.

    Args:
        commits: those to use; the block adds others.

    Raises:
        UserError: the first process says nothing.
    """
    if COMMITS in environ or environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        yield commits
        return
    start = " ".join(environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", *PLACE[4:]))
    digest = hashlib.sha256(f"{os.getppid()} {start}".encode()).hexdigest()[:16]
    file = Path(tempfile.gettempdir(), f"titan-hub-{os.getuid()}-{digest}.json")
    if environ.get("LOCAL_RANK", "0") != "0":
        yield _wait_for(file)
        return
    fetched = None
    try:
        yield commits
        fetched = commits
    finally:
        durable.replace(file, json.dumps(fetched))


def local_path(text: str, kind: str = MODEL) -> str:
    """The path that an option of a command names; a name on the hub is fetched. Raises UserError: it cannot be."""
    name = hub_name(text)
    try:
        return HubNames(commits={}).paths(text, name, kind)[0] if name else text
    except UserError as error:
        raise UserError(f"{text} {error}") from None


def known_commits(folder: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The commits that a start must use: those that its launcher has asked for, or the run's; else {}.

    Args:
        folder: the run folder; "": there is none, or the run starts over.
    """
    if made := environ.get(COMMITS):
        return json.loads(made)
    file = Path(folder, COMMITS_FILE)
    return read_object(file, "remove it, to take the newest commits") if folder and os.path.lexists(file) else {}


def _wait_for(file: Path) -> dict[str, str]:
    """What the first process of this node has said. Ends this process if it has failed: it has said why."""
    began = time.time()
    while time.time() < began + _PATIENCE:
        with suppress(OSError):
            if (status := file.stat()).st_uid == os.getuid() and status.st_mtime > began - _RECENT:
                return json.loads(file.read_bytes()) or sys.exit(2)
        time.sleep(0.2)
    raise UserError(f"the first process of this node has fetched nothing from the hub within {_PATIENCE:.0f} s")


def is_hub_name(text: str) -> bool:
    """Whether it is OWNER/NAME in the hub's characters; a relative path may be it, too."""
    return (name := parse_name(text)) is not None and name.repository == text


def cached_model(folder: str | os.PathLike[str]) -> tuple[str, str]:
    """Name and commit of a model in the hub's cache: .../models--OWNER--NAME/snapshots/COMMIT. Else "", ""."""
    paths = f"{os.path.abspath(folder)}\n{os.path.realpath(folder)}"
    match = re.search(r"/models--([\w.-]+)--([\w.-]+)/snapshots/(\w+)$", paths, re.MULTILINE)
    return (f"{match[1]}/{match[2]}", match[3]) if match else ("", "")


def no_such_model(load: str) -> Problem:
    """A checkpoint.initial_load_path that does not exist."""
    hint = nearby(load) or "; a model on the hub: Qwen/Qwen3-0.6B"
    return Problem("checkpoint.initial_load_path", f"= {load!r}: no such folder or file{hint}")
