"""Show what trains: any packed row token by token, and a summary of the whole set. `--help` lists the options.

There is one report (`inspect_report`) and three views of it: the terminal, `--json` and `--html`.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from itertools import groupby
from pathlib import Path
from typing import Any

from titan_mi100 import cli as tool
from titan_mi100.config.load import help_text, load_config
from titan_mi100.data.prepared import RefusedData
from titan_mi100.errors import UserError
from titan_mi100.inspect.page import report_page
from titan_mi100.inspect.report import COLUMNS, documents_in, make_report, visible
from titan_mi100.logging import setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    options, rest = _parser().parse_known_args(argv)
    setup_logging(0)
    return tool.exit_code(lambda: _show(options, rest))


def _show(options: argparse.Namespace, settings: Sequence[str]) -> None:
    config = load_config(settings, world_size=None)
    try:
        with redirect_stdout(sys.stderr):  # progress goes to stderr, only the report to stdout
            report = make_report(config, options)
    except RefusedData as refused:
        raise UserError(f"{refused}\nevery row: {refused.ledger}") from None
    if options.html:
        print(f"{options.html}: {Path(options.html).write_bytes(report_page(report).encode()):,} bytes")
    elif options.json:
        json.dump(report, sys.stdout, ensure_ascii=False)
        print()
    else:
        auto = options.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        for line in _lines(report, _Paint(auto or options.color == "always"), options.table):
            print(line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m titan_mi100.inspect_data",
        usage="%(prog)s --job.config_file X.toml [--section.key value ...] [options]",
        description=__doc__.splitlines()[0],
        epilog="Settings, as for training: those of [data], [model] and training.seq_len count.\n\n"
        + help_text().partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--row", metavar="N", default="", help="packed rows to show, such as 0,7 or 3-5")
    parser.add_argument("--where", metavar="FILE:LINE", default="", help="show the rows that hold this line of input")
    parser.add_argument("--validation", action="store_true", help="the validation set instead of the training set")
    parser.add_argument("--table", action="store_true", help="a line per token: number, id, document, position, text")
    parser.add_argument("--html", metavar="PATH", default="", help="write one self-contained page")
    parser.add_argument("--json", action="store_true", help="for scripts: with --row or --where the rows alone")
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="auto: on a terminal, unless NO_COLOR is set",
    )
    return parser


# --- the terminal ---


class _Paint:
    """Marks text for the terminal, with color or without."""

    def __init__(self, color: bool) -> None:
        self._color = color

    def __call__(self, code: str, text: str) -> str:
        """Line by line, because a pager resets the color at the end of a line."""
        if not self._color:
            return text
        return "\n".join(f"\033[{code}m{line}\033[0m" if line else "" for line in text.split("\n"))

    def heading(self, text: str) -> str:
        return "\n" + self("1", text)

    def running(self, tokens: Iterable[tuple[str, bool]]) -> str:
        parts = []
        for supervised, group in groupby(tokens, lambda token: token[1]):
            text = "".join(text for text, _ in group)
            parts.append(text if not supervised else self("32", text) if self._color else f"⟦{text}⟧")
        return "".join(parts)


def _lines(report: dict[str, Any], paint: _Paint, table: bool) -> Iterator[str]:
    if "read" in report:
        yield from _summary_lines(report, paint)
    yield from (line["says"] for line in report.get("where", []))
    for row in report["shown"]:
        real = len(row["id"]) - row["padding"]
        yield paint.heading(f"row {row['row']} of {report['set']}: {len(row['documents'])} documents, {real:,} tokens")
        yield "supervised: " + paint.running([("so", True)])
        for place, document, inside in documents_in(row):
            count = f"{document['tokens']:,} tokens, {document['supervised']:,} supervised"
            yield paint("1;36", f"── document {place}: {document['where']}: {count} ──")
            if not table:
                tokens = ((row["text"][i].replace("↵", "↵\n"), row["supervised"][i]) for i in inside)
                yield paint.running(tokens).removesuffix("\n")
                continue
            yield "   place       id   position  supervised  text"
            for i in inside:
                text, supervised = row["text"][i].replace(" ", "·"), row["supervised"][i]
                line = f"{i:>8} {row['id'][i]:>8} {row['position'][i]:>10}  {'yes' if supervised else '-':<10}  {text}"
                yield paint("32", line) if supervised else line
        if row["padding"]:
            yield paint("2", f"── padding: {row['padding']:,} tokens, id {row['id'][-1]} ──")


def _summary_lines(report: dict[str, Any], paint: _Paint) -> Iterator[str]:
    yield from report["read"]
    yield from (f"{name}: {value}" for name, value in report["from"].items())
    yield from (f"warning: {line}" for line in report["warnings"])
    if report["sampled"] > 1:
        yield f"one document in {report['sampled']} was examined for what counts or compares tokens below"
    yield paint.heading("options and their effects")
    for entry in report["options"]:
        effect = entry["effect"].replace("; ", "\n" + 30 * " ")
        yield f"  {entry['option'] + ' = ' + entry['value']:<27} {effect}"
    yield paint.heading(f"ledger: {report['ledger']['path']}")
    for status, rows in report["ledger"]["statuses"].items():
        yield f"  {status}: {rows['rows']:,}"
        yield from (f"    {visible(first['where'])}: {visible(first['reason'])}" for first in rows["first"])
    yield paint.heading("documents by length (x: rows that did not fit, with their length before)")
    yield from _bar_lines(report["lengths"], report["seq_len"])
    yield paint.heading("documents by supervised share in percent")
    yield from _bar_lines(report["shares"], 0)
    yield paint.heading(f"packing: {len(report['packing'])} of {report['rows']:,} rows; █ supervised, ░ not, · padding")
    for row in report["packing"]:
        columns = "".join(("·" if doc < 0 else "█" if marked else "░") * width for width, doc, marked in row["runs"])
        yield f"  {row['row']:>9,} {columns[:: COLUMNS // 80]} {row['documents']}"
    yield paint.heading("the oddest documents")
    for odd in report["oddest"]:
        yield f"  {'; '.join(odd['kinds'])}\n    row {odd['row']:,}, {odd['where']}"
        text = odd["excerpt"]
        parts = (text,) if len(text) <= 30 else (text[:20], text[-10:])
        yield "    " + " … ".join(map(paint.running, parts))


def _bar_lines(bins: list[dict[str, int]], seq_len: int) -> Iterator[str]:
    most = max(max(entry["documents"], entry["overlong"]) for entry in bins)
    for entry in bins:
        bar = "█" * -(-50 * entry["documents"] // most) + "x" * -(-50 * entry["overlong"] // most)
        end = "  ─ seq_len" if entry["to"] == seq_len else ""
        yield f"  {entry['from']:>7,}-{entry['to']:<7,} {entry['documents'] or entry['overlong']:>10,} {bar}{end}"


if __name__ == "__main__":
    sys.exit(main())
