"""The charts of our pages, as HTML with inline SVG: curves over steps, and histograms. Imports no torch.

Curves scale with the page; labels are HTML text of fixed size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from titan_mi100.workshop.pages.document import text
from titan_mi100.workshop.pages.long_files import SOURCE

_UNITS = 10_000  # width and height of the SVG's coordinate system
_COLORS = 7  # of the palette; further curves are dashed
_TINY = 1e-90  # smaller ranges are drawn as flat, so that scales stay finite
Point = tuple[float, float]  # step and value


def loss_charts(series: Mapping[str, dict[str, Any]]) -> str:
    """The curves of a run's loss, in training and on new rows of all and of each source; "": there are none.

    Args:
        series: of `read_metrics`.
    """
    sources = {key.removeprefix(SOURCE): series[key] for key in series if key.startswith(SOURCE)}
    validation = {"all": series["validation_loss"]} if "validation_loss" in series else {}
    training = {"all": series["loss"]} if "loss" in series else {}
    figures = ""
    for title, curves in (("Training loss", training), ("Validation loss", validation | sources)):
        if curves:
            widest = max(summary["bin_steps"] for summary in curves.values())
            note = f"means of {widest:,} steps" if widest > 1 else ""
            lowest = {name: summary["lowest"] for name, summary in curves.items()} if curves is not training else {}
            figures += figure(title, note, {name: summary["means"] for name, summary in curves.items()}, lowest)
    return f'<div class="charts">{figures}</div>' if figures else ""


def figure(title: str, note: str, curves: Mapping[str, Sequence[Point]], lowest: Mapping[str, Point]) -> str:
    """A chart of curves over steps.

    Args:
        note: below its title.
        curves: by their names.
        lowest: name of a curve -> its lowest point, which gets a mark.
    """
    every = [point for points in (*curves.values(), lowest.values()) for point in points]
    steps, values = zip(*every, strict=True)
    low, high, last = min(values), max(values), max(1.0, *steps)
    is_flat = high - low <= max(1e-6 * max(abs(low), abs(high)), _TINY)
    room = (0.05 * abs(high) if abs(high) > _TINY else 1.0) if is_flat else 0.04 * (high - low)
    low, high = low - room, high + room

    def place(step: float, value: float) -> str:
        return f"{round(_UNITS * step / last)},{round(_UNITS * (1 - (value - low) / (high - low)))}"

    drawn, key = "", ""
    for number, (name, points) in enumerate(curves.items()):
        classes, shown = f"k{number % _COLORS}" + (" dashed" if number >= _COLORS else ""), text(name)
        line = " ".join(place(step, value) for step, value in points)
        drawn += f'<path class="{classes}" d="M{line}h0"/>'  # h0: a single point is a dot
        if name in lowest:
            drawn += f'<path class="{classes} lowest" d="M{place(*lowest[name])}h0"/>'
            shown += f"; ● lowest: {lowest[name][1]:.4f} at step {lowest[name][0]:,}"
        piece = f'<svg class="line" viewBox="0 0 20 4"><path class="{classes}" d="M0,2 20,2"/></svg>'
        key += f"<li>{piece}<bdi>{shown}</bdi></li>"
    below = [(at / last, f"{at:,.0f}") for at, _ in ticks(0, last) if at == int(at)]
    return _frame(title, note, key if len(curves) > 1 or lowest else "", drawn, (low, high), below)


def bars(title: str, note: str, edges: Sequence[str], series: Mapping[str, Sequence[int]]) -> str:
    """A histogram.

    Args:
        edges: texts of the bins' right edges; some of them are shown.
        series: name -> counts per bin; later ones are drawn over earlier ones, and have an outline only.
    """
    most, drawn, key = max(1, *(max(counts) for counts in series.values())), "", ""
    wide = _UNITS // len(edges)
    for number, (name, counts) in enumerate(series.items()):
        # at least 1% of the height, so that a count of 1 is visible
        tall = [max(_UNITS // 100, round(_UNITS * count / most)) if count else 0 for count in counts]
        tops = [(wide * i + wide // 10, height) for i, height in enumerate(tall) if height]
        boxes = "".join(f"M{x},{_UNITS}v-{height}h{wide * 8 // 10}v{height}z" for x, height in tops)
        drawn += f'<path class="bars f{number}" d="{boxes}"/>'
        piece = f'<svg class="line" viewBox="0 0 20 8"><path class="bars f{number}" d="M1,1h18v6h-18z"/></svg>'
        key += f"<li>{piece}<bdi>{text(name)}</bdi></li>"
    every = -(-len(edges) // 6)  # labels that fit a phone
    below = [(i / len(edges), label) for i, label in enumerate(edges, 1) if (len(edges) - i) % every == 0]
    return _frame(title, note, key if len(series) > 1 else "", drawn, (0, most), below)


def _frame(
    title: str, note: str, key: str, drawn: str, ends: tuple[float, float], below: Sequence[tuple[float, str]]
) -> str:
    """A chart. Args: drawn: SVG of its curves. ends: of the vertical axis. below: (place, label) on the other axis."""
    low, high = ends
    marks = [(1 - (at - low) / (high - low), label) for at, label in ticks(low, high)]
    left = "".join(f'<span style="top:{100 * at:.2f}%">{label}</span>' for at, label in marks)
    bottom = "".join(f'<span style="left:{100 * at:.2f}%">{text(label)}</span>' for at, label in below)
    grid = "".join(f"M0,{round(_UNITS * at)} {_UNITS},{round(_UNITS * at)}" for at, _ in marks)
    width = max((len(label) for _, label in marks), default=1) + 1
    return (
        f'<figure class="chart"><figcaption><b>{text(title)}</b><small>{text(note)}</small></figcaption>'
        f"{f'<ul class=key>{key}</ul>' if key else ''}"
        f'<div class="plot" style="--labels:{width}ch"><div class="y">{left}</div><div class="area">'
        f'<svg viewBox="0 0 {_UNITS} {_UNITS}" preserveAspectRatio="none" role="img" aria-label="{text(title)}">'
        f'<path class="grid" d="{grid}"/>{drawn}</svg></div><div class="x">{bottom}</div></div></figure>\n'
    )


def ticks(low: float, high: float, most: int = 5) -> list[tuple[float, str]]:
    """Round values from low to high for the axis, about `most` of them."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    marks = [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return [(mark, f"{mark:,.0f}" if 1e4 <= abs(mark) < 1e7 else f"{mark:.4g}") for mark in marks]
