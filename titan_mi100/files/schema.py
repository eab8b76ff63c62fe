"""Checks JSON values against a dataclass or TypedDict: every key, type and bound. Imports no torch."""

import math
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from titan_mi100.wording import shortened, some

LONGEST = 1 << 20  # characters of a text, entries of a list or object
_WORDS = {int: "a whole number from 0 below 2^63", float: "a finite number", bool: "true or false"}


class UnknownKeyError(ValueError):
    """The value has a key that this version does not know. A newer one may have written it."""


def validated(value: Any, kind: Any, where: str = "") -> Any:
    """Convert a value that was decoded from JSON to the type `kind`, and check it.

    Args:
        kind: int (0 or more), float, str, bool; `X | None`, list[X], tuple[X, ...], tuple[X, Y], dict[str, X]; a
            dataclass or TypedDict with such fields; Any: no check.
        where: the value's key, for error messages, such as `progress.step`.

    Returns:
        The value; for a dataclass an instance of it.

    Raises:
        ValueError: `WHERE = VALUE must be ...`, or names the missing or unknown keys.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):  # only `X | None` is used
        others = [option for option in arguments if option is not type(None)]
        return None if value is None and others != [*arguments] else validated(value, others[0], where)
    if is_dataclass(kind) or is_typeddict(kind):
        return _with_keys(value, kind, where)
    if origin is dict:
        content = _sized(value, dict, "an object", where)
        return {key: validated(item, arguments[1], _below(where, key)) for key, item in content.items()}
    if origin in (list, tuple):
        content = _sized(value, list, "a list", where)
        if origin is list or arguments[-1] is ...:
            return origin(validated(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(content))
        if len(content) != len(arguments):
            raise ValueError(f"{where} must be a list of {len(arguments)}, not of {len(content)}")
        pairs = zip(content, arguments, strict=True)
        return tuple(validated(item, own, f"{where}[{i}]") for i, (item, own) in enumerate(pairs))
    if kind is str:
        return _sized(value, str, "a text", where)
    if kind is float and type(value) is int and abs(value) < 2**63:  # JSON writers may drop the ".0"
        value = float(value)
    # type() instead of isinstance(): a bool is an int in Python, but not in JSON.
    bad = type(value) is not kind or (kind is int and not 0 <= value < 2**63)
    if bad or (kind is float and not math.isfinite(value)):
        raise ValueError(f"{where} = {shortened(repr(value))} must be {_WORDS[kind]}")
    return value


def _with_keys(value: Any, kind: Any, where: str) -> Any:
    content, hints = _sized(value, dict, "an object", where), get_type_hints(kind)
    if is_typeddict(kind):
        required = kind.__required_keys__
    else:
        required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    # An unknown key is refused, not ignored: a newer version may have written it with a meaning.
    if unknown := content.keys() - hints.keys():
        raise UnknownKeyError(f"{where or 'it'} has the unknown key {some(sorted(unknown))}")
    if missing := required - content.keys():
        raise ValueError(f"{where or 'it'} lacks {some(sorted(missing))}")
    arguments = {key: validated(item, hints[key], _below(where, key)) for key, item in content.items()}
    return kind(**arguments)


def _sized(value: Any, kind: Any, words: str, where: str) -> Any:
    if type(value) is not kind or len(value) > LONGEST:
        raise ValueError(f"{where or 'it'} = {shortened(repr(value))} must be {words} of at most {LONGEST:,}")
    return value


def _below(where: str, key: str) -> str:
    return f"{where}.{shortened(key)}" if where else shortened(key)


def if_finite(value: float | None) -> float | None:
    """The number, or None if it is NaN or infinite, which JSON cannot hold."""
    return value if value is not None and math.isfinite(value) else None
