"""Where documents are from, as `file:line`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


def label(line: int, element: int) -> str:
    """A row's place in its file: 12, or, in a JSON array, 1[12]: its 12th element, which begins in line 1."""
    return f"{line}[{element}]" if element else str(line)


class Origins(NamedTuple):
    """The input of prepared documents. A document's line in the ledger counts from 0, without the heading."""

    files: Sequence[str]
    lines: np.ndarray  # (lines of the ledger, 3) int64: number of the file, line, element of a JSON array or 0
    document_lines: np.ndarray  # (documents,) int64: the line of the ledger that each document is from

    def where(self, document: int) -> str:
        """The document's `file:line`."""
        file, line, element = self.lines[self.document_lines[document]].tolist()
        return f"{self.files[file]}:{label(line, element)}"
