"""The short convolution of the delta rule with its SiLU as Triton kernels, and the gradients.

They compute in fp32 and round once, at the end; the plain form in delta_rule.py rounds before the SiLU, too. Backward
computes the convolution again. Each program sums its part of the gradient of the taps, then
elementwise_kernels.sum_kernel those sums, both in a fixed order, so that bits repeat.

This file needs Triton and knows nothing of torch; `convolution_launch.py` calls it. One launch computes queries, keys
and values, with `blocks` programs of columns for each. A program has TOKENS x BLOCK elements at once, in `steps` steps.

    q, k, v: (tokens, channels), each with a stride of tokens. Outputs and gradients: the same, contiguous.
    q_weight, k_weight, v_weight: (channels, 4); the last column is the tap of the token itself, w0.
    ids: (tokens,) of all rows, not negative, see delta_rule.document_ids.
"""

import triton
import triton.language as tl

from titan_mi100.model.fused.elementwise_kernels import sigmoid, silu_slope


@triton.jit
def convolution_kernel(
    q, k, v, q_weight, k_weight, v_weight, q_out, k_out, v_out, ids, tokens, q_channels, k_channels, v_channels,
    q_stride, k_stride, v_stride, blocks, steps, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes silu(convolution)."""
    part, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    x, weight, out = _of(part, q, k, v), _of(part, q_weight, k_weight, v_weight), _of(part, q_out, k_out, v_out)
    channels, stride = _of(part, q_channels, k_channels, v_channels), _of(part, q_stride, k_stride, v_stride)
    w0, w1 = _tap(weight, column, channels, 0), _tap(weight, column, channels, 1)
    w2, w3 = _tap(weight, column, channels, 2), _tap(weight, column, channels, 3)
    for step in range(steps):
        token = (tl.program_id(1) * steps + step) * TOKENS + tl.arange(0, TOKENS)
        x0, n0 = _row(x, ids, token, tokens, column, channels, stride)
        x1, n1 = _row(x, ids, token - 1, tokens, column, channels, stride)
        x2, n2 = _row(x, ids, token - 2, tokens, column, channels, stride)
        x3, n3 = _row(x, ids, token - 3, tokens, column, channels, stride)
        y = _convolved(x0, x1, x2, x3, n0, n1, n2, n3, w0, w1, w2, w3)
        at, inside = _places(token, tokens, column, channels, channels)
        tl.store(out + at, (y * sigmoid(y)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def convolution_backward_kernel(
    q_grad, k_grad, v_grad, q, k, v, q_weight, k_weight, v_weight, q_out, k_out, v_out, sums, ids, tokens, q_channels,
    k_channels, v_channels, q_stride, k_stride, v_stride, blocks, steps, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
    TRAINED: tl.constexpr,
):  # fmt: skip
    """The gradients of q, k and v, and each program's part of those of the taps.

    Args: sums: (programs of tokens, channels of q, k and v, 4) fp32, if weights are TRAINED.
    """
    part, column = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    x, weight, out = _of(part, q, k, v), _of(part, q_weight, k_weight, v_weight), _of(part, q_out, k_out, v_out)
    channels, stride = _of(part, q_channels, k_channels, v_channels), _of(part, q_stride, k_stride, v_stride)
    grad = _of(part, q_grad, k_grad, v_grad)
    w0, w1 = _tap(weight, column, channels, 0), _tap(weight, column, channels, 1)
    w2, w3 = _tap(weight, column, channels, 2), _tap(weight, column, channels, 3)
    sum0, sum1 = tl.zeros([TOKENS, BLOCK], tl.float32), tl.zeros([TOKENS, BLOCK], tl.float32)
    sum2, sum3 = tl.zeros([TOKENS, BLOCK], tl.float32), tl.zeros([TOKENS, BLOCK], tl.float32)
    for step in range(steps):
        token = (tl.program_id(1) * steps + step) * TOKENS + tl.arange(0, TOKENS)
        x0, n0 = _row(x, ids, token - 3, tokens, column, channels, stride)
        x1, n1 = _row(x, ids, token - 2, tokens, column, channels, stride)
        x2, n2 = _row(x, ids, token - 1, tokens, column, channels, stride)
        x3, n3 = _row(x, ids, token, tokens, column, channels, stride)
        x4, n4 = _row(x, ids, token + 1, tokens, column, channels, stride)
        x5, n5 = _row(x, ids, token + 2, tokens, column, channels, stride)
        x6, n6 = _row(x, ids, token + 3, tokens, column, channels, stride)
        # gradients of the convolution, of the token and the three behind it
        d3 = _slope(grad, token, tokens, column, channels, x3, x2, x1, x0, n3, n2, n1, n0, w0, w1, w2, w3)
        d4 = _slope(grad, token + 1, tokens, column, channels, x4, x3, x2, x1, n4, n3, n2, n1, w0, w1, w2, w3)
        d5 = _slope(grad, token + 2, tokens, column, channels, x5, x4, x3, x2, n5, n4, n3, n2, w0, w1, w2, w3)
        d6 = _slope(grad, token + 3, tokens, column, channels, x6, x5, x4, x3, n6, n5, n4, n3, w0, w1, w2, w3)
        d = _convolved(d3, d4, d5, d6, n3, n4, n5, n6, w0, w1, w2, w3)
        if TRAINED:
            sum0 += d3 * x3
            sum1 += tl.where(n3 == n2, d3 * x2, 0.0)
            sum2 += tl.where(n3 == n1, d3 * x1, 0.0)
            sum3 += tl.where(n3 == n0, d3 * x0, 0.0)
        at, inside = _places(token, tokens, column, channels, channels)
        tl.store(out + at, d.to(out.dtype.element_ty), mask=inside)
    if TRAINED:
        before = tl.program_id(1) * (q_channels + k_channels + v_channels)
        before += tl.where(part > 0, q_channels, 0) + tl.where(part > 1, k_channels, 0)
        at, inside = sums + (before + column).to(tl.int64) * 4, column < channels
        tl.store(at + 3, tl.sum(sum0, 0), mask=inside)
        tl.store(at + 2, tl.sum(sum1, 0), mask=inside)
        tl.store(at + 1, tl.sum(sum2, 0), mask=inside)
        tl.store(at, tl.sum(sum3, 0), mask=inside)


@triton.jit
def _of(part, q, k, v):
    """What belongs to this part."""
    if part == 1:
        q = k
    if part == 2:
        q = v
    return q


@triton.jit
def _tap(weight, column, channels, DISTANCE: tl.constexpr):
    """The tap of the token this far before."""
    return tl.load(weight + column * 4 + (3 - DISTANCE), mask=column < channels, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _places(token, tokens, column, channels, stride):
    inside = ((token >= 0) & (token < tokens))[:, None] & (column < channels)[None, :]
    return token.to(tl.int64)[:, None] * stride + column[None, :], inside


@triton.jit
def _load(x, token, tokens, column, channels, stride):
    at, inside = _places(token, tokens, column, channels, stride)
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _row(x, ids, token, tokens, column, channels, stride):
    """The elements of tokens, and the numbers of their documents; zeros and -1 outside of the tensor."""
    number = tl.load(ids + token, mask=(token >= 0) & (token < tokens), other=-1)
    return _load(x, token, tokens, column, channels, stride), number[:, None]


@triton.jit
def _convolved(x0, x1, x2, x3, n0, n1, n2, n3, w0, w1, w2, w3):
    """The sum of elements times taps, of those in the document of the first."""
    y = x0 * w0 + tl.where(n1 == n0, x1, 0.0) * w1
    return y + tl.where(n2 == n0, x2, 0.0) * w2 + tl.where(n3 == n0, x3, 0.0) * w3


@triton.jit
def _slope(grad, token, tokens, column, channels, x0, x1, x2, x3, n0, n1, n2, n3, w0, w1, w2, w3):
    """The gradient of the convolution of these tokens; 0 behind the last one."""
    y = _convolved(x0, x1, x2, x3, n0, n1, n2, n3, w0, w1, w2, w3)
    return _load(grad, token, tokens, column, channels, channels) * silu_slope(y, sigmoid(y))
