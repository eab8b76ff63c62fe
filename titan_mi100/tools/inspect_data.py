"""Show the data as training sees them: packed rows token by token.

prepared/report.py makes the report. `--json` prints it, a terminal shows lines of it, and `--html` writes the
workshop's page, which also has a summary of the set.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from itertools import groupby, islice
from typing import Any

from titan_mi100 import cli as tool
from titan_mi100.config.as_text import settings_parser
from titan_mi100.config.load import load_config
from titan_mi100.doors import door
from titan_mi100.log import setup_logging
from titan_mi100.tools.prepared.report import make_report
from titan_mi100.wording import plural, printable


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _show(*_parser().parse_known_args(argv)))


def _show(options: argparse.Namespace, settings: Sequence[str]) -> None:
    setup_logging(0)
    if options.html:
        _parser().check_used(options, "--html", vars(options).keys() - {"json"})
        door("inspect --html")(options, lambda: load_config(settings, world_size=None))
        return
    with redirect_stdout(sys.stderr):  # stdout gets the report only, so that it can be piped
        report = make_report(load_config(settings, world_size=None), options)
    print(json.dumps(report, ensure_ascii=False) if options.json else "\n".join(report_lines(report)))


def report_lines(report: dict[str, Any]) -> Iterator[str]:
    """The lines of a report that `make_report` returned. Supervised text is in brackets."""
    if "read" in report:
        yield from map(printable, report["read"])
        yield from (printable(f"{name}: {origin}") for name, origin in report["from"].items())
        yield from (printable(f"warning: {line}") for line in report["warnings"])
    yield from (printable(line["says"]) for line in report["where"])
    for row in report["shown"]:
        real = len(row["id"]) - row["padding"]
        holds = f"{plural(len(row['documents']), 'document')}, {plural(real, 'token')}"
        yield printable(f"\nrow {row['row']} of {report['set']}: {holds}")
        yield "supervised: ⟦so⟧"
        tokens = iter(zip(row["text"], row["supervised"], strict=True))
        for index, document in enumerate(row["documents"]):
            count = f"{plural(document['tokens'], 'token')}, {document['supervised']:,} supervised"
            role = document["role"]
            name = f"pair {index // 2}, {role}" if role else f"document {index}"
            yield printable(f"── {name}: {document['where']}: {count} ──")
            shown = ""
            for is_learned, run in groupby(islice(tokens, document["tokens"]), lambda token: token[1]):
                text = "".join(text.replace("↵", "↵\n") for text, _ in run)
                shown += f"⟦{printable(text)}⟧" if is_learned else printable(text)
            yield shown
        if row["padding"]:
            yield f"── padding: {row['padding']:,} tokens, id {row['id'][-1]} ──"


def _parser() -> tool.Parser:
    epilog = "Settings are those of training; only [data], [model] and training.seq_len matter here."
    parser = settings_parser("titan-mi100 inspect", __doc__.splitlines()[0], epilog)
    add = parser.add_argument
    add("--row", metavar="N", default="", help="packed rows to show, such as 0,7 or 3-5")
    add("--where", metavar="FILE:LINE", default="", help="show the rows that contain this input line")
    add("--source", metavar="NAME", default="", help="the source to show, if there are several")
    add("--validation", action="store_true", help="show the validation set instead of the training set")
    add("--html", metavar="PATH", default="", help="write a self-contained HTML page, with a summary of the set")
    add("--json", action="store_true", help="print JSON, for scripts; with --row or --where only the rows")
    return parser
