"""Tensors that the model holds in pieces (see shapes.base.Parameter): a piece of one, and one from its pieces."""

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from titan_mi100.errors import UserError
from titan_mi100.model.init import Read
from titan_mi100.shapes.base import ModelSpec, Piece, adapter_pieces
from titan_mi100.shapes.experts import INSIDE, is_fused, stacks
from titan_mi100.weights.base import Box, Kind, Weights, box
from titan_mi100.weights.experts import StackedWeights
from titan_mi100.wording import some


def read_pieces(spec: ModelSpec, read: Read, rank: int = 0) -> Read:
    """A function that reads parameters by their names in the model.

    Args:
        read: reads tensors by their HF names.
        rank: of the LoRA matrices that it reads; 0: it reads the model's own parameters.
    """
    pieces = adapter_pieces(spec, rank) if rank else spec.pieces

    def read_held(name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        if (piece := pieces.get(name)) is None:
            return read(name, shape, offset, size)
        whole_shape = torch.Size(piece.whole_shape)
        if len(whole_shape) == 1:
            return read(piece.whole, whole_shape, offset, size)
        inner, first, (rows, columns) = whole_shape[1:-1], piece.start + offset[0], size
        each = math.prod(inner)  # rows of the matrix for each index of the first dimension
        begin, end = first // each, -(-(first + rows) // each)
        start, lengths = (begin, *(0 for _ in inner), offset[1]), (end - begin, *inner, columns)
        return read(piece.whole, whole_shape, start, lengths).reshape(-1, columns)[first - begin * each :][:rows]

    return read_held


def joined(stored: Weights, spec: ModelSpec) -> Weights:
    """The weights by our names, also if they are those of a run's checkpoint, or have a prefix in the folder.

    Raises:
        UserError: two tensors have the same name here.
    """
    names = {spec.own_name(name): name for name in stored.kinds}
    if len(names) < len(stored.kinds):
        twice = sorted(stored.kinds.keys() - {*names.values()})
        problem = f"{some(twice)} and {names[spec.own_name(twice[0])]} are the same tensor of the model"
        raise UserError(f"{stored.source}: {problem}; remove one of each")
    if any(own != name for own, name in names.items()):
        stored = RenamedWeights(stored, names)
    if is_fused(spec, stored.kinds) is not None and next(stacks(spec), None):
        stored = StackedWeights(stored, spec.as_stored(stored.kinds, {}))
    matrices = (name for name in stored.kinds if name.endswith(".lora_A.weight") and INSIDE not in name)
    ranks = (stored.kinds[name].shape[0] for name in matrices)
    pieces = spec.pieces | adapter_pieces(spec, next(ranks, 0))
    return JoinedWeights(stored, pieces) if not pieces.keys().isdisjoint(stored.kinds) else stored


class RenamedWeights(Weights):
    """Weights by our names. Args: names: our name -> the name in the folder."""

    def __init__(self, stored: Weights, names: Mapping[str, str]) -> None:
        self.source, self._stored, self.named = stored.source, stored, names
        self.kinds = {own: stored.kinds[name] for own, name in names.items()}

    def read(self, name: str, shape: torch.Size, offset: Box, size: Box, exactly: bool = False) -> Tensor:
        return self._stored.read(self.named[name], shape, offset, size, exactly)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self._stored.tensor(self.named[name], dtype)


class JoinedWeights(Weights):
    """The weights of a checkpoint that a run has saved in pieces, by their HF names."""

    def __init__(self, stored: Weights, pieces: Mapping[str, Piece]) -> None:
        self.source, self._stored, self._pieces = stored.source, stored, pieces
        self.kinds = {name: kind for name, kind in stored.kinds.items() if name not in pieces}
        for name, piece in pieces.items():
            if name in stored.kinds:
                self.kinds[piece.whole] = Kind(piece.whole_shape, stored.kinds[name].dtype)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self._stored.tensor(name, dtype) if name in self._stored.kinds else super().tensor(name, dtype)

    def read(self, name: str, shape: torch.Size, offset: Box, size: Box, exactly: bool = False) -> Tensor:
        read: Read = partial(self._stored.read, exactly=exactly)
        pieces = {held: p for held, p in self._pieces.items() if p.whole == name and held in self._stored.kinds}
        if not pieces:
            return read(name, shape, offset, size)
        if len(shape) == 1:
            return read(next(iter(pieces)), shape, offset, size)
        each, column, columns = math.prod(shape[1:-1]), offset[-1], size[-1]
        begin, end, parts = offset[0] * each, (offset[0] + size[0]) * each, []
        for held, piece in pieces.items():
            first, last = max(begin, piece.start), min(end, piece.start + piece.shape[0])
            if first < last:
                own_offset, own_size = (first - piece.start, column), (last - first, columns)
                parts.append(read(held, torch.Size(piece.shape), own_offset, own_size))
        inner = (slice(None), *box(offset[1:-1], size[1:-1]))
        return torch.cat(parts).reshape(size[0], *shape[1:-1], columns)[inner]
