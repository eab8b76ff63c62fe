"""Values in messages: parts of lists and texts, sizes in bytes, and characters that a terminal obeys."""

import math
import re
import sys
from collections.abc import Iterable, Sequence

# C0, DEL and C1, line separators, and what changes the direction of text
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def command_name(otherwise: str) -> str:
    """What the user has typed to start this command: `titan-mi100 WORD`, or else another name for it."""
    return sys.argv[0] if sys.argv[0].startswith("titan-mi100 ") else otherwise


def printable(text: str) -> str:
    """The text with its control characters escaped, but for line breaks and tabs: a file's name can hold any."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in "\n\t" else repr(found[0])[1:-1], text)


def has_control_characters(text: str) -> bool:
    return _CONTROL.search(text) is not None


def is_utf8(text: str) -> bool:
    """Whether UTF-8 can hold it: a command line's bytes that are not UTF-8 come as lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def shown(value: object) -> str:
    """A value as a message shows it, cut where it is long."""
    try:
        return shortened(repr(value), 100)
    except ValueError:  # Python prints no more than 4,300 digits
        return "a number of thousands of digits"


def some(names: Iterable[object], most: int = 8) -> str:
    """The first of the names, and how many more there are: "a, b and 3 more"."""
    shown = [shortened(str(name), 500) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most:,} more" if len(shown) > most else "")


def first_of(problems: Sequence[str], where: str, most: int = 50) -> str:
    """A message with a line for each problem; of very many for the first, and how many more there are."""
    more = [f"{where}: {len(problems) - most:,} more problems"] if len(problems) > most else []
    return "\n".join([*problems[:most], *more])


def with_level(level: str, text: object) -> str:
    """A message for the terminal, with its level on each of its lines."""
    return "\n".join(f"{level} {line}" for line in printable(str(text)).split("\n"))


def shortened(text: str, most: int = 60) -> str:
    """The text, or its beginning where it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def bytes_in_words(size: int) -> str:
    """A size in decimal units, as networks are sold: "3.4 MB"."""
    power = min(int(math.log10(max(size, 1))) // 3, 3)
    return f"{size / 1000**power:.1f} {('B', 'kB', 'MB', 'GB')[power]}"


def duration_in_words(seconds: float) -> str:
    """A time in the unit that people would use: "3.4 hours"."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
