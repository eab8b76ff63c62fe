"""A model's stored weights, in any format: shape and dtype of each tensor, and reading a tensor or a part of it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from titan_mi100.errors import UserError
from titan_mi100.files.model import EMBEDDING, HEAD, tensor_problems
from titan_mi100.files.stored import StoredTensors


class Kind(NamedTuple):
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


Kinds = dict[str, Kind]
Box = tuple[int, ...]  # where a part begins, or its size: a number per dimension


class Weights(ABC):
    """A model's tensors by their HF names.

    Attributes:
        source: the folder or file, for messages.
        kinds: name -> shape and dtype, of all tensors.
        named: where names differ from those in the folder: ours -> the folder's.
    """

    source: Path
    kinds: Kinds
    named: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def read(self, name: str, shape: torch.Size, offset: Box, size: Box, exactly: bool = False) -> Tensor:
        """Read a box (a slice in every dimension) of a tensor; few other bytes are read.

        The signature is that of distributed.fill_parameters.

        Args:
            shape: the shape of the whole tensor.
            offset, size: begin and size of the box in the tensor, one number per dimension.
            exactly: in fp32 if a run has kept more bits of the weight than its tensor has (24-bit masters).

        Returns:
            A tensor of shape `size`.
        """

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a whole tensor. Args: dtype: to cast to, from all bits that there are; None: as returned by `read`."""
        shape, exactly = self.kinds[name].shape, dtype in (torch.float32, torch.float64)
        loaded = self.read(name, torch.Size(shape), (0,) * len(shape), shape, exactly)
        return loaded if dtype is None else loaded.to(dtype)

    def check(self, shapes: Mapping[str, tuple[int, ...]], with_values: bool = True) -> None:
        """Compare names, shapes and dtypes with those of a model.

        Many folders of tied models store the head as well; that is accepted if it equals the embedding. Old buffers of
        the rotary embedding are ignored, as in transformers.

        Args:
            shapes: HF name -> shape; a tied weight occurs once, as the embedding.
            with_values: read the head and embedding of a tied model and compare them; on one rank is enough.

        Raises:
            UserError: lists every tensor that is missing, unexpected, or has a wrong shape or dtype.
        """
        kinds = {name: (shape, dtype_name(dtype)) for name, (shape, dtype) in self.kinds.items()}
        problems = tensor_problems(kinds, shapes, self.named)
        # shapes has no head: the model ties it to the embedding
        tied_head = HEAD in self.kinds and HEAD not in shapes and EMBEDDING in shapes
        if with_values and not problems and tied_head and not self._same(HEAD, EMBEDDING):
            problems.append(f"config.json ties head and embedding, but {HEAD} is not {EMBEDDING}; correct config.json")
        if problems:
            raise UserError("\n".join(f"{self.source}: {problem}" for problem in problems))

    def _same(self, one: str, other: str) -> bool:
        # The two may be stored in different dtypes; compare in one that holds both exactly.
        dtype = torch.promote_types(self.kinds[one].dtype, self.kinds[other].dtype)
        return torch.equal(self.tensor(one, dtype), self.tensor(other, dtype))


class StoredWeights(Weights):
    """Tensors in memory-mapped files."""

    def __init__(self, source: Path, stored: StoredTensors, names: Mapping[str, str] | None = None) -> None:
        """Args: names: HF name -> name in the file; None: all tensors, under their own names."""
        self.source, self._stored = source, stored
        self._names = {name: name for name in stored.kinds} if names is None else names
        self.kinds = {name: Kind(*stored.kinds[own]) for name, own in self._names.items()}

    def read(self, name: str, shape: torch.Size, offset: Box, size: Box, exactly: bool = False) -> Tensor:
        return self._stored.read(self._names[name], offset, size)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """As in Weights, but parts are cast one by one, so that memory never holds the tensor in two dtypes."""
        shape = self.kinds[name].shape
        return self._stored.read(self._names[name], (0,) * len(shape), shape, dtype)


def box(offset: Iterable[int], size: Iterable[int]) -> tuple[slice, ...]:
    """The index (slices) of a part of a tensor."""
    return tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as uint8, without a copy."""
    return tensor.flatten().view(torch.uint8)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
