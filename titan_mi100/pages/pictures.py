"""Charts as PNG files. Needs matplotlib, which no other part of the package needs."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_mi100.errors import UserError
from titan_mi100.pages.charts import Chart, dots
from titan_mi100.pages.figures import SYMBOLS
from titan_mi100.wording import printable

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#b8528f", "#a67c00", "#2b93c9", "#57606a")
_MARKS = {
    "restart": ("#d55e00", "^"),
    "config": ("#b8528f", "D"),
    "skipped": ("#cf222e", "x"),
    "best": ("#009e73", "*"),
}


def check_matplotlib() -> None:
    """Raise a UserError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError('--png needs matplotlib, which is not installed; pip install "matplotlib>=3.8"') from None


def write_pictures(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Write one PNG file per chart and return the paths.

    Raises:
        UserError: the folder cannot be written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [
            _write(chart, folder / f"{number:02}_{_file_name(chart.key)}.png") for number, chart in enumerate(charts, 1)
        ]
    except OSError as error:
        raise UserError(
            f"{error.filename or folder}: cannot be written ({error.strerror}); name another --png"
        ) from None


def _file_name(key: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in key)[:60]


def _drawable(name: str) -> str:
    """The text without characters that matplotlib cannot draw: lone surrogates."""
    return printable(name).encode("utf-8", "backslashreplace").decode()


def _write(chart: Chart, path: Path) -> Path:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5 if chart.is_wide else 3.5), layout="constrained")
    axes = figure.subplots()
    for curve in chart.curves:
        steps = [(each.first + each.last) / 2 for each in curve.bins]
        how: dict[str, Any] = {"color": _COLORS[curve.color % len(_COLORS)]}
        if curve.has_band:
            low, high = [each.low for each in curve.bins], [each.high for each in curve.bins]
            axes.fill_between(steps, low, high, alpha=0.18, linewidth=0, **how)
        if curve.is_faint:
            axes.plot(steps, [each.mean for each in curve.bins], linewidth=0.8, alpha=0.4, **how)
        how |= {"linestyle": "--" if curve.color >= len(_COLORS) else "-", "marker": "o" if dots(curve) else None}
        # matplotlib leaves labels that begin with "_" out of the legend: put a zero-width space before them
        label = f"\u200b{_drawable(curve.name)}" if len(chart.curves) > 1 else None
        axes.plot(steps, curve.strong, linewidth=1.6, markersize=4, label=label, **how)
    named = set[str]()
    for mark in chart.marks:
        color, symbol = _MARKS[mark.kind]
        axes.axvline(mark.step, color=color, linewidth=0.8, linestyle=":")
        words = None if mark.kind in named else SYMBOLS[mark.kind][1]
        named.add(mark.kind)
        at_top: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot([mark.step], [1.0], symbol, color=color, label=words, **at_top)
    axes.set_yscale("log" if chart.is_log else "linear")
    axes.set_ylim(*chart.values)
    axes.set_xlim(*chart.steps)
    axes.set_yticks([at for at, _ in chart.ticks], [label for _, label in chart.ticks])
    axes.minorticks_off()
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    axes.set_xlabel("step")
    axes.set_title(f"{_drawable(chart.title)}\n{chart.note}", fontsize=9, parse_math=False)
    axes.grid(alpha=0.3)
    if len(chart.curves) > 1 or named:
        legend = figure.legend(loc="outside right upper", fontsize=8)
        for entry in legend.get_texts():
            entry.set_parse_math(False)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # matplotlib warns about characters that are not in the font; they are drawn as boxes
        figure.savefig(path, dpi=110)
    return path
