"""HF safetensors folders: which tensors are where, and reading parts of them without reading the rest."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_mi100.errors import UserError
from titan_mi100.plain_file import MIB, is_plain_name, plain_path, read_plain

_LARGEST_HEADER = 32 * MIB  # 300 bytes a tensor; the library's own limit is 100 MB, of which it makes 2 GB
_MOST_TENSORS = 100_000  # in one file
_FLOATS = {"F32", "F16", "BF16", "F64"}


class HFWeights:
    """The weights of an HF folder, one file or sharded with an index. Files are mapped, not read."""

    def __init__(self, folder: str | Path) -> None:
        """Open the folder, whoever wrote it.

        Raises:
            UserError: no weights, a shard that is missing, not a whole safetensors file or outside of the folder, an
                index that lies.
        """
        self.folder = Path(folder)
        self._handles: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}  # tensor -> file
        for file, promised in self._files().items():
            path = self.folder / file
            try:
                handle = open_safetensors(path)
            except UserError:
                raise
            except FileNotFoundError:
                raise UserError(f"{path}: no such file, but the index names it; download it again") from None
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: not a whole safetensors file ({error}); download it again") from None
            held = set(handle.keys())
            if promised is not None and (lacking := sorted(promised - held)):
                raise UserError(f"{path}: lacks {_some(lacking)}, which the index says it holds; download it again")
            if promised is not None and (unlisted := sorted(held - promised)):
                raise UserError(f"{path}: holds {_some(unlisted)}, which the index does not name; mend the index")
            self._handles[file] = handle
            self._file_of.update(dict.fromkeys(held if promised is None else promised, file))

    def _files(self) -> dict[str, set[str] | None]:
        """Each file and the tensors the index says it holds (None without an index)."""
        index = self.folder / "model.safetensors.index.json"
        if not os.path.lexists(index):
            if not os.path.lexists(self.folder / "model.safetensors"):
                raise UserError(
                    f"{self.folder}: holds neither model.safetensors nor model.safetensors.index.json; "
                    "name a folder with safetensors weights"
                )
            return {"model.safetensors": None}
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

    def check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Compare names, shapes and kinds with those of a model (HF names, a tied weight once).

        Many tied folders hold the head as well; that is accepted when it is the same tensor.

        Raises:
            UserError: every tensor that is missing, unexpected or mis-shaped.
        """
        tied_head = "lm_head.weight" in self._file_of and "lm_head.weight" not in shapes
        wanted = {**shapes, "lm_head.weight": shapes["model.embed_tokens.weight"]} if tied_head else shapes
        problems = []
        if missing := sorted(wanted.keys() - self._file_of.keys()):
            problems.append(f"missing: {_some(missing)}")
        if unexpected := sorted(self._file_of.keys() - wanted.keys()):
            problems.append(f"not part of this model: {_some(unexpected)}")
        for name in sorted(wanted.keys() & self._file_of.keys()):
            part = self._slice(name)
            if tuple(part.get_shape()) != tuple(wanted[name]):
                problems.append(f"{name} has shape {tuple(part.get_shape())}, the model's is {tuple(wanted[name])}")
            if part.get_dtype() not in _FLOATS:
                problems.append(f"{name} has dtype {part.get_dtype()}, which cannot be trained; use floating point")
        if not problems and tied_head and not self._same("lm_head.weight", "model.embed_tokens.weight"):
            problems.append(
                "config.json ties the head to the embedding, but lm_head.weight is not model.embed_tokens.weight; "
                "set tie_word_embeddings to false, or remove the wrong one"
            )
        if problems:
            raise UserError("\n".join(f"{self.folder}: {problem}" for problem in problems))

    def read(self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """A part of a tensor, as distributed.fill_parameters wants it. Only its bytes are read."""
        return self._slice(name)[
            tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
        ]

    def _slice(self, name: str) -> Any:
        return self._handles[self._file_of[name]].get_slice(name)

    def _same(self, a: str, b: str, rows: int = 8192) -> bool:
        left, right = self._slice(a), self._slice(b)
        return all(
            torch.equal(left[row : row + rows], right[row : row + rows]) for row in range(0, left.get_shape()[0], rows)
        )


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


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
