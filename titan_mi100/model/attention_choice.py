"""Which attention backend a run uses, and the name of the kernel that really runs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_mi100.config.model_spec import ModelSpec
from titan_mi100.model.attention import Backend, Documents, Eager, SdpaDocuments, SdpaMask

# The fastest backend by architecture (the keys of hardware.GPUS, and "cpu"), measured by scripts/bench/attention.py;
# docs/PERFORMANCE.md has the figures.
FASTEST: Mapping[str, type[Backend]] = {"cpu": SdpaDocuments}
_UNMEASURED = SdpaDocuments  # never holds an S x S mask
BY_NAME: Mapping[str, type[Backend]] = {kind.name: kind for kind in (Eager, SdpaMask, SdpaDocuments)}

NO_KERNEL = "explicit S x S scores (no fused kernel)"


def choose_backend(name: str, arch: str) -> Backend:
    """The backend for the config's `attention_backend` on this architecture.

    Args:
        name: "sdpa" takes the fastest for the architecture; any other name is a backend (the config has "eager").
        arch: as distributed.device_name has it: "gfx908:sramecc+:xnack-", "sm90", "cpu".
    """
    arch = arch.split(":")[0]
    if name != "sdpa":
        return BY_NAME[name]("reference implementation" if name == Eager.name else "chosen by name")
    if arch in FASTEST:
        return FASTEST[arch](f"measured fastest on {arch}")
    return _UNMEASURED(f"not measured on {arch}; holds no S x S mask")


def running_kernel(
    backend: Backend, spec: ModelSpec, documents: Documents, dtype: torch.dtype, device: torch.device
) -> str:
    """The kernel that the run's shapes, dtype and documents lead to, found by one trial call.

    PyTorch's SDPA falls back to explicit S x S scores without telling; the answer is then NO_KERNEL.
    """

    def zeros(heads: int) -> Tensor:
        shape = (documents.batch, documents.seq, heads, spec.head_dim)
        return torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)

    q, k, v = zeros(spec.num_attention_heads), zeros(spec.num_key_value_heads), zeros(spec.num_key_value_heads)
    prepared = backend.prepare(documents, device)
    with _KernelNames() as recorder, torch.enable_grad():  # with gradients SDPA chooses among other kernels
        backend(q, k, v, prepared)
    return " and ".join(sorted(recorder.found)) or NO_KERNEL


class _KernelNames(TorchDispatchMode):
    """Collects the operators that are kernels of attention: PyTorch's own by their name, and every custom operator,
    because a backend calls none that is not attention.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if not name.startswith("aten::") or "attention" in name:
            self.found.add(name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))
