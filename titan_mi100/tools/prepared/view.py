"""Renders the report of `inspect_data` as lines of text for a terminal."""

from collections.abc import Iterator
from itertools import groupby, islice
from typing import Any

from titan_mi100.wording import plural, printable


def report_lines(report: dict[str, Any], in_color: bool) -> Iterator[str]:
    """The lines of a report.

    Args:
        report: as returned by `make_report`.
        in_color: supervised text is green; else it is in brackets.
    """

    def painted(text: str, code: str) -> str:
        """Set for each line, because pagers reset the color at the end of a line."""
        lines = printable(text).split("\n")
        return "\n".join(f"\033[{code}m{line}\033[0m" if line and in_color else line for line in lines)

    def learned(text: str) -> str:
        return painted(text, "32") if in_color else f"⟦{printable(text)}⟧"

    if "read" in report:
        yield from map(printable, report["read"])
        yield from (printable(f"{name}: {origin}") for name, origin in report["from"].items())
        yield from (printable(f"warning: {line}") for line in report["warnings"])
    yield from (printable(line["says"]) for line in report["where"])
    for row in report["shown"]:
        real = len(row["id"]) - row["padding"]
        holds = f"{plural(len(row['documents']), 'document')}, {plural(real, 'token')}"
        yield "\n" + painted(f"row {row['row']} of {report['set']}: {holds}", "1")
        yield f"supervised: {learned('so')}"
        tokens = iter(zip(row["text"], row["supervised"], strict=True))
        for index, document in enumerate(row["documents"]):
            count = f"{plural(document['tokens'], 'token')}, {document['supervised']:,} supervised"
            role = document["role"]
            name = f"pair {index // 2}, {role}" if role else f"document {index}"
            yield painted(f"── {name}: {document['where']}: {count} ──", "1;36")
            shown = ""
            for is_learned, run in groupby(islice(tokens, document["tokens"]), lambda token: token[1]):
                text = "".join(text.replace("↵", "↵\n") for text, _ in run)
                shown += learned(text) if is_learned else printable(text)
            yield shown
        if row["padding"]:
            yield painted(f"── padding: {row['padding']:,} tokens, id {row['id'][-1]} ──", "2")
