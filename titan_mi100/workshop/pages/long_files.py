"""Reads the long files of a run in one pass: metrics and log. Imports no torch.

A file may be truncated, hostile or of any size; the memory that reading it takes is bounded.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_mi100.files.plain import open_plain
from titan_mi100.wording import shortened
from titan_mi100.workshop.pages.bins import Bins, usable

_LONGEST_LINE = 1 << 16  # bytes; a line of metrics.jsonl has about 400
_MOST_BYTES = 1 << 33  # largest file; a metrics.jsonl of 10,000,000 steps has half of it
MEASURES = {  # of objectives
    "accuracy", "margin", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected", "below_reference", "kl",
    "cross_entropy", "kept_mass", "agreement",
}  # fmt: skip
SERIES = {
    "loss", "grad_norm", "lr", "tokens_per_second", "mfu", "peak_memory_gib", "data_wait", "loss_scale", "seconds",
    "comm_ms", "comm_exposed_ms",
    "validation_loss", "bits_per_byte", "busiest_expert", "idle_experts", *MEASURES,
    *(f"validation_{name}" for name in MEASURES),
}  # fmt: skip
SOURCE = "validation_loss/"  # prefix of the key of one source's validation loss
_SUMS = ("seconds", "tokens", "supervised_tokens")
_MOST_SERIES, _LONGEST_NAME = len(SERIES) + 32, 300
_MOST_STEPS = 100
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,\d+)? (INFO|WARNING|ERROR) ")


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
    """Read `metrics.jsonl`. Unknown keys are ignored.

    Returns:
        `series`: key -> Bins.summary; `steps`: lines of a step; `last_step`; `unreadable`: lines; `skipped`: steps, and
        the first of them; `skipped_spikes`: how many were spikes; `validations_not_finite`; `epoch`;
        `total`: sums over all steps.
    """
    series: dict[str, Bins] = {}
    total = dict.fromkeys(_SUMS, 0.0)
    facts: dict[str, Any] = {"steps": 0, "last_step": None, "epoch": None, "unreadable": 0, "validations_not_finite": 0}
    skipped, spikes, skipped_steps = 0, 0, list[int]()
    for record in _objects(path):
        if record is None:
            facts["unreadable"] += 1
            continue
        step = record["step"]
        for key, value in record.items():
            is_source = key.startswith(SOURCE) and len(key) < _LONGEST_NAME
            if (key in SERIES or is_source) and usable(value):
                if key not in series and len(series) == _MOST_SERIES:
                    continue
                series.setdefault(key, Bins()).add(step, float(value))
            elif key == "epoch" and usable(value):
                facts["epoch"] = value
        facts["validations_not_finite"] += "validation_loss" in record and not usable(record["validation_loss"])
        if "loss" in record:
            facts["steps"] += 1
            facts["last_step"] = max(step, facts["last_step"] or 0)
            for key in _SUMS:
                total[key] += record[key] if usable(record.get(key)) else 0
            if record.get("skipped") is True:
                skipped, spikes = skipped + 1, spikes + (record.get("spike") is True)
                skipped_steps += [step] if len(skipped_steps) < _MOST_STEPS else []
    summaries = {key: bins.summary() for key, bins in sorted(series.items())}
    facts |= {"skipped": skipped, "skipped_spikes": spikes, "skipped_steps": skipped_steps}
    return {**facts, "total": total, "series": summaries}


def read_log(path: Path) -> dict[str, Any]:
    """Read `train.log`: the times of its first and last line, and how many warnings and errors it has."""
    began, ended, counts = "", "", dict.fromkeys(("INFO", "WARNING", "ERROR"), 0)
    for line in lines(path):
        if match := _LOG_LINE.match(line.decode("utf-8", "replace")):
            ended, level = match.groups()
            began = began or ended
            counts[level] += 1
    return {"began": began, "ended": ended, "warnings": counts["WARNING"], "errors": counts["ERROR"]}
