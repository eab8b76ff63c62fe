"""The layers that the model, its adapters and tensor parallelism share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_FEW_ROWS, _LARGE = 32, 100_000


def local_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that this rank computes with: its shard under tensor parallel, in the dtype of the activations.

    The cast matters where whole weights are kept in fp32: under DDP and with one data-parallel rank. FSDP2 gathers
    them in the compute dtype.
    """
    return (weight.to_local() if isinstance(weight, DTensor) else weight).to(dtype)


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T, (..., inputs) and (outputs, inputs) -> (..., outputs).

    When text is generated on a CPU there are few rows of x, and reading the weight is what takes time. The product's
    library reads it two to three times as fast as the left factor; and for a single row it would use one core only.
    """
    rows = x.numel() // x.shape[-1]
    if rows > _FEW_ROWS or torch.is_grad_enabled() or x.device.type != "cpu" or x.dtype != torch.float32:
        return F.linear(x, weight)
    flat, cores = x.reshape(rows, -1), torch.get_num_threads()
    if rows == 1 and len(weight) % cores == 0 and weight.numel() >= _LARGE:
        parts = weight.view(cores, -1, weight.shape[1])
        return torch.bmm(parts, flat.t().expand(cores, -1, 1)).view(*x.shape[:-1], -1)
    return (weight @ flat.t()).t().reshape(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """A linear layer without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, local_weight(self.weight, x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, local_weight(self.weight, x.dtype), self.eps)
