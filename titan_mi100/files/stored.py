"""Reads tensors from untrusted files, with the table of tensors that a child process made of them (see tables.py).

Only the child parses the files. Here only the bytes of values are read, at offsets that the child has checked. So a
hostile file can neither run code, nor lead to a file outside its folder, nor exhaust the memory.
"""

import math
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titan_mi100.errors import UserError
from titan_mi100.files.child import SECONDS, TOO_MUCH, call_in_child
from titan_mi100.files.plain import open_plain
from titan_mi100.files.tables import BYTES, Table

_DTYPES = {name: getattr(torch, name) for name in BYTES}
_USUAL = 0.01  # CPU seconds that a part may take without being suspicious; 20 times what was measured
_AS_INTEGERS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}  # bytes -> dtype; numpy has no bfloat16


class StoredTensors:
    """The tensors of a folder or a file, memory-mapped. Build it with one of the functions below.

    Attributes:
        kinds: name -> (shape, dtype) of each tensor.
        others: names of entries that are not tensors.
    """

    def __init__(self, folder: Path, table: Table, others: Iterable[str] = (), zipped: bool = False) -> None:
        """
        Args:
            folder: the folder with the files that the table names.
            table: see tables.py.
            others: names of entries that are not tensors.
            zipped: each part is a zip written by torch.save, as in a DCP folder; `read` asks the child to look into it.
        """
        self.folder, self.others = folder, list(others)
        self._table, self._zipped, self._seconds = table, zipped, 0.0
        self.kinds = {name: (tuple(shape), _DTYPES[dtype]) for name, (dtype, shape, _) in table.items()}

    def read(self, name: str, offset: Sequence[int], size: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """Read a box (a slice in every dimension) of a tensor. Few other bytes are read.

        Args:
            offset: where the box begins in the tensor, one number per dimension.
            size: the size of the box, one number per dimension.
            dtype: the dtype to cast to; None: as stored. Parts are cast one by one, so that memory never holds the
                whole box in two dtypes.

        Returns:
            A tensor of shape `size` in memory. It may share the mapped file's pages.

        Raises:
            UserError: a part is damaged or hostile, or the file has become shorter.
        """
        stored, _, parts = self._table[name]
        overlaps = []  # (part, first index, stop index) of the intersection of each part with the box, if not empty
        for part in parts:
            starts = [max(a, b) for a, b in zip(offset, part[0], strict=True)]
            stops = [min(a + n, b + m) for a, n, b, m in zip(offset, size, part[0], part[1], strict=True)]
            if all(start < stop for start, stop in zip(starts, stops, strict=True)):
                overlaps.append((part, starts, stops))
        places = [[begin, about] for (_, _, _, begin, about), _, _ in overlaps]
        if self._zipped and overlaps:
            zips = [[file, begin, length, stored, shape] for (_, shape, file, begin, length), _, _ in overlaps]
            places, seconds = call_in_child("files.tables:read_parts", self.folder, zips)
            self._seconds = max(0.0, self._seconds + seconds - len(zips) * _USUAL)
            if self._seconds > SECONDS:  # each part may stay below the child's limit, but not all together
                raise UserError(f"{self.folder}: {TOO_MUCH}; get it again from a source that you trust")
        # A box inside a single part is returned as a view of the mapped file; otherwise the parts are copied together.
        tensor = torch.empty(tuple(size), dtype=dtype or _DTYPES[stored]) if len(overlaps) != 1 else None
        for ((at, shape, file, _, _), starts, stops), (begin, strides) in zip(overlaps, places, strict=True):
            box = tuple(slice(a - b, c - b) for a, b, c in zip(starts, at, stops, strict=True))
            values = self._values(file, begin, stored, shape, strides, box).to(dtype or _DTYPES[stored])
            if tensor is None:
                return values
            tensor[tuple(slice(a - b, c - b) for a, b, c in zip(starts, offset, stops, strict=True))] = values
        assert tensor is not None
        return tensor

    def _values(
        self, file: str, begin: int, dtype: str, shape: list[int], strides: list[int] | None, box: tuple[slice, ...]
    ) -> Tensor:
        """Map the values of one part and return a box of them.

        Args:
            begin: first byte in the file.
            shape: the part's shape.
            strides: the strides in elements; None: contiguous.
            box: slices in the part.
        """
        nbytes, before = BYTES[dtype], begin % mmap.ALLOCATIONGRANULARITY  # a map must begin at a page
        count = math.prod(shape) if strides is None else 1 + int(np.dot(np.subtract(shape, 1), strides))
        # One map per read: the pages of a map stay in memory until it is closed, and tensors that view it keep it open.
        with open_plain(self.folder / file) as opened:
            try:
                length = before + count * nbytes
                mapped = mmap.mmap(opened.fileno(), length, access=mmap.ACCESS_COPY, offset=begin - before)
            except ValueError:  # the map would reach beyond the end of the file
                raise UserError(f"{self.folder / file}: became shorter while it was read; copy it again") from None
        steps = None if strides is None else [stride * nbytes for stride in strides]
        array = np.ndarray(shape, _AS_INTEGERS[nbytes], mapped, before, steps)
        return torch.from_numpy(np.require(array[box], requirements="A")).view(_DTYPES[dtype])


def open_hf(folder: Path) -> StoredTensors:
    """Open an HF folder. This and the next three raise UserError: a file is missing, damaged or hostile."""
    return StoredTensors(folder, call_in_child("files.tables:read_hf", folder))


def open_safetensors(file: Path) -> StoredTensors:
    """Open one safetensors file."""
    return StoredTensors(file.parent, call_in_child("files.tables:read_safetensors", file))


def open_dcp(folder: Path, files: Iterable[str] | None = None) -> StoredTensors:
    """Open a DCP folder.

    Args:
        files: the file names that its metadata may refer to (those of a manifest); None: any name in the folder.
    """
    table, others = call_in_child(
        "files.tables:read_dcp", folder / ".metadata", None if files is None else sorted(files)
    )
    return StoredTensors(folder, table, others, zipped=True)


def open_torch(file: Path) -> StoredTensors:
    """Open a file of torch.save that holds a dict of tensors, at top level or under one of tables.STATE_DICTS."""
    return StoredTensors(file.parent, call_in_child("files.tables:read_torch", file))
