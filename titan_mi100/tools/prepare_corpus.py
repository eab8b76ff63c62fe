"""Tokenise a corpus for pretraining into shards, on all cores: JSONL (plain, .gz, .zst), parquet, or folders of text.

If it is stopped or killed, the same command continues. `--part i/N` makes every N-th shard, for N machines that share
the folder; the last one to finish completes the corpus. Then train on it: [[data.source]] path = OUTPUT_DIR.
"""

import argparse
import csv
import hashlib
import io
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from titan_mi100 import cli
from titan_mi100.data.corpus import FORMAT, LARGEST_MANIFEST, Corpus, Shard, lines_before, read_corpus, shard_path
from titan_mi100.data.formats import IDENTIFIERS, first_row, holds_identifiers
from titan_mi100.data.shards import (
    BLANK,
    ShardPlan,
    atomic_file,
    cut_into_units,
    make_shard,
    read_shard,
    remove_temporary_files,
    write_atomically,
)
from titan_mi100.errors import UserError
from titan_mi100.files.child import end
from titan_mi100.files.durable import probe
from titan_mi100.files.patterns import matching_files, unusable
from titan_mi100.files.plain import parse_object, read_plain
from titan_mi100.files.pool import check_shared_memory, forked_pool, kill_workers
from titan_mi100.files.schema import LONGEST
from titan_mi100.log import TokenProgress, log, setup_logging
from titan_mi100.text.assets import CORPUS, PLAN
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.load import load_tokenizer
from titan_mi100.wording import plural, some

_LIBRARIES = ("tiktoken", "tokenizers", "sentencepiece")
_SHOWN = 10  # bad rows listed in a message
# A shard with so many bad rows, more than good ones, stops the preparation. The words mark that error.
_MANY_BAD, _MOSTLY_BAD = 1000, "of a shard cannot be read"
_AGAIN = 0.5  # seconds between two updates of the progress bar


def main(argv: Sequence[str] | None = None) -> int:
    def program() -> int:
        options = _parser().parse_args(argv)
        setup_logging(0)
        return _prepare(options)

    return cli.exit_code(program)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="titan-mi100 prepare", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Exit codes: 0 the corpus (or this part of it) is complete; 1 crash; 2 bad options or input.",
    )  # fmt: skip
    add = parser.add_argument
    where = "files, globs, or folders with the files below them, but not hidden ones"
    add("--input", nargs="+", default=[], metavar="PATH", help=where)
    add("--include", default="*", metavar="GLOB", help="names of files in folders, such as '*.py'; default: all")
    add("--output_dir", required=True, metavar="DIR", help="the corpus: a new folder, or an unfinished one to continue")
    add("--tokenizer", metavar="PATH", help="HF folder, or a sentencepiece .model file")
    add("--format", choices=("rows", "text"), default="rows",
        help="rows: JSONL, JSON or parquet with a column of text (default); text: each file is a document")  # fmt: skip
    add("--text_column", default="text", metavar="NAME", help="column with the text of a row; default: text")
    add("--bos", default="none", metavar="TOKEN", help="token before each document; default: none")
    add("--eos", default="auto", metavar="TOKEN",
        help="token after each document, or none; default: <|endoftext|>, or else the tokenizer's own")  # fmt: skip
    add("--on_bad_row", choices=("skip", "error"), default="skip",
        help="rows that cannot be read: skip them (default), or refuse to complete the corpus")  # fmt: skip
    add("--max_bad_share", type=_share, default=0.001, metavar="X",
        help="largest share of rows that may be skipped; default: 0.001")  # fmt: skip
    add("--part", type=_part, default=(1, 1), metavar="i/N", help="make part i of N, from 1")
    add("--workers", type=int, default=0, metavar="N", help="processes; default: one per core")
    add("--json", action="store_true", help="print the result as JSON")
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


def _prepare(options: argparse.Namespace) -> int:
    """Make the missing shards of this part; complete the corpus if no shard is missing then."""
    folder, started = Path(options.output_dir), time.monotonic()
    if not options.tokenizer or not options.input:
        raise UserError("--input (the files) and --tokenizer (the model's tokenizer) are needed; add them")
    if options.on_bad_row == "error":
        _parser().check_used(options, "--on_bad_row error", vars(options).keys() - {"max_bad_share"})
    if options.workers < 0:
        raise UserError(f"--workers {options.workers}: must be above 0, or 0 for one per core")
    tokenizer = load_tokenizer(options.tokenizer)
    plan = _plan(options, tokenizer)
    end()  # the child process that tried the tokenizer and read the first row: forked workers must not share it
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporary_files(folder)
        probe(folder, "--output_dir")
        (part, parts), total = options.part, len(plan.units)
        _write_or_check_plan(folder, plan, by_time=parts == 1)
        shard_numbers = range(part - 1, total, parts)
        most_bad = 0.0 if options.on_bad_row == "error" else options.max_bad_share
        made = {number: shard for number in shard_numbers if (shard := read_shard(folder, number, plan.key))}
        for shard in made.values():
            _check_readable(plan, shard, most_bad)
        missing = [number for number in shard_numbers if number not in made]
        if len(missing) < len(shard_numbers):
            log.info(f"{len(shard_numbers) - len(missing):,} of {len(shard_numbers):,} shards exist already")
        workers = options.workers or len(os.sched_getaffinity(0))
        _make_shards(folder, plan, missing, tokenizer, workers, most_bad)
        shards = [shard for i in range(total) if (shard := read_shard(folder, i, plan.key))]
        if len(shards) < total:
            left = f"{total - len(shards):,} of {total:,} shards are missing; other parts make them"
            log.info(f"part {part}/{parts} is complete; {left}")
            return _say({"complete": False, "shards": len(shards)}, options.json)
        _complete_corpus(folder, plan, shards, most_bad)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}; fix that and start again") from None
    summary: dict[str, Any] = {
        "complete": True, "shards": total, "documents": sum(shard.documents for shard in shards),
        "tokens": sum(shard.tokens for shard in shards), "seconds": round(time.monotonic() - started, 2),
        "left_out": sum(map(_bad_count, shards)),
    }  # fmt: skip
    words = f"{plural(summary['documents'], 'document')}, {plural(summary['tokens'], 'token')}"
    log.info(f"{folder}: {words} in {plural(total, 'shard')} ({summary['seconds']:,.1f} s)")
    return _say(summary, options.json)


def _say(result: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print(json.dumps(result))
    return 0


def _plan(options: argparse.Namespace, tokenizer: Tokenizer) -> ShardPlan:
    """Collect everything that the shards depend on. Raises UserError: an option or an input file is wrong."""
    output = os.path.realpath(options.output_dir)
    for path in options.input:
        if os.path.isdir(path) and f"{output}/".startswith(f"{os.path.realpath(path)}/"):
            raise UserError(f"--output_dir {options.output_dir}: is inside the input {path}; name a folder outside")
    files = _files(options.input, options.include)
    sizes = [os.path.getsize(file) for file in files]
    units = cut_into_units(files, sizes, options.format == "text")
    row: dict[str, Any] = {}
    with suppress(UserError):  # the file has no row that can be read: the ledger counts that
        row = first_row(files[0]) if options.format == "rows" else row
    if holds_identifiers(row) and not isinstance(row.get(options.text_column), str):
        raise UserError(f"{files[0]}: {IDENTIFIERS}")
    if len(units) > LONGEST:  # corpus.json could not be read
        raise UserError(f"--input: makes {len(units):,} shards, {LONGEST:,} are possible; join files into fewer")
    is_text = options.format == "text"
    eos = options.eos
    # "auto": a chat model's own eos token ends a turn (<|im_end|>); pretraining documents end with <|endoftext|>.
    if eos == "auto":
        eos = "<|endoftext|>" if len(tokenizer.encode("<|endoftext|>")) == 1 else tokenizer.eos_token
    ends = {"bos": options.bos, "eos": eos}
    tokens = {name: "" if token == "none" else token for name, token in ends.items()}
    ids = {}
    for name, token in tokens.items():
        encoded = tokenizer.encode(token) if token else [0]
        if len(encoded) != 1:
            raise UserError(f"--{name} {token!r}: is not a single token of this tokenizer; name one, or write none")
        ids[name] = encoded[0]
    return ShardPlan(
        tokenizer=tokenizer.fingerprint, n_vocab=tokenizer.n_vocab, pad_id=tokenizer.pad_token_id,
        bos=tokens["bos"], eos=tokens["eos"], bos_id=ids["bos"], eos_id=ids["eos"],
        text_column="" if is_text else options.text_column, is_text=is_text,
        libraries={name: cli.version_of(name) for name in _LIBRARIES}, files=files, sizes=sizes,
        units=units,
    )  # fmt: skip


def _files(inputs: Sequence[str], include: str) -> list[str]:
    """All input files, each once, in the order of --input; files of a folder are sorted by name."""
    all_files, problems = dict[str, None](), list[str]()
    for input_path in inputs:
        if ".." not in input_path:  # "..": behind a link the shortened path may be another file
            input_path = os.path.normpath(input_path)
        if os.path.isdir(input_path):
            below, unread = list[str](), list[OSError]()
            for path, folders, names in os.walk(input_path, onerror=unread.append):
                folders[:] = sorted(name for name in folders if not name.startswith("."))  # os.walk follows this order
                links = [link for name in folders if os.path.islink(link := os.path.join(path, name))]
                problems += [f"{link}: is a link to a folder; remove it, or name it in --input" for link in links]
                chosen = (name for name in sorted(names) if fnmatch(name, include) and not name.startswith("."))
                below += [os.path.join(path, name) for name in chosen]
            problems += [f"{error.filename}: cannot be read: {error.strerror}" for error in unread]
            problems += [f"{file}: {unusable(file)}" for file in below if not os.path.isfile(file)]
            problems += [] if below else [f"{input_path}: has no file {include}"]
            all_files.update(dict.fromkeys(below))
        else:
            files, wrong = matching_files(input_path)
            all_files.update(dict.fromkeys(files))
            problems += wrong
    if problems:
        raise UserError("\n".join(problems))
    once = {os.path.realpath(file): file for file in reversed(all_files)}  # the same file under several names
    return [file for file in all_files if once[os.path.realpath(file)] == file]


def _write_or_check_plan(folder: Path, plan: ShardPlan, by_time: bool) -> None:
    """Write plan.json; if it exists, check that it is the same plan.

    Args:
        by_time: also compare the input files' modification times. Copies on several machines differ in them.

    Raises:
        UserError: the folder belongs to another plan, or the input files have changed since.
    """
    path = folder / PLAN
    now = asdict(plan)
    text = json.dumps({"plan": now, "changed": [os.stat(file).st_mtime_ns for file in plan.files]})
    if not path.exists():
        others = [child for child in folder.iterdir() if not child.name.startswith(".")]
        if others and not path.exists():  # looked at again: another part may have written it in the meantime
            raise UserError(f"{folder}: is not empty and is not a corpus; name a new --output_dir")
        if not path.exists():
            write_atomically(path, text)
    # If two parts write it at the same time, the last one wins, and both compare with that one here.
    if (content := read_plain(path, LARGEST_MANIFEST)) == text.encode():
        return
    before = parse_object(content, path, "name a new --output_dir").get("plan")
    if not isinstance(before, dict):
        raise UserError(f"{path}: is not as it was written; name a new --output_dir")
    ours = json.loads(text)["plan"]
    # Names for the message. "" leaves a key out, because it follows from another one.
    keys = {"files": "input files", "sizes": "sizes of input files", "eos_id": "", "bos_id": "", "units": ""}
    different = [keys.get(key, key) for key in now if ours[key] != before.get(key)]
    if different := list(filter(None, different)):
        raise UserError(
            f"{folder}: was started with different {some(different)}; use the same, or name another --output_dir"
        )
    if by_time:
        raise UserError(f"{folder}: input files have changed since it was started; name another --output_dir")


_worker: tuple[Path, ShardPlan, Tokenizer, Any, Any]  # a worker's state; the last two are counters of all workers


def _init_worker(*state: Any) -> None:
    global _worker
    _worker = state  # type: ignore[assignment]


def _work_on_shard(number: int) -> Shard:
    folder, plan, tokenizer, done, tokens = _worker

    def progress(size: int, count: int) -> None:
        with done.get_lock():
            done.value += size
            tokens.value += count

    return make_shard(folder, plan, number, tokenizer, progress)


def _make_shards(
    folder: Path, plan: ShardPlan, numbers: list[int], tokenizer: Tokenizer, workers: int, most_bad: float
) -> None:
    """Make shards in worker processes. Raises UserError: some could not be made; the completed ones are kept."""
    if not numbers:
        return
    check_shared_memory()
    context = multiprocessing.get_context("fork")
    done, tokens = context.Value("q", 0), context.Value("q", 0)
    size = sum(plan.bytes_of(plan.units[number]) for number in numbers)
    errors: list[str] = []
    pool = forked_pool(min(workers, len(numbers)), _init_worker, folder, plan, tokenizer, done, tokens)
    try:
        bar = TokenProgress("tokenising", size)
        with bar:
            left: set[Future[Shard]] = {pool.submit(_work_on_shard, number) for number in numbers}
            while left:
                finished, left = wait(left, timeout=_AGAIN)
                bar.reach(done.value, tokens.value)
                for future in finished:
                    try:
                        _check_readable(plan, future.result(), most_bad)
                    except UserError as error:
                        errors.append(str(error))
                if any(_MOSTLY_BAD in error for error in errors):  # probably a wrong option: stop early
                    break
    except BrokenProcessPool:
        problem = "a tokenising process was killed, most likely because memory ran out (see dmesg)"
        raise UserError(f"{problem}; start again with fewer --workers; complete shards are kept") from None
    except KeyboardInterrupt:
        kill_workers()  # their unfinished shards are made again
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    if errors:
        raise UserError("\n".join([*sorted(set(errors))[:_SHOWN], "fix the input, or leave these files out"]))


def _check_readable(plan: ShardPlan, shard: Shard, most_bad: float) -> None:
    """Raises UserError: most rows of a shard cannot be read, so reading the other shards would be useless."""
    bad = _bad_count(shard)
    if bad >= _MANY_BAD and bad > max(0.5, most_bad) * (bad + shard.documents):
        kinds = ", ".join(f"{kind}: {number:,}" for kind, number in shard.bad.items())
        column = "" if plan.is_text else f"; is --text_column {plan.text_column} right?"
        raise UserError(f"{bad:,} of {bad + shard.documents:,} rows {_MOSTLY_BAD} ({kinds}){column}")


def _bad_count(shard: Shard) -> int:
    """Rows of a shard that cannot be read; blank rows are not counted."""
    return sum(number for kind, number in shard.bad.items() if kind != BLANK)


def _complete_corpus(folder: Path, plan: ShardPlan, shards: list[Shard], most_bad: float) -> None:
    """Write the ledger and corpus.json. Raises UserError: too many rows were left out, or no document is left."""
    _write_ledger(folder, plan, shards)
    bad, rows = sum(map(_bad_count, shards)), sum(sum(shard.bad.values()) + shard.documents for shard in shards)
    if bad:
        kinds = Counter[str]()
        for shard in shards:
            kinds.update({kind: number for kind, number in shard.bad.items() if kind != BLANK})
        counts = ", ".join(f"{kind}: {number:,}" for kind, number in kinds.most_common())
        words = f"{bad:,} of {rows:,} rows cannot be read ({counts}); each is in {folder / 'bad_rows.csv'}"
        if bad > most_bad * rows:
            first = "\n".join(_first_bad(folder, plan, shards))
            raise UserError(f"{first}\n{words}; correct them and use a new --output_dir, or raise --max_bad_share")
        log.warning(f"{words}; they are left out")
    if not any(shard.tokens for shard in shards):
        raise UserError(f"{some(plan.files, 3)}: no document is left")
    content = _content(shard.sha256["bin"] for shard in shards)
    corpus = Corpus(
        FORMAT, plan.key, content, plan.tokenizer, plan.n_vocab, plan.pad_id, plan.bos, plan.eos,
        first_files=[unit.first for unit in plan.units], tokens=[shard.tokens for shard in shards],
        documents=[shard.documents for shard in shards], lines=[shard.lines for shard in shards],
    )  # fmt: skip
    remove_temporary_files(folder)
    # Written only if it differs: runs may be reading a complete corpus, and resume only from the same bytes.
    with suppress(UserError):  # it is missing or damaged
        if read_corpus(folder)[0] == corpus:
            return
    write_atomically(folder / CORPUS, json.dumps(asdict(corpus)))


def _bad_rows(folder: Path, plan: ShardPlan, shards: list[Shard], numbers: Sequence[int]) -> Any:
    """(file, line, kind, detail) of each row that was left out. Args: numbers: the shards to look into."""
    first_files, lines = [unit.first for unit in plan.units], [shard.lines for shard in shards]
    for number in numbers:
        before = lines_before(first_files, lines, number)
        for line in (
            shard_path(folder, number, "bad.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
        ):  # not splitlines(): texts hold U+2028
            file, line_number, kind, detail = json.loads(line)
            yield plan.files[file], before + line_number, kind, detail


def _first_bad(folder: Path, plan: ShardPlan, shards: list[Shard]) -> list[str]:
    numbers = [number for number, shard in enumerate(shards) if _bad_count(shard)]
    bad = _bad_rows(folder, plan, shards, numbers)
    rows = (f"{file}:{line}: {kind}: {detail}" for file, line, kind, detail in bad if kind != BLANK)
    return [row for row, _ in zip(rows, range(_SHOWN), strict=False)]


def _write_ledger(folder: Path, plan: ShardPlan, shards: list[Shard]) -> None:
    """Write ledger.csv (counts per file, or per group of text files) and bad_rows.csv (each row that was left out)."""
    kinds = sorted({kind for shard in shards for kind in shard.bad})
    keys = ("bytes", "documents", "tokens", *kinds)
    merged: dict[str, Counter[str]] = {}
    for unit, shard in zip(plan.units, shards, strict=True):
        others = unit.stop - unit.first - 1
        counts = merged.setdefault(plan.files[unit.first] + (f" and {others} more" if others else ""), Counter())
        counts.update({"bytes": plan.bytes_of(unit), "documents": shard.documents, "tokens": shard.tokens, **shard.bad})
    _write_table(folder / "ledger.csv", ["file", *keys], ([name, *(c[k] for k in keys)] for name, c in merged.items()))
    if empty := [name for name, counts in merged.items() if not any(counts[key] for key in keys[1:])]:
        log.warning(f"{some(empty, 3)}: no rows; counted as 0 documents")
    numbers = [number for number, shard in enumerate(shards) if shard.bad]
    rows = _bad_rows(folder, plan, shards, numbers)
    _write_table(folder / "bad_rows.csv", ["file", "line", "kind", "detail"], rows)


def _write_table(path: Path, heading: list[str], rows: Iterable[Any]) -> None:
    with atomic_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
        csv.writer(text).writerow(heading)
        csv.writer(text).writerows(rows)
        text.flush()
        text.detach()  # otherwise closing `text` would close the file before atomic_file has synced it


def _content(hashes: Iterable[str]) -> str:
    """The hash of a corpus, of its shards' hashes."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
