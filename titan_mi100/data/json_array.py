"""Splits a JSON array into the bytes of its elements.

Python's decoder needs text. So the file is read as latin-1, one character per byte; positions are byte positions, and
`strict_json` checks the UTF-8 of each row later.
"""

import json
import re
from collections.abc import Iterator
from typing import BinaryIO

LARGEST = 2**32  # bytes: the array is held in memory
_BLOCK = 2**20
# Only finds where elements end; the values are dropped. float instead of int: int() takes quadratic time in its digits.
_SYNTAX = json.JSONDecoder(parse_int=float)
_SPACE = re.compile(r"[ \t\n\r]*")


class BrokenArray(ValueError):
    """A syntax error of the array at `line`; elements after it cannot be located."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(reason)
        self.line = line


def array_elements(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Iterate over the elements of a JSON array.

    Args:
        file: positioned before the opening bracket.

    Returns:
        For each element the line (from 1) where it begins, and its bytes.

    Raises:
        BrokenArray: at the first syntax error, or the array is larger than LARGEST.
    """
    content = bytearray()
    while block := file.read(_BLOCK):
        content += block
        if len(content) > LARGEST:
            raise BrokenArray(f"over {LARGEST:,} bytes", 1)
    text = content.decode("latin-1")
    at, line, counted = _after_space(text, text.index("[") + 1), 1, 0
    separator = text[at : at + 1]
    try:
        while separator != "]":
            line, counted = line + text.count("\n", counted, at), at
            stop = _SYNTAX.raw_decode(text, at)[1]
            yield line, text[at:stop].encode("latin-1")
            at = _after_space(text, stop)
            separator = text[at : at + 1]
            if separator not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
            if separator == ",":
                at = _after_space(text, at + 1)
        if (at := _after_space(text, at + 1)) < len(text):
            raise json.JSONDecodeError("there is more text after the closing bracket", text, at)
    except json.JSONDecodeError as error:
        raise BrokenArray(error.msg, error.lineno) from None
    except RecursionError:
        raise BrokenArray("nested too deeply", line) from None


def _after_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()  # type: ignore[union-attr]  # matches nothing, too
