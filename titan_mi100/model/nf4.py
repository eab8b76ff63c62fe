"""Frozen weights in 4 bits: NF4 (Dettmers et al., 2023, QLoRA), the base of LoRA adapters.

A block is 64 consecutive weights of a row. It stores one scale, its largest magnitude. Each weight is stored as the
4-bit code of the nearest of 16 values between -1 and 1; the values are quantiles of the normal distribution.

The codes are packed into a tensor of the compute dtype, as raw bits. FSDP2 then gathers that tensor like any other
weight; arithmetic on it would be meaningless.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_mi100.config.settings import NF4_BLOCK as BLOCK
from titan_mi100.model.fused.running import only, runs
from titan_mi100.model.layers import Linear, grouped, local_weight

# The 16 values, from appendix E of the paper. The code of a value is its index in this table.
_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


def codes_per_value(dtype: torch.dtype) -> int:
    """Number of 4-bit codes that fit into one element of the dtype: 4 for a 16-bit dtype."""
    return 2 * dtype.itemsize


def quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise a matrix to NF4.

    Args:
        weight: (outputs, inputs); inputs is a multiple of 64.
        dtype: the compute dtype, the dtype of both results.

    Returns:
        The packed codes, (outputs, inputs / codes_per_value(dtype)), and the largest magnitude of each block,
        (outputs, inputs / 64).
    """
    blocks = weight.float().unflatten(1, (-1, BLOCK))  # (outputs, inputs / 64, 64)
    # Round the scale to its stored dtype first: the codes must be nearest for the scale that dequantize reads.
    largest = blocks.abs().amax(-1).to(dtype)
    # A block of zeros has scale 0; clamp_min avoids 0 / 0.
    scaled = blocks / largest.float().clamp_min(torch.finfo(torch.float32).tiny)[..., None]
    levels = torch.tensor(_VALUES)
    # The boundaries are the midpoints between neighbouring values, so bucketize finds the nearest value.
    codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).flatten(1)
    # Two codes per byte, the even column in the upper 4 bits.
    return (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous().view(dtype), largest


def value_pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two values of each byte of codes, (256, 2). On a GPU the host waits for the copy, so call it once."""
    levels = torch.tensor(_VALUES, dtype=dtype, device=device)
    return torch.cartesian_prod(levels, levels)


def dequantize(codes: Tensor, largest: Tensor, pairs: Tensor | None = None) -> Tensor:
    """Restore the matrix from the results of `quantize`.

    Args:
        pairs: the result of `value_pairs`; None: computed here.

    Returns:
        (outputs, inputs), in the dtype of `largest`.
    """
    pairs = value_pairs(largest.dtype, largest.device) if pairs is None else pairs
    if runs("nf4", largest):
        from titan_mi100.model.fused.nf4_launch import restore

        return restore(codes, largest, pairs)
    # One table look-up per byte instead of two shifts and two look-ups.
    unscaled = F.embedding(codes.view(torch.uint8).int(), pairs)  # (outputs, inputs / 2, 2)
    return unscaled.view(*largest.shape, BLOCK).mul_(largest[..., None]).flatten(1)


def trial(device: torch.device, dtype: torch.dtype) -> str:
    """What is wrong with the kernel on this device: it must give the bits of plain operations. See running.Trial."""
    draw = torch.Generator().manual_seed(1)
    codes, largest = (x.to(device) for x in quantize(torch.randn(48, 192, generator=draw), dtype))
    results = []
    for kinds in ((), ("nf4",)):
        with only(kinds):
            results.append(dequantize(codes, largest))
    return "" if torch.equal(*results) else "other bits than those of plain operations"


def restored(stored: Sequence[Tensor]) -> Tensor:
    """The matrix of a frozen weight, (outputs, inputs). Args: stored: of Linear, or NF4Linear."""
    return stored[0] if len(stored) == 1 else dequantize(*stored)


def whole(*operands: Tensor | None) -> list[Tensor | None]:
    """The operands of layers with their matrices restored, for pieces.in_pieces."""
    each = (one._replace(weight=restored(one.stored), largest=None, pairs=None) for one in grouped(operands))
    return list(chain(*each))


class _Product(torch.autograd.Function):
    """x @ weight.T for an NF4 weight. Backward dequantises the weight again instead of saving it: the 16-bit weight
    exists only during a matrix product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *stored: Tensor) -> Tensor:
        ctx.save_for_backward(*stored)
        return F.linear(x, restored(stored))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return grad @ restored(ctx.saved_tensors), None, None, None


class NF4Linear(Linear):
    """A frozen linear layer in NF4: `weight` holds the packed codes, `largest` the largest magnitude per block."""

    def shrink(self, dtype: torch.dtype) -> None:
        """Replace the parameters by NF4 parameters on the meta device.

        Args:
            dtype: the compute dtype.
        """
        rows, columns = self.out_features, self.in_features
        with torch.device("meta"):
            codes = torch.empty(rows, columns // codes_per_value(dtype), dtype=dtype)
            self.largest = nn.Parameter(torch.empty(rows, columns // BLOCK, dtype=dtype), requires_grad=False)
        self._pairs = value_pairs(dtype, self.largest.device)
        self.weight = nn.Parameter(codes, requires_grad=False)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "NF4Linear":
        """Move the layer (`to_empty`, `to`), and make the table of values anew where it is now.

        The table is no buffer: `to_empty` would leave a buffer without values. It is no global cache either: that would
        keep a table made under FakeTensorMode, without values, for a real run in the same process.
        """
        super()._apply(fn, recurse)
        self._pairs = value_pairs(self.largest.dtype, self.largest.device)
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.with_bias(_Product.apply(x, *self.stored(x.dtype)))

    def stored(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return local_weight(self.weight, dtype), local_weight(self.largest, dtype), self._pairs
