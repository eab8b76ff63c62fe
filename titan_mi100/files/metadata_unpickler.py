"""Reads the pickle of a DCP folder's `.metadata` and runs nothing that it names."""

import pickle
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.serialization import _get_layout

_NONE = type(None)

# The classes of a `.metadata` and the exact types of their fields; a field that may be None may be missing.
_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {
    Metadata: {
        "state_dict_metadata": (dict,),
        "planner_data": (dict, _NONE),
        "storage_data": (dict,),
        "storage_meta": (StorageMeta, _NONE),
        "version": (str, _NONE),
    },
    TensorStorageMetadata: {"properties": (TensorProperties,), "size": (torch.Size,), "chunks": (list,)},
    ChunkStorageMetadata: {"offsets": (torch.Size,), "sizes": (torch.Size,)},
    BytesStorageMetadata: {},
    MetadataIndex: {"fqn": (str,), "offset": (torch.Size, _NONE), "index": (int, _NONE)},
    _StorageInfo: {
        "relative_path": (str,),
        "offset": (int,),
        "length": (int,),
        "transform_descriptors": (list, tuple, _NONE),
    },
    StorageMeta: {
        "checkpoint_id": (str, PurePosixPath, _NONE),
        "save_id": (str, _NONE),
        "load_id": (str, _NONE),
        "modules": (list, _NONE),
    },
}
_PROPERTIES = (torch.dtype, torch.layout, bool, _MEM_FORMAT_ENCODING, bool)  # the state of TensorProperties

# Every global that a `.metadata` may name. Paths become ones that touch no file, on any system.
_GLOBALS: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in (*_FIELDS, TensorProperties, _MEM_FORMAT_ENCODING)},
    **{("torch", str(kind)[6:]): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)},
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    **{
        (module, f"{kind}Path"): PurePosixPath
        for module in ("pathlib", "pathlib._local")
        for kind in ("Posix", "Windows")
    },
}
# What pickles of the protocols 4 and 5 are made of, less what makes sets, floats and bytes.
_OPCODES = b"".join(
    [
        *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT),
        *(pickle.BINGET, pickle.LONG_BINGET, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT),
        *(pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
        *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.EMPTY_LIST),
        *(pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.GLOBAL, pickle.STACK_GLOBAL),
    ]
)
_Unpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _Opcodes(dict[int, Callable[[Any], None]]):
    def __missing__(self, opcode: int) -> NoReturn:
        raise pickle.UnpicklingError(f"uses the pickle opcode {chr(opcode)!r}, which no checkpoint needs")


class MetadataUnpickler(_Unpickler):
    """Makes the objects of a `.metadata` and no others, whatever their pickle asks for.

    It calls nothing that a pickle names: what is made, of which arguments, is listed here. Python's own unpickler in
    Python, because the one in C fills 64 GiB at the word of five bytes (LONG_BINPUT), and to leave out opcodes.
    """

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _GLOBALS:
            raise pickle.UnpicklingError(f"asks for {module}.{name}, which no checkpoint needs")
        return _GLOBALS[module, name]

    def _new(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, type) or kind not in (*_FIELDS, TensorProperties) or arguments != ():
            raise pickle.UnpicklingError("makes an object of what is no class of a checkpoint")
        self.append(object.__new__(kind))

    def _reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if type(arguments) is not tuple:
            raise pickle.UnpicklingError("calls without arguments")
        kinds = [type(argument) for argument in arguments]
        if function is torch.Size and kinds == [tuple] and all(type(n) is int and 0 <= n < 2**63 for n in arguments[0]):
            self.append(torch.Size(arguments[0]))
        elif function is _get_layout and arguments == ("torch.strided",):
            self.append(torch.strided)
        elif function is _MEM_FORMAT_ENCODING and kinds == [int]:
            self.append(_MEM_FORMAT_ENCODING(arguments[0]))
        elif function is PurePosixPath and set(kinds) <= {str}:
            self.append(PurePosixPath(*arguments))
        else:
            raise pickle.UnpicklingError("calls something in a way that no checkpoint does")

    def _build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        kind = type(made)
        if kind is TensorProperties and type(state) is tuple and tuple(map(type, state)) == _PROPERTIES:
            made.__setstate__(state)
            return
        fields = _FIELDS.get(kind, {})
        if type(state) is not dict or not state.keys() <= fields.keys():
            raise pickle.UnpicklingError(f"gives a {kind.__name__} fields that it does not have")
        for name, kinds in fields.items():
            if (type(state[name]) if name in state else _NONE) not in kinds:
                raise pickle.UnpicklingError(f"has a {kind.__name__} with an impossible {name}")
        made.__dict__.update(state)

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put([key, value])

    def _set_items(self) -> None:
        self._put(self.pop_mark())

    def _put(self, items: list[Any]) -> None:
        keys = items[::2]
        if type(self.stack[-1]) is not dict or not {type(key) for key in keys} <= {str, MetadataIndex}:
            raise pickle.UnpicklingError("has a dict with keys that no checkpoint has")  # hashing some never ends
        self.stack[-1].update(zip(keys, items[1::2], strict=True))

    dispatch = _Opcodes(
        {code: _Unpickler.dispatch[code] for code in _OPCODES}
        | {pickle.NEWOBJ[0]: _new, pickle.REDUCE[0]: _reduce, pickle.BUILD[0]: _build}
        | {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items}
    )
