"""A model's weights at rest, whatever the format: which tensors there are, and reading parts of them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from titan_mi100.errors import UserError

_TRAINABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BLOCK_BYTES = 16 << 20  # of larger ones malloc would give back the memory each time, and the kernel clear it
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Kind(NamedTuple):
    """What a tensor is, but for its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Weights(ABC):
    """Tensors by their HF names.

    Attributes:
        source: the folder or file.
        kinds: of all tensors.
    """

    source: Path
    kinds: dict[str, Kind]

    @abstractmethod
    def read(self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        """A part of a tensor, as distributed.fill_parameters wants it. Little more than its bytes is read."""

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Compare names, shapes and kinds with those of a model (HF names, a tied weight once).

        Many tied folders hold the head as well; that is accepted when it is the same tensor.

        Raises:
            UserError: every tensor that is missing, unexpected or mis-shaped.
        """
        tied_head = HEAD in self.kinds and HEAD not in shapes and EMBEDDING in shapes
        wanted = {**shapes, HEAD: shapes[EMBEDDING]} if tied_head else shapes
        problems = []
        if missing := sorted(wanted.keys() - self.kinds.keys()):
            problems.append(f"missing: {some(missing)}")
        if unexpected := sorted(self.kinds.keys() - wanted.keys()):
            problems.append(f"not part of this model: {some(unexpected)}")
        for name in sorted(wanted.keys() & self.kinds.keys()):
            shape, dtype = self.kinds[name]
            if shape != tuple(wanted[name]):
                problems.append(f"{name} has shape {shape}, the model's is {tuple(wanted[name])}")
            if dtype not in _TRAINABLE:
                problems.append(f"{name} has dtype {in_words(dtype)}, which cannot be trained; use floating point")
        if not problems and tied_head and not self._same(HEAD, EMBEDDING):
            problems.append(
                "config.json ties the head to the embedding, but lm_head.weight is not model.embed_tokens.weight; "
                "set tie_word_embeddings to false, or remove the wrong one"
            )
        if any(".lora_A." in name for name in unexpected):
            problems = ["is a LoRA adapter; name its base, and merge it, or go on with it by lora.initial_load_path"]
        if problems:
            raise UserError("\n".join(f"{self.source}: {problem}" for problem in problems))

    def _same(self, a: str, b: str) -> bool:
        if self.kinds[a] != self.kinds[b]:
            return False
        return all(
            torch.equal(self.rows(a, start, stop), self.rows(b, start, stop))
            for start, stop in row_blocks(self.kinds[a])
        )

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor."""
        shape = self.kinds[name].shape
        if not shape:
            return self.read(name, torch.Size(shape), (), ())
        return self.read(name, torch.Size(shape), (start, *[0] * (len(shape) - 1)), (stop - start, *shape[1:]))


def row_blocks(kind: Kind) -> Iterator[tuple[int, int]]:
    """Ranges of rows that together are the whole tensor, none of them large."""
    rows = kind.shape[0] if kind.shape else 1
    step = max(1, _BLOCK_BYTES * rows // max(kind.nbytes, 1))
    yield from ((start, min(start + step, rows)) for start in range(0, max(rows, 1), step))


def some(names: Iterable[str], most: int = 8) -> str:
    """Some of the names, for a message."""
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def in_words(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
