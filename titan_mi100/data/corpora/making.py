"""Makes a corpus: collects the input, lets processes make its shards, writes the ledger and corpus.json."""

import argparse
import csv
import hashlib
import io
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import asdict
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

from titan_mi100.cli import version_of
from titan_mi100.data.corpora.corpus import (
    FORMAT,
    LARGEST_MANIFEST,
    Corpus,
    Shard,
    lines_before,
    read_corpus,
    shard_path,
)
from titan_mi100.data.corpora.shards import (
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
from titan_mi100.files.pool import forked_pool, with_state
from titan_mi100.files.schema import LONGEST
from titan_mi100.log import ByteProgress, log
from titan_mi100.text.assets import CORPUS, PLAN
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.load import load_tokenizer
from titan_mi100.wording import plural, some

_LIBRARIES = ("tiktoken", "tokenizers", "sentencepiece")
_SHOWN = 10  # bad rows listed in a message
# A shard with so many bad rows, more than good ones, stops the preparation. The words mark that error.
_MANY_BAD, _MOSTLY_BAD = 1000, "of a shard cannot be read"


def make_corpus(options: argparse.Namespace) -> None:
    """Make the missing shards of this part; complete the corpus if no shard is missing then.

    Args:
        options: of tools/prepare_corpus.py.

    Raises:
        UserError: an option or an input file is wrong, or the folder cannot be written to; what is complete is kept.
    """
    folder, started = Path(options.output_dir), time.monotonic()
    tokenizer = load_tokenizer(options.tokenizer)
    plan = _plan(options, tokenizer)
    end()  # the child process that tried the tokenizer: forked workers must not share it
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_temporary_files(folder)
        probe(folder, "--output_dir")
        (part, parts), total = options.part, len(plan.units)
        _write_or_check_plan(folder, plan, by_time=parts == 1)
        shard_numbers = range(part - 1, total, parts)
        made = {number: shard for number in shard_numbers if (shard := read_shard(folder, number, plan.key))}
        for shard in made.values():
            _check_readable(plan, shard, options.max_bad_share)
        missing = [number for number in shard_numbers if number not in made]
        if made:
            log.info(f"{len(made):,} of {len(shard_numbers):,} shards exist already")
        if missing:
            workers = options.workers or len(os.sched_getaffinity(0))
            _make_shards(folder, plan, missing, tokenizer, workers, options.max_bad_share)
        shards = [shard for i in range(total) if (shard := read_shard(folder, i, plan.key))]
        if len(shards) < total:
            left = f"{total - len(shards):,} of {total:,} shards are missing; other parts make them"
            log.info(f"part {part}/{parts} is complete; {left}")
            return
        _complete_corpus(folder, plan, shards, options.max_bad_share)
    except OSError as error:
        raise UserError(f"{error.filename or folder}: {error.strerror}; fix that and start again") from None
    documents, tokens = sum(shard.documents for shard in shards), sum(shard.tokens for shard in shards)
    words = f"{plural(documents, 'document')}, {plural(tokens, 'token')} in {plural(total, 'shard')}"
    log.info(f"{folder}: {words} ({time.monotonic() - started:,.1f} s)")


def _plan(options: argparse.Namespace, tokenizer: Tokenizer) -> ShardPlan:
    """Collect everything that the shards depend on. Raises UserError: an option or an input file is wrong."""
    output = os.path.realpath(options.output_dir)
    for path in options.input:
        if os.path.isdir(path) and f"{output}/".startswith(f"{os.path.realpath(path)}/"):
            raise UserError(f"--output_dir {options.output_dir}: is inside the input {path}; name a folder outside")
    files = _files(options.input, options.include)
    sizes = [os.path.getsize(file) for file in files]
    units = cut_into_units(files, sizes, options.format == "text")
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
        libraries={name: version_of(name) for name in _LIBRARIES}, files=files, sizes=sizes,
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


def _make_shards(
    folder: Path, plan: ShardPlan, numbers: list[int], tokenizer: Tokenizer, workers: int, most_bad: float
) -> None:
    """Make shards in worker processes. Raises UserError: some could not be made; the completed ones are kept."""
    sizes = {number: plan.bytes_of(plan.units[number]) for number in numbers}
    errors = list[str]()
    killed = (
        "a tokenising process was killed, most likely because memory ran out (see dmesg); start again with fewer "
        "--workers; complete shards are kept"
    )
    with (
        forked_pool(min(workers, len(numbers)), folder, plan, tokenizer, killed=killed) as pool,
        ByteProgress("tokenising", sum(sizes.values())) as progress,
    ):
        futures = {pool.submit(with_state, make_shard, number): number for number in numbers}
        for future in as_completed(futures):
            try:
                shard = future.result()
                progress.advance(sizes[futures[future]])
                _check_readable(plan, shard, most_bad)
            except UserError as error:
                errors.append(str(error))
                if _MOSTLY_BAD in errors[-1]:  # probably a wrong option: stop early
                    break
    if errors:
        raise UserError("\n".join([*sorted(set(errors))[:_SHOWN], "fix the input, or leave these files out"]))


def _check_readable(plan: ShardPlan, shard: Shard, most_bad: float) -> None:
    """Raises UserError: most rows of a shard cannot be read, so reading the other shards would be useless."""
    bad = sum(number for kind, number in shard.bad.items() if kind != BLANK)  # blank rows are no error
    if bad >= _MANY_BAD and bad > max(0.5, most_bad) * (bad + shard.documents):
        kinds = ", ".join(f"{kind}: {number:,}" for kind, number in shard.bad.items())
        column = "" if plan.is_text else f"; is --text_column {plan.text_column} right?"
        raise UserError(f"{bad:,} of {bad + shard.documents:,} rows {_MOSTLY_BAD} ({kinds}){column}")


def _complete_corpus(folder: Path, plan: ShardPlan, shards: list[Shard], most_bad: float) -> None:
    """Write the ledger and corpus.json. Raises UserError: too many rows were left out, or no document is left."""
    _write_ledger(folder, plan, shards)
    rows, kinds = sum(sum(shard.bad.values()) + shard.documents for shard in shards), Counter[str]()
    for shard in shards:
        kinds.update({kind: number for kind, number in shard.bad.items() if kind != BLANK})
    if bad := kinds.total():
        counts = ", ".join(f"{kind}: {number:,}" for kind, number in kinds.most_common())
        words = f"{bad:,} of {rows:,} rows cannot be read ({counts}); each is in {folder / 'bad_rows.csv'}"
        if bad > most_bad * rows:
            listed = _bad_rows(folder, plan, shards)
            lines = (f"{file}:{line}: {kind}: {detail}" for file, line, kind, detail in listed if kind != BLANK)
            first = "\n".join(islice(lines, _SHOWN))
            raise UserError(f"{first}\n{words}; correct them and use a new --output_dir, or raise --max_bad_share")
        log.warning(f"{words}; they are left out")
    if not any(shard.tokens for shard in shards):
        raise UserError(f"{some(plan.files, 3)}: no document is left")
    content = hashlib.sha256("".join(shard.sha256["bin"] for shard in shards).encode()).hexdigest()
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


def _bad_rows(folder: Path, plan: ShardPlan, shards: list[Shard]) -> Any:
    """(file, line, kind, detail) of each row that was left out."""
    first_files, lines = [unit.first for unit in plan.units], [shard.lines for shard in shards]
    for number in (number for number, shard in enumerate(shards) if shard.bad):
        before = lines_before(first_files, lines, number)
        text = shard_path(folder, number, "bad.jsonl").read_text(encoding="utf-8")
        for line in text.split("\n")[:-1]:  # not splitlines(): texts hold U+2028
            file, line_number, kind, detail = json.loads(line)
            yield plan.files[file], before + line_number, kind, detail


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
    _write_table(folder / "bad_rows.csv", ["file", "line", "kind", "detail"], _bad_rows(folder, plan, shards))


def _write_table(path: Path, heading: list[str], rows: Iterable[Any]) -> None:
    with atomic_file(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace", newline="")
        csv.writer(text).writerow(heading)
        csv.writer(text).writerows(rows)
        text.flush()
        text.detach()  # otherwise closing `text` would close the file before atomic_file has synced it
