"""The dense Qwen3 model.

The model knows nothing of parallelism, except that a rank may hold a subset of the layers (a pipeline stage) and a
shard of each weight (tensor parallel). Parameters carry HF's full names, so that a checkpoint's bytes move without
mapping.

Legend: activations are (batch, seq, ...); hidden = spec.hidden_size.
Source: the published Qwen3 weights and their config.json; tests/test_model.py compares it with transformers' Qwen3.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_mi100.attention.base import Backend, Documents
from titan_mi100.attention.plain import Eager
from titan_mi100.config.layout import Stage
from titan_mi100.config.model_spec import ModelSpec
from titan_mi100.model.layers import (
    Linear,
    RMSNorm,
    at_least_fp32,
    local_weight,
    merge_weights,
    multiply,
    outputs_of,
)
from titan_mi100.model.loss import head_loss


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles (RoPE; Su et al., 2021).

    Args:
        positions: (batch, seq), restarting at 0 in each document.

    Returns:
        Two tensors (batch, seq, 1, head_dim) in fp32. The first half of sin is negated, see `rotate`.

    They are computed in every forward instead of being kept in a buffer: there is nothing to initialise, save or cast.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[..., None].float() * (1.0 / theta**exponents)  # (batch, seq, head_dim / 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1)[:, :, None], torch.cat((-sin, sin), dim=-1)[:, :, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) by its angle.

    Args:
        x: (batch, seq, heads, head_dim), in fp32 or fp64.
    """
    # (a cos - b sin, b cos + a sin): sin already has the minus sign in its first half
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)


class Attention(nn.Module):
    """The projections before and after attention; Block calls the backend between them."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        heads, kv_heads = spec.num_attention_heads * spec.head_dim, spec.num_key_value_heads * spec.head_dim
        self.q_proj = Linear(spec.hidden_size, heads)
        self.k_proj = Linear(spec.hidden_size, kv_heads)
        self.v_proj = Linear(spec.hidden_size, kv_heads)
        self.o_proj = Linear(heads, spec.hidden_size)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps)
        self.merged: Tensor | None = None  # weights of q, k and v; see Qwen3.merge

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = (*x.shape[:2], -1, self.head_dim)  # (batch, seq, heads, head_dim)
        q, k, v = (y.view(heads) for y in outputs_of((self.q_proj, self.k_proj, self.v_proj), x, self.merged))
        # Norm and rotation run in fp32, so that q and k are rounded to 16 bits once and not twice.
        q = rotate(self.q_norm(at_least_fp32(q)), cos, sin).to(x.dtype)
        k = rotate(self.k_norm(at_least_fp32(k)), cos, sin).to(x.dtype)
        return q, k, v


class MLP(nn.Module):
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size)
        self.merged: Tensor | None = None  # weights of gate and up; see Qwen3.merge

    def forward(self, x: Tensor) -> Tensor:
        gate, up = outputs_of((self.gate_proj, self.up_proj), x, self.merged)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    """One layer in three parts: before attention, attention, after attention.

    The parts are separate because attention depends on the documents of each microbatch: torch.compile can include it
    only if the backend takes the documents as tensors (see build.apply_compile).
    """

    def __init__(self, spec: ModelSpec, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Any) -> Tensor:
        q, k, v = self.before_attention(x, cos, sin)
        return self.after_attention(x, self.backend(q, k, v, documents))

    def before_attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(attended.flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The embedding, the layers and the final norm, or a pipeline stage's share of them. The head is not included."""

    def __init__(self, spec: ModelSpec, backend: Backend, stage: Stage) -> None:
        super().__init__()
        self.spec, self.backend, self.stage = spec, backend, stage
        self.dtype: torch.dtype | None = None  # dtype of the activations; None: the dtype of the embedding
        # With tied embeddings the last stage holds a copy of the embedding too: it is the head's weight.
        embeds = stage.first or (stage.last and spec.tie_word_embeddings)
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size, spec.pad_token_id) if embeds else None
        # A dict with the model's layer numbers as keys: a pipeline stage's parameters keep their HF names.
        self.layers = nn.ModuleDict({str(number): Block(spec, backend) for number in stage.layers})
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps) if stage.last else None

    def blocks(self) -> list[Block]:
        return [block for block in self.layers.values() if isinstance(block, Block)]

    def forward(self, x: Tensor, positions: Tensor, documents: Any) -> Tensor:
        cos, sin = rotary_tables(positions, self.spec.head_dim, self.spec.rope_theta)
        if self.stage.first:
            x = self.embed(x)
        for layer in self.blocks():
            x = layer(x, cos, sin, documents)
        return x if self.norm is None else self.norm(x)

    def embed(self, input_ids: Tensor) -> Tensor:
        """(batch, seq) -> (batch, seq, hidden)."""
        assert self.embed_tokens is not None
        x = self.embed_tokens(input_ids)
        return x if self.dtype is None else x.to(self.dtype)


_HEAD_BLOCK = 1 << 14  # rows of the head (tokens of the vocabulary) that are cast at a time

# (hidden states, the head's weight, labels, index of the supervised tokens) -> (1,); see loss.head_loss
HeadLoss = Callable[..., Tensor]


class Head(nn.Module):
    """The output matrix of an untied model. It is a module with a forward, because FSDP2 gathers its weight in a
    forward hook.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size))

    def forward(self, hidden: Tensor, labels: Tensor | None, supervised: Tensor | None, loss: HeadLoss) -> Tensor:
        return logits_or_loss(hidden, self.weight, labels, supervised, loss)


def logits_or_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor | None, supervised: Tensor | None, loss: HeadLoss
) -> Tensor:
    """Logits of all tokens, logits of the `supervised` tokens (no labels), or the loss; see Qwen3.forward.

    Args:
        hidden: (batch, seq, hidden). weight: (V, hidden), or this rank's shard of the vocabulary.
    """
    if labels is None and supervised is None:
        return multiply(hidden, local_weight(weight, hidden.dtype))
    if labels is None:  # few tokens of a model in training: cast its fp32 head in blocks, never the full (V, hidden)
        few, blocks = hidden.flatten(0, 1)[supervised], local_weight(weight, weight.dtype).split(_HEAD_BLOCK)
        return torch.cat([multiply(few, block.to(few.dtype)) for block in blocks], dim=-1)
    assert supervised is not None, "labels need the index of the supervised tokens"
    return loss(hidden, local_weight(weight, weight.dtype), labels, supervised)  # the loss casts the weight in blocks


class Qwen3(nn.Module):
    """A causal language model, or the part of it that a pipeline stage holds.

    Args:
        backend: the attention backend; default: Eager, the reference.
        stage: the layers to build; default: the whole model.

    Build it under `torch.device("meta")`, shard it, call `to_empty`, then fill every parameter from a checkpoint or
    with `init.initial_values`. There are no buffers.
    """

    def __init__(self, spec: ModelSpec, backend: Backend | None = None, stage: Stage | None = None) -> None:
        super().__init__()
        stage = stage or Stage(range(spec.num_hidden_layers))
        self.model = Decoder(spec, backend or Eager(), stage)
        self.lm_head = Head(spec) if stage.last and not spec.tie_word_embeddings else None
        self.head_loss: HeadLoss = head_loss

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        documents: Any = None,
        labels: Tensor | None = None,
        supervised: Tensor | None = None,
    ) -> Tensor:
        """Compute the logits, or the summed loss if labels are given.

        Args:
            input_ids: (batch, seq). A later pipeline stage gets the hidden states of the stage before it instead,
                (batch, seq, hidden).
            positions: (batch, seq), restarting per document; default: 0, 1, ...
            documents: what `backend.prepare` returned for this microbatch; default: one document per row.
            labels: (batch, seq), already shifted; IGNORE for unsupervised tokens.
            supervised: (n,), on the device: index of the supervised tokens in the flattened batch. Without labels: the
                tokens whose logits are wanted; default: all.

        A microbatch of the loader has `document_ends` and `supervised_columns` instead of `documents` and `supervised`;
        the hook of parallel.base.read_on_host converts them.

        Returns:
            With labels the loss, (1,), in fp32 or fp64. Without labels the logits in the activations' dtype,
            (batch, seq, vocab_size) or (n, vocab_size). A stage that is not the last returns hidden states.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if documents is None:
            documents = self.model.backend.prepare(Documents.one_per_row(*positions.shape), positions.device)
        hidden = self.model(input_ids, positions, documents)
        return self.head(hidden, labels, supervised) if self.model.stage.last else hidden

    def merge(self) -> None:
        """Merge weights that have the same input (q, k, v; gate, up), so that one product replaces several. Faster for
        text generation. Not for training: the weights become views of the merged tensors.
        """
        for block in self.model.blocks():
            attention, mlp = block.self_attn, block.mlp
            attention.merged = merge_weights((attention.q_proj, attention.k_proj, attention.v_proj))
            mlp.merged = merge_weights((mlp.gate_proj, mlp.up_proj))

    def head(self, hidden: Tensor, labels: Tensor | None = None, supervised: Tensor | None = None) -> Tensor:
        """Logits of the last stage's hidden states, (batch, seq, hidden), or the summed loss if labels are given."""
        if self.lm_head is not None:
            return self.lm_head(hidden, labels, supervised, self.head_loss)
        assert self.model.embed_tokens is not None
        return logits_or_loss(hidden, self.model.embed_tokens.weight, labels, supervised, self.head_loss)
