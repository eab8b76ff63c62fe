"""The short convolution of the delta rule with its SiLU as Triton kernels, and the gradients.

They compute in fp32 and round once, at the end; the plain form in delta_rule.py rounds before the SiLU, too. Backward
computes the convolution again. Each program sums its part of the gradient of the taps, then
elementwise_kernels.sum_kernel those sums, both in a fixed order, so that bits repeat.

This file needs Triton and knows nothing of torch; `convolution_launch.py` calls it. One launch computes queries, keys and
values, with `blocks` programs of columns for each. A program has TOKENS x BLOCK elements at once, in `steps` steps.

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
        y = _convolved(x, ids, token, tokens, column, channels, stride, w0, w1, w2, w3)
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
        slope = _slope(grad, x, ids, token, tokens, column, channels, stride, w0, w1, w2, w3)
        if TRAINED:
            sum0 += slope * _row(x, token, tokens, column, channels, stride)
            sum1 += slope * _past(x, ids, token, 1, tokens, column, channels, stride)
            sum2 += slope * _past(x, ids, token, 2, tokens, column, channels, stride)
            sum3 += slope * _past(x, ids, token, 3, tokens, column, channels, stride)
        d = slope * w0
        slope = _slope(grad, x, ids, token + 1, tokens, column, channels, stride, w0, w1, w2, w3)
        d += tl.where(_is_same(ids, token + 1, 1, tokens), slope * w1, 0.0)
        slope = _slope(grad, x, ids, token + 2, tokens, column, channels, stride, w0, w1, w2, w3)
        d += tl.where(_is_same(ids, token + 2, 2, tokens), slope * w2, 0.0)
        slope = _slope(grad, x, ids, token + 3, tokens, column, channels, stride, w0, w1, w2, w3)
        d += tl.where(_is_same(ids, token + 3, 3, tokens), slope * w3, 0.0)
        at, inside = _places(token, tokens, column, channels, channels)
        tl.store(out + at, d.to(out.dtype.element_ty), mask=inside)
    if TRAINED:
        before = tl.program_id(1) * (q_channels + k_channels + v_channels)
        before += _of(part, 0, q_channels, q_channels + k_channels)
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
def _row(x, token, tokens, column, channels, stride):
    at, inside = _places(token, tokens, column, channels, stride)
    return tl.load(x + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _is_same(ids, token, DISTANCE: tl.constexpr, tokens):
    """Whether a token and the one this far before share a document."""
    before = token - DISTANCE
    own = tl.load(ids + token, mask=(token >= 0) & (token < tokens), other=-1)
    return (own == tl.load(ids + before, mask=(before >= 0) & (before < tokens), other=-1))[:, None]


@triton.jit
def _past(x, ids, token, DISTANCE: tl.constexpr, tokens, column, channels, stride):
    past = _row(x, token - DISTANCE, tokens, column, channels, stride)
    return tl.where(_is_same(ids, token, DISTANCE, tokens), past, 0.0)


@triton.jit
def _convolved(x, ids, token, tokens, column, channels, stride, w0, w1, w2, w3):
    y = _row(x, token, tokens, column, channels, stride) * w0
    y += _past(x, ids, token, 1, tokens, column, channels, stride) * w1
    y += _past(x, ids, token, 2, tokens, column, channels, stride) * w2
    return y + _past(x, ids, token, 3, tokens, column, channels, stride) * w3


@triton.jit
def _slope(grad, x, ids, token, tokens, column, channels, stride, w0, w1, w2, w3):
    """The gradient of the convolution; 0 behind the last token."""
    y = _convolved(x, ids, token, tokens, column, channels, stride, w0, w1, w2, w3)
    return _row(grad, token, tokens, column, channels, channels) * silu_slope(y, sigmoid(y))
