"""Names of the Hugging Face hub where a path is wanted: how to fetch what they name. Imports no torch."""

import hashlib
import json
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from titan_mi100.config.problem import Problem
from titan_mi100.config.srun import PLACE
from titan_mi100.errors import UserError
from titan_mi100.files import hub
from titan_mi100.files.hub_files import MODEL, HubName, parse_name
from titan_mi100.files.patterns import nearby
from titan_mi100.files.plain import read_object

_FILES = (".json", ".jsonl", ".parquet", ".gz", ".zst", ".csv", ".txt", ".toml", ".jinja", ".model")
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")
_FOLDERS = ("models", "model", "weights", "checkpoints", "assets", "outputs", "data", "runs")  # no owner's name
COMMITS = "TITAN_HUB"  # environment variable: the commits of names that the launcher has asked for, as JSON
COMMITS_FILE = "hub.json"  # the same, in the run folder
_PATIENCE, _RECENT = 3600.0, 120.0  # seconds: to wait for the node's first process; since which it may have started


def hub_name(text: str, folder: str | os.PathLike[str] = "") -> HubName | None:
    """The name on the hub that a value is, where no such file or folder is; None: it is a path.

    Args:
        folder: what a path would be relative to.
    """
    name, path = parse_name(text), os.path.join(folder, text)
    if name is None or text.endswith((*_FILES, *_WEIGHTS)) or os.path.lexists(path):
        return None
    return None if text.partition("/")[0] in _FOLDERS or nearby(path).startswith("; did you") else name


def model_path(text: str, kind: str = MODEL) -> str:
    """The path that an option of a command names; a model of the hub is fetched. Raises UserError: it cannot be."""
    name = hub_name(text)
    try:
        return hub.fetch(name, kind, {})[0] if name else text
    except UserError as error:
        raise UserError(f"{text} {error}") from None


def known_commits(folder: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The commits that a start must use: those that its launcher has asked for, or the run's; else {}.

    Args:
        folder: the run folder; "": there is none, or the run starts over.
    """
    if made := environ.get(COMMITS):
        return json.loads(made)
    with suppress(OSError):
        return read_object(Path(folder or os.devnull, COMMITS_FILE), "remove it, to take the newest commits")
    return {}


def first_of_node(environ: Mapping[str, str]) -> Path | None:
    """Where the first process of a node says which commits it has fetched, if there are more and no launcher."""
    if COMMITS in environ or environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        return None
    start = [
        str(os.getppid()),
        *(environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", *PLACE[4:])),
    ]
    digest = hashlib.sha256(" ".join(start).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"titan-hub-{os.getuid()}-{digest}.json")


def wait_for_first(file: Path) -> dict[str, str]:
    """The commits that the first process of this node has fetched. Ends this process if there are none."""
    began = time.time()
    while time.time() < began + _PATIENCE:
        with suppress(OSError):
            if file.stat().st_uid == os.getuid() and file.stat().st_mtime > began - _RECENT:
                commits = json.loads(file.read_bytes())
                return commits if commits is not None else sys.exit(2)  # the first one has said why
        time.sleep(0.2)
    raise UserError(f"the first process of this node has fetched nothing from the hub within {_PATIENCE:.0f} s")


def is_hub_name(text: str) -> bool:
    """Whether it is OWNER/NAME in the hub's characters; a relative path may be it, too."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", text, re.ASCII))


def cached_model(folder: str | os.PathLike[str]) -> tuple[str, str]:
    """Name and commit of a model in the hub's cache: .../models--OWNER--NAME/snapshots/COMMIT. Else "", ""."""
    paths = f"{os.path.abspath(folder)}\n{os.path.realpath(folder)}"
    match = re.search(r"/models--([\w.-]+)--([\w.-]+)/snapshots/(\w+)$", paths, re.MULTILINE)
    return (f"{match[1]}/{match[2]}", match[3]) if match else ("", "")


def hub_id(path: str, folder: str = "") -> str:
    """The name on the hub, OWNER/NAME, that a missing path may stand for; "": none.

    Args:
        path: as the user wrote it, or made absolute.
        folder: what it was relative to, besides the current folder.
    """
    for name in (
        os.path.relpath(path, start) if os.path.isabs(path) else path for start in (os.curdir, folder) if start
    ):
        if is_hub_name(name) and not name.endswith((*_FILES, *_WEIGHTS)) and not os.path.lexists(os.path.dirname(path)):
            return name
    return ""


def download(name: str, is_data: bool = False) -> tuple[str, str]:
    """The path to name after the download of OWNER/NAME, and the command that downloads it."""
    folder = name.partition("/")[2]
    if is_data:  # a data set may have several configurations, each in a folder, and files of several splits
        config = "main" if folder == "gsm8k" else "data"
        return f"{folder}/{config}/train-*.parquet", f"hf download {name} --repo-type dataset --local-dir {folder}"
    return folder, f"hf download {name} --local-dir {folder}"


def hub_hint(path: str, folder: str = "", is_data: bool = False) -> str:
    """The end of a message about a path that is not there, if it may be a name on the hub; else "". Args: as hub_id."""
    last = os.path.basename(path)
    name = hub_id(path, folder)
    is_folder = name.partition("/")[0] in ("", "models", "model", "weights", "checkpoints", "assets")  # no owner
    if is_folder and re.fullmatch(r"Qwen3(\.\d)?-[\d.]+B(-A\d+B)?(-Base)?", last):
        target = min(path, os.path.relpath(path), key=len)
        return f"; fetch it: hf download Qwen/{last} --local-dir {shlex.quote(target)}"
    if not name:
        return ""
    local, command = download(name, is_data)
    return f"; if you mean {name} on the Hugging Face hub, fetch it: {command}, and name {local} here"


def no_such_model(load: str, config_file: str) -> Problem:
    """A checkpoint.initial_load_path that does not exist."""
    hint = hub_hint(load, os.path.dirname(config_file)) or nearby(load)
    hint = hint or "; a model: hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"
    return Problem("checkpoint.initial_load_path", f"= {load!r}: no such folder or file{hint}")
