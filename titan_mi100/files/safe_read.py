"""Reading torch checkpoints that came from elsewhere: no code of theirs is run, nothing outside their folder is read.

DCP's own reader unpickles `.metadata` and byte entries, which runs whatever they ask for, and opens any path that the
metadata names. torch's reader of one file inflates what is compressed in it, and before torch 2.9 or so believes the
size that the pickle gives a storage, beyond the end of its memory.
"""

import io
import math
import os
import pickle
import re
import sys
import threading
import zipfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from titan_mi100.errors import UserError
from titan_mi100.files.metadata_unpickler import MetadataUnpickler
from titan_mi100.files.plain import MIB, is_plain_name, plain_path, read_plain
from titan_mi100.wording import shortened

_LARGEST_METADATA = 128 * MIB  # 2,100 tensors in 64 shards each take 19
_LOADING = threading.Lock()  # what torch.load allows is the process's


class SafeReader(dcp.FileSystemReader):
    """Reads a DCP folder of any origin, for `dcp.load`.

    Tensors are read as with the stock reader, byte entries only with a `SafeLoadPlanner`. The caller compares
    `read_metadata().state_dict_metadata` with what it wants before it allocates anything by it.
    """

    def __init__(self, folder: Path, files: Collection[str] | None = None) -> None:
        """Take the folder; nothing is read yet.

        Args:
            files: the only names that the metadata may give, as of a manifest; None: any plain name in the folder.
        """
        super().__init__(folder)
        self._files = files
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        super().reset(checkpoint_id)
        if checkpoint_id:
            self._metadata = None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:  # no "kwargs", by which dcp.load tries a second file
        """The folder's metadata, every field of it checked; read once.

        Raises:
            UserError: it is missing, damaged, or holds anything that no DCP metadata needs.
        """
        if self._metadata is None:
            path = Path(self.path) / ".metadata"
            with _as_user_error(path):
                content = MetadataUnpickler(io.BytesIO(read_plain(path, _LARGEST_METADATA))).load()
                self._metadata = self._checked(content)
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            path = Path(self.path) / name
            with _as_user_error(path), self._path_of(name).open("rb") as file:
                for item in items:
                    self._read(path, file, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, path: Path, file: IO[bytes], item: ReadItem, planner: LoadPlanner) -> None:
        name, info = item.storage_index.fqn, self.storage_data[item.storage_index]
        part = _Part(file, info.offset, info.length)
        if item.type == LoadItemType.BYTE_IO:
            if not isinstance(planner, SafeLoadPlanner):
                raise UserError(f"{path}: {name!r} is no tensor, and would be unpickled; load it with load_safely")
            planner.load_bytes(item, io.BytesIO(part.read()))
            return
        tensor = self._tensor(item.storage_index, part)
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, start, length)
        target = planner.resolve_tensor(item).detach()
        if target.shape != tensor.shape:
            raise ValueError(f"{name!r}: {tuple(tensor.shape)} does not go into {tuple(target.shape)}")
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def read_chunk(self, index: MetadataIndex) -> Tensor:
        """A chunk of a tensor, whole, outside of `dcp.load`.

        Args:
            index: the tensor's name and the chunk's offsets, as the metadata has them.

        Raises:
            UserError: it is not what the metadata says.
        """
        info = self.read_metadata().storage_data[index]
        path = Path(self.path) / info.relative_path
        with _as_user_error(path), self._path_of(info.relative_path).open("rb") as file:
            return self._tensor(index, _Part(file, info.offset, info.length))

    def _tensor(self, index: MetadataIndex, part: "_Part") -> Tensor:
        name = index.fqn
        records = _records(part)
        tensor = _load_weights_only(part)
        entry = self.read_metadata().state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == index.offset)
        found = (tensor.shape, tensor.dtype, tensor.layout) if type(tensor) is Tensor else type(tensor)
        if found != (sizes, entry.properties.dtype, torch.strided):
            raise ValueError(f"{name!r} is {found}, not the {tuple(sizes)} of {entry.properties.dtype} of the metadata")
        if len(records) > 1 or tensor.untyped_storage().nbytes() > sum(records):  # torch 2.8 would read beyond them
            raise ValueError(f"{name!r} claims more bytes than are stored")
        return tensor

    def _path_of(self, name: str) -> Path:
        """The file that the metadata means; unlike an HF folder's it is never a link."""
        if not is_plain_name(name) or (self._files is not None and name not in self._files):
            raise ValueError(f"names {name!r}, which is not one of the checkpoint's files")
        path = Path(self.path) / name
        if path.is_symlink():
            raise ValueError(f"names {name!r}, which is a link")
        return plain_path(path)

    def _checked(self, metadata: Any) -> Metadata:
        if type(metadata) is not Metadata:
            raise TypeError(f"holds a {type(metadata).__name__}")
        file_sizes: dict[str, int] = {}
        for index, info in metadata.storage_data.items():
            if type(index) is not MetadataIndex or type(info) is not _StorageInfo:
                raise TypeError(f"places {type(index).__name__} by {type(info).__name__}")
            name = info.relative_path
            if name not in file_sizes:
                file_sizes[name] = self._path_of(name).stat().st_size
            if info.offset < 0 or info.length < 0 or info.offset + info.length > file_sizes[name]:
                raise ValueError(f"{index.fqn!r} lies outside of {name!r}")
            if info.transform_descriptors:
                raise ValueError(f"{index.fqn!r} is stored transformed, which is not supported")
        entries = metadata.state_dict_metadata
        for name, entry in entries.items():
            if type(name) is not str or type(entry) not in (TensorStorageMetadata, BytesStorageMetadata):
                raise TypeError(f"has an entry {name!r} of {type(entry).__name__}")
            if isinstance(entry, TensorStorageMetadata):
                _check_tensor(name, entry, metadata.storage_data)
            elif MetadataIndex(name) not in metadata.storage_data:
                raise ValueError(f"{name!r} is nowhere")
        for name, keys in (metadata.planner_data or {}).items():
            # an int is a place in a list, which the planner fills up to there
            if type(keys) is not tuple or not all(
                type(key) is str or (type(key) is int and 0 <= key < len(entries)) for key in keys
            ):
                raise TypeError(f"has an impossible path to {name!r}")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which unpickles no byte entry: its values are plain ones, or there is a refusal."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        if _records(value):
            raise ValueError(f"{name!r} is said to be no tensor, but holds some")
        content = _load_weights_only(value)
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], content)
        else:
            self.state_dict[name] = content


def load_safely(state: dict[str, Any], reader: SafeReader) -> None:
    """`dcp.load` of tensors and values in place, with every refusal a `UserError`. A collective."""
    try:
        dcp.load(state, storage_reader=reader, planner=SafeLoadPlanner())
    except CheckpointException as error:  # a BaseException, with what went wrong on every rank
        cause = next(cause for cause, _ in error.failures.values())
        raise cause if isinstance(cause, UserError) else UserError(f"{reader.path}: {_reason(cause)}") from None


def read_torch_file(path: Path) -> dict[Any, Any]:
    """What `torch.save` wrote of a dict, its tensors mapped from the file.

    Raises:
        UserError: it asks for anything but tensors and plain values, is damaged, or is no dict.
    """
    with _as_user_error(path):
        file = plain_path(path)
        with file.open("rb") as opened:
            _records(opened)
        content = _load_weights_only(file, mmap=True)
        if not isinstance(content, dict):
            raise TypeError(f"holds a {type(content).__name__}, not a dict of tensors")
        size = file.stat().st_size
        for tensor in _tensors(content):  # a view can repeat few bytes without end
            if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.nbytes > size:
                raise ValueError(f"holds a tensor of shape {tuple(tensor.shape)} without storing its values")
    return content


class _Part(io.RawIOBase):
    """Some bytes of a file as a file. torch's own view of a part cannot be sought from its end."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        room = memoryview(buffer)[: max(0, self._length - self._at)]
        count = self._file.readinto(room)  # type: ignore[attr-defined]
        self._at += count
        return count


def _records(file: Any) -> list[int]:
    """The sizes of the storages in what `torch.save` wrote; the file is left at its start.

    Refused is what torch's reader could take for something else than Python's does, and what is not stored as it is.
    """
    if file.read(4) != b"PK\x03\x04":
        raise ValueError("is not in the format (zip) that torch.save has written since torch 1.6")
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        names = [entry.filename.lower() for entry in entries]  # torch's reader does not tell their case apart
        if any(entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 for entry in entries):
            raise ValueError("is compressed, which torch.save never does")
        if sum(entry.file_size for entry in entries) > file.seek(0, os.SEEK_END):
            raise ValueError("claims more bytes than it has")
        if archive.comment or len({*names}) != len(names) or len({name.split("/")[0] for name in names}) != 1:
            raise ValueError("is a zip that torch.save did not write")
        for entry, name in zip(entries, names, strict=True):
            if name.split("/")[1:] == ["byteorder"] and archive.read(entry) != sys.byteorder.encode():
                raise ValueError("was written on a machine of the other byte order")
    file.seek(0)
    return [entry.file_size for entry, name in zip(entries, names, strict=True) if name.split("/")[1] == "data"]


def _load_weights_only(file: Any, mmap: bool = False) -> Any:
    with _LOADING:
        return _load(file, mmap)


def _load(file: Any, mmap: bool) -> Any:
    allowed = torch.serialization.get_safe_globals()  # what libraries added, such as classes that open process groups
    torch.serialization.clear_safe_globals()
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        text = str(error).rpartition("WeightsUnpickler error:")[2]
        named = re.search(r"GLOBAL `?([\w.]+)", text)
        raise ValueError(f"asks for {named[1]}, which no tensor needs" if named else text) from None
    finally:
        torch.serialization.add_safe_globals(allowed)


def _tensors(content: Any) -> Iterator[Tensor]:
    seen: set[int] = set()
    left = [content]
    while left:
        value = left.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left += value.values() if isinstance(value, dict) else value


def _check_tensor(name: str, entry: TensorStorageMetadata, places: dict[MetadataIndex, _StorageInfo]) -> None:
    volumes: dict[torch.Size, int] = {}
    for chunk in entry.chunks:
        if type(chunk) is not ChunkStorageMetadata or not len(chunk.offsets) == len(chunk.sizes) == len(entry.size):
            raise ValueError(f"{name!r} has a part of another kind")
        if any(at + size > whole for at, size, whole in zip(chunk.offsets, chunk.sizes, entry.size, strict=True)):
            raise ValueError(f"{name!r} has a part outside of itself")
        volumes[chunk.offsets] = math.prod(chunk.sizes)
        place = places.get(MetadataIndex(name, chunk.offsets))
        if place is None or volumes[chunk.offsets] * entry.properties.dtype.itemsize > place.length:
            raise ValueError(f"{name!r} is larger than what is stored of it")
    if sum(volumes.values()) != math.prod(entry.size) or _overlap(entry.chunks):
        raise ValueError(f"the parts of {name!r} are not the whole of it")


def _overlap(chunks: list[ChunkStorageMetadata]) -> bool:
    """Whether two of the boxes share a value."""
    starts = np.array([chunk.offsets for chunk in chunks], dtype=np.int64)  # (chunks, dimensions)
    stops = starts + np.array([chunk.sizes for chunk in chunks], dtype=np.int64)
    return any(
        np.all((starts[i] < stops[i + 1 :]) & (starts[i + 1 :] < stops[i]), axis=1).any()
        for i in range(len(chunks) - 1)
    )


@contextmanager
def _as_user_error(path: Path) -> Iterator[None]:
    """Whatever a file that is cut, damaged or hostile leads to."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error}; name a whole checkpoint") from None
    except Exception as error:
        raise UserError(
            f"{path}: cannot be read safely: {_reason(error)}; it is damaged, or was made to do harm: get it again "
            "from a source that you trust"
        ) from None


def _reason(error: BaseException) -> str:
    return shortened(" ".join(str(error).split()) or type(error).__name__, 300)
