"""Causal, document-isolated, grouped-query attention: one interface, several backends, and the choice between them.

A token attends to the tokens of its own document up to itself, whatever the backend; one that could not isolate
documents has no place here. Tensors are (batch, seq, heads, head_dim).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Which of SDPA's two forms is faster, by device type, as measured by scripts/bench/attention.py (docs/PERFORMANCE.md).
# A device that nobody has measured takes "documents", the form that never holds an S x S mask.
SDPA_FORM: Mapping[str, str] = {"cpu": "documents"}


@dataclass(frozen=True)
class Documents:
    """Who attends to whom in one microbatch, in the form that the backend wants; made once for all layers."""

    spans: tuple[tuple[int, int, int], ...]  # (row, start, stop) of each document, in order
    batch: int
    seq: int
    mask: Tensor | None = None  # (batch, 1, seq, seq), True where the query may see the key


def choose_backend(name: str, device_type: str) -> str:
    """The backend that runs for the config's `sdpa` or `eager` on this kind of device."""
    return f"sdpa_{SDPA_FORM.get(device_type, 'documents')}" if name == "sdpa" else name


def describe_choice(backend: str, device_type: str) -> str:
    """Why this backend, for the log."""
    if not backend.startswith("sdpa_"):
        return "reference implementation"
    return (
        f"measured fastest on {device_type}"
        if device_type in SDPA_FORM
        else f"not measured on {device_type}; holds no S x S mask"
    )


def prepare(backend: str, document_ids: Tensor) -> Documents:
    """What the backend needs to know of a microbatch.

    Args:
        document_ids: (batch, seq); neighbours with the same id are one document.
    """
    batch, seq = document_ids.shape
    if backend == "sdpa_documents":
        rows, ends = (document_ids[:, 1:] != document_ids[:, :-1]).nonzero(as_tuple=True)
        spans, starts = [], [0] * batch
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            spans.append((row, starts[row], end + 1))
            starts[row] = end + 1
        spans += [(row, start, seq) for row, start in enumerate(starts)]
        return Documents(tuple(sorted(spans)), batch, seq)
    change = torch.zeros_like(document_ids, dtype=torch.bool)
    change[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    number = change.cumsum(1)  # (batch, seq), 0, 1, ... along the row: an id may come back later in a row
    same = number[:, None, :, None] == number[:, None, None, :]
    return Documents((), batch, seq, same & torch.ones(seq, seq, dtype=torch.bool, device=same.device).tril())


def attention(backend: str, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    """softmax(q k^T / sqrt(head_dim)) v inside documents.

    Args:
        q: (batch, seq, heads, head_dim). k, v: (batch, seq, kv_heads, head_dim); heads is a multiple of kv_heads.

    Returns:
        (batch, seq, heads, head_dim).
    """
    assert (documents.batch, documents.seq) == q.shape[:2], "the documents are another microbatch's"
    return _BACKENDS[backend](q, k, v, documents)


def _eager(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    assert documents.mask is not None
    batch, seq, heads, dim = q.shape
    groups = heads // k.shape[2]
    grouped = q.view(batch, seq, -1, groups, dim)  # query heads beside their key head: nothing is copied
    scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k) / math.sqrt(dim)
    scores = scores.float().masked_fill(~documents.mask[:, :, None], -math.inf)
    weights = scores.softmax(dim=-1).to(q.dtype)
    return torch.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(batch, seq, heads, dim)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
    """F.scaled_dot_product_attention for one row, with the query heads of a group in the batch dimension.

    There K and V are read in place for every group (stride 0). `enable_gqa` would do so too, but not everywhere: on
    torch 2.8's CPU it leads to explicit S x S scores.
    """
    _, seq, kv_heads, dim = k.shape
    q = q[0].view(seq, kv_heads, -1, dim).permute(2, 1, 0, 3)  # (groups, kv_heads, seq, head_dim)
    k, v = (x.transpose(1, 2).expand(len(q), -1, -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, **mask).permute(2, 1, 0, 3).reshape(1, seq, -1, dim)


def _sdpa_mask(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    assert documents.mask is not None
    rows = zip(q.split(1), k.split(1), v.split(1), documents.mask.split(1), strict=True)
    return torch.cat([_sdpa(*row, attn_mask=mask) for *row, mask in rows])


def _sdpa_documents(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
    outputs = [
        _sdpa(*(x[row : row + 1, start:stop] for x in (q, k, v)), is_causal=True)
        for row, start, stop in documents.spans
    ]
    return torch.cat(outputs, dim=1).view(q.shape)


def cached(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention of one new token per row to the keys and values kept of those before it, and its own.

    Args:
        q: (batch, 1, heads, head_dim). keys, values: (batch, kv_heads, length, head_dim).
        visible: (batch, length), False for padding.

    Returns:
        (batch, 1, heads, head_dim).

    The query heads of a group stand where SDPA has the queries, so K and V are read in place, once for all of them.
    """
    grouped = q.view(len(q), keys.shape[1], -1, q.shape[-1])  # (batch, kv_heads, groups, head_dim)
    mask = visible[:, None, None].expand(-1, -1, grouped.shape[2], -1)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).view(q.shape)


_BACKENDS = {"eager": _eager, "sdpa_mask": _sdpa_mask, "sdpa_documents": _sdpa_documents}


NO_KERNEL = "explicit S x S scores (no fused kernel)"


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in func.name():
            self.names.append(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def kernel_name(backend: str, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> str:
    """The kernel that PyTorch picks for these tensors; SDPA falls back to S x S scores without a word, this says so."""
    with _Recorder() as recorder, torch.enable_grad():
        attention(backend, q, k, v, documents)
    names = sorted(set(recorder.names))
    return " and ".join(names) if names else NO_KERNEL
