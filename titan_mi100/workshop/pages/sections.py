"""The report's sections. A section without content is left out."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan_mi100.wording import bytes_in_words
from titan_mi100.workshop.pages.document import text
from titan_mi100.workshop.pages.verdict import BAD, Finding


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
    known = {name: figure for name, figure in figures.items() if figure}
    shown = (f"<div><dt>{text(name)}</dt><dd>{text(figure)}</dd></div>" for name, figure in known.items())
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def finding_list(found: Sequence[Finding]) -> str:
    """A list of things to look at."""
    lines = (
        f'<li class="{each.level}"><b>{"✖" if each.level == BAD else "!"}</b><bdi>{text(each.text)}</bdi></li>'
        for each in found
    )
    return f'<ul class="findings">{"".join(lines)}</ul>' if found else ""


def shown_time(iso: str) -> str:
    """An ISO 8601 time in UTC as readable text."""
    return re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(\.\d+)?(Z|\+00:00)$", r"\1 \2 UTC", iso)


def checkpoint_list(checkpoints: dict[str, Any]) -> str:
    """The checkpoints, newest first; "": there are none."""
    rows = []
    for each in reversed(checkpoints.get("listed", [])):
        marks = ["lowest validation loss"] if each["is_best"] else []
        marks += [f"suspect: {each['why_suspect']}"] if each["is_suspect"] else []
        marks += [each["problem"]] if each["problem"] else []
        rows.append((each["name"], bytes_in_words(each["bytes"]), shown_time(each["saved"]), "; ".join(marks)))
    if not rows:
        return ""
    left_out = f"<p>{checkpoints['left_out']:,} older ones are not listed.</p>" if checkpoints["left_out"] else ""
    note = '<p class="soft">Manifests were checked; the content of the other files was not read.</p>'
    return table(("Folder", "Size", "Written", "Marks"), rows, numeric=(1,)) + left_out + note
