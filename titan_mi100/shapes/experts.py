"""Experts as data: what a mixture's layer holds and costs, and the two forms that files have of it. Imports no torch.

We hold one matrix for all experts of a projection, `mlp.experts.{gate,up,down}_proj.weight`. Its rows are the experts
one after the other, each (hidden, inner): gate's and up's are transposed. So tensor parallel splits the columns of all
three, FSDP2 the rows, and blocks of a row never straddle experts. Files have one of two forms:

    separate: `mlp.experts.N.gate_proj.weight` (inner, hidden), up_proj the same, `.down_proj.weight` (hidden, inner)
    fused: `mlp.experts.gate_up_proj` (experts, 2 x inner, hidden), `mlp.experts.down_proj` (experts, hidden, inner)
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from titan_mi100.errors import UserError
from titan_mi100.shapes.base import DRAFT, EXPERTS, INPUTS, WHOLE, LayerShape, ModelSpec, Parameter
from titan_mi100.shapes.saved import FP32, Saved

INSIDE = ".mlp.experts."  # in the names of their tensors
# peft takes these names, in any layer of such a model, for the experts'; so an MLP has no adapters
_MLP = ("gate_proj", "up_proj", "down_proj")
_SEPARATE = re.compile(r"\.mlp\.experts\.\d+\.\w+_proj\.weight$")
_FUSED = (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")


class StackPosition(NamedTuple):
    """Position of an expert's matrix in a file.

    Attributes:
        name, shape: of the tensor in the file.
        expert: number of the expert in a fused tensor; None: the tensor is one expert's.
        start: its first row there, of one expert.
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None
    start: int


def with_experts(spec: "MixtureSpec", layer: LayerShape, kind: str, is_shared: bool = False) -> LayerShape:
    """A layer with a router and experts in place of its MLP.

    Args:
        is_shared: the MLP stays beside the experts, times a gate of its own.
    """
    hidden, inner, mlp = spec.hidden_size, spec.moe_intermediate_size, spec.intermediate_size
    experts, slots = spec.num_experts, spec.num_experts_per_tok
    matrix = Parameter((experts * hidden, inner), INPUTS, experts=experts, is_transposed=True)
    small = Parameter((experts, hidden), WHOLE, "other")
    parameters = {name: p for name, p in layer.parameters.items() if not name.startswith("mlp.")} | {
        "mlp.gate.weight": small._replace(role="router"),
        "mlp.experts.gate_proj.weight": matrix,
        "mlp.experts.up_proj.weight": matrix,
        "mlp.experts.down_proj.weight": matrix._replace(is_transposed=False),
    }
    if is_shared:
        shared = {n.replace("mlp.", "mlp.shared_expert."): p for n, p in layer.parameters.items() if n[:4] == "mlp."}
        parameters |= shared | {"mlp.shared_expert_gate.weight": small._replace(shape=(1, hidden))}
    gone, names = 0 if is_shared else mlp, ("gate", "up", "silu(gate)", "silu(gate) x up", "the same x weights")
    saved = (
        *(tensor for tensor in layer.saved if is_shared or not tensor.name.startswith("mlp.")),
        Saved("experts.rows", slots * hidden, left=0),
        *(Saved(f"experts.{name}", slots * inner, left=0) for name in names),
        *(Saved("router.logits", experts), Saved("router.probabilities", experts, dtype=FP32)),
        Saved("router.order of rows", 8 * slots, dtype=FP32),  # four tensors of 8 bytes a value
    )
    gradients = Saved("mlp.gradients", 2 * slots * (inner + hidden) + 2 * (mlp - gone), left=2 * hidden)
    return replace(
        layer,
        kind=kind,
        parameters=parameters,
        adapted=(*(name for name in layer.adapted if name not in _MLP), EXPERTS),
        products=layer.products + hidden * (3 * slots * inner + experts + is_shared - 3 * gone),
        last_product=hidden * (slots * inner + is_shared * mlp),
        slots=slots,
        saved=saved,
        temporaries=(*(each for each in layer.temporaries if not each.name.startswith("mlp.")), gradients),
    )


def is_fused(spec: ModelSpec, stored: Iterable[str]) -> bool | None:
    """The form of a folder with tensors of these names; None: ours, as in a run's checkpoints."""
    names = [name for name in stored if not spec.passes_through(name)]
    if any(name.endswith(_FUSED) for name in names):
        return True
    return False if any(map(_SEPARATE.search, names)) else None


def places(name: str, parameter: Parameter, fused: bool) -> Iterator[StackPosition]:
    """Positions in a file of the experts of one of our matrices."""
    (rows, inner), experts, is_transposed = parameter.shape, parameter.experts, parameter.is_transposed
    hidden, (module, _, kind) = rows // experts, name.removesuffix(".weight").rpartition(".")
    if not fused:
        shape = (inner, hidden) if is_transposed else (hidden, inner)
        return (StackPosition(f"{module}.{expert}.{kind}.weight", shape, None, 0) for expert in range(experts))
    start = inner if kind == "up_proj" else 0
    fused_name = f"{module}.gate_up_proj" if is_transposed else f"{module}.down_proj"
    rows, columns = (2 * inner, hidden) if is_transposed else (hidden, inner)
    return (StackPosition(fused_name, (experts, rows, columns), expert, start) for expert in range(experts))


def stacks(spec: ModelSpec) -> Iterator[tuple[str, Parameter]]:
    """Our matrices of experts, by their names."""
    return ((name, parameter) for name, parameter in spec.parameters.items() if parameter.experts)


class MixtureSpec(ModelSpec):
    """The part that families with experts share; it comes before the family's own class among the bases.

    Attributes:
        experts_fused: files have the experts of a layer in one tensor.
    """

    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    experts_fused: bool
    draft_experts_fused: bool = False  # the same of the draft head's layer

    def as_stored(self, names: Collection[str], saved: Mapping[str, Any]) -> "MixtureSpec":
        draft = {name for name in names if name.startswith(DRAFT)}
        form, of_draft = is_fused(self, [name for name in names if name not in draft]), is_fused(self, draft)
        expected = sum(parameter.experts for _, parameter in stacks(self))
        if form is False and expected > 2 * (there := sum(INSIDE in name for name in names)):  # before names are made
            text = f"num_experts = {self.num_experts} in {self.num_hidden_layers:,} layers makes {expected:,} tensors"
            raise UserError(f"config.json: {text}, but the weights have {there:,} of experts; correct it")
        known = saved.get("experts_fused", self.experts_fused) if form is None else form
        drafts = saved.get("draft_experts_fused", known) if of_draft is None else of_draft
        draft_form = {"draft_experts_fused": drafts} if self.draft_layer is not None else {}
        return replace(self, experts_fused=known, **draft_form)  # type: ignore[type-var]  # of a dataclass

    def fused_in_files(self, name: str) -> bool:
        """The form of one of our matrices of experts in files."""
        return self.draft_experts_fused if name.startswith(DRAFT) else self.experts_fused

    def in_files(self, kinds: Mapping[str, Any]) -> dict[str, Any]:
        stored = dict[str, Any]()
        for name, kind in kinds.items():
            parameter = self.parameters.get(name)
            if parameter is None or not parameter.experts:
                stored[name] = kind
                continue
            form = self.fused_in_files(name)
            for slot in islice(places(name, parameter, form), 1 if form else None):
                stored[slot.name] = kind._replace(shape=slot.shape) if hasattr(kind, "_replace") else slot.shape
        return stored

    def tensor_parallel_sizes(self) -> dict[str, int]:
        return self._used({**super().tensor_parallel_sizes(), "moe_intermediate_size": self.moe_intermediate_size})

    def input_sizes(self) -> dict[str, tuple[int, bool]]:
        return self._used({**super().input_sizes(), "moe_intermediate_size": (self.moe_intermediate_size, True)})

    def _used(self, sizes: dict[str, Any]) -> dict[str, Any]:
        """Removes the inner sizes that no layer has: config.json has that of an MLP in any case."""
        expert_flags = {bool(p.experts) for name, p in self.parameters.items() if name.endswith(".down_proj.weight")}
        gone = {"intermediate_size": False not in expert_flags, "moe_intermediate_size": True not in expert_flags}
        return {name: size for name, size in sizes.items() if not gone.get(name)}

    def problems(self) -> list[str]:
        is_too_many = self.num_experts_per_tok > self.num_experts
        problem = f"num_experts_per_tok = {self.num_experts_per_tok} is more than num_experts = {self.num_experts}"
        return super().problems() + [problem] * is_too_many
