"""Names of the Hugging Face hub where a path is wanted: how to fetch what they name. Imports no torch."""

import os
import re
import shlex

from titan_mi100.config.problem import Problem
from titan_mi100.files.patterns import nearby

_FILES = (".json", ".jsonl", ".parquet", ".gz", ".zst", ".csv", ".txt", ".toml", ".jinja", ".model")
_WEIGHTS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


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
