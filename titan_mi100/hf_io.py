"""HF safetensors folders: reading parts of tensors without reading the rest, and writing them as a stream."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_mi100.durable import sync, write_synced
from titan_mi100.errors import UserError
from titan_mi100.plain_file import MIB, is_plain_name, plain_path, read_plain
from titan_mi100.weights import Kind, Weights, some

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGEST_HEADER = 32 * MIB  # 300 bytes a tensor; the library's own limit is 100 MB, of which it makes 2 GB
_MOST_TENSORS = 100_000  # in one file
_DTYPES = {  # the format's names
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def is_hf_folder(path: str | Path) -> bool:
    """Whether it holds safetensors under HF's names."""
    return any(os.path.lexists(Path(path) / name) for name in (SINGLE, INDEX))


class HFWeights(Weights):
    """The weights of an HF folder, one file or sharded with an index. Files are mapped, not read."""

    def __init__(self, folder: str | Path) -> None:
        """Look at the folder, whoever wrote it.

        Raises:
            UserError: no weights, a shard that is missing, not a whole safetensors file or outside of the folder, an
                index that lies.
        """
        self.source = Path(folder)
        self.kinds = {}
        self._path_of: dict[str, Path] = {}  # of tensors
        for file, promised in self._files().items():
            path = self.source / file
            try:
                kinds = _kinds_in(path)
            except UserError:
                raise
            except FileNotFoundError:
                raise UserError(f"{path}: no such file, but the index names it; download it again") from None
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: not a whole safetensors file ({error}); download it again") from None
            if promised is not None and (lacking := sorted(promised - kinds.keys())):
                raise UserError(f"{path}: lacks {some(lacking)}, which the index says it holds; download it again")
            if promised is not None and (unlisted := sorted(kinds.keys() - promised)):
                raise UserError(f"{path}: holds {some(unlisted)}, which the index does not name; mend the index")
            self.kinds |= kinds
            self._path_of |= dict.fromkeys(kinds, plain_path(path))

    def _files(self) -> dict[str, set[str] | None]:
        """Each file and the tensors the index says it holds (None without an index)."""
        index = self.source / INDEX
        if not os.path.lexists(index):
            if not os.path.lexists(self.source / SINGLE):
                pickled = sorted(self.source.glob("pytorch_model*.bin"))
                instead = f", only {pickled[0].name}, whose pickle may run code" if pickled else ""
                raise UserError(
                    f"{self.source}: holds neither {SINGLE} nor {INDEX}{instead}; name a folder with safetensors "
                    "weights"
                )
            return {SINGLE: None}
        if os.path.lexists(self.source / SINGLE):
            raise UserError(f"{self.source}: holds {SINGLE} and {INDEX}, of which programs read either; remove one")
        try:
            weight_map = json.loads(read_plain(index).decode("utf-8"))["weight_map"]
            files: dict[str, set[str] | None] = {}
            for name, file in weight_map.items():
                if not is_plain_name(file):
                    raise ValueError(f"file name {file!r} is not inside the folder")
                tensors = files.setdefault(file, set())
                assert tensors is not None
                tensors.add(name)
        except UserError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{index}: not an index of safetensors files: {error!r}") from None
        return files

    def read(self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        # opened for each read: pages of a map stay in memory until it is closed, and what is read lives as long as it
        handle = safe_open(self._path_of[name], framework="pt")
        return handle.get_slice(name)[
            tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
        ]


def open_safetensors(path: Path) -> Any:
    """The file, mapped. What the library checks itself: that tensors neither overlap nor leave the file."""
    path = plain_path(path)
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    if header > _LARGEST_HEADER:
        raise UserError(f"{path}: claims a header of {header:,} bytes; not a safetensors file, download it again")
    handle = safe_open(path, framework="pt")
    if (count := len(handle.keys())) > _MOST_TENSORS:
        raise UserError(f"{path}: holds {count:,} tensors, which no model does; download it again")
    return handle


def _kinds_in(path: Path) -> dict[str, Kind]:
    handle = open_safetensors(path)
    kinds = {}
    for name in handle.keys():  # noqa: SIM118  # no mapping
        part = handle.get_slice(name)
        if (dtype := _DTYPES.get(part.get_dtype())) is None:
            raise UserError(f"{path}: {name} has dtype {part.get_dtype()}, which is not supported; use bfloat16")
        kinds[name] = Kind(tuple(part.get_shape()), dtype)
    return kinds


def shard_plan(kinds: Mapping[str, Kind], shard_bytes: int) -> dict[str, list[str]]:
    """Which tensors go into which file, in order; one file if they fit. Names are those that transformers gives."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, kind in kinds.items():
        if shards[-1] and size + kind.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += kind.nbytes
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05}-of-{len(shards):05}.safetensors": names for i, names in enumerate(shards, start=1)}


def write_hf(
    folder: Path, kinds: Mapping[str, Kind], blocks: Iterable[tuple[str, int, Tensor]], shard_bytes: int
) -> None:
    """Write safetensors files, synced, and the index if there are several.

    Args:
        kinds: of all tensors.
        blocks: (name, first row, rows) of every tensor, in the order of kinds and rows.
        shard_bytes: most bytes of tensors in a file, but for a single one.
    """
    plan, stream = shard_plan(kinds, shard_bytes), iter(blocks)
    for file, names in plan.items():
        with (folder / file).open("wb") as output:
            _write_safetensors(output, {name: kinds[name] for name in names}, stream)
            output.flush()
            os.fsync(output.fileno())
    assert next(stream, None) is None, "more blocks than tensors"
    if len(plan) > 1:
        weight_map = {name: file for file, names in plan.items() for name in names}
        total = sum(kind.nbytes for kind in kinds.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_synced(folder / INDEX, json.dumps(index, indent=2) + "\n")
    sync(folder)


def _write_safetensors(output: IO[bytes], kinds: Mapping[str, Kind], stream: Iterator[tuple[str, int, Tensor]]) -> None:
    """One file: the length of the header, the header, the tensors. The library's own writer wants them all at once."""
    names = {dtype: name for name, dtype in _DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, kind in kinds.items():
        header[name] = {
            "dtype": names[kind.dtype],
            "shape": list(kind.shape),
            "data_offsets": [end, end + kind.nbytes],
        }
        end += kind.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    start = 8 + len(text)
    output.write(len(text).to_bytes(8, "little") + text)
    while end and output.tell() < start + end:
        name, _, tensor = next(stream)
        assert name in kinds
        output.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    assert output.tell() == start + end
