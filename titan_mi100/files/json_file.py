"""The one reader of JSON objects in files. Imports no torch.

Every message has the form `file: what is wrong; remedy`.
"""

import json
from pathlib import Path
from typing import Any

from titan_mi100.errors import UserError
from titan_mi100.files.plain import LARGEST_CONFIG, read_plain


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
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; {remedy}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; {remedy}") from None
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
