"""Many prompts: rows of a file in, rows of a file out, of which a later start keeps those that are there."""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tqdm import tqdm

from titan_mi100.data.files import read_records
from titan_mi100.data.strict_json import BadRow, parse
from titan_mi100.decode import Generated
from titan_mi100.errors import UserError
from titan_mi100.plain_file import read_plain
from titan_mi100.text.base import Tokenizer

_SAY_EVERY = 10  # seconds between lines where no bar can be drawn
_LARGEST_OUTPUT = 1 << 34  # bytes
_ROW_BEGINS = b'{"prompt": "'
T = TypeVar("T")


class Request(NamedTuple):
    """A prompt as the model reads it."""

    where: str  # it comes from: file:line, or "prompt 1"
    text: str
    ids: list[int]


Answer = Callable[[Sequence[list[int]], Sequence[int]], list[Generated]]  # prompts and their numbers -> what was said


def read_rows(path: str, read: Callable[[dict[str, Any]], T]) -> list[tuple[str, T]]:
    """Every row of a data file through `read`, which may raise BadRow; each with its file:line.

    Raises:
        UserError: the first line that is wrong, as file:line.
    """
    rows = []
    for record in read_records(path):
        where = f"{path}:{record.number}" + (f", element {record.element}" if record.element else "")
        try:
            if record.problem:
                raise BadRow(record.problem)
            rows.append((where, read(parse(record.raw))))
        except BadRow as bad:
            raise UserError(f"{where}: {bad}") from None
    return rows


class RowFile:
    """The rows of an --output file, a line each, in the prompts' order; a later start goes on behind the last.

    A batch's lines are written at once. What a kill or a full disk leaves of a line is cut off.
    """

    def __init__(self, path: str, requests: Sequence[Request], settings: dict[str, Any]) -> None:
        """Read the rows that are there. Without a path there is no file, and the rows are only kept.

        Args:
            settings: what the rows are made with; kept in each of them.

        Raises:
            UserError: the file is of other prompts, or was made with other settings.
        """
        self.path, self.rows, self._settings = path, list[dict[str, Any]](), settings
        if not path or not os.path.lexists(path):
            return
        content = read_plain(Path(path), _LARGEST_OUTPUT)
        *whole, cut = content.split(b"\n")
        self.rows += [self._checked(number, line, requests) for number, line in enumerate(whole, 1)]
        if cut[: len(_ROW_BEGINS)] != _ROW_BEGINS[: len(cut)]:  # somebody else's file, of one line without an end
            raise UserError(f"{path}:{len(whole) + 1}: was not written by this command; name another --output")
        if cut:
            os.truncate(path, len(content) - len(cut))

    def _checked(self, number: int, line: bytes, requests: Sequence[Request]) -> dict[str, Any]:
        where = f"{self.path}:{number}"
        try:
            row = parse(line)
        except BadRow as bad:
            raise UserError(f"{where}: {bad}; name another --output") from None
        if not isinstance(row.get("settings"), dict) or not {"prompt", "output", "finish"} <= row.keys():
            raise UserError(f"{where}: was not written by this command; name another --output")
        keys = row["settings"].keys() | self._settings.keys()
        if differing := sorted(key for key in keys if row["settings"].get(key) != self._settings.get(key)):
            raise UserError(f"{where}: was made with another {', '.join(differing)}; name another --output")
        if number > len(requests) or row["prompt"] != requests[number - 1].text:
            raise UserError(f"{where}: answers another prompt than this input's; name another --output")
        return row

    def add(self, rows: list[dict[str, Any]]) -> None:
        rows = [{**row, "settings": self._settings} for row in rows]
        self.rows += rows
        if not self.path:
            return
        try:
            with open(self.path, "ab") as file:
                file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror}); mend that and start again: it goes on there"
            ) from None


def answer_all(
    requests: Sequence[Request],
    load: Callable[[], Answer],
    tokenizer: Tokenizer,
    batch_size: int,
    file: RowFile,
    more: Callable[[int, str], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Answer the requests that the file does not hold yet, in batches, and add them to it.

    Args:
        load: makes what answers; called if something is left to do.
        more: what else a row holds, of the request's number and the output.

    Returns:
        All rows: prompt, output, tokens, finish ("stop" or "length"), and what `more` gave.
    """
    if len(file.rows) == len(requests):
        return file.rows
    answer = load()
    with _Progress(len(requests), len(file.rows)) as progress:
        while (done := len(file.rows)) < len(requests):
            numbers = range(done, min(done + batch_size, len(requests)))
            rows = []
            for number, said in zip(numbers, answer([requests[n].ids for n in numbers], numbers), strict=True):
                output = tokenizer.decode(said.ids)
                finish = "stop" if said.stopped else "length"
                row = {"prompt": requests[number].text, "output": output, "tokens": len(said.ids), "finish": finish}
                rows.append({**row, **more(number, output)})
            file.add(rows)
            progress.advance(len(rows))
    return file.rows


class _Progress:
    """A bar with the time that is left on a terminal, else a line now and then; on stderr."""

    def __init__(self, total: int, done: int) -> None:
        self._bar = tqdm(total=total, initial=done, unit="row", disable=not sys.stderr.isatty())
        self._total, self._first, self._done = total, done, done
        self._started = self._said = time.monotonic()

    def advance(self, rows: int) -> None:
        self._done += rows
        self._bar.update(rows)
        now = time.monotonic()
        if self._bar.disable and now - self._said > _SAY_EVERY and self._done < self._total:
            left = (now - self._started) / (self._done - self._first) * (self._total - self._done)
            print(f"{self._done} of {self._total} rows, {left:.0f} s left", file=sys.stderr, flush=True)
            self._said = now

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
