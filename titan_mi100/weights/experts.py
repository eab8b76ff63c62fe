"""Experts between the forms of files and ours, see shapes/experts.py: read a box of ours, write theirs."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from titan_mi100.errors import UserError
from titan_mi100.files.model import tensor_problems
from titan_mi100.shapes.base import DRAFT, ModelSpec
from titan_mi100.shapes.experts import INSIDE, MixtureSpec, places, stacks
from titan_mi100.weights.base import Box, Kind, Weights, box, dtype_name

# peft's: gate_up_proj is wrapped first, so it is the inner one, `experts.base_layer`; down_proj is `experts` itself
TARGET_PARAMETERS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


class StackedWeights(Weights):
    """Weights by our names, of a folder that has experts of the layers, of the draft head, or of both in one of the
    forms of files. Reads few bytes besides.
    """

    def __init__(self, stored: Weights, spec: ModelSpec) -> None:
        """Raises UserError: experts are missing, or have other shapes than the model's, or several dtypes."""
        self.source, self._stored, self.named = stored.source, stored, stored.named
        assert isinstance(spec, MixtureSpec)
        ours = dict(stacks(spec))
        inside = (name for name in stored.kinds if INSIDE in name and name not in ours)
        there = {name: stored.kinds[name] for name in inside if not spec.passes_through(name)}
        of_head = {name.startswith(DRAFT) for name in there}
        stacked = {name: parameter for name, parameter in ours.items() if name.startswith(DRAFT) in of_head}
        expected = spec.in_files({name: parameter.shape for name, parameter in stacked.items()})
        held = {name: (shape, dtype_name(dtype)) for name, (shape, dtype) in there.items()}
        problems = tensor_problems(held, expected, self.named)
        self.kinds = {name: kind for name, kind in stored.kinds.items() if name not in there}
        self._places = {}
        for name, parameter in stacked.items() if not problems else ():
            self._places[name] = list(places(name, parameter, spec.fused_in_files(name))), parameter.is_transposed
            dtypes = {there[position.name].dtype for position in self._places[name][0]}
            self.kinds[name] = Kind(parameter.shape, min(dtypes, key=dtype_name))
            if len(dtypes) > 1:
                problems.append(f"experts of {name} have dtypes {', '.join(sorted(map(dtype_name, dtypes)))}; use one")
        if problems:
            raise UserError("\n".join(f"{self.source}: {problem}" for problem in problems))

    def read(self, name: str, shape: torch.Size, offset: Box, size: Box, exactly: bool = False) -> Tensor:
        if name not in self._places:
            return self._stored.read(name, shape, offset, size, exactly)
        (positions, is_transposed), (first, column), (rows, columns) = self._places[name], offset, size
        each, part = shape[0] // len(positions), torch.empty(size, dtype=self.kinds[name].dtype)
        for expert in range(first // each, -(-(first + rows) // each)):
            start, end = max(first - expert * each, 0), min(first + rows - expert * each, each)
            position, rows_of, columns_of = positions[expert], (start, end - start), (column, columns)
            if is_transposed:
                rows_of, columns_of = columns_of, rows_of
            where = [
                (0 if position.expert is None else position.expert, 1),
                (rows_of[0] + position.start, rows_of[1]),
                columns_of,
            ]
            at, lengths = zip(*where[-len(position.shape) :], strict=True)
            matrix = self._stored.read(position.name, torch.Size(position.shape), at, lengths).view(lengths[-2:])
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
        assert isinstance(spec, MixtureSpec)
        positions = list(places(name, parameter, spec.fused_in_files(name)))
        if positions[0].expert is None:
            yield from ((position.name, part.contiguous()) for position, part in zip(positions, parts, strict=True))
        elif positions[0].start:
            yield positions[0].name, torch.cat((before, parts), dim=1)
        elif parameter.is_transposed:
            before = parts
        else:
            yield positions[0].name, parts.contiguous()


def as_peft_has_experts(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Adapters by our names -> by peft's.

    Ours have the matrices of all experts below each other. Of peft's that is so for A alone; the columns of B are
    ordered by rank, then by expert: (experts x rank, outputs) -> (outputs, rank x experts).
    """
    adapters = dict[str, Tensor]()
    for name, tensor in tensors.items():
        module, _, matrix = name.rpartition(".lora_")
        experts, _, kind = module.rpartition(".")
        if not module.endswith((".experts.gate_proj", ".experts.up_proj", ".experts.down_proj")):
            adapters[name] = tensor
            continue
        theirs = f"{experts}.lora_{matrix}" if kind == "down_proj" else f"{experts}.base_layer.lora_{matrix}"
        if matrix.startswith("B"):
            tensor = tensor.unflatten(0, (-1, rank)).permute(2, 1, 0).flatten(1)
        adapters[theirs] = torch.cat((adapters[theirs], tensor)) if kind == "up_proj" else tensor
    return adapters


class AdapterOfExperts(Weights):
    """An adapter of experts by our names, of a folder as peft writes it."""

    def __init__(self, stored: Weights, rank: int) -> None:
        self.source, self._stored, self._rank, self.kinds = stored.source, stored, rank, {}
        self._places = dict[str, tuple[str, slice, bool]]()
        for name, kind in stored.kinds.items():
            is_inner, is_b = ".experts.base_layer." in name, name.endswith("B.weight") and ".experts." in name
            parts = ("gate_proj", "up_proj") if is_inner and is_b else ("gate_proj",) if is_inner else ("down_proj",)
            if len(kind.shape) != 2 or kind.shape[0] % len(parts):
                expected = "of gate and up below each other" if len(parts) == 2 else "a matrix"
                raise UserError(f"{stored.source}: {name} has shape {kind.shape}, and is not {expected}; save it again")
            rows, columns = kind.shape[0] // len(parts), kind.shape[1]
            for number, part in enumerate(parts):
                own = name.replace(".base_layer", "").replace(".experts.", f".experts.{part}.")
                self._places[own] = name, slice(number * rows, (number + 1) * rows), is_b
                self.kinds[own] = Kind((columns, rows) if is_b else (rows, columns), kind.dtype)

    def read(self, name: str, shape: torch.Size, offset: Box, size: Box, exactly: bool = False) -> Tensor:
        stored, rows, is_b = self._places[name]
        matrix = self._stored.tensor(stored)[rows]
        if is_b:
            matrix = matrix.unflatten(1, (self._rank, -1)).permute(2, 1, 0).flatten(0, 1)
        return matrix[box(offset, size)]
