"""HF safetensors folders: writes tensors one by one."""

import json
import os
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from titan_mi100.files.tables import HF_DTYPES, INDEX, SINGLE
from titan_mi100.weights.base import Kinds, dtype_name, raw_bytes

_NAME_OF = {dtype: name for name, dtype in HF_DTYPES.items()}  # torch's name of a dtype -> safetensors' name


def is_hf_folder(path: str | Path) -> bool:
    """Whether a folder has safetensors under HF's names."""
    return any(os.path.lexists(Path(path) / name) for name in (SINGLE, INDEX))


def write_hf(folder: Path, kinds: Kinds, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Write safetensors files one after the other, and an index if there are several.

    Args:
        kinds: shape and dtype of all tensors.
        tensors: contiguous tensors, in the order of `kinds`.
        shard_bytes: largest number of tensor bytes in a file, unless a single tensor has more.
    """
    # The header comes first in a file, so all shapes must be known before the first tensor is read.
    file_of = _shard_plan(kinds, shard_bytes)
    # Tensors come in the order of `kinds`, and files are filled in that order, so each file is one group.
    for file, group in groupby(tensors, lambda item: file_of[item[0]]):
        with (folder / file).open("wb") as output:
            output.write(_header({name: kind for name, kind in kinds.items() if file_of[name] == file}))
            output.writelines(raw_bytes(tensor).numpy().data for _, tensor in group)
    if len({*file_of.values()}) > 1:
        total = sum(kind.nbytes for kind in kinds.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shard_plan(kinds: Kinds, shard_bytes: int) -> dict[str, str]:
    """The file of each tensor. Files are filled in order, and named as transformers names them."""
    shard_of, shard, size = {}, 1, 0
    for name, kind in kinds.items():
        if size and size + kind.nbytes > shard_bytes:
            shard, size = shard + 1, 0
        shard_of[name] = shard
        size += kind.nbytes
    return {name: SINGLE if shard == 1 else f"model-{i:05}-of-{shard:05}.safetensors" for name, i in shard_of.items()}


def _header(kinds: Kinds) -> bytes:
    """The beginning of a safetensors file: the length of a JSON text, then that text, with the offset of each tensor.

    Written by hand, because the library's writer needs all tensors of a file at once.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in kinds.items():
        begin, end = end, end + kinds[name].nbytes
        header[name] = {"dtype": _NAME_OF[dtype_name(dtype)], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # padding, so that the tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text
