"""The charts of a report, as HTML with inline SVG: loss, validation loss, throughput over steps. Imports no torch.

Curves scale with the page; labels are HTML text of fixed size.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from titan_mi100.tools.pages.document import text
from titan_mi100.tools.pages.long_files import SOURCE

_UNITS = 10_000  # width and height of the SVG's coordinate system
_COLORS = 7  # of the palette; further curves are dashed
_TINY = 1e-90  # smaller ranges are drawn as flat, so that scales stay finite
Points = Sequence[tuple[float, float]]  # step and value

STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26em), 1fr)); gap: 1em }
.chart { margin: 0; padding: .8em 1em .6em; border: 1px solid var(--line); border-radius: 8px; min-width: 0 }
.chart:first-child { grid-column: 1 / -1 }
.key { list-style: none; margin: .2em 0; padding: 0; display: flex; flex-wrap: wrap; gap: .1em 1.2em }
.chart small, .key { color: var(--soft); font-size: .8rem } .chart small { display: block }
.plot { display: grid; grid-template-columns: var(--labels) 1fr; margin: .8em 1.2em .2em 0; font-size: .75rem;
  color: var(--soft); font-variant-numeric: tabular-nums; line-height: 1 }
.plot > div { position: relative } .plot span { position: absolute; white-space: nowrap }
.plot .y span { right: .5em; transform: translateY(-50%) }
.plot .x { grid-column: 2; height: 1.7em } .plot .x span { top: .6em; transform: translateX(-50%) }
.area { height: 11em } .chart:first-child .area { height: 19em }
.area svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible }
path { fill: none; stroke-width: 1.8; vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round }
path.grid { stroke: var(--line); stroke-width: 1 } path.dashed { stroke-dasharray: 7 4 }
.k0 { stroke: var(--c0) } .k1 { stroke: var(--c1) } .k2 { stroke: var(--c2) } .k3 { stroke: var(--c3) }
.k4 { stroke: var(--c4) } .k5 { stroke: var(--c5) } .k6 { stroke: var(--c6) }
"""
# key of metrics.jsonl -> title
_KINDS = {
    "loss": "Training loss (mean over supervised tokens, nats)",
    "validation_loss": "Validation loss (nats per token)",
    "accuracy": "Pairs whose chosen answer has the greater reward (share)",
    "margin": "Margin: reward of the chosen answer minus that of the rejected one",
    "reward_chosen": "Rewards of both answers",
    "logp_chosen": "Log probabilities of both answers (nats)",
    "kl": "Distance from the reference, or from the teacher (KL, nats)",
    "cross_entropy": "Cross-entropy of the labels (nats per token)",
    "agreement": "Tokens whose likeliest id is the teacher's (share)",
    "tokens_per_second": "Throughput (tokens/s)",
    "busiest_expert": "Rows of the busiest expert (relative to the mean of its layer)",
}
_BESIDE = {"reward_chosen": "reward_rejected", "logp_chosen": "logp_rejected"}  # drawn in the same chart


def charts(run: dict[str, Any]) -> str:
    """The charts that have data, as HTML. Args: run: as `collect` returns it."""
    series, found = run["metrics"].get("series", {}), ""
    for kind, title in _KINDS.items():
        both = {kind, _BESIDE.get(kind, kind)}
        of_kind = both | {f"validation_{each}" for each in both}
        if kind.endswith("loss") and "margin" in series:
            title = f"{title.partition(' (')[0]} (mean over pairs)"
        keys = [key for key in series if key in of_kind or (kind == "validation_loss" and key.startswith(SOURCE))]
        keys.sort(key=lambda key: (key != kind, key))
        if kind == "loss":
            keys = [kind] if kind in series else []
        names = {kind: "all", **({} if kind.endswith("loss") else {kind: kind.rpartition("_")[2]})}
        curves = {names.get(key, key.removeprefix(SOURCE)).replace("_", " "): series[key]["means"] for key in keys}
        if curves:
            widths = max(series[key]["bin_steps"] for key in keys)
            found += figure(title, f"means of {widths:,} steps" if widths > 1 else "", curves)
    return f'<div class="charts">{found}</div>' if found else ""


def figure(title: str, note: str, curves: Mapping[str, Points]) -> str:
    """A chart. Args: note: below its title. curves: by their names."""
    values = [value for points in curves.values() for _, value in points]
    low, high = min(values), max(values)
    is_flat = high - low <= max(1e-6 * max(abs(low), abs(high)), _TINY)
    room = (0.05 * abs(high) if abs(high) > _TINY else 1.0) if is_flat else 0.04 * (high - low)
    low, high, last = low - room, high + room, max(1.0, *(points[-1][0] for points in curves.values()))

    def up(value: float) -> float:
        return 1 - (value - low) / (high - low)

    marks, steps = ticks(low, high), [at for at, _ in ticks(0, last) if at == int(at)]
    left = "".join(f'<span style="top:{100 * up(at):.2f}%">{label}</span>' for at, label in marks)
    below = "".join(f'<span style="left:{100 * at / last:.2f}%">{at:,.0f}</span>' for at in steps)
    grid = "".join(f"M0,{round(_UNITS * up(at))} {_UNITS},{round(_UNITS * up(at))}" for at, _ in marks)
    drawn, key = f'<path class="grid" d="{grid}"/>', ""
    for number, (name, points) in enumerate(curves.items()):
        classes = f"k{number % _COLORS}" + (" dashed" if number >= _COLORS else "")
        line = " ".join(f"{round(_UNITS * step / last)},{round(_UNITS * up(value))}" for step, value in points)
        drawn += f'<path class="{classes}" d="M{line}h0"/>'  # h0: a single point is a dot
        piece = f'<svg class="line" viewBox="0 0 20 4"><path class="{classes}" d="M0,2 20,2"/></svg>'
        key += f"<li>{piece}<bdi>{text(name)}</bdi></li>"
    width = max((len(label) for _, label in marks), default=1) + 1
    return (
        f'<figure class="chart"><figcaption><b>{text(title)}</b><small>{text(note)}</small></figcaption>'
        f"{f'<ul class=key>{key}</ul>' if len(curves) > 1 else ''}"
        f'<div class="plot" style="--labels:{width}ch"><div class="y">{left}</div><div class="area">'
        f'<svg viewBox="0 0 {_UNITS} {_UNITS}" preserveAspectRatio="none" role="img" aria-label="{text(title)}">'
        f'{drawn}</svg></div><div class="x">{below}</div></div></figure>\n'
    )


def ticks(low: float, high: float, most: int = 5) -> list[tuple[float, str]]:
    """Round values from low to high for the axis, about `most` of them."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    values = [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return [(value, f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}") for value in values]
