"""The frame, the style and the parts of our HTML pages: one file each, light and dark, no network. Imports no torch."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from titan_mi100.wording import printable
from titan_mi100.workshop.pages.verdict import BAD, Finding


def text(value: object) -> str:
    """Escape a text for HTML: markup, control characters and characters that change the text direction."""
    return escape(printable(str(value)))


def html_document(title: str, body: str) -> str:
    """A complete HTML page in one file, with style.css. Its content security policy allows no script and no network.

    Args:
        title: plain text.
        body: HTML; every text in it must be escaped by `text`.
    """
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{style}</style>\n"
    )
    return f"{head}{body}</html>\n"


def is_page(title: str) -> Callable[[bytes], bool]:
    """For durable.write_output: whether a file that begins so is a page of ours. Args: title: how its title begins."""
    return lambda start: start.startswith(b"<!DOCTYPE html>") and f"<title>{title}".encode() in start


def section(title: str, inside: str) -> str:
    return f"<section><h2><bdi>{text(title)}</bdi></h2>{inside}</section>\n" if inside else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numeric: Iterable[int] = ()) -> str:
    """An HTML table that scrolls if it is wider than the page.

    Args:
        numeric: indices of the columns that are aligned to the right.
    """
    right = set(numeric)

    def cell(tag: str, place: int, shown: str) -> str:
        kind = ' class="n"' if place in right else ' class="t"' if tag == "td" and len(shown) > 30 else ""
        return f"<{tag}{kind}><bdi>{text(shown)}</bdi></{tag}>"

    def line(tag: str, values: Sequence[str]) -> str:
        return f"<tr>{''.join(cell(tag, place, value) for place, value in enumerate(values))}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", heads)}</thead><tbody>{body}</tbody></table></div>'


def tiles(figures: Mapping[str, str]) -> str:
    """Key figures as tiles. Args: figures: name -> figure; "": not known, and left out."""
    shown = (f"<div><dt>{text(name)}</dt><dd>{text(figure)}</dd></div>" for name, figure in figures.items() if figure)
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def finding_list(found: Sequence[Finding]) -> str:
    """A list of things to look at."""
    lines = (
        f'<li class="{each.level}"><b>{"✖" if each.level == BAD else "!"}</b><bdi>{text(each.text)}</bdi></li>'
        for each in found
    )
    return f'<ul class="findings">{"".join(lines)}</ul>' if found else ""
