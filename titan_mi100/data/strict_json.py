"""JSON as its standard has it, and nothing that only Python's decoder takes. Whatever is wrong is a BadRow."""

import json
import re
from collections.abc import Iterable
from typing import Any

DEEPEST = 100  # levels; far below the interpreter's own limit, which depends on its version and on who calls
LONGEST_INTEGER = 1000  # digits; reading one takes quadratic time, and Python's own limit can be switched off

_SHOWN = 40  # characters of the input in a message
_SURROGATE = re.compile("[\ud800-\udfff]")
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_MANY_ZEROS = b"0" * (LONGEST_INTEGER + 1)


class BadRow(ValueError):
    """A row that cannot be trained on.

    `kind` is a short constant phrase to count by, `detail` says what is wrong with this row; str() gives both.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def parse(raw: bytes) -> dict[str, Any]:
    """One strict JSON object.

    Raises:
        BadRow: it is not UTF-8 or not JSON (NaN and Infinity are not), no object, has a key twice, is nested more than
            `DEEPEST` levels, or holds half of a surrogate pair, an infinite float or an absurdly long integer anywhere.
    """
    row = _load(raw)
    if type(row) is not dict:
        raise BadRow("not an object", f"a row must be a JSON object, this is {kind_of(row)}")
    return row


def parse_text(text: str) -> Any:
    """The JSON value in a text of a parsed row, as strict as the row. Raises BadRow."""
    return _load(text.encode())


def kind_of(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def shown(value: Any) -> str:
    """The value for a message: on one line, and not all of a long one."""
    if isinstance(value, dict | list):
        return kind_of(value)
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def listed(keys: Iterable[str]) -> str:
    """Keys for a message."""
    names = sorted(key if key.isprintable() and 0 < len(key) <= _SHOWN else shown(key) for key in keys)
    return ", ".join([*names[:20], f"and {len(names) - 20} more"] if len(names) > 20 else names) or "none"


def _load(raw: bytes) -> Any:
    try:
        decoder = _CAREFUL if _may_hold_long_integer(raw) else _DECODER
        value = decoder.decode(raw.decode())
    except UnicodeDecodeError as error:
        raise BadRow("not UTF-8", f"at byte {error.start + 1}; convert the file with iconv") from None
    except json.JSONDecodeError as error:
        reason = "more follows behind the value" if error.msg == "Extra data" else error.msg
        raise BadRow("not JSON", f"{reason} (column {error.colno})") from None
    except RecursionError:
        raise BadRow("nested too deeply", f"more than {DEEPEST} levels") from None
    # The decoder makes half of a surrogate pair only of an escape, and a level only of a bracket. Most rows have none.
    if raw.count(b"{") + raw.count(b"[") > DEEPEST or b"\\ud" in raw or b"\\uD" in raw:
        _check_all(value)
    return value


def _may_hold_long_integer(raw: bytes) -> bool:
    return len(raw) > LONGEST_INTEGER and _MANY_ZEROS in raw.translate(_DIGITS_TO_ZERO)


def _check_all(value: Any) -> None:
    """Refuse halves of surrogate pairs and deep nesting, level by level."""
    level, depth = [value], 0
    while level:
        for item in level:
            if isinstance(item, str) and _SURROGATE.search(item):
                raise BadRow("lone surrogate", f"half of a surrogate pair, which is no character, in {shown(item)}")
        containers = [item for item in level if isinstance(item, dict | list)]
        depth += bool(containers)
        if depth > DEEPEST:
            raise BadRow("nested too deeply", f"more than {DEEPEST} levels")
        level = []
        for container in containers:
            level += container
            if isinstance(container, dict):
                level += container.values()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise BadRow("duplicate key", f"{shown(key)} stands twice in one object")
            seen.add(key)
    return found


def _constant(name: str) -> None:
    raise BadRow("not a number", f"{name} is not JSON; use null or leave it out")


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise BadRow("number too large", f"{text[:_SHOWN]} is infinite as a float")
    return number


def _integer(text: str) -> int:
    if len(text.lstrip("-")) > LONGEST_INTEGER:
        raise BadRow("number too large", f"an integer of {len(text):,} digits; write it as a text")
    return int(text)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
_CAREFUL = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float, parse_int=_integer)
