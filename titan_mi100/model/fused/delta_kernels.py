"""The delta rule as Triton kernels: chunks are prepared, the states go through them, outputs, and the gradients back.

In the two loops over chunks a program has ROWS rows of one value head's state, which no other program needs, in two
halves of its columns. In the other kernels a program has one chunk, and sums over WIDTH rows or columns at a time. So
registers and shared memory suffice everywhere. All is computed in fp32. delta_rule.py has the plain form, formulas and
legend. Numbers of value heads count (N, B, Hk, G), those of key heads (N, B, Hk). In all kernels:

    q, k, v, grad (of the outputs), out and their gradients: (batch, seq, heads, size), contiguous, in any dtype.
    q_factor, k_factor: (N, B, Hk, C), what norms and the scale multiply queries and keys by.
    products: (N, B, Hk, C, C), on and below the diagonal Q K^T, above it K K^T. Their gradients: of each value head.
    beta, entry, last: beta, a and r, (N, B, Hk, G, C). high, low: sums of g, which add up to twice fp32's precision.
    ids: (batch, seq), see delta_rule.document_ids. Padding behind a row is of the document of its last token.

This file needs Triton and knows nothing of torch; `delta_launch.py` calls it.
"""

import triton
import triton.language as tl

from titan_mi100.model.fused.elementwise_kernels import sigmoid


@triton.jit
def _dot(a, b, sum, PRECISION: tl.constexpr):
    return tl.dot(a, b, sum, input_precision=PRECISION)


@triton.jit
def _tile(x, number, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, rows, columns):
    """The elements of these rows and columns of matrix `number`, (HEIGHT, WIDTH)."""
    return x + number.to(tl.int64) * (HEIGHT * WIDTH) + (rows[:, None] * WIDTH + columns[None, :])


@triton.jit
def _gate(x, number, heads, seq, batch, tokens, TOKENS: tl.constexpr):
    """Where these tokens of a chunk and head are in (batch, seq, heads), and whether the row has them."""
    chunk = number // heads
    start = chunk // batch * TOKENS
    x += (chunk % batch * seq + start).to(tl.int64) * heads + number % heads
    return x + tokens * heads, start + tokens < seq


@triton.jit
def _row(x, number, heads, seq, batch, tokens, columns, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """The same of (batch, seq, heads, SIZE) and these columns."""
    chunk = number // heads
    start = chunk // batch * TOKENS
    x += ((chunk % batch * seq + start).to(tl.int64) * heads + number % heads) * SIZE
    return x + (tokens[:, None] * (heads * SIZE) + columns[None, :]), (start + tokens < seq)[:, None]


@triton.jit
def _load(x, number, heads, seq, batch, tokens, columns, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """These elements, (tokens, columns); zeros behind the row."""
    x, inside = _row(x, number, heads, seq, batch, tokens, columns, TOKENS, SIZE)
    return tl.load(x, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _unit(x, factor, number, heads, seq, batch, tokens, columns, TOKENS: tl.constexpr, SIZE: tl.constexpr):
    """The same of normalised queries or keys."""
    factors = tl.load(factor + number * TOKENS + tokens)[:, None]
    return _load(x, number, heads, seq, batch, tokens, columns, TOKENS, SIZE) * factors


@triton.jit
def _documents(ids, chunk, seq, batch, tokens, TOKENS: tl.constexpr):
    """The numbers of the documents of a chunk's tokens."""
    return tl.load(ids + chunk % batch * seq + tl.minimum(chunk // batch * TOKENS + tokens, seq - 1))


@triton.jit
def _decays(high, low, ids, number, heads, seq, batch, rows, columns, TOKENS: tl.constexpr):
    """These rows and columns of L."""
    first = _documents(ids, number // heads, seq, batch, rows, TOKENS)
    second = _documents(ids, number // heads, seq, batch, columns, TOKENS)
    high, low = high + number * TOKENS, low + number * TOKENS
    logs = tl.load(high + rows)[:, None] - tl.load(high + columns)[None, :]
    logs += tl.load(low + rows)[:, None] - tl.load(low + columns)[None, :]
    return _exp(logs, (first[:, None] == second[None, :]) & (rows[:, None] >= columns[None, :]))


@triton.jit
def _exp(logs, is_same):
    return tl.where(is_same, tl.exp(tl.where(is_same, logs, 0.0)), 0.0)


@triton.jit
def chunks_kernel(
    q, k, g, strength, ids, q_factor, k_factor, beta, entry, last, high, low, products, inverse, seq, batch, heads,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Prepares a chunk of a key head: factors and products, and of its value heads the gates and inverses of I + A.

    Args: g, strength: the gates, (batch, seq, Hv).
    """
    HALF: tl.constexpr = TOKENS // 2
    key, tokens, some = tl.program_id(0), tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    first = tl.arange(0, HALF)
    second, nothing = HALF + first, tl.zeros((HALF, HALF), tl.float32)
    qk00, qk10, qk11, kk00, kk10, kk11 = nothing, nothing, nothing, nothing, nothing, nothing
    q_square0 = tl.zeros((HALF, WIDTH), tl.float32)  # a sum over lanes of squares could be fused with the squaring, and
    q_square1, k_square0, k_square1 = q_square0, q_square0, q_square0  # lanes would differ in their last bits
    for start in range(0, KEY, WIDTH):
        q0 = _load(q, key, heads, seq, batch, first, start + some, TOKENS, KEY)
        q1 = _load(q, key, heads, seq, batch, second, start + some, TOKENS, KEY)
        k0 = _load(k, key, heads, seq, batch, first, start + some, TOKENS, KEY)
        k1 = _load(k, key, heads, seq, batch, second, start + some, TOKENS, KEY)
        q_square0 += q0 * q0
        q_square1 += q1 * q1
        k_square0 += k0 * k0
        k_square1 += k1 * k1
        qk00 = _dot(q0, tl.trans(k0), qk00, PRECISION)
        qk10 = _dot(q1, tl.trans(k0), qk10, PRECISION)
        qk11 = _dot(q1, tl.trans(k1), qk11, PRECISION)
        kk00 = _dot(k0, tl.trans(k0), kk00, PRECISION)
        kk10 = _dot(k1, tl.trans(k0), kk10, PRECISION)
        kk11 = _dot(k1, tl.trans(k1), kk11, PRECISION)
    of_q0, of_q1 = _factor(q_square0) * KEY**-0.5, _factor(q_square1) * KEY**-0.5
    of_k0, of_k1 = _factor(k_square0), _factor(k_square1)
    tl.store(q_factor + key * TOKENS + first, of_q0)
    tl.store(q_factor + key * TOKENS + second, of_q1)
    tl.store(k_factor + key * TOKENS + first, of_k0)
    tl.store(k_factor + key * TOKENS + second, of_k1)
    kk00 *= of_k0[:, None] * of_k0[None, :]
    kk10 *= of_k1[:, None] * of_k0[None, :]
    kk11 *= of_k1[:, None] * of_k1[None, :]
    is_lower = first[:, None] >= first[None, :]
    block = tl.where(is_lower, qk00 * of_q0[:, None] * of_k0[None, :], kk00)  # K K^T is symmetric
    tl.store(_tile(products, key, TOKENS, TOKENS, first, first), block)
    tl.store(_tile(products, key, TOKENS, TOKENS, first, second), tl.trans(kk10))
    tl.store(_tile(products, key, TOKENS, TOKENS, second, first), qk10 * of_q1[:, None] * of_k0[None, :])
    block = tl.where(is_lower, qk11 * of_q1[:, None] * of_k1[None, :], kk11)
    tl.store(_tile(products, key, TOKENS, TOKENS, second, second), block)
    chunk = key // heads
    before = tl.load(ids + chunk % batch * seq + tl.maximum(chunk // batch * TOKENS - 1, 0))  # the state's document
    document = _documents(ids, chunk, seq, batch, tokens, TOKENS)
    last_document = _documents(ids, chunk, seq, batch, TOKENS - 1, TOKENS)
    for group in range(GROUP):
        number = key * GROUP + group
        at, above, sums_above = number * TOKENS, nothing, tl.zeros((HALF,), tl.float64)
        logs = _load_gate(g, number, heads * GROUP, seq, batch, tokens, TOKENS)
        total = tl.sum(tl.where(document == last_document, logs, 0.0).to(tl.float64), 0)
        for part in range(2):  # of the rows, as each is inverted alone
            rows = part * HALF + first
            of_rows = _documents(ids, chunk, seq, batch, rows, TOKENS)
            is_same = (of_rows[:, None] == document[None, :]) & (rows[:, None] >= tokens[None, :])
            sums = tl.sum(tl.where(is_same, logs[None, :], 0.0).to(tl.float64), 1)  # they are subtracted: in fp64
            rounded, strengths = (
                sums.to(tl.float32),
                _load_gate(strength, number, heads * GROUP, seq, batch, rows, TOKENS),
            )
            tl.store(high + at + rows, rounded)
            tl.store(low + at + rows, (sums - rounded).to(tl.float32))
            tl.store(entry + at + rows, _exp(rounded, of_rows == before))
            tl.store(last + at + rows, _exp((total - sums).to(tl.float32), of_rows == last_document))
            tl.store(beta + at + rows, strengths)
            own = _overlap(sums, sums, of_rows, of_rows, rows, rows) * strengths[:, None]
            own = _inverted(own * tl.where(part == 0, kk00, kk11), first, PRECISION, HALF)
            tl.store(_tile(inverse, number, TOKENS, TOKENS, rows, rows), own)
            of_first = _documents(ids, chunk, seq, batch, first, TOKENS)
            between = _overlap(sums, sums_above, of_rows, of_first, rows, first) * kk10 * strengths[:, None]
            between = _dot(own, _dot(between, above, nothing, PRECISION), nothing, PRECISION)
            others = (1 - part) * HALF + first
            tl.store(_tile(inverse, number, TOKENS, TOKENS, rows, others), tl.where(part == 0, 0.0, -between))
            above, sums_above = own, sums


@triton.jit
def _factor(squares):
    return 1.0 / tl.sqrt(tl.sum(squares, 1) + 1e-6)


@triton.jit
def _load_gate(x, number, heads, seq, batch, tokens, TOKENS: tl.constexpr):
    """What a value head's gate has for tokens; 0 behind the row, so that the state does not change."""
    x, inside = _gate(x, number, heads, seq, batch, tokens, TOKENS)
    return tl.load(x, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _overlap(first, second, of_rows, of_columns, rows, columns):
    """A block of L below the diagonal. Args: first, second: sums of g, of rows and columns; and their documents."""
    is_same = (of_rows[:, None] == of_columns[None, :]) & (rows[:, None] > columns[None, :])
    return _exp((first[:, None] - second[None, :]).to(tl.float32), is_same)


@triton.jit
def _inverted(a, rows, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    """The inverse of I + A, of strictly lower A: blocks of half the size are merged, until there is one."""
    inverse = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0) - a * _sibling(rows, 1)
    half = 2
    while half < SIZE:
        merged = _dot(a * _sibling(rows, half), inverse, tl.zeros((SIZE, SIZE), tl.float32), PRECISION)
        inverse = _dot(-inverse, merged, inverse, PRECISION)
        half *= 2
    return inverse


@triton.jit
def _sibling(rows, half):
    """1 where i lies in the second and j in the first half of the same block of 2 x half rows, else 0."""
    block, is_second = rows // (2 * half), rows // half % 2 == 1
    siblings = (block[:, None] == block[None, :]) & is_second[:, None] & (is_second == 0)[None, :]
    return tl.where(siblings, 1.0, 0.0)


@triton.jit
def states_kernel(
    state, k, k_factor, beta, entry, last, inverse, v, states, behind, changes, chunks, seq, batch, heads,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state before each chunk and behind the last one, and V' of each chunk; see delta_rule.forward_states."""
    HALF: tl.constexpr = KEY // 2
    rows, tokens = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    left, right = tl.arange(0, HALF), HALF + tl.arange(0, HALF)
    s0 = tl.load(_tile(state, tl.program_id(0), VALUE, KEY, rows, left))
    s1 = tl.load(_tile(state, tl.program_id(0), VALUE, KEY, rows, right))
    for chunk in range(chunks):
        number = chunk * tl.num_programs(0) + tl.program_id(0)
        key = number // GROUP
        tl.store(_tile(states, number, VALUE, KEY, rows, left), s0)
        tl.store(_tile(states, number, VALUE, KEY, rows, right), s1)
        k0 = _unit(k, k_factor, key, heads, seq, batch, tokens, left, TOKENS, KEY)
        k1 = _unit(k, k_factor, key, heads, seq, batch, tokens, right, TOKENS, KEY)
        read = _dot(s0, tl.trans(k0), tl.zeros((ROWS, TOKENS), tl.float32), PRECISION)
        read = _dot(s1, tl.trans(k1), read, PRECISION)
        enters = tl.load(entry + number * TOKENS + tokens)
        rest = tl.trans(_load(v, number, heads * GROUP, seq, batch, tokens, rows, TOKENS, VALUE))
        rest = (rest - enters[None, :] * read) * tl.load(beta + number * TOKENS + tokens)[None, :]
        inverted = tl.load(_tile(inverse, number, TOKENS, TOKENS, tokens, tokens))
        change = _dot(rest, tl.trans(inverted), tl.zeros((ROWS, TOKENS), tl.float32), PRECISION)
        tl.store(_tile(changes, number, VALUE, TOKENS, rows, tokens), change)
        change *= tl.load(last + number * TOKENS + tokens)[None, :]
        kept = tl.load(entry + number * TOKENS + TOKENS - 1)
        s0 = _dot(change, k0, kept * s0, PRECISION)
        s1 = _dot(change, k1, kept * s1, PRECISION)
    tl.store(_tile(behind, tl.program_id(0), VALUE, KEY, rows, left), s0)
    tl.store(_tile(behind, tl.program_id(0), VALUE, KEY, rows, right), s1)


@triton.jit
def outputs_kernel(
    states, q, q_factor, entry, high, low, ids, products, changes, out, seq, batch, heads,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes O of WIDTH elements of a chunk's values."""
    number, tokens = tl.program_id(0), tl.arange(0, TOKENS)
    rows, some, key = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, WIDTH), number // GROUP
    total = tl.zeros((WIDTH, TOKENS), tl.float32)
    for start in range(0, KEY, WIDTH):
        state = tl.load(_tile(states, number, VALUE, KEY, rows, start + some))
        queries = _unit(q, q_factor, key, heads, seq, batch, tokens, start + some, TOKENS, KEY)
        total = _dot(state, tl.trans(queries), total, PRECISION)
    total *= tl.load(entry + number * TOKENS + tokens)[None, :]
    pairs = _decays(high, low, ids, number, heads * GROUP, seq, batch, tokens, tokens, TOKENS)
    pairs *= tl.load(_tile(products, key, TOKENS, TOKENS, tokens, tokens))
    change = tl.load(_tile(changes, number, VALUE, TOKENS, rows, tokens))
    total = _dot(change, tl.trans(pairs), total, PRECISION)
    target, inside = _row(out, number, heads * GROUP, seq, batch, tokens, rows, TOKENS, VALUE)
    tl.store(target, tl.trans(total).to(out.dtype.element_ty), mask=inside)


@triton.jit
def read_kernel(
    states, q, k, v, q_factor, k_factor, beta, entry, high, low, ids, inverse, products, grad, read, changes, inside,
    asked, seq, batch, heads,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes what a chunk read of its state, V', and the gradient of V' by its outputs; see delta_rule._gradients.

    A program has WIDTH elements of the values of one value head. Args: asked: its part of the sum over a value's
    elements, (VALUE / WIDTH, N, B, Hk, G, C).
    """
    number, tokens = tl.program_id(0), tl.arange(0, TOKENS)
    rows, some = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, WIDTH)
    key, nothing = number // GROUP, tl.zeros((WIDTH, TOKENS), tl.float32)
    of_keys, of_queries = nothing, nothing
    for start in range(0, KEY, WIDTH):
        state = tl.load(_tile(states, number, VALUE, KEY, rows, start + some))
        keys = _unit(k, k_factor, key, heads, seq, batch, tokens, start + some, TOKENS, KEY)
        of_keys = _dot(state, tl.trans(keys), of_keys, PRECISION)
        queries = _unit(q, q_factor, key, heads, seq, batch, tokens, start + some, TOKENS, KEY)
        of_queries = _dot(state, tl.trans(queries), of_queries, PRECISION)
    tl.store(_tile(read, number, VALUE, TOKENS, rows, tokens), of_keys)
    enters = tl.load(entry + number * TOKENS + tokens)[None, :]
    rest = tl.trans(_load(v, number, heads * GROUP, seq, batch, tokens, rows, TOKENS, VALUE)) - enters * of_keys
    rest *= tl.load(beta + number * TOKENS + tokens)[None, :]
    pairs = tl.trans(tl.load(_tile(inverse, number, TOKENS, TOKENS, tokens, tokens)))
    tl.store(_tile(changes, number, VALUE, TOKENS, rows, tokens), _dot(rest, pairs, nothing, PRECISION))
    slope = tl.trans(_load(grad, number, heads * GROUP, seq, batch, tokens, rows, TOKENS, VALUE))
    asked += tl.program_id(1) * tl.num_programs(0) * TOKENS + number * TOKENS
    tl.store(asked + tokens, tl.sum(slope * of_queries, 0))
    pairs = _decays(high, low, ids, number, heads * GROUP, seq, batch, tokens, tokens, TOKENS)
    pairs *= tl.load(_tile(products, key, TOKENS, TOKENS, tokens, tokens))
    tl.store(_tile(inside, number, VALUE, TOKENS, rows, tokens), _dot(slope, pairs, nothing, PRECISION))


@triton.jit
def states_gradient_kernel(
    grad_state, k, q, k_factor, q_factor, beta, entry, asks, last, inverse, grad, inside, changes, states, first,
    scaled, lasts, chunks, seq, batch, heads,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the state behind each chunk and of the first one, and of (I + A) V', and of r this program's
    part of the sum over a value's elements. See delta_rule.backward_states.

    Args:
        asks: what multiplies grad, which is then the gradient of Q S: a. lasts: (VALUE / ROWS, N, B, Hk, G, C).
    """
    HALF: tl.constexpr = KEY // 2
    rows, tokens = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    left, right = tl.arange(0, HALF), HALF + tl.arange(0, HALF)
    lasts += tl.program_id(1) * chunks * tl.num_programs(0) * TOKENS
    s0 = tl.load(_tile(grad_state, tl.program_id(0), VALUE, KEY, rows, left))
    s1 = tl.load(_tile(grad_state, tl.program_id(0), VALUE, KEY, rows, right))
    for back in range(chunks):
        number = (chunks - 1 - back) * tl.num_programs(0) + tl.program_id(0)
        key = number // GROUP
        tl.store(_tile(states, number, VALUE, KEY, rows, left), s0)
        tl.store(_tile(states, number, VALUE, KEY, rows, right), s1)
        k0 = _load(k, key, heads, seq, batch, tokens, left, TOKENS, KEY)
        behind = _dot(s0, tl.trans(k0), tl.zeros((ROWS, TOKENS), tl.float32), PRECISION)
        k1 = _load(k, key, heads, seq, batch, tokens, right, TOKENS, KEY)
        behind = _dot(s1, tl.trans(k1), behind, PRECISION) * tl.load(k_factor + key * TOKENS + tokens)[None, :]
        change = tl.load(_tile(changes, number, VALUE, TOKENS, rows, tokens))
        tl.store(lasts + number * TOKENS + tokens, tl.sum(change * behind, 0))
        slope = tl.load(_tile(inside, number, VALUE, TOKENS, rows, tokens))
        slope += tl.load(last + number * TOKENS + tokens)[None, :] * behind
        kept = tl.load(entry + number * TOKENS + TOKENS - 1)
        s0 *= kept
        s1 *= kept
        for start in range(0, TOKENS, WIDTH):
            some = start + tl.arange(0, WIDTH)
            at, factors = number * TOKENS + some, key * TOKENS + some
            inverted = tl.load(_tile(inverse, number, TOKENS, TOKENS, tokens, some))
            inner = _dot(slope, inverted, tl.zeros((ROWS, WIDTH), tl.float32), PRECISION)
            tl.store(_tile(scaled, number, VALUE, TOKENS, rows, some), inner)
            inner *= (tl.load(entry + at) * tl.load(beta + at) * -tl.load(k_factor + factors))[None, :]
            asking = tl.trans(_load(grad, number, heads * GROUP, seq, batch, some, rows, TOKENS, VALUE))
            asking *= (tl.load(asks + at) * tl.load(q_factor + factors))[None, :]
            s0 = _dot(inner, _load(k, key, heads, seq, batch, some, left, TOKENS, KEY), s0, PRECISION)
            s0 = _dot(asking, _load(q, key, heads, seq, batch, some, left, TOKENS, KEY), s0, PRECISION)
            s1 = _dot(inner, _load(k, key, heads, seq, batch, some, right, TOKENS, KEY), s1, PRECISION)
            s1 = _dot(asking, _load(q, key, heads, seq, batch, some, right, TOKENS, KEY), s1, PRECISION)
    tl.store(_tile(first, tl.program_id(0), VALUE, KEY, rows, left), s0)
    tl.store(_tile(first, tl.program_id(0), VALUE, KEY, rows, right), s1)


@triton.jit
def pairs_gradient_kernel(
    v, beta, entry, last, high, low, ids, products, grad, read, changes, scaled, asked, lasts, grad_v, grad_beta, sums,
    grad_products, seq, batch, heads,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of v, beta, and of the products by one value head, and sums of factors times gradients.

    Args:
        asked, lasts: parts of sums, see read_kernel and states_gradient_kernel.
        sums: (4, N, B, Hk, G, C): of the normalised queries times their gradients; of the keys', but for what is also
            in the next; of the gradients of the logarithms of L by columns; and by columns those of the last row.
    """
    PART: tl.constexpr = TOKENS // 2 if ROWS == 16 else WIDTH  # of the columns at once: RDNA has few registers
    number, tokens, total = tl.program_id(0), tl.arange(0, TOKENS), tl.num_programs(0) * TOKENS
    at, key = number * TOKENS, number // GROUP
    strength, enters = tl.load(beta + at + tokens), tl.load(entry + at + tokens)
    of_beta, of_read = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
    of_queries = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, VALUE, WIDTH):
        rows = start + tl.arange(0, WIDTH)
        of_queries += tl.load(asked + start // WIDTH * total + at + tokens)
        inner = tl.load(_tile(scaled, number, VALUE, TOKENS, rows, tokens))
        was_read = tl.load(_tile(read, number, VALUE, TOKENS, rows, tokens))
        rest = _load(v, number, heads * GROUP, seq, batch, tokens, rows, TOKENS, VALUE)
        of_beta += tl.sum(inner * (tl.trans(rest) - enters[None, :] * was_read), 0)
        inner *= strength[None, :]
        target, inside = _row(grad_v, number, heads * GROUP, seq, batch, tokens, rows, TOKENS, VALUE)
        tl.store(target, tl.trans(inner).to(grad_v.dtype.element_ty), mask=inside)
        of_read += tl.sum(inner * was_read, 0)
    of_queries *= enters
    of_keys = -enters * of_read
    for part in range(0, TOKENS, PART):
        some = part + tl.arange(0, PART)
        attention, overlap = tl.zeros((TOKENS, PART), tl.float32), tl.zeros((TOKENS, PART), tl.float32)
        for start in range(0, VALUE, WIDTH):
            rows = start + tl.arange(0, WIDTH)
            slope = _load(grad, number, heads * GROUP, seq, batch, tokens, rows, TOKENS, VALUE)
            change = tl.load(_tile(changes, number, VALUE, TOKENS, rows, some))
            attention = _dot(slope, change, attention, PRECISION)
            inner = tl.load(_tile(scaled, number, VALUE, TOKENS, rows, tokens))
            overlap = _dot(tl.trans(inner), change, overlap, PRECISION)
        kept = _decays(high, low, ids, number, heads * GROUP, seq, batch, tokens, some, TOKENS)
        attention *= kept
        overlap = tl.where(tokens[:, None] > some[None, :], -overlap * kept, 0.0)
        target = _tile(grad_products, number, TOKENS, TOKENS, tokens, some)
        tl.store(target, attention, mask=tokens[:, None] >= some[None, :])
        target = _tile(grad_products, number, TOKENS, TOKENS, some, tokens)
        tl.store(target, tl.trans(overlap * strength[:, None]), mask=some[:, None] < tokens[None, :])
        overlap *= tl.trans(tl.load(_tile(products, key, TOKENS, TOKENS, some, tokens)))
        of_beta += tl.sum(overlap, 1)
        overlap *= strength[:, None]
        attention *= tl.load(_tile(products, key, TOKENS, TOKENS, tokens, some))
        of_queries += tl.sum(attention, 1)
        of_keys += tl.sum(overlap, 1)
        of_last = tl.zeros((PART,), tl.float32)
        for behind in range(VALUE // ROWS):
            of_last += tl.load(lasts + behind * total + at + some)
        of_last *= tl.load(last + at + some)
        tl.store(sums + 2 * total + at + some, tl.sum(attention + overlap, 0) + of_last)
        tl.store(sums + 3 * total + at + some, of_last)
    tl.store(sums + at + tokens, of_queries)
    tl.store(sums + total + at + tokens, of_keys)
    _store_gate(grad_beta, of_beta, number, heads * GROUP, seq, batch, tokens, TOKENS)


@triton.jit
def _store_gate(x, gradients, number, heads, seq, batch, tokens, TOKENS: tl.constexpr):
    x, inside = _gate(x, number, heads, seq, batch, tokens, TOKENS)
    tl.store(x, gradients.to(x.dtype.element_ty), mask=inside)


@triton.jit
def keys_gradient_kernel(
    states, grad_states, q, k, q_factor, k_factor, beta, entry, last, grad, changes, scaled, sums, grad_products,
    grad_q, grad_k, kept, seq, batch, heads,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of WIDTH columns of a chunk's queries and keys, over all of a key head's value heads.

    Args:
        grad_states: of the states behind the chunks. sums: see pairs_gradient_kernel.
        kept: this program's part of the sums of a state times the gradient of the next, (KEY / WIDTH, N, B, Hk, G).
    """
    key, tokens = tl.program_id(0), tl.arange(0, TOKENS)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    of_q, of_k = tl.zeros((TOKENS, WIDTH), tl.float32), tl.zeros((TOKENS, WIDTH), tl.float32)
    along_q, along_k = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
    total = tl.num_programs(0) * GROUP
    for group in range(GROUP):
        number = key * GROUP + group
        at = number * TOKENS + tokens
        enters, of_state = tl.load(entry + at), tl.zeros((WIDTH,), tl.float32)
        reads = (enters * tl.load(beta + at))[None, :]
        for start in range(0, VALUE, WIDTH):
            rows = start + tl.arange(0, WIDTH)
            state = tl.load(_tile(states, number, VALUE, KEY, rows, columns))
            slope = _load(grad, number, heads * GROUP, seq, batch, tokens, rows, TOKENS, VALUE) * enters[:, None]
            of_q = _dot(slope, state, of_q, PRECISION)
            slope = tl.load(_tile(scaled, number, VALUE, TOKENS, rows, tokens)) * reads
            of_k = _dot(tl.trans(-slope), state, of_k, PRECISION)
            change = tl.load(_tile(changes, number, VALUE, TOKENS, rows, tokens)) * tl.load(last + at)[None, :]
            behind = tl.load(_tile(grad_states, number, VALUE, KEY, rows, columns))
            of_k = _dot(tl.trans(change), behind, of_k, PRECISION)
            of_state += tl.sum(state * behind, 1)
        tl.store(kept + tl.program_id(1) * total + number, tl.sum(of_state, 0))
        along_q += tl.load(sums + at)
        along_k += tl.load(sums + total * TOKENS + at) + tl.load(sums + 2 * total * TOKENS + at)
        for start in range(0, TOKENS, WIDTH):  # sums over some tokens at a time
            others = start + tl.arange(0, WIDTH)
            queries = _unit(q, q_factor, key, heads, seq, batch, others, columns, TOKENS, KEY)
            keys = _unit(k, k_factor, key, heads, seq, batch, others, columns, TOKENS, KEY)
            pairs = tl.load(_tile(grad_products, number, TOKENS, TOKENS, tokens, others))
            other = tl.trans(tl.load(_tile(grad_products, number, TOKENS, TOKENS, others, tokens)))
            order = tokens[:, None] - others[None, :]
            of_q = _dot(tl.where(order >= 0, pairs, 0.0), keys, of_q, PRECISION)
            of_k = _dot(tl.where(order <= 0, other, 0.0), queries, of_k, PRECISION)
            pairs = tl.where(order > 0, other, tl.where(order < 0, pairs, 0.0))
            of_k = _dot(pairs, keys, of_k, PRECISION)
    # Now through the norms: a unit vector's gradient has no part along it. Queries have the length 1 / sqrt(KEY).
    of_q -= _unit(q, q_factor, key, heads, seq, batch, tokens, columns, TOKENS, KEY) * (along_q * KEY)[:, None]
    of_k -= _unit(k, k_factor, key, heads, seq, batch, tokens, columns, TOKENS, KEY) * along_k[:, None]
    of_q *= tl.load(q_factor + key * TOKENS + tokens)[:, None]
    of_k *= tl.load(k_factor + key * TOKENS + tokens)[:, None]
    grad_q, inside = _row(grad_q, key, heads, seq, batch, tokens, columns, TOKENS, KEY)
    tl.store(grad_q, of_q.to(grad_q.dtype.element_ty), mask=inside)
    grad_k, inside = _row(grad_k, key, heads, seq, batch, tokens, columns, TOKENS, KEY)
    tl.store(grad_k, of_k.to(grad_k.dtype.element_ty), mask=inside)


@triton.jit
def decays_gradient_kernel(
    sums, kept, entry, ids, grad_g, seq, batch, heads,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of g. Args: sums, kept: see pairs_gradient_kernel and keys_gradient_kernel."""
    number, tokens, total = tl.program_id(0), tl.arange(0, TOKENS), tl.num_programs(0)
    at, of_state = number * TOKENS + tokens, 0.0
    for part in range(KEY // WIDTH):
        of_state += tl.load(kept + part * total + number)
    slope = tl.load(sums + at) + tl.load(sums + total * TOKENS + at) - tl.load(sums + 2 * total * TOKENS + at)
    of_last = tl.sum(tl.load(sums + 3 * total * TOKENS + at), 0)
    of_last += tl.load(entry + number * TOKENS + TOKENS - 1) * of_state
    slope += tl.where(tokens == TOKENS - 1, of_last, 0.0)
    document = _documents(ids, number // (heads * GROUP), seq, batch, tokens, TOKENS)
    is_same = (document[:, None] == document[None, :]) & (tokens[:, None] >= tokens[None, :])
    slope = tl.sum(tl.where(is_same, slope[:, None], 0.0), 0)
    _store_gate(grad_g, slope, number, heads * GROUP, seq, batch, tokens, TOKENS)


@triton.jit
def gates_kernel(a, b, rate, bias, g, beta, tokens, HEADS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Computes g = -exp(rate) softplus(a + bias) and beta = sigmoid(b).

    Args: a, b, g, beta: (tokens, HEADS). rate, bias: (HEADS,). ROWS, BLOCK: tokens and heads of a program at once.
    """
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside, at = (row < tokens)[:, None] & (column < HEADS)[None, :], row[:, None] * HEADS + column[None, :]
    x, strength, speed = _gates(a, b, rate, bias, at, inside, column, HEADS)
    small = tl.exp(tl.minimum(x, 20.0))
    grown = 1.0 + small
    soft = tl.where(grown == 1.0, small, tl.log(grown) * (small / tl.where(grown == 1.0, 1.0, grown - 1.0)))
    tl.store(g + at, -speed * tl.where(x > 20.0, x, soft), mask=inside)
    tl.store(beta + at, strength, mask=inside)


@triton.jit
def gates_gradient_kernel(
    grad_g, grad_beta, a, b, rate, bias, g, grad_a, grad_b, sums, tokens, steps,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradients of a and b, and each program's part of those of rate and bias, in `steps` steps.

    Args: sums: (2, programs, HEADS).
    """
    column = tl.arange(0, BLOCK)
    of_rate, of_bias = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        inside, at = (row < tokens)[:, None] & (column < HEADS)[None, :], row[:, None] * HEADS + column[None, :]
        x, strength, speed = _gates(a, b, rate, bias, at, inside, column, HEADS)
        slope = tl.load(grad_g + at, mask=inside, other=0.0)
        of_rate += slope * tl.load(g + at, mask=inside, other=0.0)
        slope *= -speed * sigmoid(x)
        of_bias += slope
        tl.store(grad_a + at, slope.to(grad_a.dtype.element_ty), mask=inside)
        slope = tl.load(grad_beta + at, mask=inside, other=0.0) * strength * (1.0 - strength)
        tl.store(grad_b + at, slope.to(grad_b.dtype.element_ty), mask=inside)
    sums += tl.program_id(0) * HEADS + column
    tl.store(sums, tl.sum(of_rate, 0), mask=column < HEADS)
    tl.store(sums + tl.num_programs(0) * HEADS, tl.sum(of_bias, 0), mask=column < HEADS)


@triton.jit
def _gates(a, b, rate, bias, at, inside, column, HEADS: tl.constexpr):
    """a + bias, sigmoid(b) and exp(rate)."""
    x = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias + column, mask=column < HEADS, other=0.0).to(tl.float32)[None, :]
    speed = tl.exp(tl.load(rate + column, mask=column < HEADS, other=0.0).to(tl.float32))[None, :]
    return x, sigmoid(tl.load(b + at, mask=inside, other=0.0).to(tl.float32)), speed
