"""A strict JSON decoder: it refuses the extensions that Python's decoder accepts. Every error is a BadRecord."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, TypeVar

from titan_mi100.wording import shortened, some

# Levels of nesting. Far below the interpreter's recursion limit, which depends on its version and on the call stack:
# the same file must be accepted or refused everywhere.
DEEPEST = 100

UNREAD = "type of a parquet column"  # the key of an object that stands for a column's value that JSON cannot hold
TO_UTF8 = "convert the file, e.g. from Latin-1: iconv -f latin1 -t utf-8 FILE > NEW"
IF_IDLE = "if it does not matter, name it in data.ignored_keys"  # remedy for a refused key

_SHOWN = 40  # characters of the input in a message
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # an unterminated string extends to the end of the text
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
T = TypeVar("T")


class BadRecord(Exception):
    """A record that cannot be used for training.

    Attributes:
        kind: a short constant phrase, for counting.
        detail: what is wrong with this record. str() gives both.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def parse(raw: bytes) -> dict[str, Any]:
    """Decode one JSON object.

    Raises:
        BadRecord: the bytes are not UTF-8, not JSON (NaN and Infinity are not JSON) or not an object; an object has a
            key twice; the nesting is deeper than `DEEPEST`; or a value is half of a surrogate pair, an infinite float
            or an integer of thousands of digits.
    """
    row = _load(raw)
    if type(row) is not dict:
        raise BadRecord("not an object", f"a row must be a JSON object, but is {kind_of(row)}")
    return row


def parse_text(text: str, kind: str, wanted: str) -> Any:
    """Decode JSON inside a text of a record, by the same rules.

    Args:
        kind, wanted: kind and reason of the BadRecord that an error raises.
    """
    try:
        return _load(text.encode())
    except BadRecord as bad:
        raise BadRecord(kind, f"{wanted}; {bad}") from None


def expect(value: Any, json_type: type[T], wanted: str, kind: str = "wrong type") -> T:
    """Return `value` if it is a dict, list or str, as `json_type` says.

    Raises:
        BadRecord: otherwise. Its text is, for example, "KIND: WANTED, is a number".
    """
    if not isinstance(value, json_type):
        raise BadRecord(kind, f"{wanted}, is {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    """The JSON type of a value, for messages."""
    if isinstance(value, dict) and value.keys() == {UNREAD}:
        return f"parquet's {value[UNREAD]}, which no JSON value is"
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def shown(value: Any) -> str:
    """The value for a message, on one line; long values are shortened."""
    return kind_of(value) if isinstance(value, dict | list) else shortened(repr(value), _SHOWN)


def listed(keys: Iterable[str]) -> str:
    """Keys for a message, sorted; at most 20 of them."""
    plain = (key if key.isprintable() and 0 < len(key.strip()) == len(key) <= _SHOWN else shown(key) for key in keys)
    return some(sorted(plain), 20) or "none"


def _load(raw: bytes) -> Any:
    # Most records have few brackets and no escaped surrogate, so they skip both of these slow checks.
    try:
        text = raw.decode()
        value = _DECODER.decode(text)
        if raw.count(b"{") + raw.count(b"[") > DEEPEST and _depth(text) > DEEPEST:
            raise RecursionError
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        raise BadRecord("not UTF-8", f"at byte {error.start + 1}; {TO_UTF8}") from None
    except UnicodeEncodeError:
        raise BadRecord(
            "lone surrogate", "half of a surrogate pair (\\ud800 to \\udfff), which is not a character"
        ) from None
    except RecursionError:
        raise BadRecord("nested too deeply", f"more than {DEEPEST} levels") from None
    except json.JSONDecodeError as error:
        reason = "there is more text after the value" if error.msg == "Extra data" else error.msg
        raise BadRecord("not JSON", f"{reason} (column {error.colno})") from None
    except ValueError:  # from int(): Python limits the digits, because the conversion takes quadratic time
        limit = f"an integer of over {sys.get_int_max_str_digits():,} digits"
        raise BadRecord("number too large", f"{limit}; write it as a text") from None


def _depth(text: str) -> int:
    """The depth of nested brackets outside strings."""
    brackets = _NO_BRACKETS.sub("", _STRING.sub("", text))
    return max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object; Python's decoder would silently keep the last of two equal keys."""
    members = dict(pairs)
    if len(members) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise BadRecord("duplicate key", f"{shown(key)} occurs twice in one object")
    return members


def _constant(name: str) -> None:
    raise BadRecord("not a number", f"{name} is not JSON; use null or delete the key")


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise BadRecord("number too large", f"{text[:_SHOWN]} is infinite as a float")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
