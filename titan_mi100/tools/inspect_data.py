"""Show the data as training sees them: packed rows token by token.

prepared/report.py makes the report. `--json` prints it, a terminal shows lines of it (prepared/view.py), and `--html`
writes the workshop's page, which also has a summary of the set.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from titan_mi100 import cli as tool
from titan_mi100.config.as_text import settings_parser
from titan_mi100.config.load import load_config
from titan_mi100.doors import door
from titan_mi100.log import setup_logging
from titan_mi100.tools.prepared.report import make_report
from titan_mi100.tools.prepared.view import report_lines


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _show(*_parser().parse_known_args(argv)))


def _show(options: argparse.Namespace, settings: Sequence[str]) -> None:
    setup_logging(0)
    if options.html:
        _parser().check_used(options, "--html", vars(options).keys() - {"json"})
        return door("inspect --html")(options, lambda: load_config(settings, world_size=None))
    with redirect_stdout(sys.stderr):  # stdout gets the report only, so that it can be piped
        report = make_report(load_config(settings, world_size=None), options)
    if options.json:
        return print(json.dumps(report, ensure_ascii=False))
    for line in report_lines(report, in_color=sys.stdout.isatty() and not os.environ.get("NO_COLOR")):
        print(line)
    return None


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


if __name__ == "__main__":
    sys.exit(main())
