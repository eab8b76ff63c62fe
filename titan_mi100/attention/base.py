"""The interface of attention backends: causal grouped-query attention that never crosses a document boundary.

In every backend a token attends to itself and to the earlier tokens of its own document. A kernel that cannot separate
documents must not become a backend. Tensors are (batch, seq, heads, head_dim).

`torch_backends.py` has the backends that need only PyTorch; `choice.py` decides which one a run uses. To add a kernel,
add a file with a subclass of Backend, and a line in `config/kernels.py`.
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

    They are Python integers, so that a backend can split tensors without waiting for the device. The class is not a
    pytree for torch, so FSDP2's hooks pass it on unchanged.
    """

    batch: int
    seq: int
    lengths: tuple[int, ...]  # tokens per document, row by row, from left to right; the lengths of a row sum to seq

    @classmethod
    def one_per_row(cls, batch: int, seq: int) -> "Documents":
        return cls(batch, seq, (seq,) * batch)

    @classmethod
    def from_ends(cls, ends: Tensor) -> "Documents":
        """Read the documents from `document_ends` of a microbatch.

        Args:
            ends: (batch, seq) integers on the CPU: for each row the column after each document's last token,
                ascending, padded with -1 on the right. The last document of a row ends at column seq.
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
    """The shape of attention on each rank of a run."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str  # of the activations: "bfloat16"


class Backend(ABC):
    """One way to compute attention.

    Attributes:
        without_kernel: description of what it computes if no fused kernel runs.
        is_traceable: `prepare` returns tensors only, so torch.compile can trace a full block as one graph.
    """

    without_kernel: ClassVar[str] = NO_KERNEL
    is_traceable: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, documents: Documents, device: torch.device) -> Any:
        """Convert a microbatch's documents to what `__call__` needs. Called once; all layers use the result.

        It must not read values from the device, and must copy to the device asynchronously.
        """

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any) -> Tensor:
        """Computes softmax(q k^T / sqrt(head_dim)) v inside documents.

        Args:
            q: (batch, seq, heads, head_dim). k, v: (batch, seq, kv_heads, head_dim); heads is a multiple of kv_heads.
            prepared: what `prepare` returned for this microbatch.

        Returns:
            (batch, seq, heads, head_dim).
        """


def boundaries(documents: Documents) -> np.ndarray:
    """Bounds of each token's document in the flattened batch: its first token, and the token after its last one.

    Returns:
        (2, batch x seq) int32.
    """
    lengths = np.asarray(documents.lengths)
    ends = np.cumsum(lengths)
    return np.repeat(np.stack([ends - lengths, ends]), lengths, axis=1).astype(np.int32)
