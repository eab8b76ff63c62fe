"""Renders the report of `inspect_data` as lines of text for a terminal."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

from titan_mi100.tools.prepared.texts import visible
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
_COLORS = {"heading": "1", "document": "1;36", "soft": "2", "supervised": "32", "supervised row": "32"}


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


def report_lines(report: dict[str, Any], table: bool) -> Iterator[Line]:
    """The lines of a report.

    Args:
        report: as returned by `make_report`.
        table: show rows as tables with one line per token, instead of running text.
    """
    if "read" in report:
        yield from _summary(report)
    yield from ([Piece(line["says"])] for line in report.get("where", []))
    for row in report["shown"]:
        real = len(row["id"]) - row["padding"]
        documents = plural(len(row["documents"]), "document")
        yield _heading(f"row {row['row']} of {report['set']}: {documents}, {plural(real, 'token')}")
        yield [Piece("supervised: "), Piece("so", "supervised")]
        start = 0
        for index, document in enumerate(row["documents"]):
            inside = range(start, start := start + document["tokens"])
            count = f"{plural(document['tokens'], 'token')}, {document['supervised']:,} supervised"
            role = document["role"]
            name = f"pair {index // 2}, {role}" if role else f"document {index}"
            yield [Piece(f"── {name}: {document['where']}: {count} ──", "document")]
            yield from _table(row, inside) if table else [_running(row, inside)]
        if row["padding"]:
            yield [Piece(f"── padding: {row['padding']:,} tokens, id {row['id'][-1]} ──", "soft")]


def _heading(text: str) -> Line:
    return [Piece("\n"), Piece(text, "heading")]


def _running(row: dict[str, Any], inside: range) -> Line:
    """A document as running text. Args: inside: positions of its tokens in the row."""
    kinds = ("", "supervised")
    return [Piece(row["text"][i].replace("↵", "↵\n"), kinds[row["supervised"][i]]) for i in inside]


def _table(row: dict[str, Any], inside: range) -> Iterator[Line]:
    """A document as a table with one line per token."""
    yield [Piece("   place       id   position  supervised  text")]
    for i in inside:
        text, supervised = row["text"][i].replace(" ", "·"), row["supervised"][i]
        line = f"{i:>8} {row['id'][i]:>8} {row['position'][i]:>10}  {'yes' if supervised else '-':<10}  {text}"
        yield [Piece(line, "supervised row" if supervised else "")]


def _summary(report: dict[str, Any]) -> Iterator[Line]:
    """The lines of the summary."""
    texts = [*report["read"], *(f"{name}: {origin}" for name, origin in report["from"].items())]
    texts += [f"warning: {line}" for line in report["warnings"]]
    yield from ([Piece(text)] for text in texts)
    yield _heading(f"ledger: {report['ledger']['path']}")
    for status, rows in report["ledger"]["statuses"].items():
        yield [Piece(f"  {status}: {rows['rows']:,}")]
        yield from ([Piece(f"    {visible(first['where'])}: {visible(first['reason'])}")] for first in rows["first"])
    yield _heading(f"packing: {len(report['packing'])} of {report['rows']:,} rows; █ supervised, ░ not, · padding")
    yield from ([Piece(f"  {row['row']:>9,} {row['picture']} {row['documents']}")] for row in report["packing"])
