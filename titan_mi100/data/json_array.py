"""The elements of one JSON array, read piece by piece: where each begins and ends, not what is in it.

The window holds the bytes as latin-1, one character each: the decoder takes text, and UTF-8 is checked per row later.
"""

import json
import re
from collections.abc import Iterator
from typing import BinaryIO

_SYNTAX = json.JSONDecoder(parse_int=float)  # for extents only; int() is quadratic in its digits, float() is not
_SPACE = re.compile(r"[ \t\n\r]*")
_LOOKAHEAD = 16  # characters: longer than any JSON token but strings, so the window's end cuts through none before it


class BrokenArray(ValueError):
    """The array's syntax ends at this line; nothing after it can be told apart."""

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
    window = _Window(file, chunk)
    try:
        window.next()
        window.move(window.at + 1)  # the opening bracket
        separator = window.next()
        while separator != "]":
            stop = window.end_of_element(longest)
            yield window.line, window.text[window.at : stop].encode("latin-1")
            window.move(stop)
            separator = window.next()
            window.demand(separator in (",", "]"), "Expecting ',' or ']'")
            if separator == ",":
                window.move(window.at + 1)
                window.next()
        window.move(window.at + 1)
        window.demand(not window.next(), "more follows after the closing bracket")
    except json.JSONDecodeError as error:
        raise BrokenArray(error.msg, window.line + window.text.count("\n", window.at, error.pos)) from None
    except RecursionError:
        raise BrokenArray("nested too deeply", window.line) from None


class _Window:
    """A part of the file: `text`, the position `at` in it, and the `line` of that."""

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
        """Where the element that begins here stops; the window grows until it holds all of it."""
        while True:
            try:
                stop = _SYNTAX.raw_decode(self.text, self.at)[1]
                if self._ended or stop <= len(self.text) - _LOOKAHEAD:  # else the rest of a number may follow
                    return stop
            except json.JSONDecodeError as error:  # a mistake, or the rest of the element is not in the window yet
                near_end = error.pos > len(self.text) - _LOOKAHEAD or error.msg.startswith("Unterminated string")
                if self._ended or not near_end:
                    raise
                self.demand(len(self.text) - self.at <= longest, f"an element of over {longest:,} bytes")
            self._grow()

    def _grow(self) -> None:
        """Drop what is done with; read on as much as is kept, so that decoding it again stays linear."""
        kept = self.text[self.at :]
        data = self._file.read(max(self._chunk, len(kept)))
        self.text, self.at, self._ended = kept + data.decode("latin-1"), 0, not data
