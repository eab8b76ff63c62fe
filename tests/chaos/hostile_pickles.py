"""Checkpoints that want something to happen when they are read: DCP folders and files by torch.save, for row 10."""

import contextlib
import io
import os
import pickle
import struct
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from titan_mi100.shapes.qwen3 import Qwen3Spec

SPEC = Qwen3Spec(16, 8, 8, 1, 2, 1, 4, True)
Build = Callable[[Path], None]


# ---- pickles that want to do something: each leaves `canary` behind when it is obeyed


class Call:
    """Pickled as a call, also one of what another call gives."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call

    def __call__(self) -> None:
        raise NotImplementedError  # pickle wants it callable


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value.encode())) + value.encode()


def stack_global(module: str, name: str) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def called(function: bytes, argument: bytes) -> bytes:
    return function + argument + pickle.TUPLE1 + pickle.REDUCE


def raw_pickles(canary: Path) -> dict[str, bytes]:
    """Whole pickles, written by hand: every way in which opcodes come to call something."""
    touch, proto = f"touch {canary}", b"\x80\x04"
    metadata = stack_global("torch.distributed.checkpoint.metadata", "Metadata")
    storage = stack_global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    made = metadata + pickle.EMPTY_TUPLE + pickle.NEWOBJ
    system, popen = stack_global("posix", "system"), stack_global("subprocess", "Popen")
    encoding = stack_global("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
    bomb = (
        pickle.EMPTY_TUPLE
        + (pickle.MEMOIZE + pickle.BINGET + b"\0" + pickle.TUPLE2)
        + b"".join(pickle.MEMOIZE + pickle.BINGET + bytes([n]) + pickle.TUPLE2 for n in range(1, 60))
    )
    return {
        "GLOBAL posix.system": called(b"cposix\nsystem\n", text(touch)) + b".",
        "GLOBAL builtins.eval": called(b"cbuiltins\neval\n", text(f"open({str(canary)!r}, 'w')")) + b".",
        "INST": b"(" + text(touch) + b"iposix\nsystem\n.",
        "OBJ": b"(" + b"cposix\nsystem\n" + text(touch) + b"o.",
        "STACK_GLOBAL posix.system": proto + called(system, text(touch)) + b".",
        "dotted name behind torch": proto
        + called(stack_global("torch", "serialization.os.system"), text(touch)) + b".",
        "dotted name behind an allowed module": proto
        + called(stack_global("torch.distributed.checkpoint.filesystem", "os.system"), text(touch))
        + b".",
        "dotted name behind an allowed class": proto
        + called(stack_global("torch", "Size.__class__.__subclasses__"), text(touch))
        + b".",
        "a bare name of an allowed module": proto
        + called(stack_global("torch.distributed.checkpoint.filesystem", "pickle"), text(touch))
        + b".",
        "names from the memo": proto
        + text("posix") + pickle.MEMOIZE + text("system") + pickle.MEMOIZE + pickle.TUPLE2
        + pickle.BINGET + b"\0" + pickle.BINGET + b"\1" + pickle.STACK_GLOBAL + text(touch)
        + pickle.TUPLE1 + pickle.REDUCE + b".",
        "POP": proto + called(system, text(touch)) + pickle.POP + made + b".",
        "NEWOBJ of subprocess.Popen": proto + popen + text(touch) + pickle.TUPLE1 + pickle.NEWOBJ + b".",
        "NEWOBJ_EX": proto + popen + text(touch) + pickle.TUPLE1 + pickle.EMPTY_DICT + pickle.NEWOBJ_EX + b".",
        "BUILD with a __setstate__": proto
        + made + pickle.EMPTY_DICT + text("__setstate__") + system + pickle.SETITEM + pickle.BUILD
        + text(touch) + pickle.BUILD + b".",
        "BUILD of a class": proto
        + storage + pickle.NONE + pickle.EMPTY_DICT + text("relative_path") + text("/etc/passwd") + pickle.SETITEM
        + pickle.TUPLE2 + pickle.BUILD + b".",
        "BUILD of a function": proto
        + stack_global("torch.serialization", "_get_layout") + pickle.EMPTY_DICT + text("a") + pickle.NONE
        + pickle.SETITEM + pickle.BUILD + b".",
        "REDUCE of a class": proto + metadata + pickle.EMPTY_DICT + pickle.TUPLE1 + pickle.REDUCE + b".",
        "REDUCE of a dtype": proto + called(stack_global("torch", "float32"), text(touch)) + b".",
        "an enum of a dict": proto + called(encoding, pickle.EMPTY_DICT) + b".",
        "a negative size": proto
        + called(stack_global("torch", "Size"), pickle.BININT + struct.pack("<i", -1) + pickle.TUPLE1) + b".",
        "PERSID": b"Pposix.system\n.",
        "EXT1": proto + b"\x82\x01.",
        "bytearray of a terabyte": proto
        + called(stack_global("builtins", "bytearray"), b"\x8a\x06\0\0\0\0\0\1") + b".",
        "BYTEARRAY8": b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",
        "a memo of four billion": proto + pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\xff.",
        "a key whose hash takes for ever": proto + pickle.EMPTY_DICT + bomb + pickle.NONE + pickle.SETITEM + b".",
        "nested without end": proto + pickle.EMPTY_LIST * 200_000 + pickle.APPEND * 199_999 + b".",
        "no metadata but a list": pickle.dumps([1, 2]),
        "no metadata but nothing": pickle.dumps(None),
        "no pickle": b"\x89PNG\r\n" * 100,
        "empty": b"",
    }  # fmt: skip


def calls(folder: Path) -> dict[str, Any]:
    """Objects whose pickle is a call."""
    import builtins
    import ctypes
    import functools
    import importlib
    import operator
    import runpy
    import types

    canary, script = folder / "canary", folder / "script.py"
    touch = f"touch {canary}"
    script.write_text(f"open({str(canary)!r}, 'w')")
    return {
        "os.system": Call(os.system, touch),
        "eval": Call(builtins.eval, f"open({str(canary)!r}, 'w')"),
        "exec": Call(builtins.exec, f"open({str(canary)!r}, 'w')"),
        "compile": Call(builtins.compile, "1", "x", "eval"),
        "open": Call(builtins.open, str(canary), "w"),
        "__import__": Call(builtins.__import__, "antigravity"),
        "getattr": Call(getattr, "a", "__class__"),
        "subprocess": Call(subprocess.check_output, ["touch", str(canary)]),
        "partial": Call(Call(functools.partial, os.system, touch)),
        "attrgetter": Call(Call(operator.attrgetter, "__class__"), "a"),
        "import_module": Call(importlib.import_module, "this"),
        "runpy": Call(runpy.run_path, str(script)),
        "ctypes": Call(ctypes.CDLL, "libc.so.6"),
        "SimpleNamespace": Call(types.SimpleNamespace),
        "torch.load": Call(torch.load, str(script)),
        "torch.hub": Call(torch.hub.load, str(folder), "x", "local"),
        "_load_from_bytes": Call(torch.storage._load_from_bytes, pickle.dumps(Call(os.system, touch))),
        "a path": Call(Path.touch, canary),
        "DeviceMesh": Call(torch.distributed.device_mesh.DeviceMesh, "cpu", [0]),
    }


# ---- DCP folders


def genuine(folder: Path) -> Path:
    """A checkpoint by stock DCP: nested tensors, and byte entries as of AdamW's param groups."""
    checkpoint = folder / "ck"
    state = {
        "model": {"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)},
        "optim": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.999)}]},
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(checkpoint))
    return checkpoint


@contextlib.contextmanager
def edited(folder: Path) -> Iterator[Metadata]:
    """The metadata of a genuine checkpoint, written back after the change."""
    checkpoint = genuine(folder)
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    yield metadata
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def in_chunks(
    folder: Path, name: str, whole: torch.Tensor, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    """A DCP folder of one tensor in such boxes, every second one stored transposed."""
    metadata = Metadata({}, {}, {})
    chunks = [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in boxes]
    properties = TensorProperties(dtype=whole.dtype)
    metadata.state_dict_metadata[name] = TensorStorageMetadata(properties, whole.shape, chunks)
    with (folder / "__0_0.distcp").open("wb") as file:
        for number, chunk in enumerate(chunks):
            part = whole[tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))].contiguous()
            begin = file.tell()
            torch.save(part.T.contiguous().T if number % 2 else part, file)
            place = _StorageInfo("__0_0.distcp", begin, file.tell() - begin)
            metadata.storage_data[MetadataIndex(name, chunk.offsets)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def dcp_raw(name: str) -> Build:
    def build(folder: Path) -> None:
        (genuine(folder) / ".metadata").write_bytes(raw_pickles(folder / "canary")[name])

    return build


def dcp_edit(change: Callable[[Metadata, Path], Any]) -> Build:
    def build(folder: Path) -> None:
        with edited(folder) as metadata:
            change(metadata, folder)

    return build


def info_of(metadata: Metadata, name: str) -> _StorageInfo:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


def tensor_of(metadata: Metadata, name: str = "model.a") -> TensorStorageMetadata:
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    return entry


def placed(path: str, prepare: Callable[[Path], Any] = lambda folder: None) -> Build:
    """The metadata says that a tensor is in `path`, in which {folder} is the case's."""

    def change(metadata: Metadata, folder: Path) -> None:
        prepare(folder)
        info_of(metadata, "model.a").relative_path = path.format(folder=folder)

    return dcp_edit(change)


def copy_outside(folder: Path) -> Path:
    """The checkpoint's tensors, whole, where nothing may be read."""
    (folder / "outside").mkdir(exist_ok=True)
    target = folder / "outside" / "__0_0.distcp"
    target.write_bytes((folder / "ck" / "__0_0.distcp").read_bytes())
    return target


def moved_outside(file: Path, folder: Path) -> None:
    """The file is elsewhere, and a link to it in its place."""
    (folder / "outside").mkdir(exist_ok=True)
    file.rename(folder / "outside" / file.name)
    file.symlink_to(folder / "outside" / file.name)


def piped(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def linked(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "ck" / name).symlink_to(copy_outside(folder))


def stored(name: str, content: Callable[[Path], bytes]) -> Build:
    """What is stored of an entry is `content` instead."""

    def change(metadata: Metadata, folder: Path) -> None:
        info, data = info_of(metadata, name), content(folder)
        with (folder / "ck" / info.relative_path).open("ab") as file:
            info.offset, info.length = file.tell(), len(data)
            file.write(data)

    return dcp_edit(change)


def saved(value: Any, **options: Any) -> bytes:
    written = io.BytesIO()
    torch.save(value, written, **options)
    return written.getvalue()


def rezipped(
    content: bytes,
    changes: dict[str, bytes],
    compression: int = zipfile.ZIP_STORED,
    more: dict[str, bytes] | None = None,
) -> bytes:
    """A zip with other bytes in some of its files (by the end of their names)."""
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(written, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, next((data for end, data in changes.items() if name.endswith(end)), old.read(name)))
        for name, data in (more or {}).items():
            new.writestr(name, data)
    return written.getvalue()


def with_pickle(content: bytes, payload: bytes) -> bytes:
    return rezipped(content, {"/data.pkl": payload})


def claiming(count: int) -> bytes:
    """A tensor of `count` floats of which 12 are stored."""
    whole = saved(torch.zeros(12))
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        content = archive.read("archive/data.pkl")
    number = b"J" + struct.pack("<i", count)
    claims = content.replace(b"K\x0ct", number + b"t").replace(b"K\x0c\x85", number + b"\x85")
    assert claims != content
    return with_pickle(whole, claims)


def claiming_record(content: bytes, name: str) -> bytes:
    """A zip whose directory says that a file in it is larger than the whole."""
    at = content.rindex(f"archive/{name}".encode()) - 46  # the directory's entry: sizes at 20 and 24, its name at 46
    assert content[at : at + 4] == b"PK\x01\x02"
    return content[: at + 20] + struct.pack("<II", 0x7FFFFFFF, 0x7FFFFFFF) + content[at + 28 :]


def commented(content: bytes, comment: bytes) -> bytes:
    return content[:-2] + struct.pack("<H", len(comment)) + comment


def renamed(content: bytes, name: bytes, new: bytes) -> bytes:
    """Another name of the same length."""
    assert len(name) == len(new) and content.count(name) == 2
    return content.replace(name, new)


def set_again(payload: bytes) -> bytes:
    """The pickle of {"a": tensor}, whose tensor then gets a state: for torch.load another shape."""
    assert payload.endswith(b"s.")
    return payload[:-2] + b"}b" + b"s."


def grow(metadata: Metadata, sizes: tuple[int, ...]) -> None:
    entry = tensor_of(metadata)
    entry.size = entry.chunks[0].sizes = torch.Size(sizes)


def dcp_cases() -> dict[str, Build]:
    cases: dict[str, Build] = {f"metadata, {name}": dcp_raw(name) for name in raw_pickles(Path("x"))}
    for name in (
        *("os.system", "eval", "exec", "compile", "open", "__import__", "getattr", "subprocess", "partial"),
        *("attrgetter", "import_module", "runpy", "ctypes", "SimpleNamespace", "torch.load", "torch.hub"),
        *("_load_from_bytes", "a path", "DeviceMesh"),
    ):
        cases[f"metadata calls {name}"] = dcp_edit(
            lambda metadata, folder, name=name: setattr(metadata, "planner_data", calls(folder)[name])
        )

    def system(folder: Path) -> Call:
        return Call(os.system, f"touch {folder / 'canary'}")

    def at(place: Callable[[Metadata, Call], Any]) -> Build:
        return dcp_edit(lambda metadata, folder: place(metadata, system(folder)))

    legacy = {"_use_new_zipfile_serialization": False}
    return cases | {
        "call in a dict's key": at(lambda m, call: m.state_dict_metadata.update({call: BytesStorageMetadata()})),
        "call in a tensor's size": at(lambda m, call: setattr(tensor_of(m), "size", call)),
        "call in a chunk": at(lambda m, call: tensor_of(m).chunks.append(call)),
        "call in a path": at(lambda m, call: setattr(info_of(m, "model.a"), "relative_path", call)),
        "call in the storage meta": at(lambda m, call: setattr(m.storage_meta, "modules", [call])),
        "call in a field of no use": at(lambda m, call: setattr(m, "more", call)),
        "path above": placed("../outside/__0_0.distcp", copy_outside),
        "path absolute": placed("{folder}/outside/__0_0.distcp", copy_outside),
        "path above by a link": placed("link.distcp", linked("link.distcp")),
        "path in a linked folder": placed(
            "sub/__0_0.distcp",
            lambda folder: (copy_outside(folder), (folder / "ck" / "sub").symlink_to(folder / "outside")),
        ),
        "path with NUL": placed("a\0b"),
        "path empty": placed(""),
        "path is ..": placed(".."),
        "path is a pipe": placed("pipe", lambda folder: os.mkfifo(folder / "ck" / "pipe")),
        "path is a device": placed("zero", lambda folder: (folder / "ck" / "zero").symlink_to("/dev/zero")),
        "path is a folder": placed("sub", lambda folder: (folder / "ck" / "sub").mkdir()),
        "path is missing": placed("none.distcp"),
        "path is not in the manifest": placed(
            "more.distcp", lambda folder: os.link(folder / "ck" / "__0_0.distcp", folder / "ck" / "more.distcp")
        ),
        "metadata is a link": lambda folder: moved_outside(genuine(folder) / ".metadata", folder),
        "metadata is a pipe": lambda folder: piped(genuine(folder) / ".metadata"),
        "metadata is missing": lambda folder: (genuine(folder) / ".metadata").unlink(),
        "metadata of a gigabyte": lambda folder: os.truncate(genuine(folder) / ".metadata", 1 << 30),
        "metadata cut": lambda folder: os.truncate(genuine(folder) / ".metadata", 700),
        "offset negative": dcp_edit(lambda m, _: setattr(info_of(m, "model.a"), "offset", -1)),
        "offset a string": dcp_edit(lambda m, _: setattr(info_of(m, "model.a"), "offset", "5")),
        "length negative": dcp_edit(lambda m, _: setattr(info_of(m, "model.a"), "length", -5)),
        "length beyond the file": dcp_edit(lambda m, _: setattr(info_of(m, "model.a"), "length", 1 << 40)),
        "tensor of a petabyte": dcp_edit(lambda m, _: grow(m, (1 << 40, 256))),
        "tensor of an overflowing size": dcp_edit(lambda m, _: grow(m, (1 << 62, 1 << 62))),
        "tensor of a petabyte that claims its bytes": dcp_edit(
            lambda m, _: (grow(m, (1 << 40, 256)), setattr(info_of(m, "model.a"), "length", 1 << 60))
        ),
        "tensor of a negative size": dcp_edit(lambda m, _: grow(m, (-3, -4))),
        "part outside of its tensor": dcp_edit(
            lambda m, _: tensor_of(m).chunks.append(ChunkStorageMetadata(torch.Size([3, 0]), torch.Size([3, 4])))
        ),
        "parts that leave a gap": dcp_edit(lambda m, _: setattr(tensor_of(m), "size", torch.Size([4, 4]))),
        "part of other dimensions": dcp_edit(lambda m, _: setattr(tensor_of(m).chunks[0], "offsets", torch.Size([0]))),
        "tensor that is nowhere": dcp_edit(lambda m, _: m.storage_data.pop(MetadataIndex("model.a", [0, 0]))),
        "bytes that are nowhere": dcp_edit(lambda m, _: m.state_dict_metadata.update(x=BytesStorageMetadata())),
        "stored transformed": dcp_edit(lambda m, _: setattr(info_of(m, "model.a"), "transform_descriptors", ["zstd"])),
        "a name that is no string": dcp_edit(lambda m, _: m.state_dict_metadata.update({5: BytesStorageMetadata()})),
        "an entry of another kind": dcp_edit(lambda m, _: m.state_dict_metadata.update(x=m.storage_meta)),
        "properties left out": dcp_edit(lambda m, _: setattr(tensor_of(m), "properties", None)),
        "tensor calls os.system": stored("model.a", lambda f: saved(system(f))),
        "tensor of the old format": stored("model.a", lambda f: saved(torch.zeros(3, 4), **legacy)),
        "tensor compressed": stored(
            "model.a", lambda f: rezipped(saved(torch.zeros(3, 4)), {"data/0": bytes(1 << 26)}, zipfile.ZIP_DEFLATED)
        ),
        "tensor with a record of 2 GB": stored(
            "model.a", lambda f: claiming_record(saved(torch.zeros(3, 4)), "data/0")
        ),
        "tensor behind other bytes": stored("model.a", lambda f: b"a" * 64 + saved(torch.zeros(3, 4))),
        "tensor of the other byte order": stored(
            "model.a", lambda f: rezipped(saved(torch.zeros(3, 4)), {"byteorder": b"big"})
        ),
        "tensor larger than its storage": stored(
            "model.a",
            lambda f: with_pickle(
                saved(torch.zeros(12)), zip_pickle(saved(torch.zeros(12))).replace(b"K\x0c\x85", b"K\xff\x85")
            ),
        ),
        "tensor of another dtype": stored("model.a", lambda f: saved(torch.zeros(3, 4, dtype=torch.float64))),
        "tensor of another shape": stored("model.a", lambda f: saved(torch.zeros(4, 3))),
        "tensor that is sparse": stored("model.a", lambda f: saved(torch.zeros(3, 4).to_sparse())),
        "tensor that is a dict": stored("model.a", lambda f: saved({"a": torch.zeros(3, 4)})),
        "tensor cut": stored("model.a", lambda f: saved(torch.zeros(3, 4))[:-100]),
    }


def zip_pickle(content: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return archive.read("archive/data.pkl")


# ---- one file by torch.save


def torch_file(content: Callable[[Path], bytes]) -> Build:
    return lambda folder: (folder / "model.pt").write_bytes(content(folder)) and None


def torch_cases() -> dict[str, Build]:
    def system(folder: Path) -> Call:
        return Call(os.system, f"touch {folder / 'canary'}")

    def raw(name: str) -> Build:
        return torch_file(lambda f: with_pickle(saved(1), raw_pickles(f / "canary")[name]))

    def tarred(folder: Path) -> bytes:
        written = io.BytesIO()
        with tarfile.open(fileobj=written, mode="w") as archive:
            for name in ("sys_info", "pickle", "../../outside/storages"):
                member = tarfile.TarInfo(name)
                content = pickle.dumps(system(folder))
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        return written.getvalue()

    def compressed(folder: Path) -> bytes:
        return rezipped(saved({"a": torch.zeros(12)}), {"data/0": bytes(1 << 26)}, zipfile.ZIP_DEFLATED)

    def link(folder: Path) -> None:
        (folder / "model.pt").write_bytes(saved({"a": torch.zeros(3)}))
        moved_outside(folder / "model.pt", folder)

    names = ("os.system", "eval", "runpy", "torch.load", "torch.hub", "_load_from_bytes", "partial", "DeviceMesh")
    cases = {f"calls {name}": torch_file(lambda f, name=name: saved({"a": calls(f)[name]})) for name in names}
    for name in ("GLOBAL posix.system", "INST", "OBJ", "dotted name behind torch", "BUILD with a __setstate__", "EXT1"):
        cases[name] = raw(name)
    one, other, all_but = saved({"a": torch.zeros(12)}), saved({"a": torch.ones(12)}), {"byteorder": b"big"}
    cases |= {  # torch.load reads another tensor of each, or none
        "a zip behind another": torch_file(lambda f: one + other),
        "a zip in the comment": torch_file(lambda f: commented(one, other)),
        "bytes before the zip": torch_file(lambda f: b"PK\3\4" + one),
        "a byte order in capitals": torch_file(lambda f: rezipped(one, all_but).replace(b"byteorder", b"ByteOrder")),
        "a name that differs in case": torch_file(lambda f: rezipped(one, {}, more={"archive/DATA/0": b"1" * 48})),
        "a name with NUL": torch_file(lambda f: renamed(one, b"archive/data/0", b"archive/data\0/")),
        "two folders": torch_file(lambda f: rezipped(one, {}, more={"other/data/1": b"1"})),
        "a tensor that is set again": torch_file(lambda f: with_pickle(one, set_again(zip_pickle(one)))),
        "a dimension more than numpy has": torch_file(lambda f: saved({"a": torch.zeros((1,) * 33)})),
        "an empty tensor of impossible sizes": torch_file(lambda f: saved({"a": torch.zeros(1, 0).expand(1 << 60, 0)})),
    }
    legacy = {"_use_new_zipfile_serialization": False}
    return cases | {
        "of the old format": torch_file(lambda f: saved({"a": system(f)}, **legacy)),
        "a bare pickle": torch_file(lambda f: pickle.dumps(system(f))),
        "a tar": torch_file(tarred),
        "compressed": torch_file(compressed),
        "storage beyond what is stored": torch_file(lambda f: claiming(1 << 24)),
        "a view of a petabyte": torch_file(lambda f: saved({"a": torch.zeros(1).expand(1 << 48)})),
        "a view in a list": torch_file(lambda f: saved({"a": [torch.zeros(1).expand(1 << 48)]})),
        "no dict": torch_file(lambda f: saved([torch.zeros(1)])),
        "cut": torch_file(lambda f: saved({"a": torch.zeros(99)})[:-99]),
        "empty": torch_file(lambda f: b""),
        "a link": link,
        "a pipe": lambda folder: os.mkfifo(folder / "model.pt"),
        "a folder": lambda folder: (folder / "model.pt").mkdir(),
    }
