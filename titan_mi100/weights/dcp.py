"""Reads weights from DCP folders and files of `torch.save`, and writes them tensor by tensor."""

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
from titan_mi100.checkpoint.keys import OPTIMIZER, is_weight
from titan_mi100.files.stored import open_dcp, open_torch
from titan_mi100.optim.formats import join_24_bits
from titan_mi100.shapes.families import own_name
from titan_mi100.weights.base import EMBEDDING, Box, StoredWeights, Weights, raw_bytes

MODEL_FILE = "model.pt"
_WRAPPERS = ("model.", "state_dict.", "module.", "_orig_mod.")  # DDP and torch.compile add the last two


def _without_wrapper(stored: Collection[str]) -> dict[str, str]:
    """HF name -> stored name. Removes a prefix that other trainers put before the names of all weights.

    The prefix is recognised by the embedding's name. HF names themselves begin with "model.", so a prefix cannot be
    removed without looking.
    """
    embeddings = [name for name in stored if name.endswith("embed_tokens.weight")]
    prefixes = (
        p for p in _WRAPPERS for name in embeddings if name.startswith(p) and own_name(name[len(p) :]) == EMBEDDING
    )
    prefix = next(prefixes, "")
    return {name.removeprefix(prefix): name for name in stored if name.startswith(prefix)}


class DCPWeights(StoredWeights):
    """The weights of a DCP folder, written by us or by another trainer. Entries that are not tensors are ignored."""

    def __init__(self, folder: str | Path, only_weights: bool = True, files: Collection[str] | None = None) -> None:
        """Read the folder's metadata.

        Args:
            only_weights: leave out optimizer state and per-rank state.
            files: read only these files (those of a manifest); None: any file of the folder.

        Raises:
            UserError: it is not a DCP folder, it is damaged, or its metadata has classes that DCP never writes.
        """
        stored = open_dcp(Path(folder), files)
        names = _without_wrapper([*stored.kinds, *stored.others])
        names = {name: own for name, own in names.items() if own in stored.kinds}
        kept = {name: own for name, own in names.items() if is_weight(name) or not only_weights}
        super().__init__(Path(folder), stored, kept)
        self._residuals = {
            name: own
            for name, (shape, dtype) in self.kinds.items()
            if stored.kinds.get(own := f"{OPTIMIZER}{name}.residual") == (shape, torch.int8) and dtype is torch.bfloat16
        }

    def read(self, name: str, shape: torch.Size, offset: Box, size: Box, exactly: bool = False) -> Tensor:
        weight = super().read(name, shape, offset, size)
        if not exactly or name not in self._residuals:
            return weight
        residual = self._stored.read(self._residuals[name], offset, size)
        return join_24_bits(weight, residual, torch.empty(size))

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """As in StoredWeights; of a weight with 24 bits, as in Weights."""
        return Weights.tensor(self, name, dtype) if name in self._residuals else super().tensor(name, dtype)


def read_torch_weights(path: Path) -> StoredWeights:
    """The weights of a file of `torch.save`: a dict of tensors, at top level or under one of tables.STATE_DICTS.

    Raises:
        UserError: the file is damaged, its pickle needs other classes than tensors and plain values, or it holds no
            such dict.
    """
    stored = open_torch(path)
    return StoredWeights(path, stored, _without_wrapper(stored.kinds))


def write_dcp(files: HashedFiles, folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a DCP folder. Each tensor is one chunk.

    The format is that of DCP's own writer. That writer needs all tensors in memory until the end (torch 2.8).

    Args:
        files: writes the files, syncs them and keeps their hashes.
        tensors: (HF name, tensor), one after the other.
    """
    metadata, file = Metadata({}, {}, {}), "__0_0.distcp"  # the name that DCP gives to rank 0's file
    with files.create_stream(folder / file, "wb") as stream:
        for name, tensor in tensors:
            start, begin = torch.Size([0] * tensor.ndim), stream.tell()  # offset in the tensor; byte in the file
            # torch.save stores a tensor's whole storage, so a view is copied first.
            torch.save(tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone(), stream)
            storage = _StorageInfo(file, begin, stream.tell() - begin)
            metadata.storage_data[MetadataIndex(name, start, 0)] = storage
            properties, chunks = TensorProperties(dtype=tensor.dtype), [ChunkStorageMetadata(start, tensor.shape)]
            metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, tensor.shape, chunks)
            metadata.planner_data[name] = (name,)
    with files.create_stream(folder / ".metadata", "wb") as stream:
        pickle.dump(metadata, stream)


def write_torch(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a dict of tensors with `torch.save`.

    torch.save needs all tensors at once. They are collected in memory-mapped temporary files instead of memory.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        mapped: dict[str, Tensor] = {}
        for name, tensor in tensors:
            if tensor.numel():  # an empty file cannot be mapped
                path = Path(scratch) / str(len(mapped))
                path.write_bytes(raw_bytes(tensor).numpy().data)
                tensor = torch.from_file(str(path), size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
            mapped[name] = tensor
        torch.save(mapped, folder / MODEL_FILE)
