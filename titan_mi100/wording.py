"""Formats values for messages: shortened lists and texts, sizes, durations, escaped control characters."""

import math
import re
import sys
import time
from collections.abc import Iterable, Sequence

# C0, DEL and C1 control characters, line separators, and characters that change the direction of text
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")


def command_name(otherwise: str) -> str:
    """The command as the user typed it, `titan-mi100 WORD`; `otherwise` if it was started in another way."""
    return sys.argv[0] if sys.argv[0].startswith("titan-mi100 ") else otherwise


def printable(text: str) -> str:
    """Escape the control characters of a text except line breaks and tabs. File names can contain any character."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in "\n\t" else repr(found[0])[1:-1], text)


def has_control_characters(text: str) -> bool:
    return _CONTROL.search(text) is not None


def is_utf8(text: str) -> bool:
    """Whether the text can be encoded in UTF-8. Bytes of a command line that are not UTF-8 become lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def shown(value: object) -> str:
    """The repr of a value, shortened to 100 characters."""
    try:
        return shortened(repr(value), 100)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        return "a number of thousands of digits"


def as_key(name: str) -> str:
    """A key as a message shows it: TOML allows any text as a quoted key."""
    return shortened(repr(name)[1:-1])


def plural(number: int, what: str) -> str:
    """A number with its noun: "1 row", "2,000 rows", "2 processes"."""
    return f"{number:,} {what}{('es' if what.endswith('s') else 's') * (number != 1)}"


def some(names: Iterable[object], most: int = 8) -> str:
    """The first `most` names, and the number of the others: "a, b and 3 more"."""
    shown = [shortened(str(name), 500) for name in names]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most:,} more" if len(shown) > most else "")


def first_of(problems: Sequence[str], where: str, most: int = 50) -> str:
    """One line per problem; after `most` lines, the number of the others."""
    rest = [f"{where}: {len(problems) - most:,} more problems"] if len(problems) > most else []
    return "\n".join([*problems[:most], *rest])


def with_level(level: str, text: object) -> str:
    """A message for the terminal, with its level at the start of each line."""
    return "\n".join(f"{level} {line}" for line in printable(str(text)).split("\n"))


def shortened(text: str, most: int = 60) -> str:
    """The text, cut after `most` characters."""
    return text if len(text) <= most else f"{text[:most]}..."


def last_question(prompt: str, most: int) -> str:
    """The last user turn of a prompt as Qwen3's chat template renders it; of other text the last `most` characters."""
    questions = re.findall(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", prompt, re.DOTALL)
    return shortened(questions[-1], most) if questions else prompt[-most:]


def bytes_in_words(size: int) -> str:
    """A size of `size` bytes in decimal units: "3.4 MB"."""
    power = min(int(math.log10(max(size, 1))) // 3, 3)
    return f"{size / 1000**power:.1f} {('B', 'kB', 'MB', 'GB')[power]}"


def duration_in_words(seconds: float) -> str:
    """A time in a readable unit: "3.4 hours"."""
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def utc_now() -> str:
    """The time as ISO 8601, UTC: "2026-01-31T18:34:39.123Z"."""
    now = time.time()
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03}Z"
