"""Reads TOML files; says what to do about a mistake in one. Imports no torch."""

import re
import sys
from pathlib import Path
from typing import Any

from titan_mi100.errors import UserError, read_or_refuse
from titan_mi100.files import child
from titan_mi100.files.patterns import unusable
from titan_mi100.files.plain import MIB
from titan_mi100.wording import printable, shortened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Bytes of a file. Parsing can take cubic time: larger files are parsed in a child process with a time limit.
_SMALL, _LARGEST = MIB >> 6, MIB
_REMEDY = "write [section] or key = value, each once; texts in quotes (with a \\ in '...'), lists in [ ], true, false"


def read_toml(path: str | Path) -> dict[str, Any]:
    """The content of a TOML file. Raises UserError: it cannot be read; the message begins with the path."""
    if problem := unusable(str(path), "*.toml"):
        raise UserError(f"{path}: {problem}")
    with read_or_refuse(path):  # gone since
        is_small = Path(path).stat().st_size <= _SMALL
    return parse(str(path)) if is_small else child.call_in_child("config.toml_file:parse", Path(path))


def parse(path: str) -> dict[str, Any]:
    """As `read_toml`, in this process and without a look at what kind of file it is."""
    text = ""
    try:
        with open(path, "rb") as file:
            content = file.read(_LARGEST + 1)
        if len(content) > _LARGEST:
            raise ValueError(f"it is larger than {_LARGEST:,} bytes, which no config is")
        document = tomllib.loads(text := content.decode("utf-8-sig"))
        if not _is_json(document):
            raise ValueError("a date or a time, which no setting is; put it in quotes, as a text")
        return document
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise UserError(f"{path}: cannot be read as TOML: line {number} is not UTF-8; save the file as UTF-8") from None
    except (OSError, ValueError, RecursionError) as error:
        message = str(error)
        problem = f"{path}: cannot be read as TOML: {shortened(message, 300)}"
        if match := re.search(r"\(at (?:line (\d+), column \d+|end of document)\)$", message):
            # not splitlines(): only "\n" ends a line of TOML
            line = text.split("\n")[int(match[1]) - 1] if match[1] else text.rstrip().rpartition("\n")[2]
            problem += f": {printable(shortened(line.strip(), 100))}; {_REMEDY}"
        raise UserError(problem) from None


def _is_json(value: Any) -> bool:
    """Whether there is no date or time in it."""
    if isinstance(value, dict | list):
        return all(map(_is_json, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | int | float)
