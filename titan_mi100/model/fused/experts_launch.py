"""Launches the grouped products of experts; operators for torch.compile."""

from typing import Any

import torch
import triton
from torch import Tensor

from titan_mi100.device import accelerator
from titan_mi100.device.operators import custom_operator
from titan_mi100.model.fused import experts_kernels as kernels
from titan_mi100.model.fused.running import launch


def tile(x: Tensor, height: int, width: int, depth: int) -> dict[str, Any]:
    """Settings of a launch: a program computes ROWS x COLUMNS of a product of (height, depth) and (depth, width)."""
    if not accelerator.is_cuda(x.device):
        return _shrunk((16, 32, 32), (height, width, depth), 4)
    return _shrunk((64, 128, 32) if x.itemsize == 2 else (32, 32, 32), (height, width, depth), 4)


def _shrunk(most: tuple[int, int, int], sizes: tuple[int, int, int], warps: int) -> dict[str, Any]:
    """Args: most: sizes of a tile, which need not be much larger than those of the whole."""
    rows, columns, depth = (min(n, max(16, triton.next_power_of_2(size))) for n, size in zip(most, sizes, strict=True))
    return {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "PRECISION": "ieee", "num_warps": warps}


@custom_operator("titan_mi100::expert_products")
def products(
    x: Tensor, weight: Tensor, ends: Tensor, is_transposed: bool, alpha: float = 1.0, added: Tensor | None = None
) -> Tensor:
    """Multiply rows by their expert's matrix, and by alpha, and add.

    Args: see experts._Loop; weight: (experts x rows of a matrix, columns); added: as the result.
    """
    made, (rows, inner), experts = _outputs(x, weight, ends, is_transposed), x.shape, len(ends)
    columns = made.shape[1]
    settings = tile(x, rows, columns, inner)
    programs = (triton.cdiv(columns, settings["COLUMNS"]), rows // settings["ROWS"] + experts)
    constants = {"EXPERTS": experts, "LANES": triton.next_power_of_2(experts), "IS_TRANSPOSED": is_transposed}
    inputs = x.contiguous(), weight.contiguous(), ends, made if added is None else added.contiguous(), made
    if rows:
        constants |= {"IS_ADDED": added is not None, **settings}
        launch(kernels.products_kernel, programs, *inputs, alpha, inner, columns, **constants)
    return made


@custom_operator("titan_mi100::expert_sums")
def sums(left: Tensor, right: Tensor, ends: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha * left^T right of each expert's rows, below each other."""
    (_, height), width = left.shape, right.shape[1]
    made, settings = left.new_empty(len(ends) * height, width), tile(left, height, width, len(left))
    programs = (triton.cdiv(height, settings["ROWS"]) * triton.cdiv(width, settings["COLUMNS"]), len(ends))
    inputs = left.contiguous(), right.contiguous(), ends, made
    launch(kernels.sums_kernel, programs, *inputs, alpha, height, width, **settings)
    return made


def _outputs(x: Tensor, weight: Tensor, ends: Tensor, is_transposed: bool) -> Tensor:
    return x.new_empty(len(x), weight.shape[1] if is_transposed else len(weight) // len(ends))


@products.operator.register_fake
def _(
    x: Tensor, weight: Tensor, ends: Tensor, is_transposed: bool, alpha: float = 1.0, added: Tensor | None = None
) -> Tensor:
    return _outputs(x, weight, ends, is_transposed)


@sums.operator.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor, alpha: float = 1.0) -> Tensor:
    return left.new_empty(len(ends) * left.shape[1], right.shape[1])
