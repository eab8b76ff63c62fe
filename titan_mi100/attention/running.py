"""Finds the name of the attention kernel that really runs."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_mi100.attention.base import Backend, Documents, Shape


def running_kernel(backend: Backend, shape: Shape, documents: Documents, device: torch.device) -> str:
    """The kernel that a backend uses for this shape and these documents, found by one call.

    PyTorch's SDPA falls back to explicit S x S scores silently; then the result is the backend's `without_kernel`.
    """

    def zeros(heads: int) -> Tensor:
        size = (documents.batch, documents.seq, heads, shape.head_dim)
        return torch.zeros(size, dtype=getattr(torch, shape.dtype), device=device, requires_grad=True)

    q, k, v = zeros(shape.heads), zeros(shape.kv_heads), zeros(shape.kv_heads)
    prepared = backend.prepare(documents, device)
    with _KernelNames() as recorder, torch.enable_grad():  # with gradients SDPA chooses among other kernels
        backend(q, k, v, prepared)
    return " and ".join(sorted(recorder.found)) or backend.without_kernel


class _KernelNames(TorchDispatchMode):
    """Collects the attention kernels among the operators that run: PyTorch's by their name, and every custom operator,
    because a backend calls no other custom operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if not name.startswith("aten::") or "attention" in name:
            self.found.add(name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))
