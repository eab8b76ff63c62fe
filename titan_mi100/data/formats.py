"""What a line of training data may look like: JSONL with `messages`, or with two named columns."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100.errors import UserError

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
_MESSAGE_KEYS = {"role", "content", "reasoning_content"}
_SHOWN = 20  # bad rows printed before the rest are only counted


class Conversation(NamedTuple):
    """One line of input, as chat messages."""

    where: str  # file:line
    messages: list[Message]


@dataclass(frozen=True)
class Reader:
    """Turns one JSON object into messages."""

    description: str
    read: Callable[[dict[str, Any]], list[Message]]  # raises ValueError with the reason


def choose_reader(path: str, name: str, prompt_column: str, response_column: str) -> Reader:
    """The reader for the config's [data] format; `auto` goes by the first line that is a JSON object.

    Raises:
        UserError: the first line is of no known form.
    """
    if prompt_column:
        return _column_reader(prompt_column, response_column)
    if name == "messages":
        return _MESSAGES
    for _, raw in _numbered_lines(path):
        try:
            keys = set(_parse(raw))
        except ValueError:
            continue  # reported with its line number when the rows are read
        if "messages" in keys:
            return _MESSAGES
        for pair in (("question", "answer"), ("prompt", "completion"), ("prompt", "response")):
            if keys >= set(pair):
                return _column_reader(*pair)
        raise UserError(
            f"{path}: rows have the keys {', '.join(sorted(keys))}; expected `messages`, or name two columns in "
            "[data] prompt_column and response_column"
        )
    raise UserError(f"{path}: no line is a JSON object; expected one per line")


def read_conversations(path: str, reader: Reader, bad: "BadRows") -> Iterator[Conversation]:
    """Every good line of a JSONL file; the others go to `bad`. Blank lines are passed over."""
    for number, raw in _numbered_lines(path):
        where = f"{path}:{number}"
        try:
            yield Conversation(where, reader.read(_parse(raw)))
        except ValueError as error:
            bad.add(where, str(error))


class BadRows:
    """Rows that cannot be trained on, with their reasons."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, where: str, reason: str) -> None:
        self._found.append(f"{where}: {reason}")

    def raise_if_any(self) -> None:
        if self._found:
            more = [f"... and {len(self._found) - _SHOWN} more bad rows"] if len(self._found) > _SHOWN else []
            raise UserError("\n".join([*self._found[:_SHOWN], *more]))


def _numbered_lines(path: str) -> Iterator[tuple[int, bytes]]:
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def _parse(raw: bytes) -> dict[str, Any]:
    """One strict JSON object. Raises ValueError with the reason."""
    try:
        row = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 (byte {error.start + 1})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, is {_kind(row)}")
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"not JSON: {name}")


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a text, is {_kind(value)}")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise ValueError(f"{what} holds half of a surrogate pair, which is no character")
    return value


def _column_reader(prompt: str, response: str) -> Reader:
    def read(row: dict[str, Any]) -> list[Message]:
        for column in (prompt, response):
            if column not in row:
                raise ValueError(f"has no column {column!r}; it has {', '.join(sorted(row)) or 'none'}")
        if not _text(row[response], response).strip():
            raise ValueError(f"{response} is empty: nothing to learn")
        return [
            {"role": "user", "content": _text(row[prompt], prompt)},
            {"role": "assistant", "content": row[response]},
        ]

    return Reader(f"columns {prompt} and {response}", read)


def _read_messages(row: dict[str, Any]) -> list[Message]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("has no list `messages`")
    for number, message in enumerate(messages, 1):
        what = f"message {number}"
        if not isinstance(message, dict):
            raise ValueError(f"{what} must be an object, is {_kind(message)}")
        if unknown := sorted(message.keys() - _MESSAGE_KEYS):
            raise ValueError(f"{what} has {', '.join(unknown)}; supported are {', '.join(sorted(_MESSAGE_KEYS))}")
        if message.get("role") not in ROLES:
            raise ValueError(f"{what} has role {message.get('role')!r}; known are {', '.join(ROLES)}")
        for key in message.keys() | {"content"}:
            _text(message.get(key), f"{what}: {key}")
    if not any(m["role"] == "assistant" and m["content"].strip() for m in messages):
        raise ValueError("has no assistant message with text: nothing to learn")
    return messages


_MESSAGES = Reader("messages", _read_messages)
