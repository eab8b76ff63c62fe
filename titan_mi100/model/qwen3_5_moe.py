"""The layers of Qwen3.5's mixtures of experts: those of Qwen3.5, with experts and a shared expert in place of the MLP.

tests/test_qwen3_5_moe.py compares it with transformers'.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from titan_mi100.attention.base import Backend
from titan_mi100.model.decoder import CausalLM, Layer
from titan_mi100.model.experts import Mixture, keeping_routes
from titan_mi100.model.qwen3 import MLP
from titan_mi100.model.qwen3_5 import AttentionBlock, DeltaBlock, GatedBlock, Weight, ZeroCentredNorm
from titan_mi100.shapes.base import LayerShape
from titan_mi100.shapes.qwen3_5 import FULL, LINEAR
from titan_mi100.shapes.qwen3_5_moe import Qwen3_5MoeSpec


class SharedMixture(Mixture):
    """A mixture whose tokens all go through one more expert, times a gate."""

    def __init__(self, spec: Qwen3_5MoeSpec) -> None:
        super().__init__(
            spec.hidden_size, spec.moe_intermediate_size, spec.num_experts, spec.num_experts_per_tok, is_normalised=True
        )
        self.shared_expert, self.shared_expert_gate = MLP(spec), Weight(1, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        return super().forward(x) + shared  # the dear ones last: a recomputed block stops before their pieces


class SparseBlock(GatedBlock):
    """The part that both kinds of layers share: experts in place of the MLP."""

    routers = ("mlp.gate",)
    compiled = ("project",)  # how many rows an expert has is not known when a graph is made
    recompute_contexts = staticmethod(keeping_routes)

    def __init__(self, spec: Qwen3_5MoeSpec, shape: LayerShape, backend: Backend) -> None:
        super().__init__(spec, shape, backend)
        self.mlp = SharedMixture(spec)  # type: ignore[assignment]


class SparseAttentionBlock(SparseBlock, AttentionBlock):
    """Attention, and experts."""


class SparseDeltaBlock(SparseBlock, DeltaBlock):
    """The gated delta rule, and experts."""


class Qwen3_5Moe(CausalLM):
    """The text part of a Qwen3.5 with experts."""

    kinds: ClassVar[Mapping[str, type[Layer]]] = {FULL: SparseAttentionBlock, LINEAR: SparseDeltaBlock}
    norm = ZeroCentredNorm
