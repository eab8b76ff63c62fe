"""Show the data as training sees them: packed rows token by token, and a summary of the set.

prepared/report.py makes one report. `--json` prints it, a terminal shows lines of it (prepared/view.py), and `--html`
writes a page (prepared/page.py).
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from titan_mi100 import cli as tool
from titan_mi100.config.as_text import settings_parser
from titan_mi100.config.load import load_config
from titan_mi100.doors import door
from titan_mi100.log import setup_logging
from titan_mi100.tools.prepared.report import make_report
from titan_mi100.tools.prepared.view import report_lines, terminal_text
from titan_mi100.wording import printable


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _show(*_parser().parse_known_args(argv)))


def _show(options: argparse.Namespace, settings: Sequence[str]) -> None:
    setup_logging(0)
    if options.html or options.json:
        idle = ("json", "color") if options.html else ("table", "color")
        _parser().check_used(options, "--html" if options.html else "--json", vars(options).keys() - {*idle})
    page = door("inspect --html")(Path(options.html)) if options.html else None
    with redirect_stdout(sys.stderr):  # stdout gets the report only, so that it can be piped
        report = make_report(load_config(settings, world_size=None), options)
    if page:
        size = page.write(report, options.table)
        first = report.get("sets", [report])[0]  # each set of a mixture has the lines of all
        print(printable("\n".join([*first["read"], *(f"WARNING {line}" for line in first["warnings"])])))
        print(f"{options.html}: {size:,} bytes; open it in a browser")
    elif options.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        auto = options.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for line in terminal_text(report_lines(report, options.table), auto or options.color == "always"):
            print(line)


def _parser() -> tool.Parser:
    epilog = "Settings are those of training; only [data], [model] and training.seq_len matter here."
    parser = settings_parser("titan-mi100 inspect", __doc__.splitlines()[0], epilog)
    add = parser.add_argument
    add("--row", metavar="N", default="", help="packed rows to show, such as 0,7 or 3-5")
    add("--where", metavar="FILE:LINE", default="", help="show the rows that contain this input line")
    add("--source", metavar="NAME", default="", help="the source to show, if there are several")
    add("--validation", action="store_true", help="show the validation set instead of the training set")
    add("--table", action="store_true", help="show one line per token: place, id, position, supervised, text")
    add("--html", metavar="PATH", default="", help="write the report as one self-contained HTML page")
    add("--json", action="store_true", help="print JSON, for scripts; with --row or --where only the rows")
    on = "auto: on a terminal, unless NO_COLOR is set"
    add("--color", choices=("auto", "always", "never"), default="auto", help=on)
    return parser


if __name__ == "__main__":
    sys.exit(main())
