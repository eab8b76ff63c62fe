"""Renders the report of `inspect_data` as lines of text for a terminal."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

from titan_mi100.wording import plural, printable


class Piece(NamedTuple):
    """A part of a line.

    Attributes:
        kind: a key of `_COLORS`, or "" for plain text.
    """

    text: str
    kind: str = ""


Line = list[Piece]

# kind -> the terminal's color code
_COLORS = {"heading": "1", "document": "1;36", "soft": "2", "supervised": "32"}


def terminal_text(lines: Iterable[Line], color: bool) -> Iterator[str]:
    """The lines for a terminal. With `color`, styles are colors; without, supervised text is in brackets ⟦ ⟧."""
    for line in lines:
        shown = ""
        for kind, parts in groupby(line, lambda part: part.kind):
            text = printable("".join(part.text for part in parts))
            if kind and color:  # set for each line, because pagers reset the color at the end of a line
                text = "\n".join(f"\033[{_COLORS[kind]}m{row}\033[0m" if row else "" for row in text.split("\n"))
            shown += f"⟦{text}⟧" if kind == "supervised" and not color else text
        yield shown


def report_lines(report: dict[str, Any]) -> Iterator[Line]:
    """The lines of a report. Args: report: as returned by `make_report`."""
    if "read" in report:
        yield from ([Piece(text)] for text in report["read"])
        yield from ([Piece(f"{name}: {origin}")] for name, origin in report["from"].items())
        yield from ([Piece(f"warning: {line}")] for line in report["warnings"])
    yield from ([Piece(line["says"])] for line in report["where"])
    for row in report["shown"]:
        real = len(row["id"]) - row["padding"]
        holds = f"{plural(len(row['documents']), 'document')}, {plural(real, 'token')}"
        yield [Piece("\n"), Piece(f"row {row['row']} of {report['set']}: {holds}", "heading")]
        yield [Piece("supervised: "), Piece("so", "supervised")]
        start = 0
        for index, document in enumerate(row["documents"]):
            inside = range(start, start := start + document["tokens"])
            count = f"{plural(document['tokens'], 'token')}, {document['supervised']:,} supervised"
            role = document["role"]
            name = f"pair {index // 2}, {role}" if role else f"document {index}"
            yield [Piece(f"── {name}: {document['where']}: {count} ──", "document")]
            kinds = ("", "supervised")
            yield [Piece(row["text"][i].replace("↵", "↵\n"), kinds[row["supervised"][i]]) for i in inside]
        if row["padding"]:
            yield [Piece(f"── padding: {row['padding']:,} tokens, id {row['id'][-1]} ──", "soft")]
