"""JSON as its standard has it, and nothing that only Python's decoder takes. Whatever is wrong is a BadRow."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

DEEPEST = 100  # levels; far below the interpreter's own limit, which depends on its version and on who calls

_SHOWN = 40  # characters of the input in a message
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # a string without its end goes on to the end
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")


class BadRow(Exception):
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
    # Most rows have few brackets and no escaped surrogate: they pay for neither check.
    try:
        text = raw.decode()
        value = _DECODER.decode(text)
        if raw.count(b"{") + raw.count(b"[") > DEEPEST and _depth(text) > DEEPEST:
            raise RecursionError
        if b"\\ud" in raw or b"\\uD" in raw:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as error:
        raise BadRow("not UTF-8", f"at byte {error.start + 1}; convert the file with iconv") from None
    except UnicodeEncodeError:
        raise BadRow("lone surrogate", "half of a surrogate pair (\\ud800 to \\udfff), which is no character") from None
    except RecursionError:
        raise BadRow("nested too deeply", f"more than {DEEPEST} levels") from None
    except json.JSONDecodeError as error:
        reason = "more follows after the value" if error.msg == "Extra data" else error.msg
        raise BadRow("not JSON", f"{reason} (column {error.colno})") from None
    except ValueError:  # of int(), which takes quadratic time
        limit = f"an integer of over {sys.get_int_max_str_digits():,} digits"
        raise BadRow("number too large", f"{limit}; write it as a text") from None


def _depth(text: str) -> int:
    """Levels of brackets, strings apart."""
    brackets = _NO_BRACKETS.sub("", _STRING.sub("", text))
    return max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise BadRow("duplicate key", f"{shown(key)} stands twice in one object")
    return found


def _constant(name: str) -> None:
    raise BadRow("not a number", f"{name} is not JSON; use null or leave it out")


def _float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise BadRow("number too large", f"{text[:_SHOWN]} is infinite as a float")
    return number


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)
