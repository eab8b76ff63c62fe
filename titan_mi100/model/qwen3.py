"""The layer of the dense Qwen3.

Source: the published Qwen3 weights and their config.json; tests/test_model.py compares it with transformers' Qwen3.
"""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from torch import Tensor, nn

from titan_mi100.attention.base import Backend
from titan_mi100.model.decoder import AttentionLayer, CausalLM, Layer
from titan_mi100.model.elementwise import norm_and_rotate, swiglu
from titan_mi100.model.layers import Linear, RMSNorm, grouped, merge_weights, outputs_of
from titan_mi100.model.nf4 import whole
from titan_mi100.model.pieces import in_pieces
from titan_mi100.shapes.base import LayerShape
from titan_mi100.shapes.qwen3 import Qwen3Spec


class Attention(nn.Module):
    """The projections before and after attention; Block calls the backend between them."""

    norm = RMSNorm  # of queries and keys
    per_query = 1  # outputs of q_proj for each value of a query

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        heads, kv_heads = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.q_proj = Linear(spec.hidden_size, self.per_query * heads)
        self.k_proj = Linear(spec.hidden_size, kv_heads)
        self.v_proj = Linear(spec.hidden_size, kv_heads)
        self.o_proj = Linear(heads, spec.hidden_size)
        self.q_norm = self.norm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = self.norm(spec.head_dim, spec.rms_norm_eps)
        self.merged: Tensor | None = None  # weights of q, k and v

    def merge(self) -> None:
        self.merged = merge_weights((self.q_proj, self.k_proj, self.v_proj))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        heads = (*x.shape[:2], -1, self.head_dim)  # (batch, seq, heads, head_dim)
        q, k, v = (y.view(heads) for y in outputs_of((self.q_proj, self.k_proj, self.v_proj), x, self.merged))
        return *norm_and_rotate(q, k, (self.q_norm, self.k_norm), cos, sin), v


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x)). Attributes: piece_tokens: see pieces.in_pieces."""

    piece_tokens = 0

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size)
        self.merged: Tensor | None = None  # weights of gate and up

    def merge(self) -> None:
        self.merged = merge_weights((self.gate_proj, self.up_proj))

    def forward(self, x: Tensor) -> Tensor:
        if 0 < self.piece_tokens < x.shape[:2].numel():
            layers = self.gate_proj, self.up_proj, self.down_proj
            masks, operands = [layer.mask(x) for layer in layers], [layer.operands(x.dtype) for layer in layers]
            again, flat = partial(self._piece, is_read=False), list(chain(*operands))
            return in_pieces(self._piece, self.piece_tokens, [x, *masks], flat, whole, again)
        gate, up = outputs_of((self.gate_proj, self.up_proj), x, self.merged)
        return self.down_proj(swiglu(gate, up))

    def _piece(self, x: Tensor, *others: Tensor | None, is_read: bool = True) -> Tensor:
        masks, (gate, up, down) = others[:3], grouped(others[3:])
        inside = swiglu(self.gate_proj.compute(x, masks[0], gate), self.up_proj.compute(x, masks[1], up))
        return self.down_proj.compute(inside, masks[2], down, is_read)


class Block(AttentionLayer):
    """Attention and SwiGLU, each after a norm and added to the residual stream."""

    sequence_gathered_after = ("input_layernorm", "post_attention_layernorm")
    sequence_scattered_after = ("self_attn.o_proj", "mlp")

    def __init__(self, spec: Qwen3Spec, shape: LayerShape, backend: Backend) -> None:
        super().__init__(spec, shape, backend)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def project(self, x: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.self_attn.project(self.input_layernorm(x), *tables)

    def output(self, x: Tensor, mixed: Tensor) -> Tensor:
        normed, x = self.post_attention_layernorm(x, self.self_attn.o_proj(mixed.flatten(2)))
        return x + self.mlp(normed)


class Qwen3(CausalLM):
    """A dense Qwen3."""

    kinds: ClassVar[Mapping[str, type[Layer]]] = {"attention": Block}
