"""JSON as its standard has it, and nothing that only Python's decoder takes. Whatever is wrong is a BadRecord."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, TypeVar

from titan_mi100.wording import shortened, some

DEEPEST = 100  # levels; far below the interpreter's own limit, which depends on its version and on who calls

TO_IGNORE = "delete it, or name it in data.ignored_keys"  # of a key that is refused

_SHOWN = 40  # characters of the input in a message
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # a string without its end goes on to the end
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
T = TypeVar("T")


class BadRecord(Exception):
    """A record that cannot be trained on.

    `kind` is a short constant phrase to count by, `detail` says what is wrong with this record; str() gives both.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def parse(raw: bytes) -> dict[str, Any]:
    """One strict JSON object.

    Raises:
        BadRecord: it is not UTF-8 or not JSON (NaN and Infinity are not), no object, has a key twice, is nested more
            than `DEEPEST` levels, or holds half of a surrogate pair, an infinite float or an absurdly long integer
            anywhere.
    """
    value = _load(raw)
    if type(value) is not dict:
        raise BadRecord("not an object", f"a row must be a JSON object, this is {kind_of(value)}")
    return value


def parse_text(text: str, kind: str, wanted: str) -> Any:
    """The JSON value in a text of a record, as strict as the record. Raises BadRecord of this kind."""
    try:
        return _load(text.encode())
    except BadRecord as bad:
        raise BadRecord(kind, f"{wanted}; {bad}") from None


def expect(value: Any, json_type: type[T], wanted: str, kind: str = "wrong type") -> T:
    """The value, if it has this type: dict, list or str. Raises BadRecord "kind: wanted, is a number"."""
    if not isinstance(value, json_type):
        raise BadRecord(kind, f"{wanted}, is {kind_of(value)}")
    return value


def kind_of(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")


def shown(value: Any) -> str:
    """The value for a message: on one line, and not all of a long one."""
    return kind_of(value) if isinstance(value, dict | list) else shortened(repr(value), _SHOWN)


def listed(keys: Iterable[str]) -> str:
    """Keys for a message."""
    plain = (key if key.isprintable() and 0 < len(key) <= _SHOWN else shown(key) for key in keys)
    return some(sorted(plain), 20) or "none"


def _load(raw: bytes) -> Any:
    # Most records have few brackets and no escaped surrogate: they pay for neither check.
    try:
        text = raw.decode()
        value = _DECODER.decode(text)
        if raw.count(b"{") + raw.count(b"[") > DEEPEST and _depth(text) > DEEPEST:
            raise RecursionError
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        raise BadRecord("not UTF-8", f"at byte {error.start + 1}; convert the file with iconv") from None
    except UnicodeEncodeError:
        raise BadRecord(
            "lone surrogate", "half of a surrogate pair (\\ud800 to \\udfff), which is no character"
        ) from None
    except RecursionError:
        raise BadRecord("nested too deeply", f"more than {DEEPEST} levels") from None
    except json.JSONDecodeError as error:
        reason = "more follows after the value" if error.msg == "Extra data" else error.msg
        raise BadRecord("not JSON", f"{reason} (column {error.colno})") from None
    except ValueError:  # of int(), which takes quadratic time
        limit = f"an integer of over {sys.get_int_max_str_digits():,} digits"
        raise BadRecord("number too large", f"{limit}; write it as a text") from None


def _depth(text: str) -> int:
    """Levels of brackets, strings apart."""
    brackets = _NO_BRACKETS.sub("", _STRING.sub("", text))
    return max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise BadRecord("duplicate key", f"{shown(key)} stands twice in one object")
    return found


def _constant(name: str) -> None:
    raise BadRecord("not a number", f"{name} is not JSON; use null or leave it out")


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise BadRecord("number too large", f"{text[:_SHOWN]} is infinite as a float")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
