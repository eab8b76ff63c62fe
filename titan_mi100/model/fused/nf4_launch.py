"""Launches the NF4 kernel; an operator for torch.compile."""

import torch
import triton
from torch import Tensor

from titan_mi100.config.settings import NF4_BLOCK
from titan_mi100.device.operators import custom_operator
from titan_mi100.model.fused import nf4_kernel
from titan_mi100.model.fused.running import launch

_BYTES, _WARPS = 1024, 4  # of codes, per program


@custom_operator("titan_mi100::restore_nf4")
def restore(codes: Tensor, largest: Tensor, pairs: Tensor) -> Tensor:
    """Do what nf4.dequantize does, bit for bit."""
    rows, blocks = largest.shape
    weight = largest.new_empty(rows, blocks * NF4_BLOCK)
    stored, count = codes.contiguous().view(torch.uint8), weight.numel() // 2
    constants = {"SCALED": NF4_BLOCK, "BLOCK": _BYTES, "num_warps": _WARPS}
    programs = (triton.cdiv(count, _BYTES),)
    launch(nf4_kernel.dequantize_kernel, programs, stored, largest.contiguous(), pairs, weight, count, **constants)
    return weight


@restore.operator.register_fake
def _(codes: Tensor, largest: Tensor, pairs: Tensor) -> Tensor:
    return largest.new_empty(largest.shape[0], largest.shape[1] * NF4_BLOCK)
