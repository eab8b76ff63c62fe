"""Reads the long files of a run in one pass: metrics and log. Imports no torch.

A file may be truncated, hostile or of any size; the memory that reading it takes is bounded.
"""

import json
import re
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_mi100.files.plain import open_plain
from titan_mi100.wording import shortened

_LONGEST_LINE = 1 << 16  # bytes; a line of metrics.jsonl has about 400
_MOST_BYTES = 1 << 33  # largest file; a metrics.jsonl of 10,000,000 steps has half of it
_MOST_SERIES, _LONGEST_NAME = 64, 300
_MOST_STEPS = 100
_RECENT = 10  # number of last values; their mean is the current level of a noisy curve
_LARGEST = 1e100  # larger values are ignored, so that sums stay finite
_LOG_LINE = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:,\d+)? (WARNING|ERROR) ")


class Summary:
    """The count, sum and extreme values of a key, in one pass over its (step, value)."""

    def __init__(self, step: int, value: float) -> None:
        self._count, self._sum = 0, 0.0
        self._first = self._last = self._lowest = self._highest = (step, value)
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def add(self, step: int, value: float) -> None:
        self._count, self._sum, self._last = self._count + 1, self._sum + value, (step, value)
        self._lowest = self._last if value < self._lowest[1] else self._lowest
        self._highest = self._last if value > self._highest[1] else self._highest
        self._recent.append(value)

    def as_dict(self) -> dict[str, Any]:
        """Everything as a dict for JSON. `recent`: (mean of the last values, their number)."""
        return {
            "count": self._count, "sum": self._sum, "mean": self._sum / self._count, "first": self._first,
            "last": self._last, "lowest": self._lowest, "highest": self._highest,
            "recent": (sum(self._recent) / len(self._recent), len(self._recent)),
        }  # fmt: skip


def usable(value: object) -> bool:
    """Whether a value is a number that can be shown, and is not a bool, NaN, infinite or huge."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST


def lines(path: Path) -> Iterator[bytes]:
    """The file's lines; a line longer than _LONGEST_LINE is returned in pieces.

    Raises:
        UserError, OSError: as open_plain does.
    """
    read = 0
    with open_plain(path) as file:
        while read < _MOST_BYTES and (line := file.readline(_LONGEST_LINE)):
            read += len(line)
            yield line


def whole(value: object, least: int = 0) -> int | None:
    """The value if it is an integer from `least` to 2**63 - 1 and not a bool, else None."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and least <= value < 2**63 else None  # type: ignore[operator, return-value]


def words(value: object, most: int = 2000) -> str:
    """The value if it is a text, shortened to `most` characters, else ""."""
    return shortened(value, most) if isinstance(value, str) else ""


def _objects(path: Path) -> Iterator[dict[str, Any] | None]:
    """The JSON object of each line; None for a line that is not an object with a step."""
    for line in lines(path):
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            yield None
            continue
        yield parsed if isinstance(parsed, dict) and whole(parsed.get("step")) is not None else None


def read_metrics(path: Path) -> dict[str, Any]:
    """Read `metrics.jsonl`.

    Returns:
        `series`: key -> Summary.as_dict, of each key with numbers; `steps`: lines of a step; `last_step`; `unreadable`:
        lines; `skipped`: steps, and the first of them; `skipped_spikes`: how many were spikes;
        `validations_not_finite`.
    """
    series: dict[str, Summary] = {}
    counts = dict.fromkeys(("steps", "unreadable", "validations_not_finite", "skipped", "skipped_spikes"), 0)
    last_step, skipped_steps = None, list[int]()
    for record in _objects(path):
        if record is None:
            counts["unreadable"] += 1
            continue
        step = record.pop("step")
        for key, number in record.items():
            if usable(number) and len(key) < _LONGEST_NAME and (key in series or len(series) < _MOST_SERIES):
                series.setdefault(key, Summary(step, float(number))).add(step, float(number))
        counts["validations_not_finite"] += "validation_loss" in record and not usable(record["validation_loss"])
        if "loss" in record:
            counts["steps"] += 1
            last_step = max(step, last_step or 0)
            if record.get("skipped") is True:
                counts["skipped"] += 1
                counts["skipped_spikes"] += record.get("spike") is True
                skipped_steps += [step] if len(skipped_steps) < _MOST_STEPS else []
    summaries = {key: summary.as_dict() for key, summary in sorted(series.items())}
    return {**counts, "last_step": last_step, "skipped_steps": skipped_steps, "series": summaries}


def read_log(path: Path) -> dict[str, int]:
    """Count the warnings and errors in `train.log`."""
    levels = Counter(match[1] for line in lines(path) if (match := _LOG_LINE.match(line)))
    return {"warnings": levels[b"WARNING"], "errors": levels[b"ERROR"]}
