"""DCP folders and files of `torch.save` as weights: reading them, and writing them tensor by tensor."""

import pickle
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

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
from titan_mi100.files.stored import open_dcp, open_torch
from titan_mi100.weights.base import EMBEDDING, StoredWeights, raw_bytes

MODEL_FILE = "model.pt"
_WRAPPERS = ("model.", "state_dict.", "module.", "_orig_mod.")


def _without_wrapper(stored: Collection[str]) -> dict[str, str]:
    """The stored names by those without the prefix that other trainers put before the names of all weights."""
    prefix = next((prefix for prefix in _WRAPPERS if prefix + EMBEDDING in stored), "")
    return {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}


class DCPWeights(StoredWeights):
    """The weights of a DCP folder, whoever wrote it. Entries that are no tensors are ignored."""

    def __init__(self, folder: str | Path, only_weights: bool = True, files: Collection[str] | None = None) -> None:
        """Look at the folder's metadata.

        Args:
            only_weights: leave out optimizer state and what ranks keep for themselves.
            files: the only ones that are read, as of a manifest; None: any of the folder.

        Raises:
            UserError: it is no DCP folder, damaged, or holds anything that no DCP metadata needs.
        """
        stored = open_dcp(Path(folder), files)
        names = _without_wrapper([*stored.kinds, *stored.others])
        names = {name: own for name, own in names.items() if own in stored.kinds}
        kept = {name: own for name, own in names.items() if is_weight(name) or not only_weights}
        super().__init__(Path(folder), stored, kept)


def read_torch_weights(path: Path) -> StoredWeights:
    """The weights of a file that `torch.save` wrote: a dict of tensors, alone or under one of the usual keys.

    Raises:
        UserError: it is damaged, asks for anything but tensors and plain values, or holds no such dict.
    """
    stored = open_torch(path)
    return StoredWeights(path, stored, _without_wrapper(stored.kinds))


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
