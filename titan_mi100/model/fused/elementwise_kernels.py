"""The work between products as Triton kernels: norms, rotation, SwiGLU, and their gradients.

A kernel reads 16 or 32 bits, computes in fp32 and rounds what it writes once. Gradients read the inputs again and
compute the rest again, so that nothing else is saved. The gradient of a gain is a sum over all rows: each program sums
its own rows, then `sum_kernel` those sums, both in a fixed order, so that bits repeat.

This file needs Triton and knows nothing of torch; `elementwise_launch.py` calls it. In all kernels ROWS and BLOCK are
the rows and columns that a program has at once, powers of two.
"""

import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(gate, up, out, columns, gate_stride, up_stride, BLOCK: tl.constexpr):
    """Computes silu(gate) * up. Args: gate, up: rows of `columns`, with a stride each. out: contiguous."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (g * _sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    grad, gate, up, grad_gate, grad_up, columns, gate_stride, up_stride, BLOCK: tl.constexpr
):  # fmt: skip
    """The gradients of gate and up, contiguous."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < columns, row * columns + column
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    s = _sigmoid(g)
    tl.store(grad_gate + at, (d * u * _silu_slope(g, s)).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, (d * g * s).to(grad_up.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _silu_slope(x, sigmoid):
    return sigmoid * (1.0 + x * (1.0 - sigmoid))
