"""Values in messages: lists and texts of which only a part is shown, and sizes in bytes."""

import math
from collections.abc import Iterable


def some(names: Iterable[object], most: int = 8) -> str:
    """The first of the names, and how many more there are: "a, b and 3 more"."""
    shown = list(map(str, names))
    return ", ".join(shown[:most]) + (f" and {len(shown) - most:,} more" if len(shown) > most else "")


def with_level(level: str, text: object) -> str:
    """A message with its level on each of its lines."""
    return "\n".join(f"{level} {line}" for line in str(text).split("\n"))


def shortened(text: str, most: int = 60) -> str:
    """The text, or its beginning where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def bytes_in_words(size: int) -> str:
    """A size in decimal units, as networks are sold: "3.4 MB"."""
    power = min(int(math.log10(max(size, 1))) // 3, 3)
    return f"{size / 1000**power:.1f} {('B', 'kB', 'MB', 'GB')[power]}"
