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


@triton.jit
def prepare_kernel(
    q, k, v, q_out, k_out, v_out, qk, kk, seq, batch, q_strides, q_step, k_strides, k_step, v_strides, v_step, scale,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk of one key head: its queries and keys, normalised, their products, its values; see delta_rule._Chunks.

    Args:
        q, k, v: (batch, seq, heads, size) in any dtype; a row's and a token's stride each.
        scale: of queries. WIDTH: columns that are read at once.
    """
    chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = chunk * tl.num_programs(1) + head
    tokens, some = tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    token, row = chunk // batch * TOKENS + tokens, chunk % batch
    inside = (token < seq)[:, None]
    q += row * q_strides + token[:, None] * q_step + head * KEY
    k += row * k_strides + token[:, None] * k_step + head * KEY
    v += row * v_strides + token[:, None] * v_step + head * GROUP * VALUE
    q_square, k_square = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
    for start in range(0, KEY, WIDTH):
        x = tl.load(q + start + some[None, :], mask=inside, other=0.0).to(tl.float32)
        y = tl.load(k + start + some[None, :], mask=inside, other=0.0).to(tl.float32)
        q_square += tl.sum(x * x, 1)
        k_square += tl.sum(y * y, 1)
    q_factor, k_factor = scale / tl.sqrt(q_square + 1e-6), 1.0 / tl.sqrt(k_square + 1e-6)
    of_qk, of_kk = tl.zeros((TOKENS, TOKENS), tl.float32), tl.zeros((TOKENS, TOKENS), tl.float32)
    for start in range(0, KEY, WIDTH):
        x = tl.load(q + start + some[None, :], mask=inside, other=0.0).to(tl.float32) * q_factor[:, None]
        y = tl.load(k + start + some[None, :], mask=inside, other=0.0).to(tl.float32) * k_factor[:, None]
        tl.store(_tile(q_out, number, TOKENS, KEY, tokens, start + some), x)
        tl.store(_tile(k_out, number, TOKENS, KEY, tokens, start + some), y)
        of_qk = _dot(x, tl.trans(y), of_qk, PRECISION)
        of_kk = _dot(y, tl.trans(y), of_kk, PRECISION)
    tl.store(_tile(qk, number, TOKENS, TOKENS, tokens, tokens), of_qk)
    tl.store(_tile(kk, number, TOKENS, TOKENS, tokens, tokens), of_kk)
    for start in range(0, GROUP * VALUE, WIDTH):
        x = tl.load(v + start + some[None, :], mask=inside, other=0.0).to(tl.float32)
        places = _tile(v_out, number, GROUP * VALUE, TOKENS, start + some, tokens)
        tl.store(places, tl.trans(x))


@triton.jit
def inverse_kernel(
    kk, number, high, low, beta, decay, inverse, heads, GROUP: tl.constexpr, HALF: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """The decays L and the inverse of I + A of a chunk of 2 x HALF tokens and a value head.

    Args:
        number: (N, B, C) of the document. high, low: sums of g, (N, B, Hv, C), which add up to twice the precision.
    """
    of_value, first = tl.program_id(0).to(tl.int64), tl.arange(0, HALF)
    kk += of_value // GROUP * (4 * HALF * HALF)
    number += of_value // heads * (2 * HALF)
    high, low, beta = high + of_value * (2 * HALF), low + of_value * (2 * HALF), beta + of_value * (2 * HALF)
    decay, inverse = decay + of_value * (4 * HALF * HALF), inverse + of_value * (4 * HALF * HALF)
    second, nothing = first + HALF, tl.zeros((HALF, HALF), tl.float32)
    above = _inverted(_overlap(kk, number, high, low, beta, decay, first, first, HALF), first, PRECISION, HALF)
    below = _inverted(_overlap(kk, number, high, low, beta, decay, second, second, HALF), first, PRECISION, HALF)
    tl.store(_tile(inverse, 0, 2 * HALF, 2 * HALF, first, first), above)
    tl.store(_tile(inverse, 0, 2 * HALF, 2 * HALF, second, second), below)
    tl.store(_tile(inverse, 0, 2 * HALF, 2 * HALF, first, second), nothing)
    tl.store(_tile(decay, 0, 2 * HALF, 2 * HALF, first, second), nothing)
    between = _dot(_overlap(kk, number, high, low, beta, decay, second, first, HALF), above, nothing, PRECISION)
    tl.store(_tile(inverse, 0, 2 * HALF, 2 * HALF, second, first), -_dot(below, between, nothing, PRECISION))


@triton.jit
def _overlap(kk, number, high, low, beta, decay, rows, columns, HALF: tl.constexpr):
    """These rows and columns of A, the strictly lower part of beta L (k.k); stores those of L."""
    is_same = tl.load(number + rows)[:, None] == tl.load(number + columns)[None, :]
    is_same = is_same & (rows[:, None] >= columns[None, :])
    logs = tl.load(high + rows)[:, None] - tl.load(high + columns)[None, :]
    logs += tl.load(low + rows)[:, None] - tl.load(low + columns)[None, :]
    kept = tl.where(is_same, tl.exp(tl.where(is_same, logs, 0.0)), 0.0)
    tl.store(_tile(decay, 0, 2 * HALF, 2 * HALF, rows, columns), kept)
    kept *= tl.load(_tile(kk, 0, 2 * HALF, 2 * HALF, rows, columns)) * tl.load(beta + rows)[:, None]
    return tl.where(rows[:, None] > columns[None, :], kept, 0.0)


@triton.jit
def _inverted(a, rows, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    """The inverse of I + A, of strictly lower A: blocks of half the size are merged, until there is one."""
    inverse = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0) - a * _sibling(rows, 1)
    half = 2
    while half < SIZE:
        merged = _dot(a * _sibling(rows, half), inverse, tl.zeros((SIZE, SIZE), tl.float32), PRECISION)
        inverse -= _dot(inverse, merged, tl.zeros((SIZE, SIZE), tl.float32), PRECISION)
        half *= 2
    return inverse


@triton.jit
def _sibling(rows, half):
    """1 where i lies in the second and j in the first half of the same block of 2 x half rows, else 0."""
    block, is_second = rows // (2 * half), rows // half % 2 == 1
    siblings = (block[:, None] == block[None, :]) & is_second[:, None] & (is_second == 0)[None, :]
    return tl.where(siblings, 1.0, 0.0)
