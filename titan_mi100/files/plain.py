"""Reading files that came from elsewhere: regular ones of a sane size, nothing outside their folder, no code in them.

The messages have the form `file: what is wrong; remedy`. Imports no torch.
"""

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from titan_mi100.errors import UserError
from titan_mi100.files.schema import checked

MIB = 1 << 20
LARGEST_CONFIG = 16 * MIB  # real ones: a tokenizer_config.json of 1 MiB
LARGEST_TABLE = 100 * MIB  # a tokenizer or an index of shards; real ones: a tokenizer.json of 33 MiB

_CODE_KEYS = ("auto_map", "custom_pipelines", "trust_remote_code")


def plain_path(path: Path) -> Path:
    """Where the regular file is that `path` names. Opening anything else could hang, or read what is not the folder's.

    A symbolic link is followed in one layout only, a snapshot of the hub's cache, whose files are links into the
    `blobs` folder of the same repository.

    Raises:
        UserError: a link that leads elsewhere, or a folder, pipe or device.
        OSError: there is nothing, or it cannot be looked at.
    """
    if path.is_symlink():
        target, folder = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
        if not any(up.name == "snapshots" and target.parent == up.parent / "blobs" for up in folder.parents):
            raise UserError(f"{path}: is a link to {target}, outside of its folder; copy the file itself there (cp -L)")
        if not target.exists():
            raise UserError(f"{path}: is a link to {target}, which is not there; download it again")
        path = target
    if not stat.S_ISREG(path.stat(follow_symlinks=False).st_mode):
        raise UserError(f"{path}: is not a regular file; put the file itself there")
    return path


def open_plain(path: Path) -> BinaryIO:
    """A regular file, open; whatever else takes its place meanwhile is not waited for. Raises as `plain_path` does."""
    return os.fdopen(os.open(plain_path(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def read_plain(path: Path, largest: int = LARGEST_TABLE) -> bytes:
    """The content of a regular file of at most `largest` bytes; raises as `plain_path` does."""
    with open_plain(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise UserError(f"{path}: is larger than {largest:,} bytes, which no real one is; download it again")
    return content


def read_object(path: Path, remedy: str, largest: int = LARGEST_CONFIG) -> dict[str, Any]:
    """The JSON object in a regular file.

    Args:
        remedy: what the user can do where the file is missing or is not what it should be.
        largest: bytes; a larger file is refused.

    Raises:
        UserError: the file is missing, cannot be read, or holds no JSON object.
    """
    try:
        content = read_plain(path, largest)
    except OSError as error:
        what = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise UserError(f"{path}: {what}; {remedy}") from None
    return parse_object(content, path, remedy)


def parse_object(content: bytes, path: str | Path, remedy: str) -> dict[str, Any]:
    """The JSON object in a file's content; `path` is for the message. Raises UserError as read_object."""
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}; {remedy}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: must hold one JSON object, not a {type(value).__name__}; {remedy}")
    return value


def is_plain_name(name: object) -> bool:
    """Whether a name that was found inside of a file stays inside of that file's folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


def refuse_code(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config that wants Python code of its own to be run: without it, it may mean something else."""
    for key in _CODE_KEYS:
        if config.get(key):
            raise UserError(f"{file}: {key} asks for Python code, which is not run; use a folder that needs none")


def read_checked(path: Path, kind: Any, remedy: str) -> Any:
    """The JSON object in a regular file as `kind`, a dataclass or TypedDict; see schema.checked.

    Raises:
        UserError: as read_object; or a key is missing, unknown, or its value is not what it must be.
    """
    try:
        return checked(read_object(path, remedy), kind)
    except ValueError as error:
        text = str(error)
        raise UserError(text if isinstance(error, UserError) else f"{path}: {text}; {remedy}") from None
