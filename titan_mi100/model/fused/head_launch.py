"""Launches the kernels of the head's loss on a block of logits, (n, width)."""

import triton
from torch import Tensor

from titan_mi100.model.fused import head_kernel
from titan_mi100.model.fused.running import launch

DEPTH, LANES, COLUMNS, WARPS = 4, 2048, 8192, 4  # see sum_kernel; columns of a program of gradient_kernel


def add(logits: Tensor, start: int, ids: Tensor, highest: Tensor, total: Tensor, target: Tensor) -> None:
    """Add a block to the sums of its rows, and store the logits of the ids that are in it.

    Args:
        start: its first column. ids: (n, k), contiguous. highest, total: (n,). target: (n, k).
    """
    (rows, width), k = logits.shape, ids.shape[1]
    constants = {"ONE": k == 1, "DEPTH": DEPTH, "LANES": LANES, "num_warps": WARPS}
    launch(head_kernel.sum_kernel, (rows,), logits, ids, highest, total, target, width, start, **constants)
    if k > 1:
        launch(head_kernel.pick_kernel, (rows,), logits, ids, target, width, start, k, IDS=triton.next_power_of_2(k))


def subtract(logits: Tensor, start: int, ids: Tensor, scale: Tensor, log_sum: Tensor) -> None:
    """Replace the logits by softmax * scale, less scale for the id if each row has one. Args: scale: (n,)."""
    rows, width = logits.shape
    constants = {"ONE": ids.shape[1] == 1, "COLUMNS": COLUMNS, "num_warps": WARPS}
    programs = (rows, triton.cdiv(width, COLUMNS))
    launch(head_kernel.gradient_kernel, programs, logits, ids, scale, log_sum, width, start, **constants)


def subtract_several(
    delta: Tensor, start: int, ids: Tensor, grad: Tensor, scale: Tensor, log_sum: Tensor, target: Tensor
) -> None:
    """After `subtract`, correct the gradients of several ids. Args: grad, target: (n, k)."""
    (rows, width), k = delta.shape, ids.shape[1]
    kernel, lanes = head_kernel.ids_gradient_kernel, triton.next_power_of_2(k)
    launch(kernel, (rows,), delta, ids, grad, scale, log_sum, target, width, start, k, IDS=lanes)
