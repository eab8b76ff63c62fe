"""Experts between the forms of files and ours, see shapes/experts.py: read a box of ours, write theirs."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from titan_mi100.errors import UserError
from titan_mi100.files.model import tensor_problems
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.experts import INSIDE, as_in_files, places, stacks
from titan_mi100.weights.base import Kind, Weights, dtype_name


class StackedWeights(Weights):
    """Weights by our names, of a folder that has experts in one of the forms of files. Reads few bytes besides."""

    def __init__(self, stored: Weights, spec: ModelSpec, fused: bool) -> None:
        """Raises UserError: experts are missing, or have other shapes than the model's, or several dtypes."""
        self.source, self._stored = stored.source, stored
        there = {name: kind for name, kind in stored.kinds.items() if INSIDE in name}
        wanted = as_in_files(spec, {name: parameter.shape for name, parameter in stacks(spec)}, fused)
        problems = tensor_problems({n: (shape, dtype_name(dtype)) for n, (shape, dtype) in there.items()}, wanted)
        self.kinds = {name: kind for name, kind in stored.kinds.items() if name not in there}
        self._places = {}
        for name, parameter in stacks(spec) if not problems else ():
            self._places[name] = places(name, parameter, fused), parameter.is_transposed
            dtypes = {there[place.name].dtype for place in self._places[name][0]}
            self.kinds[name] = Kind(parameter.shape, min(dtypes, key=dtype_name))
            if len(dtypes) > 1:
                problems.append(f"experts of {name} have dtypes {', '.join(sorted(map(dtype_name, dtypes)))}; use one")
        if problems:
            raise UserError("\n".join(f"{self.source}: {problem}" for problem in problems))

    def read(self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        if name not in self._places:
            return self._stored.read(name, shape, offset, size)
        (found, is_transposed), (first, column), (rows, columns) = self._places[name], offset, size
        each, part = shape[0] // len(found), torch.empty(size, dtype=self.kinds[name].dtype)
        for expert in range(first // each, -(-(first + rows) // each)):
            start, end = max(first - expert * each, 0), min(first + rows - expert * each, each)
            place, rows_of, columns_of = found[expert], (start, end - start), (column, columns)
            if is_transposed:
                rows_of, columns_of = columns_of, rows_of
            box = [(0 if place.expert is None else place.expert, 1), (rows_of[0] + place.start, rows_of[1]), columns_of]
            at, lengths = zip(*box[-len(place.shape) :], strict=True)
            matrix = self._stored.read(place.name, torch.Size(place.shape), at, lengths).view(lengths[-2:])
            begin = expert * each + start - first
            part[begin : begin + end - start] = matrix.t() if is_transposed else matrix
        return part


def in_files(spec: ModelSpec | None, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors by our names, gate's before up's -> the same with experts in the form of files."""
    before = torch.empty(0)
    for name, tensor in tensors:
        parameter = spec.parameters.get(name) if spec else None
        if spec is None or parameter is None or not parameter.experts:
            yield name, tensor
            continue
        parts = tensor.unflatten(0, (parameter.experts, -1))
        parts = parts.mT if parameter.is_transposed else parts
        found = places(name, parameter, spec.experts_fused)
        if found[0].expert is None:
            yield from ((place.name, part.contiguous()) for place, part in zip(found, parts, strict=True))
        elif found[0].start:
            yield found[0].name, torch.cat((before, parts), dim=1)
        elif parameter.is_transposed:
            before = parts
        else:
            yield found[0].name, parts.contiguous()
