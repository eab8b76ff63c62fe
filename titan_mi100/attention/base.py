"""Causal grouped-query attention inside documents: what a backend is.

A token attends to itself and to the earlier tokens of its own document, in every backend. A kernel that cannot keep
documents apart must not become a backend. Tensors are (batch, seq, heads, head_dim).

`plain.py` has the backends that need PyTorch only, `choice.py` decides which one a run uses. A new kernel is a new file
with a subclass of Backend and an entry there.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

NO_KERNEL = "explicit S x S scores (no fused kernel)"


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


@dataclass(frozen=True)
class Shape:
    """What a run asks of attention on each rank."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str  # of the activations: "bfloat16"


class Backend(ABC):
    """One way to compute attention.

    Attributes:
        name: for the log and the benchmarks.
        without_kernel: what it computes where no fused kernel runs.
        is_traceable: takes nothing but tensors from `prepare`, so that torch.compile sees a whole block as one graph.
        why: why this backend was chosen, for the log.
    """

    name: ClassVar[str]
    without_kernel: ClassVar[str] = NO_KERNEL
    is_traceable: ClassVar[bool] = False

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


def boundaries(documents: Documents) -> np.ndarray:
    """(2, batch x seq) int32: per token the first of its document, and the one behind its last."""
    lengths = np.asarray(documents.lengths)
    ends = np.cumsum(lengths)
    return np.repeat(np.stack([ends - lengths, ends]), lengths, axis=1).astype(np.int32)
