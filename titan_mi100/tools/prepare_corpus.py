"""Tokenise a corpus for pretraining into shards, on all cores: JSONL (plain, .gz, .zst), parquet, or folders of text.

If it is stopped or killed, the same command continues. `--part i/N` makes every N-th shard, for N machines that share
the folder; the last one to finish completes the corpus. Then train on it: [[data.source]] path = OUTPUT_DIR.
"""

import argparse
import re
from collections.abc import Sequence
from contextlib import suppress

from titan_mi100 import cli
from titan_mi100.data.corpora.making import make_corpus
from titan_mi100.errors import UserError
from titan_mi100.log import setup_logging


def main(argv: Sequence[str] | None = None) -> int:
    return cli.exit_code(lambda: _run(_parser().parse_args(argv)))


def _run(options: argparse.Namespace) -> None:
    setup_logging(0)
    if options.workers < 0:
        raise UserError(f"--workers {options.workers}: must be above 0, or 0 for one per core")
    make_corpus(options)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="titan-mi100 prepare", description=__doc__,
        formatter_class=cli.RawHelp,
        epilog="Exit codes: 0 the corpus (or this part of it) is complete; 1 crash; 2 bad options or input.",
    )  # fmt: skip
    add = parser.add_argument
    where = "files, globs, or folders with the files below them, but not hidden ones"
    add("--input", nargs="+", required=True, metavar="PATH", help=where)
    add("--include", default="*", metavar="GLOB", help="names of files in folders, such as '*.py'; default: all")
    add("--output_dir", required=True, metavar="DIR", help="the corpus: a new folder, or an unfinished one to continue")
    add("--tokenizer", required=True, metavar="PATH", help="HF folder, or a sentencepiece .model file")
    add("--format", choices=("rows", "text"), default="rows",
        help="rows: JSONL, JSON or parquet with a column of text (default); text: each file is a document")  # fmt: skip
    add("--text_column", default="text", metavar="NAME", help="column with the text of a row; default: text")
    add("--bos", default="none", metavar="TOKEN", help="token before each document; default: none")
    add("--eos", default="auto", metavar="TOKEN",
        help="token after each document, or none; default: <|endoftext|>, or else the tokenizer's own")  # fmt: skip
    add("--max_bad_share", type=_share, default=0.001, metavar="X",
        help="largest share of rows that cannot be read and are left out; default: 0.001")  # fmt: skip
    add("--part", type=_part, default=(1, 1), metavar="i/N", help="make part i of N, from 1")
    add("--workers", type=int, default=0, metavar="N", help="processes; default: one per core")
    return parser


def _share(text: str) -> float:
    with suppress(ValueError):
        if 0 <= (share := float(text)) <= 1:
            return share
    raise argparse.ArgumentTypeError(f"{text!r} must be a number from 0 to 1")


def _part(text: str) -> tuple[int, int]:
    match = re.fullmatch("([0-9]{1,6})/([0-9]{1,6})", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r} must be i/N with 1 <= i <= N, such as 1/4")
    return int(match[1]), int(match[2])
