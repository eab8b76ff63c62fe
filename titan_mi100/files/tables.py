"""Locates the tensors in untrusted files: name, dtype, shape, file and offset. Imports no torch.

Formats: safetensors, DCP folders, files of `torch.save`. Runs in the child process (child.py), whose limits bound the
memory and time that a file can cost. Pickles are loaded into inert objects only; no code of theirs is run.

A table is `{name: [dtype, shape, parts]}`. A part is `[offset in the tensor, size, file, first byte, x]`, where x is
the strides in elements (None: contiguous) or, for DCP, the number of bytes of a zip that `read_parts` looks into.
"""

import io
import json
import math
import mmap
import os
import pickle
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from titan_mi100.errors import UserError
from titan_mi100.files.child import TOO_MUCH, raise_limits
from titan_mi100.files.plain import MIB, is_plain_name, open_plain, read_object, without_contradictions
from titan_mi100.files.schema import validated
from titan_mi100.wording import shortened, shown, some

Table = dict[str, list[Any]]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STATE_DICTS = ("model", "state_dict", "model_state_dict")  # keys under which trainers store the weights in a file
_LARGEST = 384 * MIB  # largest header or .metadata; 172 bytes per part: a 32B model on 512 ranks needs 178 MiB
_MOST_DIMS = 32  # dimensions of a tensor; numpy 1 allows no more

BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
# safetensors' names of the dtypes that can be trained
HF_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Class names in pickles, without their suffix "Storage" -> dtype. "": an untyped storage; the tensor names the dtype.
_STORAGES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "Untyped": "",
}  # fmt: skip


# ---- safetensors


def read_hf(folder: str) -> Table:
    """The tensors of an HF folder: one file, or shards with an index.

    Raises:
        UserError: a file is missing, is not a complete safetensors file, or holds other tensors than the index says.
    """
    root = Path(folder)
    if not os.path.lexists(root / INDEX):
        return read_safetensors(str(root / SINGLE))
    index = root / INDEX
    if os.path.lexists(root / SINGLE):
        raise UserError(f"{root}: has both {SINGLE} and {INDEX}; programs differ in which they read; remove one")
    weight_map = read_object(index, "download it again", _LARGEST).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: not an index of safetensors files: it has no weight_map; download it again")
    table: Table = {}
    promised: dict[str, set[str]] = {}
    for name, file in weight_map.items():
        if not is_plain_name(file):
            raise UserError(f"{index}: file name {shown(file)} is not inside the folder; download it again")
        promised.setdefault(file, set()).add(name)
    for file, names in promised.items():
        held = read_safetensors(str(root / file))
        if odd := sorted(names ^ held.keys()):
            raise UserError(f"{root / file}: holds other tensors than {INDEX} says: {some(odd)}; correct it")
        table |= held
    return table


def read_safetensors(file: str) -> Table:
    """The tensors of one safetensors file. As the format demands, they must fill the file without gaps.

    Layout: 8 bytes with the header's length (little-endian), the header in JSON, then the values.
    """
    path = Path(file)
    with _as_user_error(path, "not a complete safetensors file", "download it again"), open_plain(path) as opened:
        length, size = _from_little_endian(opened.read(8)), os.fstat(opened.fileno()).st_size
        header = json.loads(_read_bounded(opened, 8, length, size).decode(), object_pairs_hook=without_contradictions)
        validated(header.pop("__metadata__", {}), dict[str, str], "__metadata__")
        end, table = 8 + length, {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            shape, (begin, stop) = _shape(entry["shape"]), entry["data_offsets"]
            if (dtype := HF_DTYPES.get(entry["dtype"])) is None:
                problem = f"{shortened(name)} has dtype {shown(entry['dtype'])}, which cannot be trained"
                raise UserError(f"{path}: {problem}; if its weights are quantized, use the model's unquantized folder")
            fits = 8 + length + begin == end and stop - begin == math.prod(shape) * BYTES[dtype]
            if not _are_sizes(begin, stop) or not fits:
                raise ValueError(f"{name} has too few or too many bytes, or does not begin where the one before ends")
            table[name] = [dtype, shape, [[[0] * len(shape), shape, path.name, end, None]]]
            end += stop - begin
        if end != size:
            raise ValueError(f"has {size:,} bytes, its header says {end:,}")
    return table


# ---- pickles: a pickle can call any function that it names; here each name becomes an inert class


class _Object:
    """Stands for the result of a class or call in a pickle. It stores the arguments and the state, and runs nothing."""

    __slots__ = ("arguments", "state")
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "_Object":
        made = super().__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Dict(dict[Any, Any]):
    """Stands for an OrderedDict; attributes that a pickle sets on it are dropped."""

    def __setstate__(self, state: Any) -> None:
        pass


# The classes in a DCP `.metadata`, and the fields that they may have.
_FIELDS = {
    "Metadata": {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"},
    "TensorStorageMetadata": {"properties", "size", "chunks"},
    "ChunkStorageMetadata": {"offsets", "sizes"},
    "BytesStorageMetadata": set(),
    "MetadataIndex": {"fqn", "offset", "index"},
    "StorageMeta": {"checkpoint_id", "save_id", "load_id", "modules"},
    "_StorageInfo": {"relative_path", "offset", "length", "transform_descriptors"},
}
_DCP = "torch.distributed.checkpoint"
# Every global that a pickle may name -> the inert class that stands for it. All other globals are refused.
_GLOBALS: dict[tuple[str, str], Any] = {
    (module, name): _Dict if name == "OrderedDict" else type(name, (_Object,), {"__slots__": ()})
    for module, names in {
        "torch": ("Size", "device", *BYTES, *(f"{kind}Storage" for kind in _STORAGES)),
        "torch.storage": ("UntypedStorage",),
        "torch.serialization": ("_get_layout",),
        "torch._utils": ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
        "collections": ("OrderedDict", "Counter"),
        **dict.fromkeys(("builtins", "__builtin__"), ("set", "bytearray", "complex")),
        "_codecs": ("encode",),
        f"{_DCP}.metadata": (*(_FIELDS.keys() - {"_StorageInfo"}), "TensorProperties", "_MEM_FORMAT_ENCODING"),
        f"{_DCP}.filesystem": ("_StorageInfo",),
        **dict.fromkeys(("pathlib", "pathlib._local"), ("PosixPath", "PurePosixPath", "WindowsPath")),
    }.items()
    for name in names
}


def _member(owner: Any, name: Any) -> _Object:
    """Stands for builtins.getattr, by which Python 3.11.2 (Debian 12) pickles an enum's member. Else it is refused."""
    made = _GLOBALS[f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"]
    if owner is not made or not (isinstance(name, str) and name.startswith("TORCH_")):
        raise pickle.UnpicklingError("asks for builtins.getattr, which no checkpoint needs")
    inert: _Object = made(name)
    return inert


_GLOBALS["builtins", "getattr"] = _member


class _Unpickler(pickle.Unpickler):
    """Loads a pickle into inert objects."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise pickle.UnpicklingError(f"asks for {module}.{name}, which no checkpoint needs")
        return _GLOBALS[module, name]

    def persistent_load(self, pid: Any) -> Any:
        return _Object(pid)


def _fields_of(made: Any, kind: str) -> Any:
    """The fields of an inert object. Raises TypeError: it is not of class `kind`, or has unknown fields."""
    if type(made).__name__ != kind or not isinstance(made, _Object):
        raise TypeError(f"holds a {type(made).__name__} instead of a {kind}")
    fields = _FIELDS.get(kind)
    if fields is not None and not (made.state or {}).keys() <= fields:
        raise TypeError(f"has a {kind} with unknown fields")
    return made.state


def _call_arguments(made: Any, *names: str) -> tuple[Any, ...]:
    """The arguments of a call in the pickle. Raises TypeError: it calls none of `names`."""
    if not isinstance(made, _Object) or type(made).__name__ not in names or made.state is not None:
        raise TypeError(f"holds a {type(made).__name__} instead of {' or '.join(names)}")
    return made.arguments


def _size(made: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    (numbers,) = _call_arguments(made, "Size")
    return tuple(_shape(numbers))


def _dtype(kind: Any) -> str:
    if not isinstance(kind, type) or kind.__name__ not in BYTES:
        raise TypeError(f"holds a {getattr(kind, '__name__', kind)!r} instead of a dtype")
    return kind.__name__


def _from_little_endian(content: bytes) -> int:
    return int.from_bytes(content, "little")


def _are_sizes(*numbers: Any) -> bool:
    return all(type(number) is int and 0 <= number < 2**63 for number in numbers)


def _shape(numbers: Any) -> list[int]:
    """The numbers as a list. Raises ValueError: numpy and torch cannot have this shape."""
    fits = type(numbers) in (list, tuple) and len(numbers) <= _MOST_DIMS and _are_sizes(*numbers)
    if not fits or math.prod(number or 1 for number in numbers) >= 2**59:  # with 8 bytes each, 2^62 bytes
        raise ValueError("has an impossible size")
    return list(numbers)


# ---- DCP folders


def read_dcp(file: str, files: list[str] | None) -> tuple[Table, list[str]]:
    """The tensors of a DCP folder, and the names of its entries that are not tensors.

    Args:
        file: the folder's `.metadata`.
        files: the file names that the metadata may refer to (those of a manifest); None: any name in the folder.
    """
    path = Path(file)
    with _as_user_error(path), open_plain(path) as opened:
        if files is not None and path.name not in files:
            raise ValueError("the manifest does not name it")
        size = os.fstat(opened.fileno()).st_size
        metadata = _fields_of(_Unpickler(io.BytesIO(_read_bounded(opened, 0, size, size))).load(), "Metadata")
        places = _places(path.parent, metadata["storage_data"], files)
        table: Table = {}
        others = []
        for name, entry in metadata["state_dict_metadata"].items():
            if type(name) is not str:
                raise TypeError(f"has an entry {name!r}")
            if type(entry).__name__ == "BytesStorageMetadata":
                others.append(name)
                continue
            fields = _fields_of(entry, "TensorStorageMetadata")
            dtype, layout, *_ = _fields_of(fields["properties"], "TensorProperties")
            if _call_arguments(layout, "_get_layout") != ("torch.strided",):
                raise ValueError(f"{name!r} is not a dense tensor")
            shape = _size(fields["size"])
            parts: list[list[Any]] = []
            for chunk in fields["chunks"]:
                box = _fields_of(chunk, "ChunkStorageMetadata")
                offset, sizes = _size(box["offsets"]), _size(box["sizes"])
                location = places.get((name, offset))
                if location is None or math.prod(sizes) * BYTES[_dtype(dtype)] > location[2]:
                    raise ValueError(f"{name!r} is larger than its stored bytes")
                parts.append([offset, sizes, *location])
            if not _fills_exactly([(part[0], part[1]) for part in parts], shape):
                raise ValueError(f"the parts of {name!r} overlap or leave gaps")
            table[name] = [_dtype(dtype), shape, parts]
    return table, others


def _places(folder: Path, storage: Any, files: list[str] | None) -> dict[tuple[str, Any], tuple[str, int, int]]:
    """(tensor name, offset) -> (file, first byte, number of bytes) of each part."""
    places, size_of = {}, {}
    for index, info in storage.items():
        at, where = _fields_of(index, "MetadataIndex"), _fields_of(info, "_StorageInfo")
        file, begin, length = where["relative_path"], where["offset"], where["length"]
        if not is_plain_name(file) or (files is not None and file not in files):
            raise ValueError(f"names {file!r}, which is not one of the checkpoint's files")
        if file not in size_of:
            with open_plain(folder / file) as opened:
                size_of[file] = os.fstat(opened.fileno()).st_size
        if not _are_sizes(begin, length) or begin + length > size_of[file]:
            raise ValueError(f"{at['fqn']!r} lies outside {file!r}")
        if where.get("transform_descriptors"):
            raise ValueError(f"{at['fqn']!r} is stored transformed, which is not supported")
        places[at["fqn"], at.get("offset") and _size(at["offset"])] = file, begin, length
    return places


def _fills_exactly(boxes: list[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """Whether boxes (offset, size) fill the shape without gaps and without overlaps."""
    # If all boxes are inside and their volumes sum up to the shape's, there is a gap only if two boxes overlap.
    inside = all(
        len(offset) == len(size) == len(shape) and all(a + n <= m for a, n, m in zip(offset, size, shape, strict=True))
        for offset, size in boxes
    )
    if not inside or sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    if not shape:
        return len(boxes) == 1
    # A sweep along dimension 0: only earlier boxes that reach beyond the beginning of this one can overlap it.
    reaching: list[tuple[Sequence[int], Sequence[int]]] = []
    for offset, size in sorted(box for box in boxes if math.prod(box[1])):
        reaching = [(other, extent) for other, extent in reaching if other[0] + extent[0] > offset[0]]
        for other, extent in reaching:
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, size, other, extent, strict=True)):
                return False
        reaching.append((offset, size))
    return True


def read_parts(folder: str, wanted: list[list[Any]]) -> tuple[list[list[Any]], float]:
    """Look into parts of a DCP folder (zips). Returns first byte and strides of each part's values; CPU seconds.

    Args:
        wanted: per part: file, first byte and bytes of the zip; and the dtype and shape that it must hold.
    """
    layouts, started = [], time.process_time()
    for file, begin, length, dtype, shape in wanted:
        path = Path(folder) / file
        with _as_user_error(path), open_plain(path) as opened:
            before = begin % mmap.ALLOCATIONGRANULARITY
            with mmap.mmap(opened.fileno(), before + length, access=mmap.ACCESS_READ, offset=begin - before) as part:
                *kind, strides, first = _tensor(*_load_torch_zip(part, before))
            if kind != [dtype, shape]:
                raise ValueError(f"holds a {kind}, but the metadata says {[dtype, shape]}")
            layouts.append([begin - before + first, strides])
    return layouts, time.process_time() - started


# ---- files of torch.save


def read_torch(file: str) -> Table:
    """The tensors of a file of `torch.save`: a dict of tensors, at top level or under one of STATE_DICTS."""
    path = Path(file)
    with _as_user_error(path), open_plain(path) as opened:
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            content, records = _load_torch_zip(mapped)
        if not isinstance(content, dict):
            raise TypeError(f"holds a {type(content).__name__}, not a dict of tensors")
        tensors = next((content[key] for key in STATE_DICTS if isinstance(content.get(key), dict)), content)
        table: Table = {}
        for name, made in tensors.items():
            if type(name) is not str or not type(made).__name__.startswith("_rebuild_"):
                problem = f"its entry {shown(name)} is a {type(made).__name__}, not a tensor"
                where = f"a dict from names to tensors, at top level or under {', '.join(STATE_DICTS)}"
                raise UserError(f"{path}: {problem}; name a file that holds {where}")
            dtype, shape, strides, begin = _tensor(made, records)
            table[name] = [dtype, shape, [[[0] * len(shape), shape, path.name, begin, strides]]]
    return table


def _tensor(made: Any, records: dict[str, tuple[int, int]]) -> tuple[str, list[int], list[int] | None, int]:
    """dtype, shape, strides in elements (None: no elements) and first byte of a tensor, as pickled by torch.

    Args: made: a call of `_rebuild_tensor_v2` and the like; records: storage key -> (first byte, bytes).
    """
    if type(made).__name__ == "_rebuild_parameter":
        made = _call_arguments(made, "_rebuild_parameter")[0]
    storage, offset, shape, strides, _, _, *rest = _call_arguments(made, "_rebuild_tensor_v2", "_rebuild_tensor_v3")
    ((_, kind, key, *_),) = _call_arguments(storage, "_Object")
    dtype = _STORAGES.get(kind.__name__.removesuffix("Storage")) or _dtype(rest.pop(0))
    shape, strides = (list(_size(numbers) if isinstance(numbers, _Object) else numbers) for numbers in (shape, strides))
    if any(rest) or not _are_sizes(offset, *_shape(shape), *strides) or len(shape) != len(strides):
        raise ValueError("holds a tensor of a kind that no checkpoint needs")
    begin, length = records[key]
    if not (count := math.prod(shape)):
        return dtype, shape, None, begin
    # The stride of a dimension of size 1 is never used, and may be any number; bound it, so that it cannot overflow.
    strides = [min(stride, count) if n == 1 else stride for n, stride in zip(shape, strides, strict=True)]
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if max(count, last + 1) * BYTES[dtype] > length:
        raise ValueError(f"has a tensor of shape {tuple(shape)}, but does not store all its values")
    return dtype, shape, strides, begin + offset * BYTES[dtype]


def _load_torch_zip(file: mmap.mmap, start: int = 0) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Load the pickle of a zip of `torch.save`. Returns it as inert objects, and (first byte, bytes) per storage.

    Args:
        file: ends where the zip ends.
        start: byte where the zip begins.

    A zip that torch's reader might understand differently than Python's is refused: it could show torch other values.
    """
    if file[start : start + 4] != b"PK\x03\x04":
        raise ValueError("is not in the format (zip) that torch.save has written since torch 1.6")
    with zipfile.ZipFile(file) as archive:  # type: ignore[call-overload]  # has all that is used of a file
        entries = archive.infolist()
    size, tail, records, folders = len(file), file[-98:], {}, set()
    # The end record of a zip without comment has 22 bytes; bytes -6 to -2 hold the offset of the central directory.
    # Before it, a zip64 has a record with 64-bit numbers (56 bytes) and a locator (20 bytes, "PK\6\7").
    directory, moved = _from_little_endian(tail[-6:-2]), False
    if tail[-42:-38] == b"PK\x06\x07":
        directory, moved = _from_little_endian(tail[-50:-42]), _from_little_endian(tail[-34:-26]) != size - 98 - start
    if archive.comment or moved or start + directory != archive.start_dir:
        raise ValueError("is a zip that torch.save did not write")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError("is compressed, which torch.save never does")
        file.seek(entry.header_offset)
        header = file.read(30)  # the local header; it ends with the lengths of the name and of the extra field
        begin = (
            entry.header_offset + len(header) + _from_little_endian(header[26:28]) + _from_little_endian(header[28:])
        )
        if begin + entry.file_size > size:
            raise ValueError("claims more bytes than it has")
        folder, _, name = entry.orig_filename.partition("/")  # the name as stored; `filename` is cut at a NUL
        folders.add(folder)
        records[name.lower()] = begin, entry.file_size  # torch.load ignores the case of names
    if len(records) != len(entries) or len(folders) != 1:
        raise ValueError("is a zip that torch.save did not write")
    if "byteorder" in records and _read_bounded(file, *records["byteorder"], size) != sys.byteorder.encode():
        raise ValueError("was written on a machine of the other byte order")
    unpickler = _Unpickler(io.BytesIO(_read_bounded(file, *records["data.pkl"], size)))
    return unpickler.load(), {name[5:]: location for name, location in records.items() if name.startswith("data/")}


def _read_bounded(file: IO[bytes] | mmap.mmap, begin: int, length: int, size: int) -> bytes:
    """Read bytes to be parsed, and raise this process's limits accordingly. Raises ValueError: an impossible length."""
    if length > _LARGEST or begin + length > size:
        raise ValueError(f"claims a header of {length:,} bytes, more than any real file has")
    raise_limits(length)
    file.seek(begin)
    return file.read(length)


@contextmanager
def _as_user_error(path: Path, what: str = "cannot be read safely", remedy: str = "") -> Iterator[None]:
    """Turn any exception that a truncated, damaged or hostile file causes into a UserError."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise UserError(f"{error.filename or path}: {reason}; {remedy or 'name a complete checkpoint'}") from None
    except Exception as error:
        reason = shortened(" ".join(str(error).split()) or type(error).__name__, 300)
        reason = TOO_MUCH if isinstance(error, MemoryError) else reason
        remedy = remedy or "it is damaged, or was made to do harm: get it again from a source that you trust"
        raise UserError(f"{path}: {what}: {reason}; {remedy}") from None
