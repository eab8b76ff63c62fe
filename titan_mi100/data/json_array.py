"""Splits one large JSON array into the bytes of its elements, reading it piece by piece.

Python's decoder needs text. So the window holds the bytes as latin-1, one character per byte; positions are byte
positions, and `strict_json` checks the UTF-8 of each row later.
"""

import json
import re
from collections.abc import Iterator
from typing import BinaryIO

# Only finds where elements end; the values are dropped. float instead of int: int() takes quadratic time in its digits.
_SYNTAX = json.JSONDecoder(parse_int=float)
_SPACE = re.compile(r"[ \t\n\r]*")
# Characters at the window's end that are not trusted: the end may cut through a token there. Longer than any literal.
_LOOKAHEAD = 16


class BrokenArray(ValueError):
    """A syntax error of the array at `line`; elements after it cannot be located."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(reason)
        self.line = line


def array_elements(file: BinaryIO, chunk: int, longest: int) -> Iterator[tuple[int, bytes]]:
    """Iterate over the elements of a JSON array.

    Args:
        file: positioned before the opening bracket.
        chunk: bytes to read at a time; more if an element is longer.
        longest: limit for the bytes of one element; up to twice as many are held in memory.

    Returns:
        For each element the line (from 1) where it begins, and its bytes.

    Raises:
        BrokenArray: at the first syntax error, or at an element longer than `longest`.
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
        window.demand(not window.next(), "there is more text after the closing bracket")
    except json.JSONDecodeError as error:
        raise BrokenArray(error.msg, window.line + window.text.count("\n", window.at, error.pos)) from None
    except RecursionError:
        raise BrokenArray("nested too deeply", window.line) from None


class _Window:
    """A part of the file: its `text`, the current position `at` in it, and the file's `line` at that position."""

    def __init__(self, file: BinaryIO, chunk: int) -> None:
        self._file, self._chunk = file, chunk
        self.text, self.at, self.line, self._ended = "", 0, 1, False

    def next(self) -> str:
        """Skip white space. Returns the next character without consuming it, "" at the end of the file."""
        while True:
            self.move(_SPACE.match(self.text, self.at).end())  # type: ignore[union-attr]  # matches nothing, too
            if self.at < len(self.text) or self._ended:
                return self.text[self.at : self.at + 1]
            self._grow()

    def move(self, stop: int) -> None:
        """Set the position to `stop`, counting the lines between."""
        self.line += self.text.count("\n", self.at, stop)
        self.at = stop

    def demand(self, right: bool, reason: str) -> None:
        """Raise a syntax error at the current position unless `right`."""
        if not right:
            raise json.JSONDecodeError(reason, self.text, self.at)

    def end_of_element(self, longest: int) -> int:
        """The position after the element that begins here. The window grows until it holds the whole element."""
        while True:
            try:
                stop = _SYNTAX.raw_decode(self.text, self.at)[1]
                # Near the window's end the result may be wrong: `12` may be the beginning of `123`.
                if self._ended or stop <= len(self.text) - _LOOKAHEAD:
                    return stop
            except json.JSONDecodeError as error:
                # Either a syntax error, or the window ends inside the element. An unterminated string is reported at
                # its beginning, which may be far from the window's end.
                near_end = error.pos > len(self.text) - _LOOKAHEAD or error.msg.startswith("Unterminated string")
                if self._ended or not near_end:
                    raise
                self.demand(len(self.text) - self.at <= longest, f"an element of over {longest:,} bytes")
            self._grow()

    def _grow(self) -> None:
        """Drop the text before the position, and read more.

        At least as much is read as is kept: the window doubles, so decoding it again each time takes linear time.
        """
        kept = self.text[self.at :]
        block = self._file.read(max(self._chunk, len(kept)))
        self.text, self.at, self._ended = kept + block.decode("latin-1"), 0, not block
