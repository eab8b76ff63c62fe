"""Frozen weights in 4 bits: NF4 (Dettmers et al., 2023, QLoRA), for training adapters beside them.

Blocks of 64 neighbours in a row share their largest magnitude; each weight is the nearest of 16 values between -1 and
1, which hold equally many of normally distributed numbers. The codes lie in a tensor of the dtype of the computation,
as bits: FSDP2 gathers it like any weight, and nothing computes with it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_mi100.model.layers import Linear, local_weight

BLOCK = 64
# The table of the paper's appendix E.
_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def codes_per_value(dtype: torch.dtype) -> int:
    """Of 4 bits, in the place of a value of the dtype."""
    return 2 * dtype.itemsize


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and magnitudes of a matrix.

    Args:
        weight: (outputs, inputs); inputs is a multiple of 64.
        dtype: of both results.

    Returns:
        (outputs, inputs / codes_per_value(dtype)) and (outputs, inputs / 64).
    """
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1).to(dtype)  # as it is kept
    scaled = blocks / largest.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    values = torch.tensor(_VALUES)
    codes = torch.bucketize(scaled, (values[1:] + values[:-1]) / 2).to(torch.uint8).flatten(1)
    return (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous().view(dtype), largest


def dequantize(codes: Tensor, largest: Tensor) -> Tensor:
    """The matrix, (outputs, inputs), in the dtype of `largest`."""
    values = torch.tensor(_VALUES, dtype=largest.dtype, device=largest.device)
    pairs = torch.cartesian_prod(values, values)  # (256, 2): what a byte stands for
    found = F.embedding(codes.view(torch.uint8).int(), pairs)  # (outputs, inputs / 2, 2)
    return found.view(*largest.shape, BLOCK).mul_(largest[..., None]).flatten(1)


class _Product(torch.autograd.Function):
    """x @ weight.T; backward makes the weight again, so that it never lives for longer than a product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, largest: Tensor) -> Tensor:
        ctx.save_for_backward(codes, largest)
        return F.linear(x, dequantize(codes, largest))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad @ dequantize(*ctx.saved_tensors), None, None


class NF4Linear(Linear):
    """A frozen linear layer whose `weight` holds codes, and `largest` the magnitudes of their blocks."""

    def shrink(self, dtype: torch.dtype) -> None:
        """Make the parameters those of 4 bits, on the meta device. Args: dtype: of the computation."""
        rows, columns = self.out_features, self.in_features
        with torch.device("meta"):
            codes = torch.empty(rows, columns // codes_per_value(dtype), dtype=dtype)
            self.largest = nn.Parameter(torch.empty(rows, columns // BLOCK, dtype=dtype), requires_grad=False)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, local_weight(self.weight, x.dtype), local_weight(self.largest, x.dtype))
