"""Charts as HTML with inline SVG: curves scale with the page, labels are HTML text of fixed size. Imports no torch."""

from collections.abc import Iterable, Sequence

from titan_mi100.tools.pages.charts import Chart, Curve, ticks
from titan_mi100.tools.pages.document import text

_UNITS = 10_000  # width and height of the SVG's coordinate system
_COLORS = 7
SYMBOLS = {
    "restart": ("▲", "restart"),
    "config": ("◆", "settings changed"),
    "skipped": ("✕", "step skipped"),
    "best": ("★", "lowest validation loss"),
}
_MOST_MARKS = 200  # drawn per kind

STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26em), 1fr)); gap: 1em }
.chart { margin: 0; padding: .8em 1em .6em; border: 1px solid var(--line); border-radius: 8px; min-width: 0 }
.chart.wide { grid-column: 1 / -1 }
.chart figcaption { line-height: 1.35 }
.chart small, .key { color: var(--soft); font-size: .8rem } .chart small { display: block }
.key { list-style: none; margin: .2em 0; padding: 0; display: flex; flex-wrap: wrap; gap: .1em 1.2em }
.plot { display: grid; grid-template-columns: var(--labels) 1fr; margin: .8em 1.2em .2em 0; font-size: .75rem;
  color: var(--soft); font-variant-numeric: tabular-nums; line-height: 1 }
.plot > div { position: relative }
.plot span { position: absolute; white-space: nowrap }
.plot .y span { right: .5em; transform: translateY(-50%) }
.plot .x { grid-column: 2; height: 1.7em }
.plot .x span { top: .6em; transform: translateX(-50%) }
.plot .marks { grid-column: 2; height: 1.2em }
.plot .marks span { transform: translateX(-50%); cursor: help }
.area { height: 11em }
.wide .area { height: 19em }
.area svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible }
path { fill: none; stroke-width: 1.8; vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round }
path.grid { stroke: var(--line); stroke-width: 1 }
path.band { stroke: none; opacity: .25 }
path.dashed { stroke-dasharray: 7 4 }
path.at { stroke-width: 1; stroke-dasharray: 3 3; opacity: .7 }
.k0 { stroke: var(--c0) } .k1 { stroke: var(--c1) } .k2 { stroke: var(--c2) } .k3 { stroke: var(--c3) }
.k4 { stroke: var(--c4) } .k5 { stroke: var(--c5) } .k6 { stroke: var(--c6) }
.band.k0 { fill: var(--c0) } .band.k1 { fill: var(--c1) } .band.k2 { fill: var(--c2) } .band.k3 { fill: var(--c3) }
.band.k4 { fill: var(--c4) } .band.k5 { fill: var(--c5) } .band.k6 { fill: var(--c6) }
.restart { color: var(--c1); stroke: var(--c1) } .config { color: var(--c3); stroke: var(--c3) }
.skipped { color: var(--bad); stroke: var(--bad) } .best { color: var(--c2); stroke: var(--c2) }
@media (max-width: 40em) { .plot .x span:nth-child(even) { display: none } .wide .area { height: 14em } }
"""


def figure(chart: Chart) -> str:
    """The chart as HTML."""
    values, steps = ticks(*chart.values), (at for at, _ in ticks(*chart.steps) if at == int(at))
    width = max((len(label) for _, label in values), default=1) + 1
    left = "".join(f'<span style="top:{100 * (1 - chart.up(at)):.2f}%">{label}</span>' for at, label in values)
    below = "".join(f'<span style="left:{100 * chart.across(at):.2f}%">{at:,.0f}</span>' for at in steps)
    kinds = [kind for kind in SYMBOLS if any(mark.kind == kind for mark in chart.marks)]
    return (
        f'<figure class="chart{" wide" if chart.is_wide else ""}"><figcaption><b>{text(chart.title)}</b>'
        f"<small>{text(chart.note)}</small></figcaption>{_key(chart, kinds)}"
        f'<div class="plot" style="--labels:{width}ch">{_mark_rows(chart, kinds)}<div class="y">{left}</div>'
        f'<div class="area">{_drawing(chart, kinds)}</div><div class="x">{below}</div></div></figure>\n'
    )


def _key(chart: Chart, kinds: Iterable[str]) -> str:
    """The legend above the drawing: names of the curves and of the marks."""
    entries = []
    if len(chart.curves) > 1:
        for curve in chart.curves:
            entries.append(f"<li>{line_of(curve.color)}<bdi>{text(curve.name)}</bdi></li>")
    for kind in kinds:
        symbol, words = SYMBOLS[kind]
        entries.append(f'<li><span class="{kind}">{symbol}</span> {words}</li>')
    return f'<ul class="key">{"".join(entries)}</ul>' if entries else ""


def _mark_rows(chart: Chart, kinds: Iterable[str]) -> str:
    """The marks above the drawing, one row per kind."""
    rows = ""
    for kind in kinds:
        symbol = SYMBOLS[kind][0]
        marks = [mark for mark in chart.marks if mark.kind == kind][:_MOST_MARKS]
        spans = "".join(
            f'<span style="left:{100 * chart.across(mark.step):.2f}%" title="{text(mark.text)}">{symbol}</span>'
            for mark in marks
        )
        rows += f'<div class="marks {kind}">{spans}</div>'
    return rows


def line_of(color: int) -> str:
    """A short piece of a curve for the legend."""
    return f'<svg class="line" viewBox="0 0 20 4"><path class="{_classes(color)}" d="M0,2 20,2"/></svg>'


def _classes(color: int) -> str:
    return f"k{color % _COLORS}" + (" dashed" if color >= _COLORS else "")


def _drawing(chart: Chart, kinds: Iterable[str]) -> str:
    """The drawing as SVG: grid, marks and curves."""
    grid = "".join(f"M0,{_y(chart, at)} {_UNITS},{_y(chart, at)}" for at, _ in ticks(*chart.values))
    paths = [f'<path class="grid" d="{grid}"/>']
    for kind in kinds:
        marks = [mark for mark in chart.marks if mark.kind == kind][:_MOST_MARKS]
        at = "".join(f"M{_x(chart, mark.step)},0 {_x(chart, mark.step)},{_UNITS}" for mark in marks)
        paths.append(f'<path class="at {kind}" d="{at}"/>')
    for curve in chart.curves:
        paths += _curve(chart, curve)
    return (
        f'<svg viewBox="0 0 {_UNITS} {_UNITS}" preserveAspectRatio="none" role="img" '
        f'aria-label="{text(chart.title)} by step">{"".join(paths)}</svg>'
    )


def _curve(chart: Chart, curve: Curve) -> list[str]:
    classes, across, found = _classes(curve.color), [(each.first + each.last) / 2 for each in curve.bins], list[str]()
    if curve.has_band:
        upper = _points(chart, across, [each.high for each in curve.bins])
        lower = _points(chart, across, [each.low for each in curve.bins])
        found.append(f'<path class="band {classes}" d="M{" ".join([*upper, *lower[::-1]])}Z"/>')
    points = " ".join(_points(chart, across, curve.values))
    return [*found, f'<path class="{classes}" d="M{points}h0"/>']  # h0: a single point is a dot


def _points(chart: Chart, steps: Sequence[float], values: Sequence[float]) -> list[str]:
    return [f"{_x(chart, step)},{_y(chart, value)}" for step, value in zip(steps, values, strict=True)]


def _x(chart: Chart, step: float) -> int:
    return round(_UNITS * chart.across(step))


def _y(chart: Chart, value: float) -> int:
    return round(_UNITS * (1 - chart.up(value)))
