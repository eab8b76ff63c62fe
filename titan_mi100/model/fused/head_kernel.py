"""The head's loss between its products as Triton kernels: forward reads a block of logits once, backward reads it once
and writes their gradient in its place.

A program has a row, so it sums in a fixed order and no two programs write the same number: equal inputs give equal
bits. Sums are in fp32; a gradient is rounded once. loss.py has the plain form.

Legend: logits (n, width), contiguous; `start` is the first one's column in the vocabulary. ids (n, k); an id outside of
the block has no column here.

This file needs Triton and knows nothing of torch; `head_launch.py` calls it.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exp(x):
    return tl.exp2(x * LOG2_E)


@triton.jit
def _columns_of(ids, row, start, k, IDS: tl.constexpr):
    """A row's ids as columns of the block, and which of the IDS places have one."""
    number = tl.arange(0, IDS)
    return (tl.load(ids + row * k + number, mask=number < k, other=-1) - start).to(tl.int32), number < k


# Of a block's first column Triton would compile again for 0 and for multiples of 16; its width shows how rows lie.
@triton.jit(do_not_specialize=["start"])
def sum_kernel(
    logits, ids, highest, total, target, width, start, ONE: tl.constexpr, DEPTH: tl.constexpr, LANES: tl.constexpr
):
    """Updates a row's highest logit and its sum of exp(logit - highest); stores the logit of its id (if it has ONE).

    Each of LANES has a maximum and a sum of its own until the row's end: DEPTH logits then need one exponential each
    and one together, and no exchange between lanes.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    before, total_before = tl.load(highest + row), tl.load(total + row)  # barriers below keep the stores behind these
    peak = tl.full((LANES,), -1e30, tl.float32)  # finite: a lane without logits then adds exactly 0
    summed = tl.zeros((LANES,), tl.float32)
    for first in range(0, width, DEPTH * LANES):
        column = first + tl.arange(0, DEPTH)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        x = tl.load(logits + column, mask=column < width, other=float("-inf")).to(tl.float32)
        raised = tl.maximum(peak, tl.max(x, 0))
        summed = summed * _exp(peak - raised) + tl.sum(_exp(x - raised[None, :]), 0)
        peak = raised
    raised = tl.maximum(before, tl.max(peak, 0))
    tl.store(total + row, total_before * _exp(before - raised) + tl.sum(summed * _exp(peak - raised), 0))
    tl.store(highest + row, raised)
    if ONE:
        column = (tl.load(ids + row) - start).to(tl.int32)
        inside = (column >= 0) & (column < width)
        tl.store(target + row, tl.load(logits + column, mask=inside, other=0.0).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["start", "k"])
def pick_kernel(logits, ids, target, width, start, k, IDS: tl.constexpr):
    """Stores the logits of a row's k ids."""
    row = tl.program_id(0).to(tl.int64)
    column, is_id = _columns_of(ids, row, start, k, IDS)
    inside = is_id & (column >= 0) & (column < width)
    x = tl.load(logits + row * width + column, mask=inside, other=0.0)
    tl.store(target + row * k + tl.arange(0, IDS), x.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["start"])
def gradient_kernel(logits, ids, scale, log_sum, width, start, ONE: tl.constexpr, COLUMNS: tl.constexpr):
    """Replaces COLUMNS logits of a row by (softmax - one_hot(id)) * scale; without the id if it has not ONE."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    places = logits + row * width + column
    x = tl.load(places, mask=column < width, other=0.0).to(tl.float32)
    slope = _exp(x - tl.load(log_sum + row))
    if ONE:
        slope -= tl.where(column == (tl.load(ids + row) - start).to(tl.int32), 1.0, 0.0)
    tl.store(places, (slope * tl.load(scale + row)).to(logits.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["start", "k"])
def ids_gradient_kernel(delta, ids, grad, scale, log_sum, target, width, start, k, IDS: tl.constexpr):
    """Stores the gradients of the logits of a row's k ids, softmax * scale - grad, after gradient_kernel.

    The softmax is computed again from `target`, the ids' logits, so that it is rounded once. Those of an id that is
    there several times add up in the order of the ids, and each of them stores the same number.
    """
    row = tl.program_id(0).to(tl.int64)
    column, is_id = _columns_of(ids, row, start, k, IDS)
    share = tl.zeros((IDS,), tl.float32)
    for other in range(k):
        other_column = (tl.load(ids + row * k + other) - start).to(tl.int32)
        share += tl.where(column == other_column, tl.load(grad + row * k + other), 0.0)
    x = tl.load(target + row * k + tl.arange(0, IDS), mask=is_id, other=0.0)
    slope = _exp(x - tl.load(log_sum + row)) * tl.load(scale + row) - share
    inside = is_id & (column >= 0) & (column < width)
    tl.store(delta + row * width + column, slope.to(delta.dtype.element_ty), mask=inside)
