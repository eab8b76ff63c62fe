"""The attention backends that need only PyTorch, and attention to a KV cache."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_mi100.attention.base import Backend, Documents, boundaries
from titan_mi100.attention.repeatable import differs, has_kernel, repeatable, with_repeatable_backward
from titan_mi100.device.accelerator import to_device


def document_mask(documents: Documents, device: torch.device) -> Tensor:
    """A mask, (batch, 1, seq, seq) bool: True where the query (row) may attend to the key (column)."""
    numbers = np.repeat(np.arange(len(documents.lengths)), documents.lengths)
    number = to_device(torch.from_numpy(numbers).view(documents.batch, documents.seq), device)
    same = number[:, None, :, None] == number[:, None, None, :]
    return same & torch.ones(documents.seq, documents.seq, dtype=torch.bool, device=device).tril()


class Eager(Backend):
    """Explicit S x S scores: the reference for the tests of all other backends."""

    is_traceable = True

    def prepare(self, documents: Documents, device: torch.device) -> Tensor:
        return document_mask(documents, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Tensor) -> Tensor:
        batch, seq, heads, dim = q.shape
        assert prepared.shape == (batch, 1, seq, seq), "the mask is of another microbatch"
        groups = heads // k.shape[2]
        grouped = q.view(batch, seq, -1, groups, dim)  # a view: k and v are not repeated per group
        scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k) / math.sqrt(dim)
        # softmax in fp32: sums of 16-bit numbers would lose too much precision
        scores = _wide(scores).masked_fill(~prepared[:, :, None], -math.inf)
        weights = scores.softmax(dim=-1).to(q.dtype)
        return torch.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(batch, seq, heads, dim)


class Sdpa(Backend):
    """F.scaled_dot_product_attention: one causal call per document, without a mask."""

    def prepare(self, documents: Documents, device: torch.device) -> Documents:
        return documents

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Documents) -> Tensor:
        assert (prepared.batch, prepared.seq) == q.shape[:2], "the documents are of another microbatch"
        # Use one split of the flattened batch: its backward is one concatenation. With one slice per document, backward
        # would allocate and add a full-size gradient for each document.
        parts = (x.flatten(0, 1)[None].split(prepared.lengths, dim=1) for x in (q, k, v))
        outputs = [_causal(*document) for document in zip(*parts, strict=True)]
        return torch.cat(outputs, dim=1).view(q.shape)


# Pad lengths to a multiple of this for 16-bit dtypes on a CPU. There torch compiles a kernel for each new length and
# keeps it (8 MB each), so few different lengths must occur.
_TILE = 64


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one document: (1, length, heads, head_dim)."""
    length = q.shape[1]
    padding = -length % _TILE if q.device.type == "cpu" and q.dtype.itemsize == 2 else 0
    if padding:  # pad after the last token: attention is causal, so no real token attends to the padding
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v))
    return _sdpa(q, k, v, is_causal=True)[:, :length]


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
    """F.scaled_dot_product_attention for one row, with the query heads of a group in the batch dimension.

    K and V are expanded over the groups with stride 0, so they are not copied. `enable_gqa` is no alternative: on a CPU
    with torch 2.8 it computes explicit S x S scores.
    """
    _, seq, kv_heads, dim = k.shape
    q = q[0].view(seq, kv_heads, -1, dim).permute(2, 1, 0, 3)  # (groups, kv_heads, seq, head_dim)
    k, v = (x.transpose(1, 2).expand(len(q), -1, -1, -1) for x in (k, v))
    with repeatable(differs(q.device)):
        is_needed = differs(q.device) and has_kernel(q, k, v, **mask)
    with repeatable(is_needed):
        output = with_repeatable_backward(F.scaled_dot_product_attention(q, k, v, **mask), is_needed)
    return output.permute(2, 1, 0, 3).reshape(1, seq, -1, dim)


class Chunked(Backend):
    """Explicit scores for a few hundred queries at a time, recomputed in backward. For devices without a fused kernel.

    Memory grows linearly with seq, and only matrix products are needed.
    """

    without_kernel = "explicit scores of a few hundred queries at a time"

    def prepare(self, documents: Documents, device: torch.device) -> "Chunks":
        limits = boundaries(documents)
        return Chunks(limits, to_device(torch.from_numpy(limits[0]), device))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: "Chunks") -> Tensor:
        assert prepared.limits.shape[1] == q.shape[0] * q.shape[1], "the chunks are of another microbatch"
        flat = _ChunkedAttention.apply(*(x.flatten(0, 1) for x in (q, k, v)), prepared)
        return flat.view(q.shape)


class Chunks(NamedTuple):
    """The documents of a flattened batch, for _ChunkedAttention."""

    limits: np.ndarray  # see base.boundaries
    starts: Tensor  # (batch x seq,) int32, the first row of `limits`, on the device

    def of(self, heads: int) -> Iterator[tuple[int, int, int]]:
        """Yield chunks (key, first, last): the queries first:last and the keys key:last that they need.

        A chunk has at most _QUERIES queries and _SCORES scores.
        """
        starts, ends = self.limits
        tokens = len(starts)
        first = 0
        while first < tokens:
            key = int(starts[first])
            size = max(1, min(_QUERIES, _SCORES // (heads * (first - key + _QUERIES))))
            last = min(first + size, tokens)
            # Late in a long document, end the chunk with the document: queries of the next document would compute
            # scores with all these keys only to mask them.
            if first - key > size:
                last = min(last, int(ends[first]))
            yield key, first, last
            first = last


_QUERIES, _SCORES = 256, 1 << 24  # the most queries and scores of a chunk; these scores take 64 MiB in fp32


class _ChunkedAttention(torch.autograd.Function):
    """Arguments: q (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim). Inside, queries and scores are
    grouped by key head: (kv_heads, group x queries, head_dim or keys).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chunks: Chunks) -> Tensor:
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        # log-sum-exp of each query's scores: with it backward recomputes the softmax weights of a chunk
        sums = q.new_empty((k.shape[1], q.shape[1] // k.shape[1], len(q)), dtype=_wide(q[:0]).dtype)
        for key, first, last in chunks.of(q.shape[1]):
            scores = _chunk_scores(q, k, chunks.starts, key, first, last)
            total = scores.logsumexp(-1, keepdim=True)
            sums[:, :, first:last] = total.view(*sums.shape[:2], -1)
            weights = scores.sub_(total).exp_().to(q.dtype)
            output[first:last] = _per_query(weights @ _per_key_head(v[key:last]), output[first:last])
        ctx.save_for_backward(q, k, v, output, sums)
        ctx.chunks = chunks
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, output, sums = ctx.saved_tensors
        grad_q = torch.empty_like(q, memory_format=torch.contiguous_format)
        grad_k, grad_v = (torch.zeros_like(x, dtype=sums.dtype) for x in (k, v))
        scale = 1 / math.sqrt(q.shape[-1])
        for key, first, last in ctx.chunks.of(q.shape[1]):
            scores = _chunk_scores(q, k, ctx.chunks.starts, key, first, last)
            weights = scores.sub_(sums[:, :, first:last].reshape(*scores.shape[:2], 1)).exp_()
            slope, queries = _per_key_head(grad[first:last], len(k[0])), _per_key_head(q[first:last], len(k[0]))
            grad_v[key:last] += (weights.to(q.dtype).mT @ slope).transpose(0, 1)
            # gradient of the scores: weights * (grad @ v^T - delta), with delta = sum(output * grad) per query
            delta = _wide(_per_key_head(output[first:last], len(k[0])) * _wide(slope)).sum(-1, keepdim=True)
            weights *= _wide(slope @ _per_key_head(v[key:last]).mT) - delta
            slopes = weights.mul_(scale).to(q.dtype)
            grad_k[key:last] += (slopes.mT @ queries).transpose(0, 1)
            grad_q[first:last] = _per_query(slopes @ _per_key_head(k[key:last]), grad_q[first:last])
        return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), None


def _per_key_head(x: Tensor, kv_heads: int = 0) -> Tensor:
    """(tokens, heads, head_dim) -> (kv_heads, group x tokens, head_dim). Keys and values have groups of one head."""
    tokens, heads, dim = x.shape
    grouped = x.view(tokens, kv_heads or heads, -1, dim).permute(1, 2, 0, 3)
    return grouped.reshape(kv_heads or heads, -1, dim)


def _per_query(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of _per_key_head: (kv_heads, group x tokens, head_dim) -> (tokens, heads, head_dim)."""
    return x.view(len(x), -1, len(like), x.shape[-1]).permute(2, 0, 1, 3).reshape(like.shape)


def _chunk_scores(q: Tensor, k: Tensor, starts: Tensor, key: int, first: int, last: int) -> Tensor:
    """Scores of the queries first:last with the keys key:last, (kv_heads, group x queries, keys); -inf where masked."""
    queries, keys = _per_key_head(q[first:last], k.shape[1]), _per_key_head(k[key:last])
    scores = _wide(queries @ keys.mT).mul_(1 / math.sqrt(q.shape[-1]))
    rows = torch.arange(first, last, device=q.device)[:, None]
    columns = torch.arange(key, last, device=q.device)
    hidden = (columns > rows) | (columns < starts[first:last, None])
    scores.view(k.shape[1], -1, *hidden.shape).masked_fill_(hidden, -math.inf)
    return scores


def _wide(x: Tensor) -> Tensor:
    """Cast to fp32; fp64 stays fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cached(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention of one new token per row to the cached keys and values, which include its own.

    Args:
        q: (batch, 1, heads, head_dim). keys, values: (batch, kv_heads, length, head_dim).
        visible: (batch, length), False for padding.

    Returns:
        (batch, 1, heads, head_dim).

    The query heads of a group are put into SDPA's query dimension, so K and V are not copied and are read once per
    group.
    """
    grouped = q.view(len(q), keys.shape[1], -1, q.shape[-1])  # (batch, kv_heads, groups, head_dim)
    mask = visible[:, None, None].expand(-1, -1, grouped.shape[2], -1)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).view(q.shape)
