"""Reads the records of a data file one after another: JSONL or parquet of any size, or a JSON array; gzip and zstd.

The file type is detected by content, not by name. This module does not look into the records; `formats` does.
"""

import gzip
import io
import json
import os
import shlex
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from titan_mi100.data.file_type import BYTE_ORDER_MARK, GZIP, HEAD, PARQUET, WANTED, ZSTD, first_byte, refusal
from titan_mi100.data.json_array import BrokenArray, array_elements
from titan_mi100.data.strict_json import UNREAD
from titan_mi100.errors import UserError, read_or_refuse
from titan_mi100.files.child import call_in_child, raise_limits
from titan_mi100.files.patterns import matching_files, unusable
from titan_mi100.wording import some

# The longest record in bytes, some 4 million tokens. A longer one is refused without being held in memory.
LONGEST_LINE = 2**24
CHUNK = 2**20  # bytes read at a time
_UNPACKED = 2**22  # bytes of parquet rows that are unpacked, and sent by the child process, at a time
# Protection against decompression bombs: once this many bytes are unpacked, a file may not exceed so many times its
# packed size.
_BOMB, _MOST_UNPACKED = 2**20, 100
_PACKED_BLOCK = 2**16  # bytes unpacked at once; of zstd those before a damaged place in the same block are lost

# Why a record cannot be read, as "kind: what is wrong; remedy".
NUL = "NUL byte: the file is damaged, or not UTF-8 (UTF-16?); write it again, or convert it with iconv"
BROKEN_ARRAY = "broken JSON array"  # never skipped, even with on_bad_row = "skip": unknown many rows follow
_TOO_LONG = "row too long: over {:,} bytes; cut its text into several rows, or is a line end missing?"
_BROKEN = BROKEN_ARRAY + ": {}; the rest of the file was not read; correct it, or write one object per line (JSONL)"


class NoRowsError(UserError):
    """A file without rows."""


class Record(NamedTuple):
    """One JSON object of a file, not decoded yet, or the reason why it cannot be read."""

    number: int  # line, from 1; in a JSON array the line where the element begins; in parquet the row
    raw: bytes  # empty if there is a problem
    problem: str  # "", or "kind: detail" for a `BadRecord`
    element: int = 0  # number in a JSON array, from 1, because several elements may share a line; else 0
    nulls: str = "kept"  # what happens to nulls in tool calls' arguments by default: "kept", or "left out" (parquet)


def read_records(path: str) -> Iterator[Record]:
    """Iterate over the records of a file in order; see `RecordReader`."""
    return iter(RecordReader(path))


def label(line: int, element: int) -> str:
    """A record's place in its file: "12" is line 12; "1[12]" is element 12 of a JSON array, which begins in line 1."""
    return f"{line}[{element}]" if element else str(line)


def expand_patterns(patterns: Sequence[str]) -> list[list[str]]:
    """The files of each path or glob pattern.

    Raises:
        UserError: one line for each pattern that matches no file or an unreadable one.
    """
    matches = [matching_files(pattern) for pattern in patterns]
    if wrong := [line for _, problems in matches for line in problems]:
        raise UserError("\n".join(wrong))
    return [files for files, _ in matches]


class RecordReader:
    """Iterates over the records of one file, holding a bounded part of it in memory; a JSON array as a whole.

    During the iteration `consumed` rises to `size`, the file's bytes on disk; a progress bar shows both.
    """

    def __init__(self, path: str) -> None:
        self.path, self.size, self.line = path, 0, 0  # line: number of the last line read
        self._position: Callable[[], int] = lambda: 0

    @property
    def consumed(self) -> int:
        """Bytes of the file read so far; of a packed one packed bytes, up to `CHUNK` unpacked ones ahead."""
        return self._position()

    def __iter__(self) -> Iterator[Record]:
        """Read from the start.

        Raises:
            NoRowsError: it has none.
            UserError: the file's type is not supported, or the rest of it cannot be read (damage).
                A single bad line raises nothing: it becomes a record with a `problem`.
        """
        if reason := unusable(self.path):
            raise UserError(f"{self.path}: {reason}")
        number = 0
        try:
            with open(self.path, "rb", buffering=0) as file:
                self.size = os.fstat(file.fileno()).st_size
                for record in self._records(file):
                    number = record.number
                    yield record
        except EOFError as damage:
            kind, reason = damage.args
            problem = f"the {kind} data is damaged or truncated after line {number} ({reason})"
            raise UserError(f"{self.path}: {problem}; copy or write the file again ({kind} -t checks it)") from None
        except OSError as error:
            raise UserError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        finally:
            self._position = lambda: self.size
        if not number:
            raise NoRowsError(f"{self.path}: has no rows; {WANTED}")

    def _records(self, file: io.FileIO) -> Iterator[Record]:
        """Detect the file's type and return the iterator for it. `peek` shows the head without consuming it."""
        stream: io.BufferedReader = io.BufferedReader(file, max(CHUNK, HEAD))
        self._position = stream.tell  # not the file's, which is up to a buffer ahead
        if stream.peek().startswith(PARQUET):
            return self._parquet_rows()
        if stream.peek().startswith(GZIP):
            stream = io.BufferedReader(_Unpacked(self.path, stream, "gzip"), max(CHUNK, HEAD))
        elif stream.peek().startswith(ZSTD):
            stream = io.BufferedReader(_Unpacked(self.path, stream, "zstd"), max(CHUNK, HEAD))
        head = stream.peek()[:HEAD]
        if reason := refusal(head):
            kind = UserError if head else NoRowsError
            raise kind(f"{self.path}: is {reason.replace('FILE', shlex.quote(self.path))}")
        if first_byte(head) != b"[":
            return self._lines(stream)
        if head.startswith(BYTE_ORDER_MARK):
            stream.read(len(BYTE_ORDER_MARK))
        return _elements(stream)

    def span(self, start: int, stop: int) -> Iterator[Record]:
        """The lines of a JSONL file that begin in bytes [start, stop), numbered from 1.

        Adjacent spans together give every line exactly once.

        Raises:
            UserError: the file cannot be read.
        """
        with read_or_refuse(self.path), open(self.path, "rb", buffering=CHUNK) as file:
            if start:  # skip to the first line start: the line that began before `start` belongs to another span
                file.seek(start - 1)  # one byte earlier, so that a line beginning exactly at `start` is kept
                while (rest := file.readline(CHUNK)) and not rest.endswith(b"\n"):
                    pass
            yield from self._lines(file, stop)

    def _lines(self, file: BinaryIO, stop: int | None = None) -> Iterator[Record]:
        """The records of JSONL from the file's position on. Args: stop: lines that begin at or after it are left."""
        number, limit, readline = 0, LONGEST_LINE + 1, file.readline  # + 1: the line end
        while (stop is None or file.tell() < stop) and (line := readline(limit)):
            self.line = number = number + 1
            if len(line) == limit and not line.endswith(b"\n"):
                # too long: skip its rest in pieces, without holding it in memory
                while (rest := readline(CHUNK)) and not rest.endswith(b"\n"):
                    pass
                yield Record(number, b"", _TOO_LONG.format(LONGEST_LINE))
                continue
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            line = line.removeprefix(BYTE_ORDER_MARK)  # on any line: joined files have one in the middle
            if line.strip():
                yield Record(number, b"", NUL) if b"\0" in line else Record(number, line, "")

    def _parquet_rows(self) -> Iterator[Record]:
        number, rows, unpacked = 0, 1, 0
        self._position = lambda: self.size * number // rows if rows else self.size
        while number < rows:
            rows, batch = call_in_child("data.files:unpack_parquet", Path(self.path), number)
            for raw, problem in batch:
                number, unpacked = number + 1, unpacked + len(raw)
                if unpacked > max(_BOMB, _MOST_UNPACKED * self.size):
                    reason = f"is parquet whose rows are over {_MOST_UNPACKED} times its size"
                    raise UserError(f"{self.path}: {reason}; if that is right, convert it to JSONL first")
                yield Record(number, raw.encode(), problem, nulls="left out")


# State of the child process between two questions, so that it need not start the file again: path, the next row, the
# file's number of rows, and the iterator over the rows that are left.
_unpacking: tuple[str, int, int, Iterator[tuple[str, str]]] = ("", 0, 0, iter(()))


def unpack_parquet(path: str, start: int) -> tuple[int, list[tuple[str, str]]]:
    """Unpack some rows of a parquet file. Runs in the child process, because kilobytes can unpack to gigabytes.

    Args:
        start: the first row, from 0.

    Returns:
        The file's number of rows; and a list of (JSON text, problem) for some rows from `start` on. `problem` is "" if
        the row is good.

    Raises:
        UserError: pyarrow is missing, or the file is damaged or unpacks to too much.
    """
    global _unpacking
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        problem = "is parquet, which needs pyarrow: pip install pyarrow, or convert to JSONL"
        raise UserError(f"{path}: {problem}") from None
    try:
        raise_limits(os.stat(path).st_size)
        file, at, total, rows = _unpacking
        if (file, at) != (path, start) or not start:
            # pyarrow gets an open file, because it accepts no name that is not UTF-8. Without buffer_size it would
            # read whole row groups at once.
            source = open(path, "rb")  # noqa: SIM115  # stays open as long as the parent asks for rows
            opened = parquet.ParquetFile(source, pre_buffer=False, buffer_size=CHUNK)
            groups = [opened.metadata.row_group(i) for i in range(opened.num_row_groups)]
            total = sum(group.num_rows for group in groups)
            rows = _parquet_as_json(path, opened, groups, pyarrow.types, start)
        unpacked, size = list[tuple[str, str]](), 0
        while size < _UNPACKED and (row := next(rows, None)):
            unpacked.append(row)
            size += len(row[0]) + 64  # 64: what an entry takes besides its text, roughly
        _unpacking = path, start + len(unpacked), total, rows
        return total, unpacked
    except MemoryError:  # also pyarrow's ArrowMemoryError, a subclass
        problem = "is parquet whose rows need far more memory than the file's size suggests"
        raise UserError(f"{path}: {problem}; if they are right, convert it to JSONL first") from None
    except (pyarrow.ArrowException, ValueError, OSError) as error:  # pyarrow raises any of these for a damaged file
        if isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(f"{path}: is parquet that cannot be read: {reason}; write it again") from None


def _parquet_as_json(path: str, file: Any, groups: list[Any], types: Any, start: int) -> Iterator[tuple[str, str]]:
    """Rows from `start` on as (JSON text, problem). Whole row groups before `start` are skipped unread.

    Args:
        file: pyarrow's ParquetFile.
        groups: the metadata of its row groups.
        types: the module pyarrow.types.
    """
    columns = [field.name for field in file.schema_arrow if _is_json(field.type, types)]
    if not columns or len({*columns}) < len(columns):
        problem = "with two columns of one name" if columns else "without a column of text, numbers or lists of them"
        types_found = some((f"{field.name} is {field.type}" for field in file.schema_arrow), 4)
        raise UserError(f"{path}: is parquet {problem}{'' if columns else f' ({types_found})'}; write it again")
    # A stand-in for each column that JSON cannot hold, so that such a key is counted or refused as in JSONL.
    unread = {field.name: {UNREAD: str(field.type)} for field in file.schema_arrow if field.name not in columns}
    number = behind = 0  # rows of all batches so far; rows of all groups so far
    for i, group in enumerate(groups):
        behind += group.num_rows
        if behind <= start:
            number = behind
            continue
        # Rows of a batch: about _UNPACKED bytes, by the group's mean row size. The metadata may lie, hence at most 256.
        size = min(max(1, _UNPACKED * group.num_rows // max(1, group.total_byte_size)), 256)
        for batch in file.iter_batches(size, row_groups=[i], columns=columns, use_threads=False):
            number += batch.num_rows
            for row in batch.slice(max(0, start - number + batch.num_rows)).to_pylist() if number > start else ():
                text = json.dumps(without_nulls(row) | unread, ensure_ascii=False)
                yield ("", _TOO_LONG.format(LONGEST_LINE)) if len(text.encode()) > LONGEST_LINE else (text, "")
        if number != behind:
            raise UserError(f"{path}: is damaged parquet: {number:,} rows instead of {behind:,}; write it again")


def _is_json(kind: Any, types: Any) -> bool:
    """Whether a parquet column's values are JSON values. Of other columns (images, times) only the name is."""
    if types.is_dictionary(kind):
        return _is_json(kind.value_type, types)
    if types.is_nested(kind):
        return all(_is_json(kind.field(i).type, types) for i in range(kind.num_fields))
    of_text = (types.is_string, types.is_large_string, getattr(types, "is_string_view", types.is_string))
    tests = (*of_text, types.is_boolean, types.is_integer, types.is_null)
    return any(test(kind) for test in tests) or types.is_float32(kind) or types.is_float64(kind)


def without_nulls(value: Any, call: bool = False, keep: bool = False) -> Any:
    """Remove null keys, recursively, except in the arguments of tool calls, where NaN becomes null.

    All structs of a parquet column have the same keys; a key that was missing in the original row is null.

    Args:
        call: the value is a tool call, or inside one.
        keep: it is a call's arguments, or inside them.
    """
    if isinstance(value, dict):
        kept = {}
        for key, raw in value.items():
            child = raw if raw == raw else None  # false for NaN, which pandas writes for a missing number
            if keep or child is not None:
                is_input = key == ("input" if value.get("type") == "tool_use" else "arguments" if call else None)
                kept[key] = without_nulls(child, call or key in ("tool_calls", "function_call"), keep or is_input)
        return kept
    return [without_nulls(child, call, keep) for child in value] if isinstance(value, list) else value


class _Unpacked(io.RawIOBase):
    """Unpacks gzip or zstd, all that comes before a damaged place. Raises EOFError: the kind, and what is wrong."""

    def __init__(self, path: str, packed: io.BufferedReader, kind: str) -> None:
        self._packed, self._kind, self._written = packed, kind, 0
        self._read: Callable[[int], bytes]
        if kind == "gzip":
            self._read = gzip.GzipFile(fileobj=packed).read1
            return
        try:
            import pyarrow
        except ImportError:
            problem = "is packed by zstd, which needs pyarrow: pip install pyarrow, or unpack it (zstd -d)"
            raise UserError(f"{path}: {problem}") from None
        self._read = pyarrow.CompressedInputStream(pyarrow.PythonFile(packed, "r"), "zstd").read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            block = self._read(min(len(buffer), _PACKED_BLOCK))
        except (EOFError, zlib.error, OSError) as error:
            if getattr(error, "errno", None):  # the disk's
                raise
            raise EOFError(self._kind, error) from None
        self._written += len(block)
        if self._written > max(_BOMB, _MOST_UNPACKED * self._packed.tell()):
            raise EOFError(self._kind, f"over {_MOST_UNPACKED} times its size; if that is right, unpack it first")
        buffer[: len(block)] = block
        return len(block)


def _elements(file: io.BufferedReader) -> Iterator[Record]:
    """The records of a JSON array. A syntax error becomes the last record: no element after it can be located."""
    try:
        for element, (line, raw) in enumerate(array_elements(file), 1):
            problem = _TOO_LONG.format(LONGEST_LINE) if len(raw) > LONGEST_LINE else ""
            yield Record(line, b"" if problem else raw, problem, element)
    except BrokenArray as broken:
        yield Record(broken.line, b"", _BROKEN.format(broken))
