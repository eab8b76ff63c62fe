"""Tensors in files that came from elsewhere, by the table that a child process made of them (see tables.py).

No other reader sees the files: what is read here are the bytes of values, at places that were checked. So nothing that
the files say can run code, leave their folder or take memory.
"""

import math
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titan_mi100.errors import UserError
from titan_mi100.files.child import SECONDS, TOO_MUCH, ask
from titan_mi100.files.plain import open_plain
from titan_mi100.files.tables import BYTES, Table

_DTYPES = {name: getattr(torch, name) for name in BYTES}
_USUAL = 0.01  # seconds for a part; on our machines it takes a twentieth of that
_AS_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}  # numpy lacks bfloat16


class StoredTensors:
    """Tensors of a folder or a file. Files are mapped, not read. Build it with one of the functions below.

    Attributes:
        kinds: shape and dtype of each.
        others: names of entries that are no tensors.
    """

    def __init__(self, folder: Path, table: Table, others: Iterable[str] = (), zipped: bool = False) -> None:
        """`zipped`: parts are zips, of a DCP folder."""
        self.folder, self.others = folder, list(others)
        self._table, self._zipped, self._seconds = table, zipped, 0.0
        self.kinds = {name: (tuple(shape), _DTYPES[dtype]) for name, (dtype, shape, _) in table.items()}

    def read(self, name: str, offset: Sequence[int], size: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """A box of a tensor. Little more than its bytes is read.

        Args:
            dtype: to cast to, part by part, so that the whole is in memory in one dtype only; None: as stored.
        """
        stored, _, parts = self._table[name]
        wanted = []  # the parts that reach into the box, and from where to where in each
        for part in parts:
            starts = [max(a, b) for a, b in zip(offset, part[0], strict=True)]
            stops = [min(a + n, b + m) for a, n, b, m in zip(offset, size, part[0], part[1], strict=True)]
            if all(start < stop for start, stop in zip(starts, stops, strict=True)):
                wanted.append((part, starts, stops))
        places = [[begin, about] for (_, _, _, begin, about), _, _ in wanted]
        if self._zipped and wanted:
            zips = [[file, begin, length, stored, shape] for (_, shape, file, begin, length), _, _ in wanted]
            places, seconds = ask("files.tables:read_parts", self.folder, zips)
            self._seconds = max(0.0, self._seconds + seconds - len(zips) * _USUAL)
            if self._seconds > SECONDS:  # each may stay below the limits
                raise UserError(f"{self.folder}: {TOO_MUCH}; get it again from a source that you trust")
        whole = torch.empty(tuple(size), dtype=dtype or _DTYPES[stored]) if len(wanted) != 1 else None
        for ((at, shape, file, _, _), starts, stops), (begin, strides) in zip(wanted, places, strict=True):
            box = tuple(slice(a - b, c - b) for a, b, c in zip(starts, at, stops, strict=True))
            values = self._values(file, begin, stored, shape, strides, box).to(dtype or _DTYPES[stored])
            if whole is None:
                return values
            whole[tuple(slice(a - b, c - b) for a, b, c in zip(starts, offset, stops, strict=True))] = values
        assert whole is not None
        return whole

    def _values(
        self, file: str, begin: int, dtype: str, shape: list[int], strides: list[int] | None, box: tuple[slice, ...]
    ) -> Tensor:
        nbytes, before = BYTES[dtype], begin % mmap.ALLOCATIONGRANULARITY
        count = math.prod(shape) if strides is None else 1 + int(np.dot(np.subtract(shape, 1), strides))
        # opened for each read: pages of a map stay in memory until it is closed, and what is read lives as long as it
        with open_plain(self.folder / file) as opened:
            try:
                length = before + count * nbytes
                mapped = mmap.mmap(opened.fileno(), length, access=mmap.ACCESS_COPY, offset=begin - before)
            except ValueError:
                raise UserError(f"{self.folder / file}: has become shorter while it was read; copy it again") from None
        steps = None if strides is None else [stride * nbytes for stride in strides]
        array = np.ndarray(shape, _AS_INTEGERS[nbytes], mapped, before, steps)
        return torch.from_numpy(np.require(array[box], requirements="A")).view(_DTYPES[dtype])


def open_hf(folder: Path) -> StoredTensors:
    """Of an HF folder. Raises UserError: something of it is missing, damaged or hostile; so do the next ones."""
    return StoredTensors(folder, ask("files.tables:read_hf", folder))


def open_safetensors(file: Path) -> StoredTensors:
    return StoredTensors(file.parent, ask("files.tables:read_safetensors", file))


def open_dcp(folder: Path, files: Iterable[str] | None = None) -> StoredTensors:
    """Of a DCP folder.

    Args:
        files: the only names that its metadata may give, as of a manifest; None: any plain name in the folder.
    """
    table, others = ask("files.tables:read_dcp", folder / ".metadata", None if files is None else sorted(files))
    return StoredTensors(folder, table, others, zipped=True)


def open_torch(file: Path) -> StoredTensors:
    """Of a file of torch.save, which holds a dict of tensors, alone or under one of the usual keys."""
    return StoredTensors(file.parent, ask("files.tables:read_torch", file))
