"""Reads untrusted files: only regular files of a sane size, never a file outside their folder, never code.

Messages have the form `file: what is wrong; remedy`. Imports no torch.
"""

import json
import math
import os
import shlex
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from titan_mi100.errors import UserError
from titan_mi100.files.schema import validated
from titan_mi100.wording import shortened

MIB = 1 << 20
LARGEST_CONFIG = 16 * MIB  # largest config file; the largest real one known is a tokenizer_config.json of 1 MiB
LARGEST_TABLE = 100 * MIB  # largest tokenizer or shard index; the largest one known is a tokenizer.json of 33 MiB

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\n"  # how a pointer of git-lfs begins
_CODE_KEYS = ("auto_map", "custom_pipelines", "trust_remote_code")  # they make transformers run a folder's Python code


def plain_path(path: Path) -> Path:
    """The path of the regular file that `path` names.

    Anything else is refused: opening a pipe could hang, and a link could lead to a file outside the folder. Links are
    followed in one layout only: a snapshot in the Hugging Face cache, whose files are links into the `blobs` folder of
    the same repository.

    Raises:
        UserError: `path` is a link that leads elsewhere, or a folder, pipe or device.
        OSError: `path` does not exist, or is not accessible.
    """
    if path.is_symlink():
        target, folder = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
        if not any(up.name == "snapshots" and target.parent == up.parent / "blobs" for up in folder.parents):
            raise UserError(f"{path}: is a link to {target}, outside its folder; copy the file itself there (cp -L)")
        if not target.exists():
            raise UserError(f"{path}: is a link to {target}, which does not exist; download it again")
        path = target
    if not stat.S_ISREG(path.stat(follow_symlinks=False).st_mode):
        raise UserError(f"{path}: is not a regular file; put the file itself there")
    return path


def open_plain(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises as `plain_path` does; UserError: it is a pointer of git-lfs."""
    # O_NONBLOCK and O_NOFOLLOW: a pipe or link that replaces the file after the check can neither hang nor redirect us.
    file = os.fdopen(os.open(plain_path(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    if file.peek(len(LFS_POINTER)).startswith(LFS_POINTER):
        file.close()
        raise UserError(f"{path}: {lfs_problem(path)}")
    return file


def lfs_problem(path: str | Path) -> str:
    """Why a file that begins as a pointer of git-lfs cannot be used, and the remedy."""
    folder = shlex.quote(os.path.dirname(path) or ".")
    return f"is a pointer of git-lfs, a few lines in place of the file; fetch the file: git -C {folder} lfs pull"


def read_plain(path: Path, largest: int = LARGEST_TABLE) -> bytes:
    """The content of a regular file of at most `largest` bytes. Raises as `plain_path` does; UserError: too large."""
    with open_plain(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise UserError(f"{path}: is larger than {largest:,} bytes; no real file of this kind is; download it again")
    return content


def read_object(path: Path, remedy: str, largest: int = LARGEST_CONFIG) -> dict[str, Any]:
    """The JSON object in a regular file.

    Args:
        remedy: end of the error message: what the user can do if the file is missing or wrong.
        largest: bytes; a larger file is refused.

    Raises:
        UserError: the file is missing, cannot be read, or holds no JSON object.
    """
    try:
        content = read_plain(path, largest)
    except OSError as error:
        problem = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise UserError(f"{path}: {problem}; {remedy}") from None
    return parse_object(content, path, remedy)


def without_contradictions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON. Raises ValueError: it has a key twice, with different values."""
    members = dict(pairs)
    if len(members) < len(pairs) and (twice := [key for key, value in pairs if members[key] != value]):
        raise ValueError(f"{shortened(repr(twice[0]))} occurs twice in one object, with different values")
    return members


def _finite(word: str) -> float:
    if not math.isfinite(number := float(word)):
        raise ValueError(f"{shortened(word)} is not a finite number")
    return number


def parse_object(content: bytes, path: str | Path, remedy: str) -> dict[str, Any]:
    """Decode a file's content as a JSON object. Args: path, remedy: for the message. Raises UserError."""
    try:
        hooks: dict[str, Any] = {"parse_constant": _finite, "parse_float": _finite}  # the former: of NaN, Infinity
        parsed = json.loads(content.decode("utf-8"), object_pairs_hook=without_contradictions, **hooks)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}; {remedy}") from None
    if not isinstance(parsed, dict):
        raise UserError(f"{path}: must hold one JSON object, not a {type(parsed).__name__}; {remedy}")
    return parsed


def is_plain_name(name: object) -> bool:
    """Whether a file name found inside an untrusted file refers to an entry of that file's own folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def refuse_code(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config that comes with Python code of its own. Without that code the config may mean something else."""
    for key in _CODE_KEYS:
        if config.get(key):
            raise UserError(f"{file}: {key} asks to run Python code, which is never run; use a folder without it")


def read_checked(path: Path, kind: Any, remedy: str) -> Any:
    """Read a JSON object and check it. Args: kind: a dataclass or TypedDict, see schema.validated.

    Raises:
        UserError: from `read_object`; or a key is missing or unknown, or its value has a wrong type.
    """
    try:
        return validated(read_object(path, remedy), kind)
    except ValueError as error:
        text = str(error)
        raise UserError(text if isinstance(error, UserError) else f"{path}: {text}; {remedy}") from None
