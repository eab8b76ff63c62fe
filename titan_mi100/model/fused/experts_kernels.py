"""Products of rows that are grouped by expert, and the gradient of the matrices, as Triton kernels.

Rows are sorted by expert, and `ends` says where each expert's rows end. The host does not know it: a tile of rows has
one expert, whose tiles have the numbers from start // ROWS + expert on, which are as many as its rows need wherever
they start. So there are rows // ROWS + experts numbers; a program finds its expert by counting those that begin
before it, and programs that no row is left for return. Each element is written by one program, which sums in a fixed
order: equal inputs give equal bits. experts.py has the plain form, a loop over experts.

This file needs Triton and knows nothing of torch; `experts_launch.py` calls it.
"""

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, sum, PRECISION: tl.constexpr):
    return tl.dot(a, b, sum, input_precision=PRECISION)  # for fp32; on smaller dtypes it has no effect


@triton.jit
def products_kernel(
    x, weight, ends, out, alpha, inner, columns,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, IS_TRANSPOSED: tl.constexpr, IS_ADDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes out = alpha * x W of each row's expert, if IS_ADDED added to `out`, for a tile of rows and of columns.

    Args:
        x: (rows, inner). weight: W of all experts, each (inner, columns), or if not IS_TRANSPOSED (columns, inner).
        out: (rows, columns). LANES: at least EXPERTS, a power of two.
    """
    tile, expert = tl.program_id(1), tl.arange(0, LANES)
    starts = tl.load(ends + expert - 1, mask=(expert > 0) & (expert < EXPERTS), other=0)
    own = tl.sum(((starts // ROWS + expert <= tile) & (expert < EXPERTS)).to(tl.int32), 0) - 1
    start, end = tl.load(ends + own - 1, mask=own > 0, other=0), tl.load(ends + own)
    first = start + (tile - start // ROWS - own) * ROWS
    if first >= end:
        return
    row = tl.arange(0, ROWS)
    there = tl.minimum(row, end - first - 1)  # rows behind the last are computed as that one, and not stored
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    x += first.to(tl.int64) * inner
    weight += own.to(tl.int64) * inner * columns
    sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, inner, DEPTH):
        depth = begin + tl.arange(0, DEPTH)
        a = tl.load(x + there[:, None] * inner + depth[None, :], mask=depth[None, :] < inner, other=0.0)
        if IS_TRANSPOSED:
            elements = weight + depth[:, None] * columns + column[None, :]
        else:
            elements = weight + column[None, :] * inner + depth[:, None]
        b = tl.load(elements, mask=(depth[:, None] < inner) & (column[None, :] < columns), other=0.0)
        sum = _dot(a, b, sum, PRECISION)
    sum *= alpha
    inside = (row[:, None] < end - first) & (column[None, :] < columns)
    target = out + first.to(tl.int64) * columns + (row[:, None] * columns + column[None, :])
    if IS_ADDED:
        sum += tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, sum.to(out.dtype.element_ty), mask=inside)


@triton.jit
def sums_kernel(
    left, right, ends, out, alpha, height, width,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes out = alpha * left^T right of each expert's rows, for a tile of an expert's matrix; without rows zeros.

    Args:
        left: (rows, height). right: (rows, width). out: of each expert (height, width).
    """
    expert, across = tl.program_id(1), tl.cdiv(width, COLUMNS)
    start, end = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    left += start.to(tl.int64) * height
    right += start.to(tl.int64) * width
    sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, end - start, DEPTH):
        there = depth < end - start - begin
        in_a, in_b = there[None, :] & (row[:, None] < height), there[:, None] & (column[None, :] < width)
        a = tl.load(left + depth[None, :] * height + row[:, None], mask=in_a, other=0.0)
        b = tl.load(right + depth[:, None] * width + column[None, :], mask=in_b, other=0.0)
        sum = _dot(a, b, sum, PRECISION)
        left += DEPTH * height
        right += DEPTH * width
    inside = (row[:, None] < height) & (column[None, :] < width)
    out += expert.to(tl.int64) * height * width
    tl.store(out + row[:, None] * width + column[None, :], (sum * alpha).to(out.dtype.element_ty), mask=inside)
