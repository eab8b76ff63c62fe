"""Launches the Triton update kernel on this rank's shard of a parameter."""

from typing import Any

import torch
import triton
from torch import Tensor

from titan_mi100.device import accelerator
from titan_mi100.optim import kernels

_ELEMENTS, _WARPS = 1024, 4  # per program
# No fused multiply-add: it rounds once instead of twice, and the result would differ from update_with_torch's.
LAUNCH = {"num_warps": _WARPS, "enable_fp_fusion": False}
_AS_BITS = {torch.bfloat16: torch.int16}  # the kernel converts bf16 itself, by integer operations


def update(tensors: dict[str, Tensor], number: int, whole: int, values: Any, master: str) -> None:
    """Do what reference_update.update_with_torch does, for all rows in one launch.

    Args:
        tensors: the weight, its gradient and its state by lean.py's names, (rows, columns) each.
        number: number of the first element within the full parameter.
        whole: columns of the full parameter.
        values: a reference_update.Scalars.
        master: `optimizer.master`.
    """
    bits = {name: x.view(_AS_BITS.get(x.dtype, x.dtype)) for name, x in tensors.items()}
    weight, exponents = bits["weight"], bits.get("exp_avg_exponent")
    rows, columns = weight.shape
    block = 256 if exponents is None else columns // exponents.shape[1]
    blocks = _ELEMENTS // block
    # A row is divided into blocks of its own; a program updates `blocks` of them, _ELEMENTS elements.
    programs = triton.cdiv(rows * triton.cdiv(columns, block), blocks)
    # Tensors that this configuration does not have are replaced by another pointer; the kernel does not read them.
    pointers = (
        weight, bits["gradient"], bits["exp_avg"], bits["exp_avg_sq"],
        weight if exponents is None else exponents, bits.get("exp_avg_sq_exponent", weight),
        bits.get("residual", weight),
    )  # fmt: skip
    scalars = (
        values.factor, values.beta1, 1 - values.beta1, values.beta2, 1 - values.beta2,
        values.correction, values.eps, values.rate, values.kept, values.decay,
    )  # fmt: skip
    fixed = {"MASTER": master, "CODED": exponents is not None, "BLOCK": block, "BLOCKS": blocks}
    with accelerator.device_guard(weight.device):
        kernels.update_kernel[(programs,)](
            *pointers, rows, columns, number, whole, values.key, *map(float, scalars), **fixed, **LAUNCH
        )
