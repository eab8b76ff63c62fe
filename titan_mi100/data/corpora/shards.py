"""Makes a corpus: cuts the input into units and makes a shard of each unit, independently of all others.

A shard's content depends on the plan only. So it is the same in any order, process and machine. A shard's .json is
written last: a shard without it is incomplete (its process was killed) and is made again.
"""

import fcntl
import functools
import hashlib
import json
import os
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from titan_mi100.data.corpora.corpus import FORMAT, VALUE, Shard, Unit, origin, shard_path
from titan_mi100.data.file_type import HEAD, PACKED, first_byte, refusal
from titan_mi100.data.files import LONGEST_LINE, NoRowsError, Record, RecordReader
from titan_mi100.data.formats import parse_record
from titan_mi100.data.strict_json import TO_UTF8, BadRecord, expect, listed
from titan_mi100.errors import UserError, read_or_refuse
from titan_mi100.files.durable import HashingStream, sync
from titan_mi100.files.plain import read_checked
from titan_mi100.text.base import Tokenizer

# Bytes of the smallest and the largest unit; between them, the size grows so that a corpus has about this many units.
_SMALLEST, _LARGEST, _MOST_UNITS = 2**22, 2**28, 2**10
_PART = re.compile(r"\.[0-9a-f]{32}\.part$")  # how the names that `_open_part` gives end
BLANK = "nothing to learn"  # kind of a row whose text is blank; in a corpus that is no error


@dataclass(frozen=True)
class ShardPlan:
    """The content of plan.json: everything that the shards depend on."""

    tokenizer: str  # fingerprint
    n_vocab: int
    pad_id: int
    bos: str  # token before each document; "": none
    eos: str  # token after each document; "": none
    bos_id: int
    eos_id: int
    text_column: str
    is_text: bool  # each file is one document
    libraries: dict[str, str]  # name -> version, of the libraries that tokenise
    files: list[str]
    sizes: list[int]  # bytes
    units: list[Unit]

    @functools.cached_property
    def key(self) -> str:
        """A hash of the plan. Each shard stores it, so shards of different plans are never mixed."""
        return hashlib.sha256(json.dumps([FORMAT, asdict(self)], sort_keys=True).encode()).hexdigest()

    def bytes_of(self, unit: Unit) -> int:
        """Bytes of a unit's input, as on disk (compressed)."""
        return unit.span[1] - unit.span[0] if unit.span else sum(self.sizes[unit.first : unit.stop])


def cut_into_units(files: Sequence[str], sizes: Sequence[int], is_text: bool) -> list[Unit]:
    """Cut the input into units: byte ranges of JSONL files, whole files of other types, several text files together.

    The size of a unit depends on the input only, never on the machine, so that all machines use the same units.

    Args:
        sizes: bytes of each file.
        is_text: each file is one document.

    Raises:
        UserError: a file cannot be read, or its type is not supported.
    """
    target = max(_SMALLEST, sum(sizes) // _MOST_UNITS)
    size = min(_LARGEST, 1 << (target - 1).bit_length())  # the next power of two
    if is_text:
        units, first, held = [], 0, 0
        for number, length in enumerate(sizes):
            held += length
            if held >= size or number == len(sizes) - 1:
                units.append(Unit(first, number + 1))
                first, held = number + 1, 0
        return units
    return [
        Unit(number, number + 1, (start, min(start + size, length)) if can_be_cut else None)
        for number, (file, length) in enumerate(zip(files, sizes, strict=True))
        for can_be_cut in [_is_jsonl(file)]  # a loop over one value: binds the name inside the comprehension
        for start in (range(0, length, size) if can_be_cut else [0])
    ]


def _is_jsonl(file: str) -> bool:
    """Whether a file can be read from any line on. Raises UserError: its type is not supported."""
    with read_or_refuse(file), open(file, "rb") as opened:
        head = opened.read(HEAD)
    if not head or head.startswith(PACKED):
        return False
    if reason := refusal(head):
        other = "leave such files out (--include '*.jsonl'), or if each file is a document, use --format text"
        raise UserError(f"{file}: is {reason}; {other}")
    return first_byte(head) != b"["


def read_shard(folder: Path, number: int, key: str) -> Shard | None:
    """Read the .json of a shard.

    Args:
        key: key of the plan that must have made it.

    Returns:
        None if the shard is not complete.

    Raises:
        UserError: the shard belongs to another plan, or its .json is damaged.
    """
    path = shard_path(folder, number, "json")
    if not path.exists():
        return None
    shard: Shard = read_checked(path, Shard, "remove it; the shard is then made again")
    if shard.plan != key:
        raise UserError(f"{path}: was made with another plan; name another --output_dir")
    return shard


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file for writing under a temporary name. On success it is synced and renamed to `path`, else removed."""
    with _open_part(path) as file:
        part = Path(file.name)
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            part.rename(path)
        finally:
            part.unlink(missing_ok=True)


def _open_part(path: Path) -> BinaryIO:
    """Open and lock a temporary file. The lock tells `remove_temporary_files` that its writer is alive."""
    while True:
        file = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part").open("wb")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # no link: remove_temporary_files of another process removed it before it was locked
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def write_atomically(path: Path, text: str) -> None:
    """Write a small file of a corpus atomically."""
    with atomic_file(path) as file:
        file.write(text.encode())


def remove_temporary_files(folder: Path) -> None:
    """Remove temporary files that killed processes left. Files of living writers are locked, and stay."""
    for part in folder.rglob("*.part"):
        if not _PART.search(part.name):  # a file of the user, such as an unfinished download
            continue
        with suppress(OSError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


class _Counts:
    """Counts of the input of one shard, and its bad rows."""

    def __init__(self, is_text: bool) -> None:
        self._lists_blank = is_text  # text files: each is named
        # Input lines; UTF-8 bytes of the documents; rows left out by kind; lines of bad.jsonl.
        self.lines, self.text_bytes, self.bad, self.rows = 0, 0, Counter[str](), list[str]()

    def reject(self, file: int, line: int, bad: BadRecord) -> None:
        """Count a row that is left out. Blank rows are counted only, since corpora contain many."""
        self.bad[bad.kind] += 1
        if bad.kind != BLANK or self._lists_blank:
            self.rows.append(json.dumps([file, line, bad.kind, bad.detail], ensure_ascii=False))


def make_shard(folder: Path, plan: ShardPlan, tokenizer: Tokenizer, number: int) -> Shard:
    """Write the files of shard `number`, its .json last.

    Returns:
        The shard's counts and hashes.

    Raises:
        UserError: a file cannot be read, or it changes while it is read.
    """
    unit, counts, origins = plan.units[number], _Counts(plan.is_text), list[tuple[int, int]]()
    position = 0  # of the next token in the shard
    before = [_stamp(file) for file in plan.files[unit.first : unit.stop]]
    # The unit was cut by the sizes in the plan: lines behind its end would be lost.
    if changed := [file for file, (size, _) in enumerate(before, unit.first) if size != plan.sizes[file]]:
        raise UserError(f"{plan.files[changed[0]]}: its size has changed since the start; name a new --output_dir")
    shard_path(folder, number, "bin").parent.mkdir(parents=True, exist_ok=True)
    with (
        atomic_file(shard_path(folder, number, "bin")) as values_file,
        atomic_file(shard_path(folder, number, "origins.npy")) as origins_file,
    ):
        values_out, origins_out = HashingStream(values_file), HashingStream(origins_file)
        for at, text in _documents(plan, unit, counts):
            values = _values(plan, at, text, tokenizer, counts)
            if len(values):
                origins.append((position, at))
                position += len(values)
                values_out.write(values.tobytes())
        np.lib.format.write_array(origins_out, np.array(origins, np.int64).reshape(-1, 2), allow_pickle=False)
        if before != [_stamp(file) for file in plan.files[unit.first : unit.stop]]:
            raise UserError(f"{plan.files[unit.first]}: changes while it is read; start again when it is complete")
    write_atomically(shard_path(folder, number, "bad.jsonl"), "".join(f"{row}\n" for row in counts.rows))
    sync(shard_path(folder, number, "bin").parent)
    hashes = {"bin": values_out.hexdigest(), "origins.npy": origins_out.hexdigest()}
    shard = Shard(plan.key, position, len(origins), counts.lines, counts.text_bytes, dict(counts.bad), hashes)
    write_atomically(shard_path(folder, number, "json"), json.dumps(asdict(shard), indent=1))
    return shard


def _stamp(file: str) -> list[int]:
    """Size and modification time, to notice a change while the file is read."""
    with read_or_refuse(file):
        status = os.stat(file)
    return [status.st_size, status.st_mtime_ns]


def _values(plan: ShardPlan, at: int, text: str, tokenizer: Tokenizer, counts: _Counts) -> np.ndarray:
    """A document's values as stored in a shard; empty if the tokenizer refuses the text. Args: at: see `origin`."""
    ids, bad = list[int](), BadRecord(BLANK, "the tokenizer drops all of the text")
    try:
        ids = tokenizer.encode(text)
    except UserError as error:
        bad = BadRecord("cannot be tokenised", str(error))
    if not ids:
        counts.reject(at >> 32, at % 2**32, bad)
        return np.zeros(0, VALUE)
    counts.text_bytes += len(text.encode())
    ids = [*([plan.bos_id] if plan.bos else []), *ids, *([plan.eos_id] if plan.eos else [])]
    values = np.array(ids, VALUE) << 1
    values[0] |= 1  # marks the document's first token
    return values


def _documents(plan: ShardPlan, unit: Unit, counts: _Counts) -> Iterator[tuple[int, str]]:
    """The documents of a unit: `origin` and text. Bad and blank rows are left out and counted."""
    for file in range(unit.first, unit.stop):
        path = plan.files[file]
        if plan.is_text:
            counts.lines += 1
            try:
                yield origin(file, 1), _read_text(path)
            except BadRecord as bad:
                counts.reject(file, 1, bad)
            continue
        reader = RecordReader(path)
        with suppress(NoRowsError):  # the ledger counts 0 documents
            for record in reader.span(*unit.span) if unit.span else reader:
                try:
                    yield origin(file, record.number), _text_of(record, plan.text_column)
                except BadRecord as bad:
                    counts.reject(file, record.number, bad)
        counts.lines = reader.line


def _text_of(record: Record, column: str) -> str:
    row: dict[str, Any] = parse_record(record)
    if column not in row:
        raise BadRecord("missing key", f"the row has no {column}, only {listed(row)}; name one in --text_column")
    return _not_blank(expect(row[column], str, f"{column} must be a text"))


def _read_text(path: str) -> str:
    """The content of a text file as one document. Raises BadRecord: it is too long, not UTF-8, or blank."""
    with open(path, "rb") as file:
        content = file.read(LONGEST_LINE + 1)
    if len(content) > LONGEST_LINE:
        raise BadRecord("document too long", f"over {LONGEST_LINE:,} bytes; cut the file into several")
    try:
        return _not_blank(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRecord("not UTF-8", f"at byte {error.start + 1}; {TO_UTF8}") from None


def _not_blank(text: str) -> str:
    if not text.strip():
        raise BadRecord(BLANK, "the text is blank")
    return text
