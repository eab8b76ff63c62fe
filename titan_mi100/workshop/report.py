"""Write a page about a run: did it go well, metrics, checkpoints, restarts. Or compare several in a table.

    titan-mi100 report RUN [RUN ...] [--output FILE.html] [--json]

The page is one file that needs no network, no other file and no JavaScript. Of several runs a table is printed. A run
may still be running. Imports no torch.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from titan_mi100 import cli as tool
from titan_mi100.errors import UserError
from titan_mi100.files.durable import check_output, write_output
from titan_mi100.log import setup_logging
from titan_mi100.wording import printable
from titan_mi100.workshop.pages.collect import collect
from titan_mi100.workshop.pages.document import is_page
from titan_mi100.workshop.pages.page import comparison, key_figures, page


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _report(_parser().parse_args(argv)))


def _report(options: argparse.Namespace) -> None:
    setup_logging(0)
    if options.json and options.output:
        raise UserError("--json prints to standard output and writes no page; leave --output out")
    if options.output and len(options.runs) > 1:
        raise UserError("a page is of one run, a table of several is printed; leave --output out")
    runs = dict.fromkeys(options.runs)
    output = Path(options.output or options.runs[0] / "report.html")
    if not options.json and len(runs) == 1:
        check_output(output, "--output", is_page("Report: "))
    collected = [collect(run) for run in runs]
    if options.json:
        shown = [{**run, "columns": key_figures(run)} for run in collected]
        print(json.dumps(shown if len(collected) > 1 else shown[0], allow_nan=False))
    elif len(collected) > 1:
        print(printable(comparison(collected)))
    else:
        write_output(output, text := [page(collected[0])], "--output", is_page("Report: "))
        print(f"{output}: {len(text[0].encode(errors='backslashreplace')):,} bytes")


def _parser() -> argparse.ArgumentParser:
    parser = tool.Parser(prog="titan-mi100 report", description=__doc__.splitlines()[0], epilog="See docs/REPORT.md.")
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="run folder, as training printed it; several: a table")
    add("--output", metavar="FILE.html", default="", help="the page (default: report.html in the run's folder)")
    add("--json", action="store_true", help="print the data as JSON instead")
    return parser
