"""How a corpus is made: its input cut into units, and a shard made of each, independently of all others.

What is in a shard follows from the plan alone, so it is the same in whatever order, process or machine it is made. A
shard is there when its .json is, which is written last: what a killed process leaves is made again.
"""

import fcntl
import functools
import hashlib
import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from titan_mi100.data.corpus import FORMAT, LARGEST_MANIFEST, VALUE, Shard, Unit, origin, shard_path
from titan_mi100.data.files import GZIP, HEAD, LONGEST_LINE, PARQUET, ZSTD, Record, RecordReader, first_byte, foreign
from titan_mi100.data.formats import parse_record
from titan_mi100.data.strict_json import BadRecord, expect, listed
from titan_mi100.errors import UserError
from titan_mi100.files.durable import HashingStream, sync
from titan_mi100.files.plain import read_object
from titan_mi100.files.schema import checked
from titan_mi100.text.base import Tokenizer

_SMALLEST, _LARGEST, _MOST_UNITS = 2**22, 2**28, 2**10  # bytes of a unit; units of a corpus until they have the largest
_BATCH = 2**20  # characters that are tokenised between two writes
BLANK = "nothing to learn"  # kind of a row whose text is blank, which is no mistake in a corpus


@dataclass(frozen=True)
class Plan:
    """plan.json: all that the shards follow from."""

    tokenizer: str  # fingerprint
    n_vocab: int
    pad_id: int
    bos: str  # token before each document; "": none
    eos: str  # behind
    bos_id: int
    eos_id: int
    text_column: str
    is_text: bool  # each file is one document
    libraries: dict[str, str]
    files: list[str]
    sizes: list[int]  # bytes
    units: list[Unit]

    @functools.cached_property
    def key(self) -> str:
        return hashlib.sha256(json.dumps([FORMAT, asdict(self)], sort_keys=True).encode()).hexdigest()

    def bytes_of(self, unit: Unit) -> int:
        """Bytes of input; of a file that is packed the packed ones."""
        return unit.span[1] - unit.span[0] if unit.span else sum(self.sizes[unit.first : unit.stop])


def cut(files: Sequence[str], sizes: Sequence[int], is_text: bool) -> list[Unit]:
    """The units of the input: spans of JSONL files, whole files of other kinds, several text files together.

    Their size follows from that of the input, and from nothing of the machine.
    """
    wanted = max(_SMALLEST, sum(sizes) // _MOST_UNITS)
    size = min(_LARGEST, 1 << (wanted - 1).bit_length())
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
        for can_be_cut in [_is_jsonl(file)]
        for start in (range(0, length, size) if can_be_cut else [0])
    ]


def _is_jsonl(file: str) -> bool:
    """Whether a file can be read from any line on. Raises UserError: it is of no kind that can be read."""
    try:
        with open(file, "rb") as opened:
            head = opened.read(HEAD)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    if head.startswith((GZIP, ZSTD, PARQUET)):
        return False
    if reason := foreign(head):
        raise UserError(f"{file}: is {reason}; if each file is a document, say --format text")
    return first_byte(head) != b"["


def read_shard(folder: Path, number: int, key: str) -> Shard | None:
    """What the .json of a shard says; None: it is not complete. Raises UserError: another plan made it."""
    path = shard_path(folder, number, "json")
    if not path.exists():
        return None
    remedy = "remove it, and it is made again"
    found = read_object(path, remedy, LARGEST_MANIFEST)
    if found.pop("plan", "") != key:
        raise UserError(f"{path}: was made with another plan; name another --output_dir")
    try:
        shard: Shard = checked(found, Shard)
    except ValueError as error:
        raise UserError(f"{path}: {error}; {remedy}") from None
    return shard


def damage(folder: Path, number: int, shard: Shard) -> str:
    """Which file of a shard is not what was written; "": none. Reads all of it."""
    for suffix, digest in shard.sha256.items():
        path = shard_path(folder, number, suffix)
        try:
            with path.open("rb") as file:
                found = hashlib.sha256()
                while block := file.read(1 << 22):
                    found.update(block)
        except OSError as error:
            return f"{path}: {error.strerror}"
        if found.hexdigest() != digest:
            return f"{path}: has changed"
    return ""


@contextmanager
def part_of(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes its name when it is complete and the device has it; else nothing is left."""
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
    while True:
        file = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part").open("wb")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:  # else another process removed it before it was locked
            return file
        file.close()


def write_part(path: Path, text: str) -> None:
    """Write a small file of a corpus whole, by way of a part."""
    with part_of(path) as file:
        file.write(text.encode())


def remove_parts(folder: Path) -> None:
    """Remove what processes have left that were killed; what one is writing is locked."""
    for part in folder.rglob("*.part"):
        with suppress(OSError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


class _Document(NamedTuple):
    origin: int
    text: str


class _Counts:
    """What was read for a shard."""

    def __init__(self) -> None:
        self.lines, self.text_bytes, self.bad, self.rows = 0, 0, Counter[str](), list[str]()

    def leave_out(self, file: int, line: int, bad: BadRecord) -> None:
        self.bad[bad.kind] += 1
        if bad.kind != BLANK:
            self.rows.append(json.dumps([file, line, bad.kind, bad.detail], ensure_ascii=False))


def make_shard(
    folder: Path, plan: Plan, number: int, tokenizer: Tokenizer, progress: Callable[[int, int], None]
) -> Shard:
    """Write the files of shard `number`, its .json last.

    Args:
        progress: called with the bytes of input and the tokens since the last call.

    Raises:
        UserError: a file cannot be read, or changes meanwhile.
    """
    unit, counts, origins, place, said = plan.units[number], _Counts(), list[tuple[int, int]](), 0, 0
    before = [_stamp(file) for file in plan.files[unit.first : unit.stop]]
    shard_path(folder, number, "bin").parent.mkdir(parents=True, exist_ok=True)
    with (
        part_of(shard_path(folder, number, "bin")) as values_file,
        part_of(shard_path(folder, number, "origins.npy")) as origins_file,
    ):
        out, origins_out = HashingStream(values_file), HashingStream(origins_file)
        for documents in _batches(_documents(plan, unit, counts)):
            values = [_values(plan, document, tokenizer, counts) for document in documents]
            for document, ids in zip(documents, values, strict=True):
                if len(ids):
                    origins.append((place, document.origin))
                    place += len(ids)
            written = out.size // VALUE.itemsize
            out.write(np.concatenate([np.zeros(0, VALUE), *values]).tobytes())
            share = min(1.0, counts.text_bytes / max(1, plan.bytes_of(unit)))  # packed files are larger inside
            now = int(share * plan.bytes_of(unit) * 0.95)
            progress(now - said, out.size // VALUE.itemsize - written)
            said = now
        np.lib.format.write_array(origins_out, np.array(origins, np.int64).reshape(-1, 2), allow_pickle=False)
        if before != [_stamp(file) for file in plan.files[unit.first : unit.stop]]:
            raise UserError(f"{plan.files[unit.first]}: changes while it is read; start again when it is complete")
    write_part(shard_path(folder, number, "bad.jsonl"), "".join(f"{row}\n" for row in counts.rows))
    sync(shard_path(folder, number, "bin").parent)
    hashes = {"bin": out.hexdigest(), "origins.npy": origins_out.hexdigest()}
    shard = Shard(place, len(origins), counts.lines, counts.text_bytes, dict(counts.bad), hashes)
    write_part(shard_path(folder, number, "json"), json.dumps({"plan": plan.key, **asdict(shard)}, indent=1))
    progress(plan.bytes_of(unit) - said, 0)
    return shard


def _stamp(file: str) -> list[int]:
    try:
        found = os.stat(file)
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    return [found.st_size, found.st_mtime_ns]


def _batches(documents: Iterator[_Document]) -> Iterator[list[_Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _values(plan: Plan, document: _Document, tokenizer: Tokenizer, counts: _Counts) -> np.ndarray:
    """A document's values as a shard keeps them; empty where the tokenizer refuses it."""
    try:
        ids = tokenizer.encode(document.text)
    except UserError as error:
        counts.leave_out(document.origin >> 32, document.origin % 2**32, BadRecord("cannot be tokenised", str(error)))
        return np.zeros(0, VALUE)
    counts.text_bytes += len(document.text.encode())
    ids = [*([plan.bos_id] if plan.bos else []), *ids, *([plan.eos_id] if plan.eos else [])]
    values = np.array(ids, VALUE) << 1
    values[0] |= 1
    return values


def _documents(plan: Plan, unit: Unit, counts: _Counts) -> Iterator[_Document]:
    """The documents of a unit that are not blank."""
    for file in range(unit.first, unit.stop):
        path = plan.files[file]
        if plan.is_text:
            counts.lines += 1
            try:
                yield _Document(origin(file, 1), _read_text(path))
            except BadRecord as bad:
                counts.leave_out(file, 1, bad)
            continue
        reader = RecordReader(path)
        for record in reader.span(*unit.span) if unit.span else reader:
            try:
                yield _Document(origin(file, record.number), _text_of(record, plan.text_column))
            except BadRecord as bad:
                counts.leave_out(file, record.number, bad)
        counts.lines = reader.line


def _text_of(record: Record, column: str) -> str:
    row: dict[str, Any] = parse_record(record)
    if column not in row:
        raise BadRecord("missing key", f"there is no {column}; the row has {listed(row)}; name one in --text_column")
    return _not_blank(expect(row[column], str, f"{column} must be a text"))


def _read_text(path: str) -> str:
    with open(path, "rb") as file:
        content = file.read(LONGEST_LINE + 1)
    if len(content) > LONGEST_LINE:
        raise BadRecord("document too long", f"over {LONGEST_LINE:,} bytes; cut the file into several")
    try:
        return _not_blank(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadRecord("not UTF-8", f"at byte {error.start + 1}; convert the file with iconv") from None


def _not_blank(text: str) -> str:
    if not text.strip():
        raise BadRecord(BLANK, "the text is blank")
    return text
