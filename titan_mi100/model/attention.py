"""Causal grouped-query attention inside documents: what a backend is, and the backends that need PyTorch only.

A token attends to itself and to the earlier tokens of its own document, in every backend. A kernel that cannot keep
documents apart must not become a backend. Tensors are (batch, seq, heads, head_dim).

`attention_choice.py` decides which backend a run uses. A new kernel is a new file with a subclass of Backend and an
entry there.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_mi100.model.loss import at_least_fp32


@dataclass(frozen=True)
class Documents:
    """The lengths of the documents in one microbatch, known on the host.

    They are Python integers so that a backend can cut tensors without waiting for the device, and the class is no
    container to torch (no pytree), so FSDP2's hooks pass it on unchanged.
    """

    batch: int
    seq: int
    lengths: tuple[int, ...]  # tokens per document: row after row, left to right; those of a row add up to seq

    @classmethod
    def one_per_row(cls, batch: int, seq: int) -> "Documents":
        return cls(batch, seq, (seq,) * batch)

    @classmethod
    def from_ends(cls, ends: Tensor) -> "Documents":
        """The documents that `document_ends` of a microbatch describes.

        Args:
            ends: (batch, seq) integers on the CPU: per row the column behind each document's last token, ascending,
                then -1 to the right. The last document of a row ends at column seq.
        """
        assert ends.device.type == "cpu", "document ends are read on the host; reading the device would wait for it"
        batch, seq = ends.shape
        columns = ends.numpy().astype(np.int64)
        flat = (columns + seq * np.arange(batch)[:, None])[columns >= 0]  # positions in the flattened batch
        lengths = tuple(np.diff(flat, prepend=0).tolist())
        assert (columns.max(axis=1) == seq).all() and min(lengths) > 0, "documents do not fill their rows, in order"
        return cls(batch, seq, lengths)


class Backend(ABC):
    """One way to compute attention.

    Attributes:
        name: for the log and the benchmarks.
        why: why this backend was chosen, for the log.
    """

    name: ClassVar[str]

    def __init__(self, why: str = "chosen by name") -> None:
        self.why = why

    @abstractmethod
    def prepare(self, documents: Documents, device: torch.device) -> Any:
        """What `__call__` needs to know of a microbatch's documents: made once, used by all layers.

        It must not read values from the device, and a copy to the device must be asynchronous.
        """

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any) -> Tensor:
        """softmax(q k^T / sqrt(head_dim)) v inside documents.

        Args:
            q: (batch, seq, heads, head_dim). k, v: (batch, seq, kv_heads, head_dim); heads is a multiple of kv_heads.
            prepared: what `prepare` returned for this microbatch.

        Returns:
            (batch, seq, heads, head_dim).
        """


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without waiting: only a copy from pinned memory is asynchronous."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def document_mask(documents: Documents, device: torch.device) -> Tensor:
    """(batch, 1, seq, seq) bool: True where the query (row) may attend to the key (column)."""
    numbers = np.repeat(np.arange(len(documents.lengths)), documents.lengths)
    number = to_device(torch.from_numpy(numbers).view(documents.batch, documents.seq), device)
    same = number[:, None, :, None] == number[:, None, None, :]
    return same & torch.ones(documents.seq, documents.seq, dtype=torch.bool, device=device).tril()


class Eager(Backend):
    """Explicit S x S scores: the reference that every other backend is tested against."""

    name = "eager"

    def prepare(self, documents: Documents, device: torch.device) -> Tensor:
        return document_mask(documents, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Tensor) -> Tensor:
        batch, seq, heads, dim = q.shape
        assert prepared.shape == (batch, 1, seq, seq), "the mask is of another microbatch"
        groups = heads // k.shape[2]
        grouped = q.view(batch, seq, -1, groups, dim)  # query heads beside their key head: nothing is copied
        scores = torch.einsum("bqhgd,bkhd->bhgqk", grouped, k) / math.sqrt(dim)
        scores = at_least_fp32(scores).masked_fill(~prepared[:, :, None], -math.inf)
        weights = scores.softmax(dim=-1).to(q.dtype)
        return torch.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(batch, seq, heads, dim)


class SdpaMask(Backend):
    """F.scaled_dot_product_attention with an S x S mask, one call per row."""

    name = "sdpa_mask"

    def prepare(self, documents: Documents, device: torch.device) -> Tensor:
        return document_mask(documents, device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Tensor) -> Tensor:
        assert prepared.shape == (len(q), 1, q.shape[1], q.shape[1]), "the mask is of another microbatch"
        rows = zip(q.split(1), k.split(1), v.split(1), prepared.split(1), strict=True)
        return torch.cat([_sdpa(*row, attn_mask=mask) for *row, mask in rows])


class SdpaDocuments(Backend):
    """F.scaled_dot_product_attention, one causal call per document and no mask."""

    name = "sdpa_documents"

    def prepare(self, documents: Documents, device: torch.device) -> Documents:
        return documents

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Documents) -> Tensor:
        assert (prepared.batch, prepared.seq) == q.shape[:2], "the documents are of another microbatch"
        # One split of the flattened batch. Its backward is one concatenation; the backward of a slice per document
        # would fill and add a whole row for each of them.
        parts = (x.flatten(0, 1)[None].split(prepared.lengths, dim=1) for x in (q, k, v))
        outputs = [_sdpa(*document, is_causal=True) for document in zip(*parts, strict=True)]
        return torch.cat(outputs, dim=1).view(q.shape)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
    """F.scaled_dot_product_attention for one row, with the query heads of a group in the batch dimension.

    There K and V are read in place for every group (stride 0). `enable_gqa` would do so too, but not everywhere: on
    torch 2.8's CPU it leads to explicit S x S scores.
    """
    _, seq, kv_heads, dim = k.shape
    q = q[0].view(seq, kv_heads, -1, dim).permute(2, 1, 0, 3)  # (groups, kv_heads, seq, head_dim)
    k, v = (x.transpose(1, 2).expand(len(q), -1, -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, **mask).permute(2, 1, 0, 3).reshape(1, seq, -1, dim)


def cached(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention of one new token per row to the cached keys and values, which include its own.

    Args:
        q: (batch, 1, heads, head_dim). keys, values: (batch, kv_heads, length, head_dim).
        visible: (batch, length), False for padding.

    Returns:
        (batch, 1, heads, head_dim).

    The query heads of a group take SDPA's query dimension, so K and V are read in place, once per group.
    """
    grouped = q.view(len(q), keys.shape[1], -1, q.shape[-1])  # (batch, kv_heads, groups, head_dim)
    mask = visible[:, None, None].expand(-1, -1, grouped.shape[2], -1)
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).view(q.shape)
