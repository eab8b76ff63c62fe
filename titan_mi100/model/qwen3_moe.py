"""The layers of Qwen3's mixtures of experts: those of Qwen3, most of them with experts in place of the MLP.

Source: the published weights and their config.json; tests/test_qwen3_moe.py compares it with transformers'.
"""

from collections.abc import Mapping
from typing import ClassVar

from titan_mi100.attention.base import Backend
from titan_mi100.model.decoder import CausalLM, Layer
from titan_mi100.model.experts import Mixture, keeping_routes
from titan_mi100.model.qwen3 import Block
from titan_mi100.shapes.base import LayerShape
from titan_mi100.shapes.qwen3_moe import SPARSE, Qwen3MoeSpec


class SparseBlock(Block):
    """Attention, and a mixture of experts."""

    routers = ("mlp.gate",)
    compiled = ("project",)  # how many rows an expert has is not known when a graph is made
    recompute_contexts = staticmethod(keeping_routes)

    def __init__(self, spec: Qwen3MoeSpec, shape: LayerShape, backend: Backend) -> None:
        super().__init__(spec, shape, backend)
        self.mlp = Mixture(  # type: ignore[assignment]
            spec.hidden_size, spec.moe_intermediate_size, spec.num_experts, spec.num_experts_per_tok,
            spec.norm_topk_prob,
        )  # fmt: skip


class Qwen3Moe(CausalLM):
    """A Qwen3 with experts."""

    kinds: ClassVar[Mapping[str, type[Layer]]] = {"attention": Block, SPARSE: SparseBlock}
