"""Launches the grouped products of experts."""

from typing import Any

import triton
from torch import Tensor

from titan_mi100.device import accelerator
from titan_mi100.model.fused import experts_kernels as kernels
from titan_mi100.model.fused.running import launch


def _tile(x: Tensor, *sizes: int) -> dict[str, Any]:
    """Settings of a launch: a program computes ROWS x COLUMNS of a product of (height, depth) and (depth, width).

    Args: sizes: height, width, depth. A tile is not much larger than these, as adapters have few columns.
    """
    largest, options = _largest(x)
    tile = (min(n, max(16, triton.next_power_of_2(size))) for n, size in zip(largest, sizes, strict=True))
    return dict(zip(("ROWS", "COLUMNS", "DEPTH"), tile, strict=True), PRECISION="ieee", **options)


def _largest(x: Tensor) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The largest tile on this card, and options of the compiler; these spill no registers."""
    if not accelerator.is_cuda(x.device):
        return (32, 64, 32), {"num_warps": 4}
    is_rocm, is_narrow = accelerator.is_rocm(), x.itemsize < 4
    if not is_rocm:
        return ((64, 128, 64) if is_narrow else (32, 32, 32)), {"num_warps": 4, "num_stages": 3}
    is_cdna = accelerator.properties(x.device).gcnArchName.startswith("gfx9")
    options = {"matrix_instr_nonkdim": 16} if is_cdna else {}
    return ((64, 128, 32) if is_narrow else (32, 32, 32)), {"num_warps": 8 if is_narrow else 4, **options}


def products(
    x: Tensor, weight: Tensor, ends: Tensor, is_transposed: bool, alpha: float = 1.0, base: Tensor | None = None
) -> Tensor:
    """Multiply rows by their expert's matrix and by alpha, and add them to `base`, in place.

    Args: see experts._Loop; weight: (experts x rows of a matrix, columns).
    """
    (rows, inner), experts = x.shape, len(ends)
    columns = weight.shape[1] if is_transposed else len(weight) // experts
    target, settings = x.new_empty(rows, columns) if base is None else base, _tile(x, rows, columns, inner)
    settings |= {"EXPERTS": experts, "LANES": triton.next_power_of_2(experts), "IS_ADDED": base is not None}
    programs = (triton.cdiv(columns, settings["COLUMNS"]), rows // settings["ROWS"] + experts)
    x, weight = x.contiguous(), weight.contiguous()
    constants = {"IS_TRANSPOSED": is_transposed, **settings}
    launch(kernels.products_kernel, programs, x, weight, ends, target, alpha, inner, columns, **constants)
    return target


def sums(left: Tensor, right: Tensor, ends: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha * left^T right of each expert's rows, below each other."""
    (rows, height), width, experts = left.shape, right.shape[1], len(ends)
    target, settings = left.new_empty(experts * height, width), _tile(left, height, width, rows)
    programs = (triton.cdiv(height, settings["ROWS"]) * triton.cdiv(width, settings["COLUMNS"]), experts)
    left, right = left.contiguous(), right.contiguous()
    launch(kernels.sums_kernel, programs, left, right, ends, target, alpha, height, width, **settings)
    return target
