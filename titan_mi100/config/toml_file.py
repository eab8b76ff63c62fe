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
            problem += f": {printable(shortened(line.strip(), 100))}; {_remedy(message, line)}"
        raise UserError(problem) from None


def _is_json(value: Any) -> bool:
    """Whether there is no date or time in it."""
    if isinstance(value, dict | list):
        return all(map(_is_json, value.values() if isinstance(value, dict) else value))
    return isinstance(value, str | int | float)


def _remedy(problem: str, line: str) -> str:
    """What to do about a syntax error. Args: problem: the parser's message about the line."""
    name, _, value = (part.strip() for part in line.partition("="))
    if "overwrite" in problem or "twice" in problem:
        return f"{shortened(name)} is given twice; delete one of them"
    if problem.startswith("Illegal character '\\n'"):
        return "add the missing quote at the end of the text"
    if "\\" in problem or "hex value" in problem or "escaped" in problem:
        return "in \"...\" a backslash begins an escape; write the text in '...', or / for each backslash"
    if word := re.match(r"(True|False|None)\b", value):
        return "there is no None; delete the line" if word[1] == "None" else f"write {name} = {word[1].lower()}"
    return "write [section] or key = value, with texts in quotes and lists in [ ]"
