"""What a chaos row consists of: cases, each tried in an empty folder of its own, and what they found."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

PROTECTIONS = ("hash check", "finite flag", "lock")  # what a case may be run without


class Outcome(NamedTuple):
    """What a case found."""

    count: int  # things tried
    wrong: list[str]  # what did not hold, in words
    figures: dict[str, Any] = {}  # noqa: RUF012  # a NamedTuple's default


class Case(NamedTuple):
    """One thing to try, in an empty folder of its own."""

    name: str
    run: Callable[[Path, tuple[str, ...]], Outcome]  # (folder, protections that are left out)
