"""The layers that the model, its adapters and tensor parallelism share."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_mi100.config.hardware import is_amd_cpu

_FEW_ROWS, _LARGE = 32, 100_000
# There MKL, which multiplies in fp32, uses one core for a matrix-vector product, and reads a right factor slowly.
_ON_AMD = is_amd_cpu()


def at_least_fp32(x: Tensor) -> Tensor:
    """In fp32, or fp64 where it is that already: checks in fp64 keep their precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def local_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that this rank computes with: its shard under tensor parallel, in the dtype of the activations.

    The cast matters where whole weights are kept in fp32: under DDP and with one data-parallel rank. FSDP2 gathers
    them in the compute dtype.
    """
    return (weight.to_local() if isinstance(weight, DTensor) else weight).to(dtype)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, (..., inputs) and (outputs, inputs) -> (..., outputs).

    When text is generated on a CPU there are few rows of x, and reading the weight is what takes time: down to a third,
    depending on dtype and CPU, where the weight is the left factor.
    """
    rows = x.numel() // x.shape[-1]
    if rows > _FEW_ROWS or torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype == torch.float64:
        return F.linear(x, weight)
    flat, is_fp32 = x.reshape(rows, -1), x.dtype == torch.float32
    if is_fp32 and rows < 4 and not _ON_AMD:
        return F.linear(x, weight)
    cores = torch.get_num_threads()
    if is_fp32 and rows == 1 and len(weight) % cores == 0 and weight.numel() >= _LARGE:
        parts = weight.view(cores, -1, weight.shape[1])
        return torch.bmm(parts, flat.t().expand(cores, -1, 1)).view(*x.shape[:-1], -1)
    if rows == 1:
        return torch.mv(weight, flat[0]).view(*x.shape[:-1], -1)
    return (weight @ flat.t()).t().reshape(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """A linear layer without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, local_weight(self.weight, x.dtype))


def outputs_of(layers: Sequence[Linear], x: Tensor, merged: Tensor | None) -> Sequence[Tensor]:
    """What linear layers make of the same input, by one product where their weights are merged."""
    if merged is None:
        return [layer(x) for layer in layers]
    return multiply(x, merged).split([len(layer.weight) for layer in layers], dim=-1)


def merge_weights(layers: Sequence[Linear]) -> Tensor:
    """Put the layers' weights behind each other in memory: (outputs of all, inputs), of which they become views."""
    merged = torch.cat([layer.weight for layer in layers])
    for layer, part in zip(layers, merged.split([len(layer.weight) for layer in layers]), strict=True):
        layer.weight = nn.Parameter(part, requires_grad=False)
    return merged


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, local_weight(self.weight, x.dtype), self.eps)
