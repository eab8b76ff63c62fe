"""Launches the kernels between products, forward and backward, from autograd functions."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_mi100.model.fused import elementwise_kernels as kernels
from titan_mi100.model.fused.running import launch

_COLUMNS, _WARPS = 1024, 4  # of a program of SwiGLU


class SwiGLU(torch.autograd.Function):
    """Computes silu(gate) * up of two tensors of one shape and dtype."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = _rows(gate), _rows(up)
        ctx.save_for_backward(gate, up)
        product = gate.new_empty(gate.shape)
        _swiglu(kernels.swiglu_kernel, gate, up, gate, up, product)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        grads = gate.new_empty(gate.shape), up.new_empty(up.shape)
        _swiglu(kernels.swiglu_backward_kernel, gate, up, grad.contiguous(), gate, up, *grads)
        return grads


def _swiglu(kernel: Any, gate: Tensor, up: Tensor, *tensors: Tensor) -> None:
    columns = gate.shape[-1]
    programs = (gate.numel() // columns, triton.cdiv(columns, _COLUMNS))
    if gate.numel():  # an expert of a batch may have no rows
        strides = (columns, _row_stride(gate), _row_stride(up))
        launch(kernel, programs, *tensors, *strides, BLOCK=_COLUMNS, num_warps=_WARPS)


def _row_stride(x: Tensor) -> int:
    return x.stride(-2) if x.dim() > 1 else x.shape[-1]


def _rows(x: Tensor) -> Tensor:
    """The tensor, copied unless it is rows of contiguous columns that one stride finds. Merged products give such."""
    fits = x.stride(-1) == 1 and all(x.stride(i) == x.shape[i + 1] * x.stride(i + 1) for i in range(x.dim() - 2))
    return x if fits else x.contiguous()
