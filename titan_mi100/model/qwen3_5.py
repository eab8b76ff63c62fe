"""The layers of the dense Qwen3.5 (3.6, 3.8): attention with a gate on its output, and Gated DeltaNet.

Source: the published weights and their config.json; Yang et al., 2024 (Gated Delta Networks). tests/test_qwen3_5.py
compares it with transformers' Qwen3.5.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from titan_mi100.attention.base import Backend, Documents
from titan_mi100.model.decoder import AttentionLayer, CausalLM, Layer
from titan_mi100.model.delta_rule import causal_convolution, convolved, delta_rule, document_ids, gates, recurrence
from titan_mi100.model.elementwise import at_least_fp32, gated, gated_norm, norm_and_rotate, rms_norm
from titan_mi100.model.layers import Linear, RMSNorm, local_weight, merge_weights, multiply, outputs_of
from titan_mi100.model.pieces import in_pieces
from titan_mi100.model.qwen3 import MLP, Attention
from titan_mi100.shapes.base import LayerShape, ModelSpec
from titan_mi100.shapes.qwen3_5 import FULL, LINEAR, Qwen3_5Spec


class ZeroCentredNorm(RMSNorm):
    """RMSNorm whose gain is 1 + weight, so that weight decay pulls the gain to 1."""

    is_centred = True

    def plain(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(at_least_fp32(x), 1 + weight, self.eps).to(x.dtype)


class GatedNorm(nn.Module):
    """RMSNorm times silu(gate), of each head."""

    piece_tokens = 0

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        norm, weight = partial(gated_norm, eps=self.eps), local_weight(self.weight, self.weight.dtype)
        return in_pieces(norm, self.piece_tokens, [x, gate], [weight])


class Weight(nn.Module):
    """A matrix that is neither adapted nor kept in 4 bits: it is small, and errors in it add up over a document."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, local_weight(self.weight, x.dtype))


class Decay(nn.Module):
    """The gates of the delta rule, see delta_rule.gates. fp32: the decay adds up over a document."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.ones(heads))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        rate, bias = (local_weight(weight, weight.dtype) for weight in (self.A_log, self.dt_bias))
        return gates(a, b, rate, bias)


class GatedAttention(Attention):
    """The projections before and after attention. q_proj gives of each head its query and its gate."""

    norm, per_query, piece_tokens = ZeroCentredNorm, 2, 0

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        both, k, v = outputs_of((self.q_proj, self.k_proj, self.v_proj), x, self.merged)
        q, gate = both.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (k, v))
        return *norm_and_rotate(q, k, (self.q_norm, self.k_norm), cos, sin), v, gate


class DeltaNet(nn.Module):
    """The projections, the convolutions and the rule of Gated DeltaNet."""

    piece_tokens = 0

    def __init__(self, spec: Qwen3_5Spec, parts: tuple[int, ...]) -> None:
        """Args: parts: values of a token's queries, keys and values."""
        super().__init__()
        hidden, self.dims = spec.hidden_size, (*(spec.linear_key_head_dim,) * 2, spec.linear_value_head_dim)
        self.in_proj_qkv = nn.ModuleList(Linear(hidden, rows) for rows in parts)
        self.in_proj_z = Linear(hidden, spec.values)
        self.in_proj_b, self.in_proj_a = (Weight(spec.linear_num_value_heads, hidden) for _ in range(2))
        self.conv1d = nn.ModuleList(Weight(rows, spec.linear_conv_kernel_dim) for rows in parts)
        self.decay = Decay(spec.linear_num_value_heads)
        self.norm = GatedNorm(spec.linear_value_head_dim, spec.rms_norm_eps)
        self.out_proj = Linear(spec.values, hidden)
        self.merged: Tensor | None = None  # weights of in_proj_qkv and in_proj_z

    def merge(self) -> None:
        self.merged = merge_weights((*self.in_proj_qkv, self.in_proj_z))  # type: ignore[arg-type]

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = outputs_of((*self.in_proj_qkv, self.in_proj_z), x, self.merged)  # type: ignore[arg-type]
        return *wide, self.in_proj_b(x), self.in_proj_a(x)

    def next_convolved(
        self, parts: tuple[Tensor, ...], ids: Tensor | None, last: list[Tensor] | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The same of tokens that follow others, and the inputs that the next token's need."""
        outputs, after = [], []
        for number, (x, weight) in enumerate(zip(parts[:3], self.taps(parts[0].dtype), strict=True)):
            y, newest = causal_convolution(x, weight, ids, None if last is None else last[number])
            outputs.append(F.silu(y))
            after.append(newest)
        return self.by_head(outputs), after

    def taps(self, dtype: torch.dtype) -> list[Tensor]:
        return [local_weight(conv.weight, dtype) for conv in self.conv1d]  # type: ignore[arg-type]

    def by_head(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Queries, keys and values, (batch, seq, channels) -> (batch, seq, heads, size)."""
        return [x.unflatten(-1, (-1, size)) for x, size in zip(parts, self.dims, strict=True)]


class GatedBlock(Layer):
    """The part that both kinds of layers share: the norms, and SwiGLU after the mixing."""

    def __init__(self, spec: Qwen3_5Spec, shape: LayerShape, backend: Backend) -> None:
        super().__init__(spec, shape, backend)
        self.input_layernorm = ZeroCentredNorm(spec.hidden_size, spec.rms_norm_eps)
        self.post_attention_layernorm = ZeroCentredNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    sequence_gathered_after = ("input_layernorm", "post_attention_layernorm")

    def add(self, x: Tensor, mixed: Tensor) -> Tensor:
        normed, x = self.post_attention_layernorm(x, mixed)
        return x + self.mlp(normed)


class AttentionBlock(GatedBlock, AttentionLayer):
    """Attention whose output is multiplied by a gate."""

    sequence_scattered_after = ("self_attn.o_proj", "mlp")

    def __init__(self, spec: Qwen3_5Spec, shape: LayerShape, backend: Backend) -> None:
        super().__init__(spec, shape, backend)
        self.self_attn = GatedAttention(spec)

    def project(self, x: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.self_attn.project(self.input_layernorm(x), *tables)

    def mix(self, parts: tuple[Tensor, ...], prepared: Any) -> Any:
        return super().mix(parts[:3], prepared), parts[3]

    def decode_step(self, parts: tuple[Tensor, ...], prepared: Any, state: Any, used: int, visible: Tensor) -> Any:
        return super().decode_step(parts[:3], prepared, state, used, visible), parts[3]

    def output(self, x: Tensor, mixed: Any) -> Tensor:
        outputs, gate = mixed
        outputs = in_pieces(gated, self.self_attn.piece_tokens, [outputs, gate])
        return self.add(x, self.self_attn.o_proj(outputs.flatten(2)))


class DeltaBlock(GatedBlock):
    """A layer whose positions mix by the gated delta rule."""

    sequence_scattered_after = ("linear_attn.out_proj", "mlp")
    in_fp32 = ("linear_attn.decay", "linear_attn.norm")
    is_dynamic = False  # torch 2.8 has no loop over parts of a row whose length it does not know

    def __init__(self, spec: Qwen3_5Spec, shape: LayerShape, backend: Backend) -> None:
        super().__init__(spec, shape, backend)
        self.chunk = spec.chunk
        self.linear_attn = DeltaNet(spec, shape.parameters["linear_attn.in_proj_qkv.weight"].split.parts)

    @staticmethod
    def rotary_tables(spec: ModelSpec, positions: Tensor) -> tuple[Tensor, ...]:
        return ()

    @staticmethod
    def prepare(backend: Backend, documents: Documents, device: torch.device) -> Tensor:
        return document_ids(documents, device)

    def project(self, x: Tensor, tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return self.linear_attn.project(self.input_layernorm(x))

    def mix(self, parts: tuple[Tensor, ...], prepared: Any) -> Any:
        net, (z, b, a) = self.linear_attn, parts[3:]

        def rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, *taps: Tensor) -> Tensor:
            q, k, v = net.by_head(convolved((q, k, v), taps, prepared, net.piece_tokens))
            # On a CPU memory is no shortage, and launches cost nothing. Tensors without values are counted for a GPU.
            on_cpu = q.device.type == "cpu" and not isinstance(q, FakeTensor)
            divides = on_cpu or 0 < net.piece_tokens < prepared.numel()
            return delta_rule(q, k, v, decay, strength, prepared, chunk=self.chunk, keeps=on_cpu, divides=divides)[0]

        return self.mix_rows(rule, (*parts[:3], *net.decay(a, b)), net.taps(parts[0].dtype)), z

    def new_decode_state(self, spec: ModelSpec, batch: int, seq: int, dtype: torch.dtype, device: torch.device) -> Any:
        """The convolutions' last inputs, and the rule's state; empty before the first token."""
        return {}

    def decode_step(self, parts: tuple[Tensor, ...], prepared: Any, state: Any, used: int, visible: Tensor) -> Any:
        net, (z, b, a), ids = self.linear_attn, parts[3:], None if used else prepared
        (q, k, v), last = net.next_convolved(parts, ids, state.get("inputs"))
        rule = recurrence if q.shape[1] == 1 else delta_rule
        decay, strength = net.decay(a, b)
        mixed, after = rule(q, k, v, decay, strength, ids, state.get("rule"))
        state |= {"inputs": last, "rule": after}
        return mixed, z

    def output(self, x: Tensor, mixed: Any) -> Tensor:
        outputs, z = mixed
        net = self.linear_attn
        return self.add(x, net.out_proj(net.norm(outputs, z.view_as(outputs)).flatten(2)))


class Qwen3_5(CausalLM):
    """The text part of a dense Qwen3.5."""

    kinds: ClassVar[Mapping[str, type[Layer]]] = {FULL: AttentionBlock, LINEAR: DeltaBlock}
    norm = ZeroCentredNorm
