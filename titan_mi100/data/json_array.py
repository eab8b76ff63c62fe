"""The elements of one JSON array, read piece by piece: where each begins and ends, not what is in it.

The buffer holds the bytes as latin-1, one character each: the decoder takes text, and UTF-8 is checked per row later.
"""

import json
import re
from collections.abc import Iterator
from typing import BinaryIO

_SYNTAX = json.JSONDecoder(parse_int=float)  # for extents only; int() is quadratic in its digits, float() is not
_SPACE = re.compile(r"[ \t\n\r]*")
_LONGEST_TOKEN = 16  # characters of a JSON token, strings apart, that the end of the buffer may cut through
_SCALAR = re.compile(r"[^\s,\]]*")


class BrokenArray(ValueError):
    """The array's syntax ends at this line; nothing behind it can be told apart."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(reason)
        self.line = line


def array_elements(file: BinaryIO, chunk: int, longest: int) -> Iterator[tuple[int, bytes]]:
    """The line (from 1) where each element begins, and its bytes.

    Args:
        file: stands before the opening bracket.
        chunk: bytes read at a time, or more where an element is longer.
        longest: about as many bytes of an element are held at most; it may be twice as many.

    Raises:
        BrokenArray: at the first mistake in the syntax, or an element longer than `longest`.
    """
    buffer = _Buffer(file, chunk)
    try:
        buffer.next()
        buffer.move(buffer.at + 1)  # the opening bracket
        closed = buffer.next() == "]"
        while not closed:
            stop = buffer.end_of_element(longest)
            yield buffer.line, buffer.text[buffer.at : stop].encode("latin-1")
            buffer.move(stop)
            closed = buffer.next() == "]"
            if not closed:
                buffer.demand(buffer.next() == ",", "Expecting ',' or ']'")
                buffer.move(buffer.at + 1)
                buffer.next()
        buffer.move(buffer.at + 1)
        buffer.demand(not buffer.next(), "more follows behind the closing bracket")
    except json.JSONDecodeError as error:
        raise BrokenArray(error.msg, buffer.line + buffer.text.count("\n", buffer.at, error.pos)) from None
    except RecursionError:
        raise BrokenArray("nested too deeply", buffer.line) from None


def object_spans_lines(head: bytes, whole: bool) -> bool:
    """Whether a file begins with an object that goes on behind the end of its line (pretty-printed JSON).

    Args:
        head: the file, or its beginning.
        whole: whether it is all of the file.
    """
    text = (head if whole else head[: head.rfind(b"\n") + 1]).decode("latin-1").strip()
    try:
        stop = _SYNTAX.raw_decode(text)[1]
    except json.JSONDecodeError as error:
        if error.pos < len(text):
            return False  # wrong by itself, not merely cut off
        stop = error.pos
    except RecursionError:
        return False
    return "\n" in text[:stop]


class _Buffer:
    """A window onto the file: `text`, the position `at` in it, and the `line` of that."""

    def __init__(self, file: BinaryIO, chunk: int) -> None:
        self._file, self._chunk = file, chunk
        self.text, self.at, self.line, self._ended = "", 0, 1, False

    def next(self) -> str:
        """Pass over white space; the character that follows, "" at the end of the file."""
        while True:
            self.move(_SPACE.match(self.text, self.at).end())  # type: ignore[union-attr]  # matches nothing, too
            if self.at < len(self.text) or self._ended:
                return self.text[self.at : self.at + 1]
            self._grow()

    def move(self, stop: int) -> None:
        self.line += self.text.count("\n", self.at, stop)
        self.at = stop

    def demand(self, right: bool, reason: str) -> None:
        if not right:
            raise json.JSONDecodeError(reason, self.text, self.at)

    def end_of_element(self, longest: int) -> int:
        """Where the element that begins here stops; the buffer grows until it holds all of it."""
        while True:
            try:
                if self.text[self.at : self.at + 1] in ("{", "[", '"'):
                    return _SYNTAX.raw_decode(self.text, self.at)[1]
                stop = _SCALAR.match(self.text, self.at).end()  # type: ignore[union-attr]  # matches nothing, too
                self.demand(stop > self.at, "Expecting value")
                if stop < len(self.text) or self._ended:
                    return stop
            except json.JSONDecodeError as error:  # a mistake, or the rest of the element is not in the buffer yet
                near_end = error.pos > len(self.text) - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")
                if self._ended or not near_end:
                    raise
            self.demand(len(self.text) - self.at <= longest, f"an element of over {longest:,} bytes")
            self._grow()

    def _grow(self) -> None:
        """Drop what is done with; read on at least as much as is kept, so that rereading it stays linear."""
        kept = self.text[self.at :]
        data = self._file.read(max(self._chunk, len(kept)))
        self.text, self.at, self._ended = kept + data.decode("latin-1"), 0, not data
