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
def swiglu_kernel(gate, up, out, columns, gate_stride, up_stride, BLOCK: tl.constexpr, SILU: tl.constexpr):
    """Computes silu(gate) * up, or without SILU sigmoid(gate) * up.

    Args: gate, up: rows of `columns`, with a stride each. out: contiguous.
    """
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, (_gate(g, sigmoid(g), SILU) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    grad, gate, up, grad_gate, grad_up, columns, gate_stride, up_stride, BLOCK: tl.constexpr, SILU: tl.constexpr
):  # fmt: skip
    """The gradients of gate and up, contiguous."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < columns, row * columns + column
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    s = sigmoid(g)
    slope = silu_slope(g, s) if SILU else s * (1.0 - s)
    tl.store(grad_gate + at, (d * u * slope).to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + at, (d * _gate(g, s, SILU)).to(grad_up.dtype.element_ty), mask=inside)


@triton.jit
def _gate(x, sigmoid, SILU: tl.constexpr):
    return x * sigmoid if SILU else sigmoid


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu_slope(x, sigmoid):
    return sigmoid * (1.0 + x * (1.0 - sigmoid))


@triton.jit
def norm_kernel(
    x, other, gain, out, total, rows, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    KIND: tl.constexpr, CENTRED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """RMSNorm of rows of SIZE columns.

    Args:
        other: KIND "sum": is added first, and the sum written to total; "gate": its silu multiplies the norm.
        CENTRED: the gain is 1 + gain. ROUNDED: it is rounded to the dtype of x first, as plain operations do.
    """
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < SIZE)[None, :]
    at = row[:, None] * SIZE + column[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == "sum":
        rounded = (wide + tl.load(other + at, mask=inside, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    normed = wide * _factor(wide, eps, SIZE)[:, None] * _gain(gain, x, column, SIZE, CENTRED, ROUNDED)[None, :]
    if KIND == "gate":
        z = tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        normed *= z * sigmoid(z)
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def norm_backward_kernel(
    grad, x, other, gain, grad_x, grad_other, sums, rows, steps, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KIND: tl.constexpr, CENTRED: tl.constexpr, ROUNDED: tl.constexpr, TRAINED: tl.constexpr,
):  # fmt: skip
    """The gradient of x, and each program's part of that of the gain.

    Args:
        x: KIND "sum": the sum. other: the gate; KIND "sum": the gradient of the sum from elsewhere, which is added.
        sums: (programs, SIZE) fp32, if the gain is TRAINED. steps: of a program, ROWS rows each.
    """
    column, wide_gain = tl.arange(0, BLOCK), _gain(gain, x, tl.arange(0, BLOCK), SIZE, CENTRED, ROUNDED)[None, :]
    first, summed = tl.program_id(0).to(tl.int64) * steps * ROWS, tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(steps):
        row = first + step * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < SIZE)[None, :]
        at = row[:, None] * SIZE + column[None, :]
        d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        factor = _factor(wide, eps, SIZE)[:, None]
        normed = wide * factor
        if KIND == "gate":
            z = tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
            s = sigmoid(z)
            of_gate = d * normed * wide_gain * silu_slope(z, s)
            tl.store(grad_other + at, of_gate.to(grad_other.dtype.element_ty), mask=inside)
            d *= z * s
        if TRAINED:
            summed += d * normed
        d *= wide_gain
        d = factor * (d - normed * (tl.sum(d * normed, 1) / SIZE)[:, None])
        if KIND == "sum":
            d += tl.load(other + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + at, d.to(grad_x.dtype.element_ty), mask=inside)
    if TRAINED:
        tl.store(sums + tl.program_id(0) * SIZE + column, tl.sum(summed, 0), mask=column < SIZE)


@triton.jit
def sum_kernel(
    sums, first_out, second_out, first_count, count, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """Sums the first rows of `sums`, (count, SIZE), and with a grid of (columns, 2) those after them, each from the top
    to the bottom: the gradients of one gain or two.
    """
    column, summed = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.zeros([ROWS, BLOCK], tl.float32)
    is_second = tl.program_id(1) == 1
    start, end = tl.where(is_second, first_count, 0), tl.where(is_second, count, first_count)
    for top in range(start, end, ROWS):
        row = top + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (column < SIZE)[None, :]
        summed += tl.load(sums + row[:, None] * SIZE + column[None, :], mask=inside, other=0.0)
    total = tl.sum(summed, 0)
    if is_second:
        tl.store(second_out + column, total.to(second_out.dtype.element_ty), mask=column < SIZE)
    else:
        tl.store(first_out + column, total.to(first_out.dtype.element_ty), mask=column < SIZE)


@triton.jit
def turn_kernel(
    q, k, q_gain, k_gain, cos, sin, q_out, k_out, q_programs, tokens, q_heads, k_heads, q_stride, q_head_stride,
    k_stride, k_head_stride, eps, SIZE: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    CENTRED: tl.constexpr,
):  # fmt: skip
    """RMSNorm of each head of queries and keys, whose first TURNED values are then rotated, see elementwise.rotate.

    Args:
        q, k: (tokens, heads, SIZE), with strides of tokens and heads. cos, sin: (tokens, TURNED) fp32.
        q_programs: the first programs compute q, the others k.
    """
    x, gain, target, heads, stride, head_stride = q, q_gain, q_out, q_heads, q_stride, q_head_stride
    program = tl.program_id(0)
    if program >= q_programs:
        x, gain, target, heads, stride, head_stride = k, k_gain, k_out, k_heads, k_stride, k_head_stride
        program -= q_programs
    row, column = program * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    token, other = row // heads, _partner(column, TURNED)
    inside, is_turned = (row < tokens * heads)[:, None] & (column < SIZE)[None, :], (column < TURNED)[None, :]
    start = x + (token.to(tl.int64) * stride + (row - token * heads) * head_stride)[:, None]
    wide = tl.load(start + column[None, :], mask=inside, other=0.0).to(tl.float32)
    pair = tl.load(start + other[None, :], mask=inside, other=0.0).to(tl.float32)
    table = token.to(tl.int64)[:, None] * TURNED + column[None, :]
    c = tl.load(cos + table, mask=inside & is_turned, other=1.0)
    s = tl.load(sin + table, mask=inside & is_turned, other=0.0)
    factor = _factor(wide, eps, SIZE)[:, None]
    wide *= factor * _gain(gain, x, column, SIZE, CENTRED, False)[None, :]
    pair *= factor * _gain(gain, x, other, SIZE, CENTRED, False)[None, :]
    at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(target + at, (wide * c + pair * s).to(target.dtype.element_ty), mask=inside)


@triton.jit
def turn_backward_kernel(
    q_grad, k_grad, q, k, q_gain, k_gain, cos, sin, q_out, k_out, sums, q_programs, tokens, q_heads, k_heads, q_stride,
    q_head_stride, k_stride, k_head_stride, steps, eps, SIZE: tl.constexpr, TURNED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, CENTRED: tl.constexpr, TRAINED: tl.constexpr,
):  # fmt: skip
    """The gradients of q and k, and each program's part of those of the gains; see `norm_backward_kernel`."""
    grad, x, gain, target = q_grad, q, q_gain, q_out
    heads, stride, head_stride, program = q_heads, q_stride, q_head_stride, tl.program_id(0)
    if program >= q_programs:
        grad, x, gain, target = k_grad, k, k_gain, k_out
        heads, stride, head_stride, program = k_heads, k_stride, k_head_stride, program - q_programs
    column, other = tl.arange(0, BLOCK), _partner(tl.arange(0, BLOCK), TURNED)
    is_turned, wide_gain = (column < TURNED)[None, :], _gain(gain, x, column, SIZE, CENTRED, False)[None, :]
    first, summed = program * steps * ROWS, tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(steps):
        row = first + step * ROWS + tl.arange(0, ROWS)
        inside, token = (row < tokens * heads)[:, None] & (column < SIZE)[None, :], row // heads
        at, table = row.to(tl.int64)[:, None] * SIZE, token.to(tl.int64)[:, None] * TURNED
        d = tl.load(grad + at + column[None, :], mask=inside, other=0.0).to(tl.float32)
        pair = tl.load(grad + at + other[None, :], mask=inside, other=0.0).to(tl.float32)
        start = x + (token.to(tl.int64) * stride + (row - token * heads) * head_stride)[:, None]
        wide = tl.load(start + column[None, :], mask=inside, other=0.0).to(tl.float32)
        c = tl.load(cos + table + column[None, :], mask=inside & is_turned, other=1.0)
        s = tl.load(sin + table + other[None, :], mask=inside & is_turned, other=0.0)  # where the pair had it
        factor = _factor(wide, eps, SIZE)[:, None]
        d, normed = d * c + pair * s, wide * factor
        if TRAINED:
            summed += d * normed
        d *= wide_gain
        d = factor * (d - normed * (tl.sum(d * normed, 1) / SIZE)[:, None])
        tl.store(target + at + column[None, :], d.to(target.dtype.element_ty), mask=inside)
    if TRAINED:
        tl.store(sums + tl.program_id(0) * SIZE + column, tl.sum(summed, 0), mask=column < SIZE)


@triton.jit
def _partner(column, TURNED: tl.constexpr):
    """The other column of a rotated pair; columns that are not rotated are their own."""
    other = tl.where(column < TURNED // 2, column + TURNED // 2, column - TURNED // 2)
    return tl.where(column < TURNED, other, column)


@triton.jit
def _factor(wide, eps, SIZE: tl.constexpr):
    return tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)


@triton.jit
def _gain(gain, x, column, SIZE: tl.constexpr, CENTRED: tl.constexpr, ROUNDED: tl.constexpr):
    stored = tl.load(gain + column, mask=column < SIZE, other=0.0)
    if ROUNDED:
        stored = stored.to(x.dtype.element_ty)
    wide = stored.to(tl.float32)
    if CENTRED:
        wide += 1.0
    return wide
