"""The delta rule as Triton kernels: chunks are prepared, the states go through them, and the gradients back.

In the two loops over chunks a program has ROWS rows of one value head's state, which no other program needs, in two
halves of its columns. In the other kernels a program has one chunk, and sums over a few rows or columns at a time. So
registers and shared memory suffice everywhere. All is in fp32. delta_rule.py has the plain form, formulas and legend.

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
    """Computes a chunk of one key head: its unit queries and keys, their products, its values; see delta_rule._Chunks.

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
    """Computes the decays L and the inverse of I + A of a chunk of 2 x HALF tokens and a value head.

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


@triton.jit
def read_kernel(
    states, k, q, v, beta, entry, inverse, decay, qk, grad, read, changes, entering, inside, asked,
    seq, batch, k_heads, grad_strides, grad_step,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes what a chunk read of its state, V', and their gradients by its outputs; see delta_rule._gradients.

    A program has ROWS elements of the values of one value head. Args: grad: (batch, seq, Hv, dv). asked: its part of
    the sum over a value's elements, (VALUE / ROWS, N, B, Hk, G, C).
    """
    number, tokens = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS)
    rows, some = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    key, nothing = number // GROUP, tl.zeros((ROWS, TOKENS), tl.float32)
    of_keys, of_queries = nothing, nothing
    for start in range(0, KEY, WIDTH):
        state = tl.load(_tile(states, number, VALUE, KEY, rows, start + some))
        of_keys = _dot(state, tl.trans(tl.load(_tile(k, key, TOKENS, KEY, tokens, start + some))), of_keys, PRECISION)
        queries = tl.trans(tl.load(_tile(q, key, TOKENS, KEY, tokens, start + some)))
        of_queries = _dot(state, queries, of_queries, PRECISION)
    tl.store(_tile(read, number, VALUE, TOKENS, rows, tokens), of_keys)
    enters = tl.load(entry + number * TOKENS + tokens)[None, :]
    rest = tl.load(_tile(v, number, VALUE, TOKENS, rows, tokens)) - enters * of_keys
    rest *= tl.load(beta + number * TOKENS + tokens)[None, :]
    pairs = tl.trans(tl.load(_tile(inverse, number, TOKENS, TOKENS, tokens, tokens)))
    tl.store(_tile(changes, number, VALUE, TOKENS, rows, tokens), _dot(rest, pairs, nothing, PRECISION))
    slope = _slope(grad, number, seq, batch, k_heads * GROUP, grad_strides, grad_step, rows, tokens, TOKENS, VALUE)
    asked += tl.program_id(1).to(tl.int64) * tl.num_programs(0) * TOKENS + number * TOKENS
    tl.store(asked + tokens, tl.sum(slope * of_queries, 0))
    tl.store(_tile(entering, number, VALUE, TOKENS, rows, tokens), enters * slope)
    pairs = tl.load(_tile(decay, number, TOKENS, TOKENS, tokens, tokens))
    pairs *= tl.load(_tile(qk, key, TOKENS, TOKENS, tokens, tokens))
    tl.store(_tile(inside, number, VALUE, TOKENS, rows, tokens), _dot(slope, pairs, nothing, PRECISION))


@triton.jit
def _slope(
    grad, number, seq, batch, heads, strides, step, rows, tokens, TOKENS: tl.constexpr, VALUE: tl.constexpr
):  # fmt: skip
    """The gradient of these elements of a chunk's outputs, (rows, tokens), from (batch, seq, Hv, dv)."""
    chunk = number // heads
    token = chunk // batch * TOKENS + tokens
    places = grad + chunk % batch * strides + token[:, None] * step + number % heads * VALUE + rows[None, :]
    return tl.trans(tl.load(places, mask=(token < seq)[:, None], other=0.0).to(tl.float32))


@triton.jit
def pairs_gradient_kernel(
    states, grad_states, v, beta, entry, decay, qk, kk, grad, read, changes, scaled, asked, grad_last,
    grad_v, grad_beta, sums, grad_qk, grad_kk, seq, batch, k_heads, grad_strides, grad_step,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of v, beta, of the logarithms of L and a, and of Q K^T and K K^T by one value head.

    Args:
        grad_states: of the states behind the chunks. asked, grad_last: (N, B, Hk, G, C). grad_v: as v, in fp32.
        sums: (2, N, B, Hk, G, C), of the logarithms' rows, and of their columns, which are to be subtracted.
    """
    HALF: tl.constexpr = TOKENS // 2
    number, tokens = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS)
    key, is_last = number // GROUP, tokens == TOKENS - 1
    strength, enters = tl.load(beta + number * TOKENS + tokens), tl.load(entry + number * TOKENS + tokens)
    of_beta, of_entry = tl.zeros((TOKENS,), tl.float32), tl.load(asked + number * TOKENS + tokens)
    of_state = 0.0
    for start in range(0, VALUE, ROWS):
        rows = start + tl.arange(0, ROWS)
        inner = tl.load(_tile(scaled, number, VALUE, TOKENS, rows, tokens))
        was_read = tl.load(_tile(read, number, VALUE, TOKENS, rows, tokens))
        rest = tl.load(_tile(v, number, VALUE, TOKENS, rows, tokens)) - enters[None, :] * was_read
        of_beta += tl.sum(inner * rest, 0)
        inner *= strength[None, :]
        tl.store(_tile(grad_v, number, VALUE, TOKENS, rows, tokens), inner)
        of_entry -= tl.sum(inner * was_read, 0)
        for left in range(0, KEY, ROWS):
            columns = left + tl.arange(0, ROWS)
            state = tl.load(_tile(states, number, VALUE, KEY, rows, columns))
            of_state += tl.sum(tl.sum(state * tl.load(_tile(grad_states, number, VALUE, KEY, rows, columns)), 1), 0)
    of_logs = enters * (of_entry + tl.where(is_last, of_state, 0.0))
    for part in range(0, TOKENS, HALF):
        some = part + tl.arange(0, HALF)
        attention, overlap = tl.zeros((TOKENS, HALF), tl.float32), tl.zeros((TOKENS, HALF), tl.float32)
        for start in range(0, VALUE, ROWS):
            rows = start + tl.arange(0, ROWS)
            slope = _slope(
                grad, number, seq, batch, k_heads * GROUP, grad_strides, grad_step, rows, tokens, TOKENS, VALUE
            )
            change = tl.load(_tile(changes, number, VALUE, TOKENS, rows, some))
            attention = _dot(tl.trans(slope), change, attention, PRECISION)
            inner = tl.load(_tile(scaled, number, VALUE, TOKENS, rows, tokens))
            overlap = _dot(tl.trans(inner), change, overlap, PRECISION)
        kept = tl.load(_tile(decay, number, TOKENS, TOKENS, tokens, some))
        attention *= kept
        overlap = tl.where(tokens[:, None] > some[None, :], -overlap * kept, 0.0)
        tl.store(_tile(grad_qk, number, TOKENS, TOKENS, tokens, some), attention)
        tl.store(_tile(grad_kk, number, TOKENS, TOKENS, tokens, some), overlap * strength[:, None])
        overlap *= tl.load(_tile(kk, key, TOKENS, TOKENS, tokens, some))
        of_beta += tl.sum(overlap, 1)
        logs = overlap * strength[:, None] + attention * tl.load(_tile(qk, key, TOKENS, TOKENS, tokens, some))
        logs += tl.where(is_last[:, None], kept * tl.load(grad_last + number * TOKENS + some)[None, :], 0.0)
        of_logs += tl.sum(logs, 1)
        tl.store(sums + (tl.num_programs(0) + number) * TOKENS + some, tl.sum(logs, 0))
    tl.store(grad_beta + number * TOKENS + tokens, of_beta)
    tl.store(sums + number * TOKENS + tokens, of_logs)


@triton.jit
def keys_gradient_kernel(
    states, grad_states, k, q, entry, decay, entering, changes, grad_v, grad_qk, grad_kk, grad_q, grad_k,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of WIDTH columns of a chunk's normalised queries and keys, over all of a key head's value heads.

    Args: grad_states: of the states behind the chunks.
    """
    key, tokens = tl.program_id(0).to(tl.int64), tl.arange(0, TOKENS)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    of_q, of_k = tl.zeros((TOKENS, WIDTH), tl.float32), tl.zeros((TOKENS, WIDTH), tl.float32)
    for group in range(GROUP):
        number = key * GROUP + group
        enters = tl.load(entry + number * TOKENS + tokens)[None, :]
        last = tl.load(decay + number * (TOKENS * TOKENS) + (TOKENS - 1) * TOKENS + tokens)[None, :]
        for start in range(0, VALUE, ROWS):
            rows = start + tl.arange(0, ROWS)
            state = tl.load(_tile(states, number, VALUE, KEY, rows, columns))
            of_q = _dot(tl.trans(tl.load(_tile(entering, number, VALUE, TOKENS, rows, tokens))), state, of_q, PRECISION)
            slope = tl.load(_tile(grad_v, number, VALUE, TOKENS, rows, tokens)) * enters
            of_k = _dot(tl.trans(-slope), state, of_k, PRECISION)
            change = tl.load(_tile(changes, number, VALUE, TOKENS, rows, tokens)) * last
            behind = tl.load(_tile(grad_states, number, VALUE, KEY, rows, columns))
            of_k = _dot(tl.trans(change), behind, of_k, PRECISION)
        for start in range(0, TOKENS, ROWS):  # sums over some tokens at a time
            others = start + tl.arange(0, ROWS)
            queries = tl.load(_tile(q, key, TOKENS, KEY, others, columns))
            keys = tl.load(_tile(k, key, TOKENS, KEY, others, columns))
            of_q = _dot(tl.load(_tile(grad_qk, number, TOKENS, TOKENS, tokens, others)), keys, of_q, PRECISION)
            pairs = tl.trans(tl.load(_tile(grad_qk, number, TOKENS, TOKENS, others, tokens)))
            of_k = _dot(pairs, queries, of_k, PRECISION)
            pairs = tl.trans(tl.load(_tile(grad_kk, number, TOKENS, TOKENS, others, tokens)))
            pairs += tl.load(_tile(grad_kk, number, TOKENS, TOKENS, tokens, others))
            of_k = _dot(pairs, keys, of_k, PRECISION)
    tl.store(_tile(grad_q, key, TOKENS, KEY, tokens, columns), of_q)
    tl.store(_tile(grad_k, key, TOKENS, KEY, tokens, columns), of_k)
