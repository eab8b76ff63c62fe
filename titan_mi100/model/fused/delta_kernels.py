"""The two loops over chunks of the delta rule as Triton kernels: the states, and their gradients.

A program has ROWS rows of one value head's state, which no other program needs, and goes through all chunks of a row.
All is in fp32. The state is in two halves of its columns, so that less shared memory is needed. delta_rule.py has the
plain form, the formulas and the legend.

This file needs Triton and knows nothing of torch; `delta_launch.py` calls it.
"""

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, sum, PRECISION: tl.constexpr):
    return tl.dot(a, b, sum, input_precision=PRECISION)


@triton.jit
def _start(chunk, chunks, GROUP: tl.constexpr):
    """The numbers of a chunk's value head and of its key head in (N, B, Hk, G) and (N, B, Hk)."""
    head = tl.program_id(0).to(tl.int64)
    return chunk * tl.num_programs(0) + head, chunk * (tl.num_programs(0) // GROUP) + head // GROUP


@triton.jit
def _tile(x, number, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, rows, columns):
    """The elements of these rows and columns of matrix `number`, (HEIGHT, WIDTH)."""
    return x + number * (HEIGHT * WIDTH) + rows[:, None] * WIDTH + columns[None, :]


@triton.jit
def states_kernel(
    state, k, beta, entry, last, inverse, v, states, changes, chunks,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before each chunk and behind the last one, and V' of each chunk; see delta_rule.forward_states."""
    HALF: tl.constexpr = KEY // 2
    rows, tokens = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    left, right = tl.arange(0, HALF), HALF + tl.arange(0, HALF)
    number, _ = _start(0, chunks, GROUP)
    s0 = tl.load(_tile(state, number, VALUE, KEY, rows, left))
    s1 = tl.load(_tile(state, number, VALUE, KEY, rows, right))
    for chunk in range(chunks):
        number, key = _start(chunk, chunks, GROUP)
        tl.store(_tile(states, number, VALUE, KEY, rows, left), s0)
        tl.store(_tile(states, number, VALUE, KEY, rows, right), s1)
        k0 = tl.load(_tile(k, key, TOKENS, KEY, tokens, left))
        k1 = tl.load(_tile(k, key, TOKENS, KEY, tokens, right))
        read = _dot(s0, tl.trans(k0), tl.zeros((ROWS, TOKENS), tl.float32), PRECISION)
        read = _dot(s1, tl.trans(k1), read, PRECISION)
        enters = tl.load(entry + number * TOKENS + tokens)
        rest = tl.load(_tile(v, number, VALUE, TOKENS, rows, tokens)) - enters[None, :] * read
        rest *= tl.load(beta + number * TOKENS + tokens)[None, :]
        inverted = tl.load(_tile(inverse, number, TOKENS, TOKENS, tokens, tokens))
        change = _dot(rest, tl.trans(inverted), tl.zeros((ROWS, TOKENS), tl.float32), PRECISION)
        tl.store(_tile(changes, number, VALUE, TOKENS, rows, tokens), change)
        change *= tl.load(last + number * TOKENS + tokens)[None, :]
        kept = tl.load(entry + number * TOKENS + TOKENS - 1)
        s0 = _dot(change, k0, kept * s0, PRECISION)
        s1 = _dot(change, k1, kept * s1, PRECISION)
    number, _ = _start(chunks, chunks, GROUP)
    tl.store(_tile(states, number, VALUE, KEY, rows, left), s0)
    tl.store(_tile(states, number, VALUE, KEY, rows, right), s1)


@triton.jit
def states_gradient_kernel(
    grad_state, k, beta, entry, last, inverse, q, entering, inside, changes, states, scaled, lasts, chunks,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of all states and of (I + A) V', and of r this program's part of the sum over a value's elements.

    See delta_rule.backward_states. Args: lasts: (VALUE / ROWS, N, B, Hk, G, C).
    """
    HALF: tl.constexpr = KEY // 2
    rows, tokens = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    left, right = tl.arange(0, HALF), HALF + tl.arange(0, HALF)
    number, _ = _start(0, chunks, GROUP)
    lasts += tl.program_id(1).to(tl.int64) * chunks * tl.num_programs(0) * TOKENS
    s0 = tl.load(_tile(grad_state, number, VALUE, KEY, rows, left))
    s1 = tl.load(_tile(grad_state, number, VALUE, KEY, rows, right))
    for back in range(chunks):
        behind_number, _ = _start(chunks - back, chunks, GROUP)
        number, key = _start(chunks - 1 - back, chunks, GROUP)
        tl.store(_tile(states, behind_number, VALUE, KEY, rows, left), s0)
        tl.store(_tile(states, behind_number, VALUE, KEY, rows, right), s1)
        k0 = tl.load(_tile(k, key, TOKENS, KEY, tokens, left))
        k1 = tl.load(_tile(k, key, TOKENS, KEY, tokens, right))
        behind = _dot(s0, tl.trans(k0), tl.zeros((ROWS, TOKENS), tl.float32), PRECISION)
        behind = _dot(s1, tl.trans(k1), behind, PRECISION)
        change = tl.load(_tile(changes, number, VALUE, TOKENS, rows, tokens))
        tl.store(lasts + number * TOKENS + tokens, tl.sum(change * behind, 0))
        slope = tl.load(_tile(inside, number, VALUE, TOKENS, rows, tokens))
        slope += tl.load(last + number * TOKENS + tokens)[None, :] * behind
        inverted = tl.load(_tile(inverse, number, TOKENS, TOKENS, tokens, tokens))
        slope = _dot(slope, inverted, tl.zeros((ROWS, TOKENS), tl.float32), PRECISION)
        tl.store(_tile(scaled, number, VALUE, TOKENS, rows, tokens), slope)
        enters = tl.load(entry + number * TOKENS + tokens)
        slope *= (enters * tl.load(beta + number * TOKENS + tokens))[None, :]
        kept = tl.load(entry + number * TOKENS + TOKENS - 1)
        s0 = _dot(-slope, k0, kept * s0, PRECISION)
        s1 = _dot(-slope, k1, kept * s1, PRECISION)
        enters_out = tl.load(_tile(entering, number, VALUE, TOKENS, rows, tokens))
        s0 = _dot(enters_out, tl.load(_tile(q, key, TOKENS, KEY, tokens, left)), s0, PRECISION)
        s1 = _dot(enters_out, tl.load(_tile(q, key, TOKENS, KEY, tokens, right)), s1, PRECISION)
    number, _ = _start(0, chunks, GROUP)
    tl.store(_tile(states, number, VALUE, KEY, rows, left), s0)
    tl.store(_tile(states, number, VALUE, KEY, rows, right), s1)
