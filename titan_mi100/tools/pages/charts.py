"""The charts of a report: loss, validation loss and throughput. figures.py draws them. Imports no torch."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from titan_mi100.tools.pages.bins import Bin, half_window, smoothed
from titan_mi100.tools.pages.tables import SOURCE

_TINY = 1e-90  # smaller ranges are drawn as flat, so that scales stay finite
_MOST_CURVES = 14  # per chart: seven colors, solid and dashed


class Curve(NamedTuple):
    """One line of a chart.

    Attributes:
        color: number of the palette's color; from 7 on also dashed.
        values: what the line shows at each bin: the smoothed means, or the means.
        window: number of bins that enter a smoothed value; 1: not smoothed.
        has_band: also draw the range from minimum to maximum.
    """

    name: str
    color: int
    bins: Sequence[Bin]
    values: Sequence[float]
    window: int
    has_band: bool


class Mark(NamedTuple):
    """Something that happened at a step: `restart`, `config`, `skipped` or `best`."""

    kind: str
    step: int
    text: str


class Chart(NamedTuple):
    """Curves over steps.

    Attributes:
        note: what the reader must know: bins and smoothing.
        steps, values: first and last of each axis; those of values have room above and below.
    """

    title: str
    note: str
    is_wide: bool
    curves: list[Curve]
    marks: list[Mark]
    steps: tuple[int, int]
    values: tuple[float, float]

    def across(self, step: float) -> float:
        """The horizontal position of a step, from 0 to 1."""
        return (step - self.steps[0]) / (self.steps[1] - self.steps[0])

    def up(self, value: float) -> float:
        """The vertical position of a value, from 0 (bottom) to 1."""
        low, high = self.values
        return (value - low) / (high - low)


# key of metrics.jsonl -> title, and whether its curve is smoothed
_KINDS = {
    "loss": ("Training loss (mean over supervised tokens, nats)", True),
    "validation_loss": ("Validation loss (nats per token)", False),
    "tokens_per_second": ("Throughput (tokens/s)", True),
}


def charts(run: dict[str, Any]) -> list[Chart]:
    """The charts that have data. Args: run: as `collect` returns it."""
    last, series, found = run["metrics"].get("last_step") or 0, run["metrics"].get("series", {}), []
    for kind, (title, is_smoothed) in _KINDS.items():
        keys = [kind]
        if kind == "validation_loss":
            keys += sorted(key for key in series if key.startswith(SOURCE))
        # The sources are curves of one chart; of too many, each has its own.
        for group in [keys] if len(keys) <= _MOST_CURVES else [[key] for key in keys]:
            curves = [
                _curve(series[key]["bins"], place, key, is_smoothed) for place, key in enumerate(group) if key in series
            ]
            if curves:
                source = f", source {group[0].removeprefix(SOURCE)}" if group[0] != kind else ""
                found.append(_chart(kind, title + source, curves, _marks(run) if kind == "loss" else [], last))
    return found


def _curve(bins: Sequence[Bin], color: int, key: str, is_smoothed: bool) -> Curve:
    name = "all" if key == "validation_loss" else key.removeprefix(SOURCE)
    window = 2 * half_window(len(bins)) + 1 if is_smoothed else 1
    values = smoothed(bins) if window > 1 else [each.mean for each in bins]
    return Curve(name, color, bins, values, window, any(each.high > each.low for each in bins))


def _marks(run: dict[str, Any]) -> list[Mark]:
    """What happened at a step: restarts, skipped steps ..."""
    found = []
    for number, restart in enumerate(run["restarts"], 1):
        words = restart["state"] or "no state"
        text = f"restart {number} after step {restart['step'] or 0:,}: {words}"
        found.append(Mark("restart", restart["step"] or 0, text))
    for earlier in run["earlier_configs"]:
        found.append(Mark("config", earlier["until_step"], f"settings changed after step {earlier['until_step']:,}"))
    found += [Mark("skipped", step, f"step {step:,} was skipped") for step in run["metrics"].get("skipped_steps", [])]
    if lowest := run["metrics"].get("series", {}).get("validation_loss", {}).get("lowest"):
        found.append(Mark("best", lowest[0], f"lowest validation loss, {lowest[1]:.4f}, at step {lowest[0]:,}"))
    return found


def _chart(kind: str, title: str, curves: list[Curve], marks: list[Mark], last: int) -> Chart:
    values = [value for curve in curves for value in curve.values]
    values += [end for curve in curves if curve.has_band for each in curve.bins for end in (each.low, each.high)]
    low, high = min(values), max(values)
    is_flat = high - low <= max(1e-6 * max(abs(low), abs(high)), _TINY)
    room = (0.05 * abs(high) if abs(high) > _TINY else 1.0) if is_flat else 0.04 * (high - low)
    last = max(last, *(each.last for curve in curves for each in curve.bins[-1:]))
    return Chart(
        title=title,
        note=_note(curves),
        is_wide=kind == "loss",
        curves=curves,
        marks=[mark for mark in marks if mark.step <= last],
        steps=(0, max(last, 1)),
        values=(low - room, high + room),
    )


def _note(curves: list[Curve]) -> str:
    counts, widths = [len(curve.bins) for curve in curves], [_width(curve) for curve in curves]
    values = f"{_range(counts)} value{'s' * (max(counts) > 1)}"
    found = [f"means of {_range(counts)} bins of {_range(widths)} steps" if max(widths) > 1 else values]
    if any(curve.has_band for curve in curves):
        found.append("shaded: minimum to maximum")
    if windows := [curve.window for curve in curves if curve.window > 1]:
        found.append(f"smoothed over {_range(windows)} {'bins' if max(widths) > 1 else 'values'}")
    return "; ".join(found)


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{high:,}" if low == high else f"{low:,} to {high:,}"


def _width(curve: Curve) -> int:
    """The number of steps of the widest bin."""
    return max((each.last - each.first + 1 for each in curve.bins), default=1)


def ticks(low: float, high: float, most: int = 5) -> list[tuple[float, str]]:
    """Round values from low to high for the axis, about `most` of them."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    values = [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    largest = max(map(abs, values), default=0.0)
    if largest and not 1e-3 <= largest < 1e7:
        return [(value, f"{value:.3g}") for value in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    digits += abs(round(step * 10**digits) - step * 10**digits) > 1e-6  # one more for steps such as 2.5
    return [(value, f"{value:,.{digits}f}") for value in values]
