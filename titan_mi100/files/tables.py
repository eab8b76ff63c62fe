"""Where the tensors are in files that came from elsewhere: name, dtype, shape, file and offset. Imports no torch.

Runs in the child process of child.py, whose limits stand for bounds on what a file can ask for. Formats: safetensors,
DCP folders, files of `torch.save`. Their pickles make nothing but inert objects; no code of theirs is run.

A table is `{name: [dtype, shape, parts]}`; a part is `[offset in the tensor, size, file, first byte, about]`, of which
the last is its strides (None: contiguous) or, for DCP, the bytes of a zip to be looked into by `read_parts`.
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
from titan_mi100.files.child import TOO_MUCH, allow
from titan_mi100.files.plain import MIB, is_plain_name, open_plain, read_object
from titan_mi100.files.schema import checked
from titan_mi100.wording import shortened, shown, some

Table = dict[str, list[Any]]

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
STATE_DICTS = ("model", "state_dict", "model_state_dict")  # under which trainers keep the weights in a file
_LARGEST = 384 * MIB  # of what says where tensors are: 172 bytes a part; of a 32B's 2,100 tensors from 512 ranks 178
_MOST_DIMS = 32  # of a tensor; numpy 1 has no more

BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool", "float8_e4m3fn", "float8_e5m2"), 1),
}
# by the names of safetensors: what can be trained
HF_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_STORAGES = {  # the dtypes by the classes that pickles name, each with "Storage" behind it; "": it is said elsewhere
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64",
    "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8", "Bool": "bool", "ComplexFloat": "complex64",
    "Untyped": "",
}  # fmt: skip


# ---- safetensors


def read_hf(folder: str) -> Table:
    """The tensors of an HF folder, in one file or sharded with an index.

    Raises:
        UserError: a file that is missing or not a whole safetensors file, or an index that names other tensors.
    """
    root = Path(folder)
    if not os.path.lexists(root / INDEX):
        return read_safetensors(str(root / SINGLE))
    index = root / INDEX
    if os.path.lexists(root / SINGLE):
        raise UserError(f"{root}: holds {SINGLE} and {INDEX}, of which programs read either; remove one")
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
    """The tensors of one file, which must fill it without a gap, as the format wants it."""
    path = Path(file)
    with _refusing(path, "not a whole safetensors file", "download it again"), open_plain(path) as opened:
        length, size = _little(opened.read(8)), os.fstat(opened.fileno()).st_size
        header = json.loads(_taken(opened, 8, length, size).decode(), object_pairs_hook=_unique)
        checked(header.pop("__metadata__", {}), dict[str, str], "__metadata__")
        end, table = 8 + length, {}
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            shape, (begin, stop) = _shape(entry["shape"]), entry["data_offsets"]
            if (dtype := HF_DTYPES.get(entry["dtype"])) is None:
                what = f"{shortened(name)} has dtype {shown(entry['dtype'])}, which cannot be trained"
                raise UserError(f"{path}: {what}; use bfloat16")
            fits = 8 + length + begin == end and stop - begin == math.prod(shape) * BYTES[dtype]
            if not _natural(begin, stop) or not fits:
                raise ValueError(f"{name} has other bytes than its shape needs, or not where the one before ends")
            table[name] = [dtype, shape, [[[0] * len(shape), shape, path.name, end, None]]]
            end += stop - begin
        if end != size:
            raise ValueError(f"has {size:,} bytes, its header says {end:,}")
    return table


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("names something twice")
    return found


# ---- pickles


class _Object:
    """What a pickle makes of a class or a call: what it was given, and nothing that runs."""

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
    """An OrderedDict without its attributes."""

    def __setstate__(self, state: Any) -> None:
        pass


# the classes of a `.metadata` and the fields that they may have
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
# every global that a pickle may name, as a class of its own
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise pickle.UnpicklingError(f"asks for {module}.{name}, which no checkpoint needs")
        return _GLOBALS[module, name]

    def persistent_load(self, pid: Any) -> Any:
        return _Object(pid)


def _state(made: Any, kind: str) -> Any:
    """The fields of an object, which must be of that kind."""
    if type(made).__name__ != kind or not isinstance(made, _Object):
        raise TypeError(f"holds a {type(made).__name__} where a {kind} belongs")
    fields = _FIELDS.get(kind)
    if fields is not None and not (made.state or {}).keys() <= fields:
        raise TypeError(f"gives a {kind} fields that it does not have")
    return made.state


def _called(made: Any, *names: str) -> tuple[Any, ...]:
    """The arguments of a call of one of those names."""
    if not isinstance(made, _Object) or type(made).__name__ not in names or made.state is not None:
        raise TypeError(f"holds a {type(made).__name__} where {' or '.join(names)} belongs")
    return made.arguments


def _size(made: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    (numbers,) = _called(made, "Size")
    return tuple(_shape(numbers))


def _dtype(kind: Any) -> str:
    if not isinstance(kind, type) or kind.__name__ not in BYTES:
        raise TypeError(f"holds a {getattr(kind, '__name__', kind)!r} where a dtype belongs")
    return kind.__name__


def _little(content: bytes) -> int:
    return int.from_bytes(content, "little")


def _natural(*numbers: Any) -> bool:
    return all(type(number) is int and 0 <= number < 2**63 for number in numbers)


def _shape(numbers: Any) -> list[int]:
    """The numbers, which must be a shape that numpy and torch can have."""
    fits = type(numbers) in (list, tuple) and len(numbers) <= _MOST_DIMS and _natural(*numbers)
    if not fits or math.prod(number or 1 for number in numbers) >= 2**59:  # of elements of 8 bytes
        raise ValueError("has an impossible size")
    return list(numbers)


# ---- DCP folders


def read_dcp(file: str, files: list[str] | None) -> tuple[Table, list[str]]:
    """The tensors of a DCP folder by its `.metadata`, and the names of entries that are none.

    Args:
        files: the only names that the metadata may give, as of a manifest; None: any plain name in the folder.
    """
    path = Path(file)
    with _refusing(path), open_plain(path) as opened:
        if files is not None and path.name not in files:
            raise ValueError("the manifest does not name it")
        size = os.fstat(opened.fileno()).st_size
        metadata = _state(_Unpickler(io.BytesIO(_taken(opened, 0, size, size))).load(), "Metadata")
        places = _places(path.parent, metadata["storage_data"], files)
        table: Table = {}
        others = []
        for name, entry in metadata["state_dict_metadata"].items():
            if type(name) is not str:
                raise TypeError(f"has an entry {name!r}")
            if type(entry).__name__ == "BytesStorageMetadata":
                others.append(name)
                continue
            fields = _state(entry, "TensorStorageMetadata")
            dtype, layout, *_ = _state(fields["properties"], "TensorProperties")
            if _called(layout, "_get_layout") != ("torch.strided",):
                raise ValueError(f"{name!r} is no dense tensor")
            shape = _size(fields["size"])
            parts: list[list[Any]] = []
            for chunk in fields["chunks"]:
                box = _state(chunk, "ChunkStorageMetadata")
                offset, sizes = _size(box["offsets"]), _size(box["sizes"])
                place = places.get((name, offset))
                if place is None or math.prod(sizes) * BYTES[_dtype(dtype)] > place[2]:
                    raise ValueError(f"{name!r} is larger than what is stored of it")
                parts.append([offset, sizes, *place])
            if not _fill([(part[0], part[1]) for part in parts], shape):
                raise ValueError(f"the parts of {name!r} are not the whole of it")
            table[name] = [_dtype(dtype), shape, parts]
    return table, others


def _places(folder: Path, storage: Any, files: list[str] | None) -> dict[tuple[str, Any], tuple[str, int, int]]:
    """File, first byte and number of bytes of each part, by its name and offset."""
    places, size_of = {}, {}
    for index, info in storage.items():
        at, where = _state(index, "MetadataIndex"), _state(info, "_StorageInfo")
        file, begin, length = where["relative_path"], where["offset"], where["length"]
        if not is_plain_name(file) or (files is not None and file not in files):
            raise ValueError(f"names {file!r}, which is not one of the checkpoint's files")
        if file not in size_of:
            with open_plain(folder / file) as opened:
                size_of[file] = os.fstat(opened.fileno()).st_size
        if not _natural(begin, length) or begin + length > size_of[file]:
            raise ValueError(f"{at['fqn']!r} lies outside of {file!r}")
        if where.get("transform_descriptors"):
            raise ValueError(f"{at['fqn']!r} is stored transformed, which is not supported")
        places[at["fqn"], at.get("offset") and _size(at["offset"])] = file, begin, length
    return places


def _fill(boxes: list[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> bool:
    """Whether boxes of offset and size fill the shape, without a gap and without sharing a value."""
    inside = all(
        len(offset) == len(size) == len(shape) and all(a + n <= m for a, n, m in zip(offset, size, shape, strict=True))
        for offset, size in boxes
    )
    if not inside or sum(math.prod(size) for _, size in boxes) != math.prod(shape):
        return False
    if not shape:
        return len(boxes) == 1
    reaching: list[tuple[Sequence[int], Sequence[int]]] = []  # boxes of before that reach to where this one begins
    for offset, size in sorted(box for box in boxes if math.prod(box[1])):
        reaching = [(other, extent) for other, extent in reaching if other[0] + extent[0] > offset[0]]
        for other, extent in reaching:
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, size, other, extent, strict=True)):
                return False
        reaching.append((offset, size))
    return True


def read_parts(folder: str, wanted: list[list[Any]]) -> tuple[list[list[Any]], float]:
    """First byte and strides of the values of parts of a DCP folder; and the seconds that it took to look.

    Args:
        wanted: file, first byte and bytes of the zip of each, and the dtype and shape that must be in it.
    """
    found, started = [], time.process_time()
    for file, begin, length, dtype, shape in wanted:
        path = Path(folder) / file
        with _refusing(path), open_plain(path) as opened:
            before = begin % mmap.ALLOCATIONGRANULARITY
            with mmap.mmap(opened.fileno(), before + length, access=mmap.ACCESS_READ, offset=begin - before) as part:
                *kind, strides, first = _tensor(*_saved(part, before))
            if kind != [dtype, shape]:
                raise ValueError(f"holds a {kind} where the metadata says {[dtype, shape]}")
            found.append([begin - before + first, strides])
    return found, time.process_time() - started


# ---- what torch.save wrote


def read_torch(file: str) -> Table:
    """The tensors of a file of `torch.save`: a dict of tensors, alone or under one of the usual keys."""
    path = Path(file)
    with _refusing(path), open_plain(path) as opened:
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            content, records = _saved(mapped)
        if not isinstance(content, dict):
            raise TypeError(f"holds a {type(content).__name__}, not a dict of tensors")
        found = next((content[key] for key in STATE_DICTS if isinstance(content.get(key), dict)), content)
        table: Table = {}
        for name, made in found.items():
            if type(name) is not str or not type(made).__name__.startswith("_rebuild_"):
                what = f"{shown(name)} is no tensor by its name but a {type(made).__name__}"
                where = f"a dict of tensors, alone or under {', '.join(STATE_DICTS)}"
                raise UserError(f"{path}: {what}; name a file that holds {where}")
            dtype, shape, strides, begin = _tensor(made, records)
            table[name] = [dtype, shape, [[[0] * len(shape), shape, path.name, begin, strides]]]
    return table


def _tensor(made: Any, records: dict[str, tuple[int, int]]) -> tuple[str, list[int], list[int] | None, int]:
    """dtype, shape, strides (None: it is empty) and first byte of what torch rebuilds as a tensor."""
    if type(made).__name__ == "_rebuild_parameter":
        made = _called(made, "_rebuild_parameter")[0]
    storage, offset, shape, strides, _, _, *more = _called(made, "_rebuild_tensor_v2", "_rebuild_tensor_v3")
    ((_, kind, key, *_),) = _called(storage, "_Object")
    dtype = _STORAGES.get(kind.__name__.removesuffix("Storage")) or _dtype(more.pop(0))
    shape, strides = (list(_size(numbers) if isinstance(numbers, _Object) else numbers) for numbers in (shape, strides))
    if any(more) or not _natural(offset, *_shape(shape), *strides) or len(shape) != len(strides):
        raise ValueError("holds a tensor of a kind that no checkpoint needs")
    begin, length = records[key]
    if not (count := math.prod(shape)):
        return dtype, shape, None, begin
    # of a dimension of 1 any stride will do, also one beyond all numbers
    strides = [min(stride, count) if n == 1 else stride for n, stride in zip(shape, strides, strict=True)]
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if max(count, last + 1) * BYTES[dtype] > length:
        raise ValueError(f"holds a tensor of shape {tuple(shape)} without storing its values")
    return dtype, shape, strides, begin + offset * BYTES[dtype]


def _saved(file: mmap.mmap, start: int = 0) -> tuple[Any, dict[str, tuple[int, int]]]:
    """The pickle of what `torch.save` wrote, loaded, and first byte and length of each storage.

    Args:
        file: ends where the zip ends.
        start: where it begins.

    Whatever torch.load might understand otherwise than Python's zipfile is refused.
    """
    if file[start : start + 4] != b"PK\x03\x04":
        raise ValueError("is not in the format (zip) that torch.save has written since torch 1.6")
    with zipfile.ZipFile(file) as archive:  # type: ignore[call-overload]  # has all that is used of a file
        entries = archive.infolist()
    size, tail, records, folders = len(file), file[-98:], {}, set()
    directory, moved = _little(tail[-6:-2]), False  # in the 22 bytes that a zip without comment ends with
    if tail[-42:-38] == b"PK\x06\x07":  # before them numbers of 64 bits, and where these are
        directory, moved = _little(tail[-50:-42]), _little(tail[-34:-26]) != size - 98 - start
    if archive.comment or moved or start + directory != archive.start_dir:
        raise ValueError("is a zip that torch.save did not write")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise ValueError("is compressed, which torch.save never does")
        file.seek(entry.header_offset)
        header = file.read(30)  # the entry's own, which ends with the lengths of its name and of more
        begin = entry.header_offset + len(header) + _little(header[26:28]) + _little(header[28:])
        if begin + entry.file_size > size:
            raise ValueError("claims more bytes than it has")
        folder, _, name = entry.orig_filename.partition("/")  # before Python cuts it at a NUL, or takes another
        folders.add(folder)
        records[name.lower()] = begin, entry.file_size  # torch.load looks for names whatever their case
    if len(records) != len(entries) or len(folders) != 1:
        raise ValueError("is a zip that torch.save did not write")
    if "byteorder" in records and _taken(file, *records["byteorder"], size) != sys.byteorder.encode():
        raise ValueError("was written on a machine of the other byte order")
    unpickler = _Unpickler(io.BytesIO(_taken(file, *records["data.pkl"], size)))
    return unpickler.load(), {name[5:]: place for name, place in records.items() if name.startswith("data/")}


def _taken(file: IO[bytes] | mmap.mmap, begin: int, length: int, size: int) -> bytes:
    """Bytes that are to be parsed, by which the limits of this process are set."""
    if length > _LARGEST or begin + length > size:
        raise ValueError(f"claims a header of {length:,} bytes, which no real one has")
    allow(length)
    file.seek(begin)
    return file.read(length)


@contextmanager
def _refusing(path: Path, what: str = "cannot be read safely", remedy: str = "") -> Iterator[None]:
    """Turn whatever a file that is cut, damaged or hostile leads to into a UserError."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise UserError(f"{error.filename or path}: {reason}; {remedy or 'name a whole checkpoint'}") from None
    except Exception as error:
        reason = shortened(" ".join(str(error).split()) or type(error).__name__, 300)
        reason = TOO_MUCH if isinstance(error, MemoryError) else reason
        remedy = remedy or "it is damaged, or was made to do harm: get it again from a source that you trust"
        raise UserError(f"{path}: {what}: {reason}; {remedy}") from None
