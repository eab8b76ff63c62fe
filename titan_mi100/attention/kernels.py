"""Causal attention inside documents as Triton kernels: the output, and the gradients of queries, keys and values.

The method is flash attention (Dao et al., 2022; Dao, 2023): scores exist one tile at a time, the softmax is normalised
while it is summed, and backward computes the scores again. Three things are particular here:

- Documents. The batch is one row of tokens. `boundaries` gives for each token the first token of its document and the
  one behind its last. A program visits only those tiles in which its own documents can lie.
- Grouped queries. A program for queries reads the keys of its group in place. A program for keys adds up over all
  query heads of its group.
- No atomics. Every element is written by one program, which sums in a fixed order: equal inputs give equal bits.

Legend: D = HEAD_DIM. Queries, outputs and their gradients are (tokens, heads, D), keys and values (tokens, kv_heads,
D), `lse` and `delta` (heads, tokens) in fp32. A stride is that from token to token; the rest is contiguous. Row
numbers behind the last token are moved back to it, which is cheaper than a mask: what they compute is never stored,
or belongs to a pair that is masked.

This file needs Triton and knows nothing of torch; `triton_backend.py` calls it.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(pointer, rows, stride, HEAD_DIM: tl.constexpr):  # -> (rows, D)
    return tl.load(pointer + rows[:, None] * stride + tl.arange(0, HEAD_DIM)[None, :])


@triton.jit
def _columns(pointer, rows, stride, HEAD_DIM: tl.constexpr):  # the same, transposed -> (D, rows)
    return tl.load(pointer + rows[None, :] * stride + tl.arange(0, HEAD_DIM)[:, None])


@triton.jit
def _dot(a, b, accumulator=None):
    return tl.dot(a, b, accumulator, input_precision="ieee")  # for fp32; on smaller dtypes it has no effect


@triton.jit
def _own_queries(boundaries, tokens, BLOCK_Q: tl.constexpr):
    """The queries of this program: their numbers, the same moved back to the last token, the first tokens of their
    documents; of these three the first number, the last and the latest first token."""
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_Q  # late queries have most keys: they begin first
    rows = first + tl.arange(0, BLOCK_Q)
    there = tl.minimum(rows, tokens - 1)
    last = tl.minimum(first + BLOCK_Q, tokens) - 1
    return rows, there, tl.load(boundaries + there), first, last, tl.load(boundaries + last)


@triton.jit
def forward_kernel(
    q, k, v, out, lse, boundaries, scale, tokens, q_stride, k_stride, v_stride, out_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes out = softmax(q k^T scale) v and lse = log2(sum(exp(scores))), for BLOCK_Q queries of one head."""
    rows, there, starts, first, last, latest_start = _own_queries(boundaries, tokens, BLOCK_Q)
    head = tl.program_id(1)
    k += head // GROUP * HEAD_DIM
    v += head // GROUP * HEAD_DIM
    queries = _rows(q + head * HEAD_DIM, there, q_stride, HEAD_DIM)

    highest = tl.full((BLOCK_Q,), -1e30, tl.float32)  # finite: a tile without any pair then adds exactly 0
    total = tl.zeros((BLOCK_Q,), tl.float32)
    outputs = tl.zeros((BLOCK_Q, HEAD_DIM), tl.float32)
    for block in range(tl.load(boundaries + first) // BLOCK_K * BLOCK_K, last + 1, BLOCK_K):
        columns = block + tl.arange(0, BLOCK_K)
        readable = tl.minimum(columns, tokens - 1)
        scores = _dot(queries, _columns(k, readable, k_stride, HEAD_DIM)) * (scale * LOG2_E)
        if (block < latest_start) | (block + BLOCK_K > first + 1):  # else every pair of the tile counts
            visible = (columns[None, :] <= rows[:, None]) & (columns[None, :] >= starts[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        raised = tl.maximum(highest, tl.max(scores, 1))
        shrunk = tl.exp2(highest - raised)
        weights = tl.exp2(scores - raised[:, None])
        total = total * shrunk + tl.sum(weights, 1)
        values = _rows(v, readable, v_stride, HEAD_DIM)
        outputs = _dot(weights.to(values.dtype), values, outputs * shrunk[:, None])
        highest = raised

    places = out + head * HEAD_DIM + rows[:, None] * out_stride + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(places, (outputs / total[:, None]).to(out.dtype.element_ty), mask=rows[:, None] < tokens)
    tl.store(lse + head * tokens + rows, highest + tl.log2(total), mask=rows < tokens)


@triton.jit
def queries_gradient_kernel(
    q, k, v, out, grad, grad_q, lse, delta, boundaries,
    scale, tokens, q_stride, k_stride, v_stride, out_stride, grad_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes grad_q, and delta = sum(out * grad), for BLOCK_Q queries of one head. grad is that of the output."""
    rows, there, starts, first, last, latest_start = _own_queries(boundaries, tokens, BLOCK_Q)
    head = tl.program_id(1)
    k += head // GROUP * HEAD_DIM
    v += head // GROUP * HEAD_DIM
    grads = _rows(grad + head * HEAD_DIM, there, grad_stride, HEAD_DIM)
    outputs = _rows(out + head * HEAD_DIM, there, out_stride, HEAD_DIM)
    deltas = tl.sum(outputs.to(tl.float32) * grads.to(tl.float32), 1)
    tl.store(delta + head * tokens + rows, deltas, mask=rows < tokens)
    queries = _rows(q + head * HEAD_DIM, there, q_stride, HEAD_DIM)
    sums = tl.load(lse + head * tokens + there)

    gradient = tl.zeros((BLOCK_Q, HEAD_DIM), tl.float32)
    for block in range(tl.load(boundaries + first) // BLOCK_K * BLOCK_K, last + 1, BLOCK_K):
        columns = block + tl.arange(0, BLOCK_K)
        readable = tl.minimum(columns, tokens - 1)
        keys = _columns(k, readable, k_stride, HEAD_DIM)
        weights = tl.exp2(_dot(queries, keys) * (scale * LOG2_E) - sums[:, None])
        if (block < latest_start) | (block + BLOCK_K > first + 1):
            visible = (columns[None, :] <= rows[:, None]) & (columns[None, :] >= starts[:, None])
            weights = tl.where(visible, weights, 0.0)
        slopes = weights * (_dot(grads, _columns(v, readable, v_stride, HEAD_DIM)) - deltas[:, None])
        gradient = _dot(slopes.to(keys.dtype), tl.trans(keys), gradient)

    places = grad_q + head * HEAD_DIM + rows[:, None] * out_stride + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(places, (gradient * scale).to(grad_q.dtype.element_ty), mask=rows[:, None] < tokens)


@triton.jit
def keys_gradient_kernel(
    q, k, v, grad, grad_k, grad_v, lse, delta, boundaries,
    scale, tokens, q_stride, k_stride, v_stride, grad_stride, result_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    KEYS: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Computes grad_k (if KEYS) and grad_v (if VALUES) for BLOCK_K keys of one key head; `delta` is from
    queries_gradient_kernel. Tiles are (keys, queries) here: their scores are transposed, so that they are the left
    factor of both sums as they are."""
    first = tl.program_id(0) * BLOCK_K
    kv_head = tl.program_id(1)
    rows = first + tl.arange(0, BLOCK_K)
    there = tl.minimum(rows, tokens - 1)
    last = tl.minimum(first + BLOCK_K, tokens) - 1
    ends = tl.load(boundaries + tokens + there)
    earliest_end = tl.load(boundaries + tokens + first)
    keys = _rows(k + kv_head * HEAD_DIM, there, k_stride, HEAD_DIM)
    values = _rows(v + kv_head * HEAD_DIM, there, v_stride, HEAD_DIM)

    result_k = tl.zeros((BLOCK_K, HEAD_DIM), tl.float32)
    result_v = tl.zeros((BLOCK_K, HEAD_DIM), tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        for block in range(first // BLOCK_Q * BLOCK_Q, tl.load(boundaries + tokens + last), BLOCK_Q):
            columns = block + tl.arange(0, BLOCK_Q)
            readable = tl.minimum(columns, tokens - 1)
            queries = _columns(q + head * HEAD_DIM, readable, q_stride, HEAD_DIM)
            sums = tl.load(lse + head * tokens + readable)
            weights = tl.exp2(_dot(keys, queries) * (scale * LOG2_E) - sums[None, :])
            if (block + BLOCK_Q > earliest_end) | (block < last):
                visible = (rows[:, None] <= columns[None, :]) & (columns[None, :] < ends[:, None])
                weights = tl.where(visible, weights, 0.0)
            if VALUES:
                grads = _rows(grad + head * HEAD_DIM, readable, grad_stride, HEAD_DIM)
                result_v = _dot(weights.to(grads.dtype), grads, result_v)
                turned = tl.trans(grads)
            else:
                turned = _columns(grad + head * HEAD_DIM, readable, grad_stride, HEAD_DIM)
            if KEYS:
                deltas = tl.load(delta + head * tokens + readable)
                slopes = weights * (_dot(values, turned) - deltas[None, :])
                result_k = _dot(slopes.to(queries.dtype), tl.trans(queries), result_k)

    places = kv_head * HEAD_DIM + rows[:, None] * result_stride + tl.arange(0, HEAD_DIM)[None, :]
    if KEYS:
        tl.store(grad_k + places, (result_k * scale).to(grad_k.dtype.element_ty), mask=rows[:, None] < tokens)
    if VALUES:
        tl.store(grad_v + places, result_v.to(grad_v.dtype.element_ty), mask=rows[:, None] < tokens)
