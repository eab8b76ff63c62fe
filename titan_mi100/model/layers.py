"""The layers that the model, its adapters and tensor parallelism share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def local_weight(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight that this rank computes with: its shard under tensor parallel, in the dtype of the activations.

    The cast matters only under DDP, which keeps whole weights in fp32; FSDP2 gathers them in the compute dtype.
    """
    return (weight.to_local() if isinstance(weight, DTensor) else weight).to(dtype)


class Linear(nn.Linear):
    """A linear layer without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local_weight(self.weight, x.dtype))


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, local_weight(self.weight, x.dtype), self.eps)
