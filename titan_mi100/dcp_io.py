"""DCP folders and `torch.save` files as weights: reading parts of them, and writing them as a stream."""

import os
import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titan_mi100.durable import HashingStream
from titan_mi100.errors import UserError
from titan_mi100.safe_read import SafeReader, read_torch_file
from titan_mi100.sealed import Written
from titan_mi100.state_keys import is_weight
from titan_mi100.weights import EMBEDDING, Kind, Weights

_WRAPPERS = ("model.", "state_dict.", "module.", "_orig_mod.")
_STATE_DICTS = ("model", "state_dict", "model_state_dict")  # under which trainers keep the weights in a file


class HashedFiles(FileSystem):
    """What DCP and we write, synced; keeps each file's size and SHA-256."""

    def __init__(self) -> None:
        self.written: Written = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[Any]:
        with Path(path).open(mode) as file:
            stream = HashingStream(file)  # type: ignore[arg-type]
            try:
                yield stream
            except Exception as error:
                raise stream.error or error from None
            file.flush()
            os.fsync(file.fileno())
        self.written[Path(path).name] = stream.size, stream.hexdigest()

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)

    def write(self, path: Path, content: bytes) -> None:
        with self.create_stream(path, "wb") as stream:
            stream.write(content)


def wrapped_in(names: Collection[str]) -> str:
    """What other trainers put before the names of all weights; empty: nothing."""
    return next((prefix for prefix in _WRAPPERS if prefix + EMBEDDING in names), "")


class DCPWeights(Weights):
    """The weights of a DCP folder, whoever wrote it; what else it holds is not looked at."""

    def __init__(self, folder: str | Path, only_weights: bool = True) -> None:
        """Look at the folder.

        Args:
            only_weights: leave out optimizer state and what ranks keep for themselves.

        Raises:
            UserError: it is no DCP folder, damaged, or holds anything that none needs.
        """
        self.source = Path(folder)
        self._reader = SafeReader(self.source)
        entries = self._reader.read_metadata().state_dict_metadata
        self._chunks: dict[str, list[ChunkStorageMetadata]] = {}
        self.kinds = {}
        self._prefix = wrapped_in(entries)
        for stored, entry in entries.items():
            name = stored.removeprefix(self._prefix)
            if (
                isinstance(entry, TensorStorageMetadata)
                and stored.startswith(self._prefix)
                and (is_weight(name) or not only_weights)
            ):
                self.kinds[name] = Kind(tuple(entry.size), entry.properties.dtype)
                self._chunks[name] = entry.chunks
        self._held: dict[MetadataIndex, Tensor] = {}  # a block of rows may end inside a chunk

    def read(self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        whole: Tensor | None = None
        for chunk in self._chunks[name]:
            # the box that the part and the chunk have in common
            starts = [max(a, b) for a, b in zip(offset, chunk.offsets, strict=True)]
            stops = [min(a + n, b + m) for a, n, b, m in zip(offset, size, chunk.offsets, chunk.sizes, strict=True)]
            if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
                continue
            stored = self._chunk(name, chunk.offsets)
            inner = stored[tuple(slice(a - b, z - b) for a, z, b in zip(starts, stops, chunk.offsets, strict=True))]
            if inner.shape == size:
                return inner
            if whole is None:
                whole = torch.empty(size, dtype=stored.dtype)
            whole[tuple(slice(a - b, z - b) for a, z, b in zip(starts, stops, offset, strict=True))] = inner
        return torch.empty(size, dtype=self.kinds[name].dtype) if whole is None else whole

    def _chunk(self, name: str, offsets: torch.Size) -> Tensor:
        index = MetadataIndex(self._prefix + name, offsets)
        held = self._held  # other threads read, and replace it
        if index not in held:
            # of columns, each block of rows needs all: the tensor stays; of rows, the one that was read last
            in_columns = any(place for chunk in self._chunks[name] for place in chunk.offsets[1:])
            kept = {other: chunk for other, chunk in held.items() if in_columns and other.fqn == index.fqn}
            held = self._held = {**kept, index: self._reader.read_chunk(index)}
        return held[index]


class TorchWeights(Weights):
    """The weights of a file that `torch.save` wrote: a dict of tensors, or one under a usual name."""

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
        prefix = wrapped_in(found)
        self._tensors: dict[str, Tensor] = {
            name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)
        }
        self.kinds = {name: Kind(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}

    def read(self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return self._tensors[name].detach()[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]


def write_dcp(folder: Path, kinds: Mapping[str, Kind], blocks: Iterable[tuple[str, int, Tensor]]) -> Written:
    """Write a DCP folder, synced; returns its files.

    Args:
        kinds: of all tensors.
        blocks: (name, first row, rows) of every tensor; each becomes a chunk, as a rank's shard is one.

    The form is that of DCP's own writer, which has no way to get tensors as a stream: planned by name, it holds what it
    has written until the end (torch 2.8).
    """
    chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in kinds}
    places: dict[MetadataIndex, _StorageInfo] = {}
    files, file = HashedFiles(), "__0_0.distcp"
    with files.create_stream(folder / file, "wb") as stream:
        for name, row, tensor in blocks:
            offsets = torch.Size((row, *[0] * (tensor.ndim - 1)) if tensor.ndim else ())
            begin = stream.tell()
            torch.save(_alone(tensor.contiguous()), stream)
            places[MetadataIndex(name, offsets, len(chunks[name]))] = _StorageInfo(file, begin, stream.tell() - begin)
            chunks[name].append(ChunkStorageMetadata(offsets, tensor.shape))
    entries = {
        name: TensorStorageMetadata(TensorProperties(dtype=kind.dtype), torch.Size(kind.shape), chunks[name])
        for name, kind in kinds.items()
    }
    metadata = Metadata(dict(entries), {name: (name,) for name in kinds}, places)
    with files.create_stream(folder / ".metadata", "wb") as stream:
        pickle.dump(metadata, stream)
    return files.written


def _alone(tensor: Tensor) -> Tensor:
    """The same memory as a storage of its own: torch.save would take along the whole storage of a view."""
    begin = tensor.storage_offset() * tensor.itemsize
    storage = tensor.untyped_storage()[begin : begin + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())  # type: ignore[arg-type]


def write_torch(path: Path, kinds: Mapping[str, Kind], blocks: Iterable[tuple[str, int, Tensor]]) -> None:
    """Write a dict of tensors with `torch.save`, synced. They are collected in a file beside it, not in memory."""
    scratch = path.with_name(f"{path.name}.scratch")
    total = sum(-(-kind.nbytes // 64) * 64 for kind in kinds.values())
    storage = torch.UntypedStorage.from_file(str(scratch), shared=True, nbytes=max(total, 64))
    try:
        tensors, at = {}, 0
        for name, kind in kinds.items():
            tensor = torch.empty(kind.shape, dtype=kind.dtype, device="meta")  # for its strides
            part = storage[at : at + kind.nbytes]
            tensor = torch.empty(0, dtype=kind.dtype).set_(part, 0, tensor.shape, tensor.stride())  # type: ignore[arg-type]
            tensors[name] = tensor
            at += -(-kind.nbytes // 64) * 64
        for name, row, rows in blocks:
            (tensors[name][row : row + len(rows)] if rows.ndim else tensors[name]).copy_(rows)
        with path.open("wb") as file:
            torch.save(tensors, file)
            file.flush()
            os.fsync(file.fileno())
    finally:
        scratch.unlink(missing_ok=True)
