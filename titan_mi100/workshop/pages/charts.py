"""The histogram of the data page, as HTML with inline SVG. Imports no torch.

The drawing scales with the page; labels are HTML text of fixed size.
"""

import math
from collections.abc import Mapping, Sequence

from titan_mi100.workshop.pages.document import text

_UNITS = 10_000  # width and height of the SVG's coordinate system


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
    bottom = "".join(f'<span style="left:{100 * at:.2f}%">{text(label)}</span>' for at, label in below)
    marks = {f"{count:,}": 1 - count / most for count in ticks(most)}
    left = "".join(f'<span style="top:{100 * at:.2f}%">{label}</span>' for label, at in marks.items())
    grid = "".join(f"M0,{round(_UNITS * at)} {_UNITS},{round(_UNITS * at)}" for at in marks.values())
    return (
        f'<figure class="chart"><figcaption><b>{text(title)}</b><small>{text(note)}</small></figcaption>'
        f"{f'<ul class=key>{key}</ul>' if len(series) > 1 else ''}"
        f'<div class="plot" style="--labels:{len(f"{most:,}") + 1}ch"><div class="y">{left}</div><div class="area">'
        f'<svg viewBox="0 0 {_UNITS} {_UNITS}" preserveAspectRatio="none" role="img" aria-label="{text(title)}">'
        f'<path class="grid" d="{grid}"/>{drawn}</svg></div><div class="x">{bottom}</div></div></figure>\n'
    )


def ticks(most: int) -> range:
    """Round counts from 0 to `most`, at most six of them."""
    rough = max(1, most / 5)
    power = 10 ** math.floor(math.log10(rough))
    return range(0, most + 1, next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough))
