"""DCP folders and files of `torch.save` as weights: reading them, and writing them tensor by tensor."""

import os
import pickle
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titan_mi100.checkpoint.hashed_files import HashedFiles
from titan_mi100.checkpoint.keys import is_weight
from titan_mi100.checkpoint.sealed import Written
from titan_mi100.errors import UserError
from titan_mi100.files.safe_read import SafeReader, read_torch_file
from titan_mi100.weights.base import EMBEDDING, Kind, Piece, Weights, raw_bytes

MODEL_FILE = "model.pt"
_WRAPPERS = ("model.", "state_dict.", "module.", "_orig_mod.")
_STATE_DICTS = ("model", "state_dict", "model_state_dict")  # under which trainers keep the weights in a file


def wrapper_prefix(names: Collection[str]) -> str:
    """The prefix that other trainers put before the names of all weights; empty: none."""
    return next((prefix for prefix in _WRAPPERS if prefix + EMBEDDING in names), "")


class DCPWeights(Weights):
    """The weights of a DCP folder, whoever wrote it. Entries that are no tensors are ignored."""

    def __init__(self, folder: str | Path, only_weights: bool = True) -> None:
        """Read the folder's metadata.

        Args:
            only_weights: leave out optimizer state and what ranks keep for themselves.

        Raises:
            UserError: it is no DCP folder, damaged, or holds anything that no DCP metadata needs.
        """
        self.source = Path(folder)
        self._reader = SafeReader(self.source)
        entries = self._reader.read_metadata().state_dict_metadata
        self._chunks: dict[str, list[ChunkStorageMetadata]] = {}
        self.kinds = {}
        self._prefix = wrapper_prefix(entries)
        for stored, entry in entries.items():
            name = stored.removeprefix(self._prefix)
            if (
                isinstance(entry, TensorStorageMetadata)
                and stored.startswith(self._prefix)
                and (is_weight(name) or not only_weights)
            ):
                self.kinds[name] = Kind(tuple(entry.size), entry.properties.dtype)
                self._chunks[name] = sorted(entry.chunks, key=lambda chunk: tuple(chunk.offsets))

    def read(self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        whole: Tensor | None = None
        for chunk in self._chunks[name]:
            # the intersection of the wanted box and the chunk
            starts = [max(a, b) for a, b in zip(offset, chunk.offsets, strict=True)]
            stops = [min(a + n, b + m) for a, n, b, m in zip(offset, size, chunk.offsets, chunk.sizes, strict=True)]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            stored = self._read_chunk(name, chunk)
            inner = stored[tuple(slice(a - b, z - b) for a, z, b in zip(starts, stops, chunk.offsets, strict=True))]
            if inner.shape == size:
                return inner
            if whole is None:
                whole = torch.empty(size, dtype=stored.dtype)
            whole[tuple(slice(a - b, z - b) for a, z, b in zip(starts, stops, offset, strict=True))] = inner
        return torch.empty(size, dtype=self.kinds[name].dtype) if whole is None else whole

    def parts(self, name: str) -> Iterator[Tensor]:
        chunks = self._chunks[name]
        if any(chunk.sizes[1:] != self.kinds[name].shape[1:] for chunk in chunks):  # split in columns, as by TP
            yield self.tensor(name)
        else:
            yield from (self._read_chunk(name, chunk) for chunk in chunks)

    def _read_chunk(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        return self._reader.read_chunk(MetadataIndex(self._prefix + name, chunk.offsets))


class TorchWeights(Weights):
    """The weights of a file that `torch.save` wrote: a dict of tensors, alone or under one of the usual keys."""

    def __init__(self, path: str | Path) -> None:
        """Map the file.

        Raises:
            UserError: it is damaged, asks for anything but tensors and plain values, or holds no such dict.
        """
        self.source = Path(path)
        content = read_torch_file(self.source)
        inside = next((name for name in _STATE_DICTS if isinstance(content.get(name), dict)), None)
        found: dict[Any, Any] = content if inside is None else content[inside]
        for name, tensor in found.items():
            if not isinstance(name, str) or not isinstance(tensor, Tensor):
                what = f"a {type(tensor).__name__}" if isinstance(name, str) else "under a key that is no name"
                raise UserError(
                    f"{path}: {name!r} is no tensor by its name but {what}; name a file that holds a dict of tensors, "
                    f"alone or under {', '.join(_STATE_DICTS)}"
                )
        prefix = wrapper_prefix(found)
        self._tensors: dict[str, Tensor] = {
            name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)
        }
        self.kinds = {name: Kind(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def read(self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return self._tensors[name].detach()[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]


def write_dcp(folder: Path, kinds: Mapping[str, Kind], pieces: Iterable[Piece]) -> Written:
    """Write a DCP folder, synced; returns its files.

    Args:
        kinds: of all tensors.
        pieces: of every tensor, in order; each becomes a chunk, as a rank's shard is one.

    The format is that of DCP's own writer, which cannot take tensors one after the other: it holds what it has written
    until the end (torch 2.8).
    """
    entries, places = {}, {}
    files, file = HashedFiles(), "__0_0.distcp"
    with files.create_stream(folder / file, "wb") as stream:
        for name, group in groupby(pieces, lambda piece: piece[0]):
            chunks: list[ChunkStorageMetadata] = []
            row = 0
            for _, rows in group:
                offsets = torch.Size((row, *[0] * (rows.ndim - 1)) if rows.ndim else ())
                begin = stream.tell()
                torch.save(rows, stream)
                places[MetadataIndex(name, offsets, len(chunks))] = _StorageInfo(file, begin, stream.tell() - begin)
                chunks.append(ChunkStorageMetadata(offsets, rows.shape))
                row += len(rows) if rows.ndim else 0
            kind = kinds[name]
            entries[name] = TensorStorageMetadata(TensorProperties(dtype=kind.dtype), torch.Size(kind.shape), chunks)
    metadata = Metadata(dict(entries), {name: (name,) for name in kinds}, places)
    with files.create_stream(folder / ".metadata", "wb") as stream:
        pickle.dump(metadata, stream)
    return files.written


def write_torch(folder: Path, kinds: Mapping[str, Kind], pieces: Iterable[Piece]) -> None:
    """Write a dict of tensors with `torch.save`, synced. They are collected in mapped files, not in memory."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch, (folder / MODEL_FILE).open("wb") as output:
        tensors: dict[str, Tensor] = {}
        for name, group in groupby(pieces, lambda piece: piece[0]):
            path, (shape, dtype) = Path(scratch) / str(len(tensors)), kinds[name]
            with path.open("wb") as file:
                file.writelines(raw_bytes(rows).numpy().data for _, rows in group)
            count = torch.Size(shape).numel()
            mapped = torch.from_file(str(path), size=count, dtype=dtype) if count else torch.empty(0, dtype=dtype)
            tensors[name] = mapped.view(shape)
        torch.save(tensors, output)
        output.flush()
        os.fsync(output.fileno())
