"""Parts of a self-contained HTML page: it needs no network, and its text is readable without script.

Arguments called `text`, `lines` or `cells` are escaped here; those called `html` or `parts` are markup already.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --soft: #5b6470; --page: #fff; --box: #f4f6f8; --line: #d5dae0;
  --bar: #a9b6c6; --over: #d9822b; --link: #0b5fc1 }
@media (prefers-color-scheme: dark) { :root { --text: #e4e8ed; --soft: #a0abb8; --page: #14171b; --box: #1d2127;
  --line: #363d47; --bar: #5d6c80; --over: #e39a4a; --link: #7ab8ff } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 1150px; padding: 0 20px 5em; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.6em; margin: .8em 0 .2em } h2 { font-size: 1.25em; margin: 2em 0 .5em }
h3 { font-size: 1em; margin: 1.4em 0 .3em } p { margin: .4em 0 } ul { padding-left: 1.3em; margin: .3em 0 }
a { color: var(--link) } nav a { margin-right: 1em; display: inline-block; padding: 3px 0 }
.soft { color: var(--soft); font-size: .9em } .warning { border-left: 4px solid var(--over); padding-left: 10px }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; margin: 1em 0 }
.facts div { background: var(--box); border-radius: 6px; padding: 8px 12px }
.facts b { display: block; font-size: 1.3em }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: 4px 12px 4px 0; border-bottom: 1px solid var(--line) }
.bars { display: grid; grid-template-columns: auto 1fr auto; gap: 3px 10px; align-items: center; font-size: .85em }
.bars span { text-align: right; white-space: nowrap } .bars .end { border-bottom: 2px dashed var(--over) }
.bars i, .bars svg { display: block; height: 15px; width: 100%; background: var(--bar); border-radius: 2px }
.bars i.over { background: var(--over) } .key { white-space: nowrap }
.key::before { content: ""; display: inline-block; width: 1em; height: .75em; margin: 0 .35em 0 .8em;
  background: var(--key) }
"""


def page(title: str, sections: Mapping[str, str], intro: str, style: str, script: str) -> str:
    """A whole page.

    Args:
        sections: name, which links at the top lead to -> html.
        intro: html above the sections.
        style, script: added to the page's own; not escaped.
    """
    links = "".join(f'<a href="#{name}">{name.replace("-", " ")}</a>' for name in sections)
    body = "".join(f'<section id="{name}">{html}</section>' for name, html in sections.items())
    return (
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style><h1>{escape(title)}</h1>"
        f"<nav>{links}</nav>{intro}{body}<script>{script}</script></html>\n"
    )


def tag(name: str, text: str, kind: str = "") -> str:
    """An element that holds a text; `kind`: its class."""
    return f"<{name}{kind and f' class={kind}'}>{escape(text)}</{name}>"


def bullets(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(tag('li', line) for line in lines)}</ul>"


def facts(values: Mapping[str, str]) -> str:
    """A box for each value, with its name below it."""
    boxes = (f"<div>{tag('b', value)}{escape(name)}</div>" for name, value in values.items())
    return f'<div class="facts">{"".join(boxes)}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["".join(tag("th", cell) for cell in header)]
    lines += ["".join(tag("td", cell) for cell in cells) for cells in rows]
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def legend(colors: Mapping[str, str]) -> str:
    """Name of a CSS variable -> what its color means."""
    keys = (f'<span class="key" style="--key:var(--{color})">{escape(text)}</span>' for color, text in colors.items())
    return "".join(keys)


def bars(lines: Iterable[tuple[str, str, str]]) -> str:
    """A line for each (name, html of the bar, value behind it)."""
    return f'<div class="bars">{"".join(tag("span", a) + html + tag("span", b) for a, html, b in lines)}</div>'
