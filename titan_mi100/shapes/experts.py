"""Experts as data: what a mixture's layer holds and costs, and the two forms that files have of it. Imports no torch.

We hold one matrix for all experts of a projection, `mlp.experts.{gate,up,down}_proj.weight`. Its rows are the experts
one after the other, each (hidden, inner): gate's and up's are transposed. So tensor parallel splits the columns of all
three, FSDP2 the rows, and blocks of a row never straddle experts. Files have one of two forms:

    separate: `mlp.experts.N.gate_proj.weight` (inner, hidden), up_proj the same, `.down_proj.weight` (hidden, inner)
    fused: `mlp.experts.gate_up_proj` (experts, 2 x inner, hidden), `mlp.experts.down_proj` (experts, hidden, inner)
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from titan_mi100.shapes.base import INPUTS, WHOLE, ModelSpec, Parameter, Values

INSIDE = ".mlp.experts."  # in the names of their tensors
_SEPARATE = re.compile(r"\.mlp\.experts\.\d+\.\w+_proj\.weight$")
_FUSED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


class Place(NamedTuple):
    """Where a file has an expert's matrix.

    Attributes:
        name, shape: of the tensor in the file.
        expert: number of the expert in a fused tensor; None: the tensor is one expert's.
        start: its first row there, of one expert.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None
    start: int


def stacked(hidden: int, inner: int, experts: int) -> dict[str, Parameter]:
    """The parameters of a layer's router and experts."""
    matrix = Parameter((experts * hidden, inner), INPUTS, experts=experts, is_transposed=True)
    return {
        "mlp.gate.weight": Parameter((experts, hidden), WHOLE, "other"),
        "mlp.experts.gate_proj.weight": matrix,
        "mlp.experts.up_proj.weight": matrix,
        "mlp.experts.down_proj.weight": matrix._replace(is_transposed=False),
    }


def kept(hidden: int, inner: int, experts: int, slots: int) -> Values:
    """What a mixture keeps per token: rows, gate, up and their products; probabilities and the order of rows."""
    return Values(slots * (hidden + 5 * inner) + experts, experts + 8 * slots)


def is_fused(names: Collection[str]) -> bool | None:
    """The form of a folder with tensors of these names; None: ours, as in a run's checkpoints."""
    if any(name.endswith(_FUSED) for name in names):
        return True
    return False if any(map(_SEPARATE.search, names)) else None


def places(name: str, parameter: Parameter, fused: bool) -> list[Place]:
    """Where a file has each expert of one of our matrices."""
    (rows, inner), experts, is_transposed = parameter.shape, parameter.experts, parameter.is_transposed
    hidden, (module, _, kind) = rows // experts, name.removesuffix(".weight").rpartition(".")
    if not fused:
        shape = (inner, hidden) if is_transposed else (hidden, inner)
        return [Place(f"{module}.{expert}.{kind}.weight", shape, None, 0) for expert in range(experts)]
    start = inner if kind == "up_proj" else 0
    whole = f"{module}.gate_up_proj" if is_transposed else f"{module}.down_proj"
    rows, columns = (2 * inner, hidden) if is_transposed else (hidden, inner)
    return [Place(whole, (experts, rows, columns), expert, start) for expert in range(experts)]


def stacks(spec: ModelSpec) -> Iterator[tuple[str, Parameter]]:
    """Our matrices of experts, by their names."""
    return ((name, parameter) for name, parameter in spec.parameters.items() if parameter.experts)


def as_in_files(spec: ModelSpec, kinds: Mapping[str, Any], fused: bool) -> dict[str, Any]:
    """See ModelSpec.in_files."""
    found, every = dict[str, Any](), spec.parameters
    for name, kind in kinds.items():
        if name not in every or not every[name].experts:
            found[name] = kind
            continue
        for place in places(name, every[name], fused):
            found[place.name] = kind._replace(shape=place.shape) if hasattr(kind, "_replace") else place.shape
    return found
