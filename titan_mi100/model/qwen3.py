"""Dense Qwen3, whole, in one file. Of parallelism it knows that a rank may hold some of the layers, and of a weight a
part.

Parameters carry HF's full names, so that a checkpoint's bytes move without mapping.
Legend: (batch, seq, ...); hidden = spec.hidden_size.
Source: the published Qwen3 weights and their config.json; checked against transformers' Qwen3 in tests/test_model.py.
"""

import zlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_mi100.layout import Stage
from titan_mi100.loss import at_least_fp32, head_loss
from titan_mi100.model import attention
from titan_mi100.model_spec import ModelSpec


def held(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight as this rank computes with it: its own part under tensor parallel, in the activations' dtype.

    The cast does something under DDP only, which keeps fp32 weights whole; FSDP2 gathers them in the right dtype.
    """
    return (weight.to_local() if isinstance(weight, DTensor) else weight).to(dtype)


class Linear(nn.Linear):
    """Without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, held(self.weight, x.dtype))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, held(self.weight, x.dtype), self.eps)


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, each (batch, seq, 1, head_dim) in fp32.

    Args:
        positions: (batch, seq), restarting at 0 in each document.

    Computed from the positions in every forward rather than kept in a buffer: nothing to initialise, save or cast.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angles = positions[..., None].float() * (1.0 / theta**exponents)  # (batch, seq, head_dim / 2)
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its angle, in fp32. x: (batch, seq, heads, head_dim)."""
    wide = at_least_fp32(x)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """The projections around attention; Block calls attention itself."""

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

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = (*x.shape[:2], -1, self.head_dim)  # (batch, seq, heads, head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin)
        return q, k, self.v_proj(x).view(heads)


class MLP(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.up_proj = Linear(spec.hidden_size, spec.intermediate_size)
        self.down_proj = Linear(spec.intermediate_size, spec.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer, in three parts: the middle one depends on where documents begin and end, so it is never compiled."""

    def __init__(self, spec: ModelSpec, backend: str) -> None:
        super().__init__()
        self.backend = backend
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = MLP(spec)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: attention.Documents) -> Tensor:
        q, k, v = self.before_attention(x, cos, sin)
        return self.after_attention(x, attention.attention(self.backend, q, k, v, documents))

    def before_attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(attended.flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Everything but the head; of a pipeline stage, its layers."""

    def __init__(self, spec: ModelSpec, backend: str, stage: Stage) -> None:
        super().__init__()
        self.spec, self.backend, self.stage = spec, backend, stage
        self.dtype: torch.dtype | None = None  # of the activations; None: the embedding's
        # the last stage holds a tied embedding too: it is the head's weight
        embeds = stage.first or (stage.last and spec.tie_word_embeddings)
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size) if embeds else None
        self.layers = nn.ModuleDict({str(number): Block(spec, backend) for number in stage.layers})
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps) if stage.last else None

    def blocks(self) -> list[Block]:
        return [block for block in self.layers.values() if isinstance(block, Block)]

    def forward(self, x: Tensor, positions: Tensor, document_ids: Tensor) -> Tensor:
        cos, sin = rotary_tables(positions, self.spec.head_dim, self.spec.rope_theta)
        documents = attention.prepare(self.backend, document_ids)
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


HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # hidden, the head's weight, labels -> (1,); see loss.head_loss


class Head(nn.Module):
    """The output matrix of an untied model; called as a module, so that a wrapper around it sees the call."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab_size, spec.hidden_size))

    def forward(self, hidden: Tensor, labels: Tensor | None, loss: HeadLoss) -> Tensor:
        return logits_or_loss(hidden, self.weight, labels, loss)


def logits_or_loss(hidden: Tensor, weight: Tensor, labels: Tensor | None, loss: HeadLoss) -> Tensor:
    weight = held(weight, hidden.dtype)
    return F.linear(hidden, weight) if labels is None else loss(hidden, weight, labels)


class Qwen3(nn.Module):
    """A causal language model, or the part of it that a pipeline stage holds.

    Build it under `torch.device("meta")`, shard it, `to_empty`, then fill every parameter (it has no buffers): from a
    checkpoint, or with `initial_values`.
    """

    def __init__(self, spec: ModelSpec, attention_backend: str = "eager", stage: Stage | None = None) -> None:
        super().__init__()
        stage = stage or Stage(range(spec.num_hidden_layers))
        self.model = Decoder(spec, attention_backend, stage)
        self.lm_head = Head(spec) if stage.last and not spec.tie_word_embeddings else None
        self.head_loss: HeadLoss = head_loss

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Logits, or with labels the summed loss.

        Args:
            input_ids, labels: (batch, seq); labels are shifted, loss.IGNORE = unsupervised. A later stage gets the
                hidden states of the one before, (batch, seq, hidden), in input_ids' place.
            positions: (batch, seq), restarting per document; default 0, 1, ...
            document_ids: (batch, seq), see attention.prepare; default one document per row.

        Returns:
            (batch, seq, vocab_size) in the weights' dtype without labels, else (1,) in fp32 at least. From a stage that
            is not the last: hidden states.
        """
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        if document_ids is None:
            document_ids = torch.zeros_like(input_ids)
        hidden = self.model(input_ids, positions, document_ids)
        return self.head(hidden, labels) if self.model.stage.last else hidden

    def head(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits of the last stage's hidden states, or with labels the summed loss."""
        if self.lm_head is not None:
            return self.lm_head(hidden, labels, self.head_loss)
        assert self.model.embed_tokens is not None
        return logits_or_loss(hidden, self.model.embed_tokens.weight, labels, self.head_loss)


_INIT_ROWS = 1024  # rows drawn from one seed


def initial_values(
    spec: ModelSpec, seed: int, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]
) -> Tensor:
    """A part of a parameter's random initial value: normal(0, initializer_range), ones for norms; fp32, on CPU.

    Args:
        name, shape: the whole parameter, a vector or a matrix. offset, size: the part, per dimension.

    A pure function of seed and name: each 1024 rows have their own seed, so a rank draws little more than its shard,
    and every layout starts from the same weights.
    """
    if len(shape) == 1:
        return torch.ones(size)
    std = spec.initializer_range
    return draw(seed, name, shape, offset, size, lambda rows, by: rows.normal_(0.0, std, generator=by))


def draw(
    seed: int,
    name: str,
    shape: torch.Size,
    offset: tuple[int, ...],
    size: tuple[int, ...],
    fill: Callable[[Tensor, torch.Generator], Tensor],
) -> Tensor:
    """A part of a random matrix, as initial_values; `fill(rows, generator)` draws whole rows in place."""
    values = torch.empty(size)
    row, stop = offset[0], offset[0] + size[0]
    while row < stop:
        block = row // _INIT_ROWS
        rows = torch.empty(min(_INIT_ROWS, shape[0] - block * _INIT_ROWS), shape[1])
        # hashed into 32 bits: torch's CPU generator ignores the seed's upper half
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}/{block}".encode()))
        fill(rows, generator)
        end = min(stop, (block + 1) * _INIT_ROWS)
        columns = slice(offset[1], offset[1] + size[1])
        values[row - offset[0] : end - offset[0]] = rows[row - block * _INIT_ROWS : end - block * _INIT_ROWS, columns]
        row = end
    return values
