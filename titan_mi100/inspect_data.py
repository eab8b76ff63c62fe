"""Show what trains: any packed row token by token, and a summary of the whole set. `--help` lists the options.

There is one report (`inspect.report`). `--json` prints it; a terminal and `--html` show it as the same lines
(`inspect.view`).
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

from titan_mi100 import cli as tool
from titan_mi100.config.as_text import help_text
from titan_mi100.config.load import load_config
from titan_mi100.errors import UserError
from titan_mi100.inspect.report import make_report
from titan_mi100.inspect.view import page, report_lines, terminal_text
from titan_mi100.logging import setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _show(*_parser().parse_known_args(argv)))


def _show(options: argparse.Namespace, settings: Sequence[str]) -> None:
    setup_logging(0)
    if os.path.isfile(options.html) and not Path(options.html).read_bytes().startswith(b"<!DOCTYPE html>"):
        raise UserError(f"--html {options.html}: is there already, and no page; name another file")
    with redirect_stdout(sys.stderr):  # progress goes to stderr, only the report to stdout
        report = make_report(load_config(settings, world_size=None), options)
    lines = report_lines(report, options.table)
    if options.html:
        text = page(f"What trains: {report['set']}", lines)
        print(f"{options.html}: {Path(options.html).write_bytes(text.encode()):,} bytes")
    elif options.json:
        print(json.dumps(report, ensure_ascii=False))
    else:
        auto = options.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for line in terminal_text(lines, auto or options.color == "always"):
            print(line)


def _parser() -> argparse.ArgumentParser:
    parser = tool.Parser(
        prog="python -m titan_mi100.inspect_data",
        usage="%(prog)s --job.config_file X.toml [--section.key value ...] [options]",
        description=__doc__.splitlines()[0],
        epilog="Settings, as for training: those of [data], [model] and training.seq_len count.\n\n"
        + help_text().partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--row", metavar="N", default="", help="packed rows to show, such as 0,7 or 3-5")
    add("--where", metavar="FILE:LINE", default="", help="show the rows that hold this line of input")
    add("--source", metavar="NAME", default="", help="of several sources, the one to show")
    add("--validation", action="store_true", help="the validation set instead of the training set")
    add("--table", action="store_true", help="a line per token: number, id, document, position, text")
    add("--html", metavar="PATH", default="", help="write one self-contained page")
    add("--json", action="store_true", help="for scripts: with --row or --where the rows alone")
    on = "auto: on a terminal, unless NO_COLOR is set"
    add("--color", choices=("auto", "always", "never"), default="auto", help=on)
    return parser


if __name__ == "__main__":
    sys.exit(main())
