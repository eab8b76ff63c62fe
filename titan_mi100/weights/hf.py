"""HF safetensors folders: reading tensors or parts of them without reading the rest, and writing them one by one."""

import json
import os
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_mi100.errors import UserError
from titan_mi100.files.plain import LARGEST_TABLE, MIB, is_plain_name, plain_path, read_object
from titan_mi100.weights.base import Kind, Kinds, Weights, box, raw_bytes
from titan_mi100.wording import some

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGEST_HEADER = 8 * MIB  # 120 bytes a tensor; the library's own limit is 100 MB, of which it makes 2 GB
# by the names of the format
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAME_OF = {dtype: name for name, dtype in _DTYPES.items()}


def is_hf_folder(path: str | Path) -> bool:
    """Whether it holds safetensors under HF's names."""
    return any(os.path.lexists(Path(path) / name) for name in (SINGLE, INDEX))


class HFWeights(Weights):
    """The weights of an HF folder, one file or sharded with an index. Files are mapped, not read."""

    def __init__(self, folder: str | Path) -> None:
        """Read the headers of the folder's files, whoever wrote them.

        Raises:
            UserError: no weights, a shard that is missing, not a whole safetensors file or outside of the folder, an
                index that names other tensors than the shards hold.
        """
        self.source = Path(folder)
        self.kinds = {}
        self._path_of: dict[str, Path] = {}  # of tensors
        if os.path.lexists(self.source / INDEX):
            self._add_shards()
        elif os.path.lexists(self.source / SINGLE):
            self._add(self.source / SINGLE)
        else:
            pickled = sorted(self.source.glob("pytorch_model*.bin"))
            instead = f", only {pickled[0].name}, whose pickle may run code" if pickled else ""
            raise UserError(f"{self.source}: holds no model: neither {SINGLE} nor {INDEX} nor DCP's .metadata{instead}")

    def _add_shards(self) -> None:
        """Add all files of the index, which must name exactly the tensors that they hold."""
        index = self.source / INDEX
        if os.path.lexists(self.source / SINGLE):
            raise UserError(f"{self.source}: holds {SINGLE} and {INDEX}, of which programs read either; remove one")
        weight_map = read_object(index, "download it again", LARGEST_TABLE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index}: not an index of safetensors files: it has no weight_map; download it again")
        for file in dict.fromkeys(map(str, weight_map.values())):
            if not is_plain_name(file):
                raise UserError(f"{index}: file name {file!r} is not inside the folder; download it again")
            names = {name for name, promised in weight_map.items() if promised == file}
            held = self._add(self.source / file)
            if odd := sorted(names ^ held):
                raise UserError(f"{self.source / file}: holds other tensors than {INDEX} says: {some(odd)}; correct it")

    def _add(self, path: Path) -> set[str]:
        """Add a file's tensors; returns their names."""
        handle = open_safetensors(path)
        names = handle.keys()
        for name in names:
            part = handle.get_slice(name)
            if (dtype := _DTYPES.get(part.get_dtype())) is None:
                raise UserError(f"{path}: {name} has dtype {part.get_dtype()}, which cannot be trained; use bfloat16")
            self.kinds[name] = Kind(tuple(part.get_shape()), dtype)
        self._path_of |= dict.fromkeys(names, plain_path(path))
        return set(names)

    def read(self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        # opened for each read: pages of a map stay in memory until it is closed, and what is read lives as long as it
        handle = safe_open(self._path_of[name], framework="pt")
        return handle.get_slice(name)[box(offset, size)]


def open_safetensors(path: Path) -> Any:
    """The file, mapped. The library checks that tensors neither overlap nor leave the file.

    Raises:
        UserError: it is missing, unreadable, not a whole safetensors file, or unreasonably large.
    """
    try:
        path = plain_path(path)
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
        if header > _LARGEST_HEADER:
            raise UserError(f"{path}: claims a header of {header:,} bytes; not a safetensors file, download it again")
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; download it again") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}); download it again") from None


def write_hf(folder: Path, kinds: Kinds, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Write safetensors files, one after the other, and the index if there are several.

    Args:
        kinds: of all tensors.
        tensors: in the order of kinds, contiguous.
        shard_bytes: most bytes of tensors in a file, unless a single tensor has more.
    """
    file_of = _shard_plan(kinds, shard_bytes)
    for file, group in groupby(tensors, lambda item: file_of[item[0]]):
        with (folder / file).open("wb") as output:
            output.write(_header({name: kind for name, kind in kinds.items() if file_of[name] == file}))
            output.writelines(raw_bytes(tensor).numpy().data for _, tensor in group)
    if len({*file_of.values()}) > 1:
        total = sum(kind.nbytes for kind in kinds.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shard_plan(kinds: Kinds, shard_bytes: int) -> dict[str, str]:
    """The file of each tensor, filled in order; one file if they fit. Names are those that transformers gives."""
    shard_of, shard, size = {}, 1, 0
    for name, kind in kinds.items():
        if size and size + kind.nbytes > shard_bytes:
            shard, size = shard + 1, 0
        shard_of[name] = shard
        size += kind.nbytes
    return {name: SINGLE if shard == 1 else f"model-{i:05}-of-{shard:05}.safetensors" for name, i in shard_of.items()}


def _header(kinds: Kinds) -> bytes:
    """What a safetensors file begins with: the length of a JSON text, and the text: each tensor's place behind it.

    The library's own writer wants all tensors of a file at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in kinds.items():
        begin, end = end, end + kinds[name].nbytes
        header[name] = {"dtype": _NAME_OF[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text
