"""Tensors that the model holds in pieces (see shapes.base.Parameter): a piece of one, and one from its pieces."""

import math

import torch
from torch import Tensor

from titan_mi100.model.init import Read
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.weights.base import Kind, Weights, box


def read_pieces(spec: ModelSpec, read: Read) -> Read:
    """A function that reads parameters by their names in the model. Args: read: reads tensors by their HF names."""

    def read_held(name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        if (piece := spec.pieces.get(name)) is None:
            return read(name, shape, offset, size)
        whole = torch.Size(spec.parameters[piece.whole].shape)
        inner, first, (rows, columns) = whole[1:-1], piece.start + offset[0], size
        each = math.prod(inner)  # rows of the matrix for each index of the first dimension
        begin, end = first // each, -(-(first + rows) // each)
        start, lengths = (begin, *(0 for _ in inner), offset[1]), (end - begin, *inner, columns)
        return read(piece.whole, whole, start, lengths).reshape(-1, columns)[first - begin * each :][:rows]

    return read_held


def joined(stored: Weights, spec: ModelSpec) -> Weights:
    """The weights by their HF names, also if they are those of a run's checkpoint."""
    return JoinedWeights(stored, spec) if not spec.pieces.keys().isdisjoint(stored.kinds) else stored


class JoinedWeights(Weights):
    """The weights of a checkpoint that a run has saved in pieces, by their HF names."""

    def __init__(self, stored: Weights, spec: ModelSpec) -> None:
        self.source, self._stored, self._spec = stored.source, stored, spec
        self.kinds = {name: kind for name, kind in stored.kinds.items() if name not in spec.pieces}
        for name, piece in spec.pieces.items():
            if name in stored.kinds:
                self.kinds[piece.whole] = Kind(spec.parameters[piece.whole].shape, stored.kinds[name].dtype)

    def read(self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return self._joined(self._stored.read, name, shape, offset, size)

    def read_exactly(self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return self._joined(self._stored.read_exactly, name, shape, offset, size)

    def _joined(
        self, read: Read, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]
    ) -> Tensor:
        pieces = {held: p for held, p in self._spec.pieces.items() if p.whole == name and held in self._stored.kinds}
        if not pieces:
            return read(name, shape, offset, size)
        each, column, columns = math.prod(shape[1:-1]), offset[-1], size[-1]
        begin, end, found = offset[0] * each, (offset[0] + size[0]) * each, []
        for held, piece in pieces.items():
            first, last = max(begin, piece.start), min(end, piece.start + piece.shape[0])
            if first < last:
                where = (first - piece.start, column), (last - first, columns)
                found.append(read(held, torch.Size(piece.shape), *where))
        inner = (slice(None), *box(offset[1:-1], size[1:-1]))
        return torch.cat(found).reshape(size[0], *shape[1:-1], columns)[inner]
