"""DCP folders and files of `torch.save` as weights: reading them, and writing them tensor by tensor."""

import pickle
import tempfile
from collections.abc import Collection, Iterable
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
from titan_mi100.errors import UserError
from titan_mi100.files.safe_read import SafeReader, read_torch_file
from titan_mi100.weights.base import EMBEDDING, Kind, LoadedWeights, Weights, box, raw_bytes

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
        return self._assemble(name, offset, size, self.kinds[name].dtype)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """As of Weights; cast chunk by chunk, so that the whole of it is in memory in one dtype only."""
        shape, stored = self.kinds[name]
        return self._assemble(name, (0,) * len(shape), shape, dtype or stored)

    def _assemble(self, name: str, offset: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A box of a tensor, from the chunks that have a part in it."""
        whole = torch.empty(size, dtype=dtype)
        for chunk in self._chunks[name]:
            # the intersection of the wanted box and the chunk
            starts = [max(a, b) for a, b in zip(offset, chunk.offsets, strict=True)]
            stops = [min(a + n, b + m) for a, n, b, m in zip(offset, size, chunk.offsets, chunk.sizes, strict=True)]
            lengths = [stop - start for start, stop in zip(starts, stops, strict=True)]
            if any(length <= 0 for length in lengths):
                continue
            stored = self._reader.read_chunk(MetadataIndex(self._prefix + name, chunk.offsets))
            part = stored[box((a - b for a, b in zip(starts, chunk.offsets, strict=True)), lengths)]
            if part.shape == size:
                return part.to(dtype)
            whole[box((a - b for a, b in zip(starts, offset, strict=True)), lengths)] = part
        return whole


def read_torch_weights(path: Path) -> LoadedWeights:
    """The weights of a file that `torch.save` wrote: a dict of tensors, alone or under one of the usual keys.

    Raises:
        UserError: it is damaged, asks for anything but tensors and plain values, or holds no such dict.
    """
    content = read_torch_file(path)
    found: dict[Any, Any] = next((content[key] for key in _STATE_DICTS if isinstance(content.get(key), dict)), content)
    for name, tensor in found.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise UserError(
                f"{path}: {name!r} is no tensor by its name but a {type(tensor).__name__}; name a file that holds a "
                f"dict of tensors, alone or under {', '.join(_STATE_DICTS)}"
            )
    prefix = wrapper_prefix(found)
    tensors = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
    return LoadedWeights(path, tensors)


def write_dcp(files: HashedFiles, folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a DCP folder by `files`, which syncs them and keeps their hashes; each tensor is one chunk.

    The format is that of DCP's own writer, which cannot take tensors one after the other: it holds what it has written
    until the end (torch 2.8).
    """
    metadata, file = Metadata({}, {}, {}), "__0_0.distcp"
    with files.create_stream(folder / file, "wb") as stream:
        for name, tensor in tensors:
            start, begin = torch.Size([0] * tensor.ndim), stream.tell()
            # a tensor that is a part of another would be saved with all of it
            torch.save(tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone(), stream)
            place = _StorageInfo(file, begin, stream.tell() - begin)
            metadata.storage_data[MetadataIndex(name, start, 0)] = place
            properties, chunks = TensorProperties(dtype=tensor.dtype), [ChunkStorageMetadata(start, tensor.shape)]
            metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
            metadata.planner_data[name] = (name,)
    with files.create_stream(folder / ".metadata", "wb") as stream:
        pickle.dump(metadata, stream)


def write_torch(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a dict of tensors with `torch.save`. They are collected in mapped files, not in memory."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        mapped: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if tensor.numel():
                path = Path(scratch) / str(len(mapped))
                path.write_bytes(raw_bytes(tensor).numpy().data)
                tensor = torch.from_file(str(path), size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
            mapped[name] = tensor
        torch.save(mapped, folder / MODEL_FILE)
