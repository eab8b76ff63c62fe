"""Starts the update kernel on what a rank holds of a parameter."""

from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from titan_mi100.optim import kernels

_ELEMENTS, _WARPS = 1024, 4  # of a program
# Sums and products are not to become one operation, which rounds once instead of twice.
LAUNCH = {"num_warps": _WARPS, "enable_fp_fusion": False}
_AS_BITS = {torch.bfloat16: torch.int16}


def update(tensors: dict[str, Tensor], number: int, whole: int, values: Any, master: str) -> None:
    """As lean.update_plainly, of all rows at once.

    Args:
        tensors: rows of the weight, its gradient and its state, by lean.py's names.
        number: of the first element. whole: columns of the whole parameter.
        values: lean._Numbers.
    """
    bits = {name: x.view(_AS_BITS.get(x.dtype, x.dtype)) for name, x in tensors.items()}
    weight, exponents = bits["weight"], bits.get("exp_avg_exponent")
    rows, columns = weight.shape
    block = 256 if exponents is None else columns // exponents.shape[1]
    blocks = _ELEMENTS // block
    programs = triton.cdiv(rows * triton.cdiv(columns, block), blocks)
    pointers = (
        weight, bits["gradient"], bits["exp_avg"], bits["exp_avg_sq"],
        weight if exponents is None else exponents, bits.get("exp_avg_sq_exponent", weight),
        bits.get("residual", weight),
    )  # fmt: skip
    scalars = (
        values.factor, values.beta1, 1 - values.beta1, values.beta2, 1 - values.beta2,
        values.correction, values.eps, values.rate, values.kept,
    )  # fmt: skip
    fixed = {"MASTER": master, "CODED": exponents is not None, "BLOCK": block, "BLOCKS": blocks}
    with torch.cuda.device(weight.device) if weight.is_cuda else nullcontext():
        kernels.update_kernel[(programs,)](
            *pointers, rows, columns, number, whole, values.key, *map(float, scalars), **fixed, **LAUNCH
        )
