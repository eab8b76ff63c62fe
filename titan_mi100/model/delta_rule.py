"""The delta rule of Gated DeltaNet, and the short convolution before it, inside the documents of packed rows.

Source: Gated Delta Networks (Yang, Kautz, Hatamizadeh, 2024), with the norms of Qwen3.5 (its config.json, and its layer
in transformers). Per token and head, with the state S, (dk, dv):

    S <- e^g S;   S <- S + k (beta (v - S^T k))^T;   o = S^T q

`recurrence` does just that. `delta_rule` computes a chunk of tokens at once, with S at the chunk's start:

    c_i  = the sum of g over the tokens of the chunk up to i that are in the document of i
    L_ij = e^(c_i - c_j) if j <= i and both are in one document, else 0; r is its last row
    a_i  = e^(c_i) if S belongs to the document of token i, else 0

    A = strictly lower part of beta_i L_ij (k_i.k_j);   V' = (I + A)^-1 beta (V - a K S)
    O = a Q S + (L * Q K^T) V';   S <- a_last S + K^T (r V')

These masks isolate the documents. A chunk has a fixed place in its row, so documents cost nothing.

Legend: N chunks of C tokens; B rows; Hk key heads, each with G value heads; dk and dv, the sizes of a key and a value.
States and values are transposed: (dv, dk) and (dv, C). So the value heads of a key head are rows of one product, and
its keys and queries are never repeated.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_mi100.attention.base import Documents, boundaries
from titan_mi100.device.accelerator import to_device
from titan_mi100.device.operators import custom_operator
from titan_mi100.model.elementwise import at_least_fp32
from titan_mi100.model.fused.running import difference, runs, runs_unwatched
from titan_mi100.model.pieces import in_pieces
from titan_mi100.shapes.delta_rule import CHUNK, SUBSTITUTED, tokens_at_once

_EPS = 1e-6  # of the norms of queries and keys


def document_ids(documents: Documents, device: torch.device) -> Tensor:
    """A number per token, equal inside a document and unique in the batch: (batch, seq) int32 on the device."""
    starts = torch.from_numpy(boundaries(documents)[0]).view(documents.batch, documents.seq)
    return to_device(starts, device)


def causal_convolution(
    x: Tensor, weight: Tensor, ids: Tensor | None = None, last: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve each channel with the tokens before it. A tap that reaches over the start of a document is 0.

    Args:
        x: (batch, seq, channels).
        weight: (channels, width); the last column is the tap of the token itself.
        ids: (batch, seq), see `document_ids`; None: each row is one document.
        last: (batch, width - 1, channels), the inputs before column 0, of its document; None: zeros.

    Returns:
        The result, like x, computed in fp32 (fp64 stays), without an activation. And the inputs that the token behind
        the row needs as `last`; zeros where they are of another document than the row's last token.
    """
    seq, before = x.shape[1], weight.shape[1] - 1
    ids = ids if ids is not None else x.new_zeros(x.shape[:2], dtype=torch.int32)
    if seq < before or last is not None:
        last = x.new_zeros(len(x), before, x.shape[2]) if last is None else last.to(x.dtype)
        x, ids = torch.cat((last, x), 1), torch.cat((ids[:, :1].expand(-1, before), ids), 1)
    own = ids[:, -before:] == ids[:, -1:]
    return _Convolution.apply(x, weight, ids).to(x.dtype)[:, -seq:], x[:, -before:] * own[..., None]


def convolved(parts: Sequence[Tensor], weights: Sequence[Tensor], ids: Tensor, piece: int = 0) -> Sequence[Tensor]:
    """Convolve queries, keys and values, whole rows, and apply SiLU. Args: as of `causal_convolution`, of each.

    Args:
        piece: tokens of a piece, see in_pieces. It has all tokens of some channels instead, as many values.
    """
    if runs_unwatched("delta", parts[0]) and weights[0].shape[1] == 4:
        from titan_mi100.model.fused.convolution_launch import Convolution

        return Convolution.apply(ids, *parts, *weights)
    share = min(piece / ids.numel(), 1.0)
    return [
        in_pieces(_channels, math.ceil(share * x.shape[2]), [x.permute(2, 0, 1)[None], weight[None]], [ids])[0].permute(
            1, 2, 0
        )
        for x, weight in zip(parts, weights, strict=True)
    ]


def _channels(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """Convolve and apply SiLU. Args: x: (1, channels, batch, seq). weight: (1, channels, width)."""
    return F.silu(causal_convolution(x[0].permute(1, 2, 0), weight[0], ids)[0]).permute(2, 0, 1)[None]


class _Convolution(torch.autograd.Function):
    """Convolution of rows without earlier inputs, in fp32 or fp64. Backward recomputes the taps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ids)
        wide, (own, *taps) = at_least_fp32(x), _taps(weight)
        convolved = wide * own
        for distance, tap in enumerate(taps, 1):
            past = wide[:, :-distance]
            convolved[:, distance:].addcmul_(past * _same(ids, distance, past), tap)
        return convolved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, ids = ctx.saved_tensors
        wide, (own, *taps) = at_least_fp32(x), _taps(weight)
        grad_x, columns = grad * own, [(grad * wide).sum((0, 1))]
        for distance, tap in enumerate(taps, 1):
            past = wide[:, :-distance]
            slope = grad[:, distance:] * _same(ids, distance, past)
            grad_x[:, :-distance].addcmul_(slope, tap)
            columns.append(slope.mul_(past).sum((0, 1)))
        return grad_x.to(x.dtype), torch.stack(columns[::-1], 1).to(weight.dtype), None


def _taps(weight: Tensor) -> tuple[Tensor, ...]:
    """Taps by distance: the token itself, the one before it, ... Each is contiguous: else a CPU would not vectorise."""
    return at_least_fp32(weight).flip(1).t().contiguous().unbind()


def _same(ids: Tensor, distance: int, like: Tensor) -> Tensor:
    """Ones where a token and the one `distance` before it share a document, else zeros."""
    return (ids[:, distance:] == ids[:, :-distance]).to(like.dtype)[..., None]


def gates(a: Tensor, b: Tensor, rate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithms of each head's decay, -exp(rate) softplus(a + bias), and the strength, sigmoid(b).

    Args: a, b: (batch, seq, heads). The first is in at least fp32: it adds up over a document.
    """
    if runs_unwatched("delta", a):
        from titan_mi100.model.fused.delta_launch import Gates

        return Gates.apply(a, b, rate, bias)  # type: ignore[no-any-return]
    wide = at_least_fp32(a)
    return -rate.to(wide.dtype).exp() * F.softplus(wide + bias.to(wide.dtype)), b.sigmoid()


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, ids: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The delta rule token by token: the definition, and the way to decode. As `delta_rule`."""
    queries, keys = _normalised(q, q.shape[-1] ** -0.5), _normalised(k)
    group = v.shape[2] // k.shape[2]
    queries, keys = (x.repeat_interleave(group, 2) for x in (queries, keys))
    values, strength, decay = at_least_fp32(v), at_least_fp32(beta), at_least_fp32(g).exp()
    state = _zeros(v, k) if state is None else state
    outs = []
    for t in range(v.shape[1]):
        if ids is not None and t:
            state = torch.where((ids[:, t] == ids[:, t - 1])[:, None, None, None], state, 0.0)
        state = state * decay[:, t, :, None, None]
        read = (state * keys[:, t, :, None]).sum(-1)  # (B, heads, dv)
        change = strength[:, t, :, None] * (values[:, t] - read)
        state = state + change[..., None] * keys[:, t, :, None]
        outs.append((state * queries[:, t, :, None]).sum(-1))
    return torch.stack(outs, 1).to(v.dtype), state


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ids: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
    keeps: bool = False,
    divides: bool = True,
) -> tuple[Tensor, Tensor]:
    """The delta rule, in chunks.

    Args:
        q, k: (batch, seq, k_heads, dk), not normalised: that is done here, x / sqrt(sum x^2 + 1e-6), q / sqrt(dk).
        v: (batch, seq, v_heads, dv). Value head h reads key head h // (v_heads / k_heads).
        g: (batch, seq, v_heads), the logarithm of the decay, at most 0; in fp32 even if the others are not.
        beta: (batch, seq, v_heads), from 0 to 1.
        ids: (batch, seq), see `document_ids`; None: each row is one document.
        state: (batch, v_heads, dv, dk), of the tokens before column 0, of its document; None: zeros.
        chunk: C, a power of two.
        keeps: backward does not compute the chunks again: an eighth less time, for more memory.
        divides: compute a long row in parts, so that temporaries are small; else all at once, in fewer operations.

    Returns:
        The outputs, like v, and the state behind each row's last token, in fp32 (fp64 for fp64 inputs). All is computed
        in fp32 or fp64. Backward keeps the arguments and the state at each chunk, and computes the rest again.
    """
    assert chunk & (chunk - 1) == 0, "the inverse halves its blocks"
    state = _zeros(v, k) if state is None else state
    ids = ids if ids is not None else torch.zeros(v.shape[:2], dtype=torch.int32, device=v.device)
    kernels = _kernels(v, v.shape[-1], k.shape[-1], chunk) if runs_unwatched("delta", v) else None
    tokens = tokens_at_once(len(v), v.shape[2], chunk) if divides else v.shape[1]
    if kernels and tokens >= v.shape[1]:  # the backward of a split copies
        return kernels.DeltaRule.apply(chunk, ids, state, q, k, v, g, beta)  # type: ignore[no-any-return]
    outs: list[Tensor] = []  # torch.compile knows no list[Tensor]()
    before = ids[:, :1]
    for own, *inputs in zip(*(x.split(tokens, 1) for x in (ids, q, k, v, g, beta)), strict=True):
        if kernels:  # which take a state to be of the first token's document
            state = state * (own[:, :1] == before)[..., None, None] if outs else state
            output, state = kernels.DeltaRule.apply(chunk, own, state, *inputs)
        else:
            output, state = _DeltaRule.apply(chunk, keeps, before, own, state, *inputs)
        outs.append(output)
        before = own[:, -1:]
    return torch.cat(outs, 1) if len(outs) > 1 else outs[0], state


def _zeros(v: Tensor, k: Tensor) -> Tensor:
    """The state before the first token."""
    batch, _, heads, size = v.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    return torch.zeros(batch, heads, size, k.shape[-1], dtype=dtype, device=v.device)


class _DeltaRule(torch.autograd.Function):
    """Saves its arguments and the state at each chunk, (N, B, Hk, G, dv, dk). With `keeps` also what the chunks need;
    otherwise backward computes that again.
    """

    @staticmethod
    def forward(
        ctx: Any, chunk: int, keeps: bool, before: Tensor, ids: Tensor, state: Tensor, *inputs: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = _Chunks.of(chunk, before, ids, *inputs)
        state = state.unflatten(1, x.v.shape[2:4])
        states, changes = forward_states(state, [x.k, x.beta, x.entry, x.last, x.inverse, x.v])
        states, state = states[:-1], states[-1].clone()
        output = changes @ (x.decay * x.qk).mT
        output.addcmul_(x.entry, _queries_times_states(states, x.q))
        ctx.save_for_backward(before, ids, *inputs, states, *(x if keeps else ()))
        ctx.chunk = chunk
        # A view: with torch 2.11 a compiled Function that returns what `.to` returned unchanged gets no gradient.
        return _tokens(output, inputs[2])[:], state.flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        before, ids, q, k, v, g, beta, states, *kept = ctx.saved_tensors
        x = _Chunks(*kept) if kept else _Chunks.of(ctx.chunk, before, ids, q, k, v, g, beta)
        grad_state = grad_state.unflatten(1, x.v.shape[2:4])
        grad_out = _values(grad, ctx.chunk, k.shape[2])
        grad_state, grad_q, grad_k, grad_v, grad_g, grad_beta = _gradients(x, states, grad_out, grad_state)
        del x, grad_out
        gates = (_tokens(x, y[..., None]).squeeze(-1) for x, y in ((grad_g, g), (grad_beta, beta)))
        grad_q, grad_k = _normalised_backward(q, grad_q, q.shape[-1] ** -0.5), _normalised_backward(k, grad_k)
        return None, None, None, None, grad_state.flatten(1, 2), grad_q, grad_k, _tokens(grad_v, v), *gates


def _gradients(x: "_Chunks", states: Tensor, grad_out: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    """The gradients of the first state and of q, k, v, g and beta, as they are in _Chunks."""
    read = _queries_times_states(states, x.k)
    rest = torch.addcmul(x.v, x.entry, read, value=-1)
    changes = (rest * x.beta) @ x.inverse.mT
    entering = x.entry * grad_out  # gradient of what the outputs read of the state
    inside = grad_out @ (x.decay * x.qk)  # gradient of the changes by the outputs of their chunk
    parts = [x.k, x.beta, x.entry, x.last, x.inverse, x.q, entering, inside, changes]
    grad_states, scaled, grad_last = backward_states(grad_state, parts)
    del inside, parts
    grad_beta = (scaled * rest).sum(-2, keepdim=True)
    del rest
    grad_attention, grad_overlap = grad_out.mT @ changes, (scaled.mT @ changes).tril_(-1).neg_()
    grad_v = scaled.mul_(x.beta)
    grad_entry = _queries_times_states(states, x.q).mul_(grad_out).addcmul_(grad_v, read, value=-1).sum(-2)
    del read
    grad_entry[..., -1] += (grad_states[1:] * states).sum((-2, -1))
    grad_q = _states_times_values(entering, states)
    grad_k = _states_times_values(changes.mul_(x.last), grad_states[1:])
    grad_k -= _states_times_values(entering.copy_(grad_v).mul_(x.entry), states)
    del changes, entering
    # Now through the pairs of tokens: Q K^T and K K^T, and the logarithms of L and a.
    grad_attention *= x.decay
    grad_overlap *= x.decay
    grad_qk, grad_kk = grad_attention.sum(3), (grad_overlap * x.beta.mT).sum(3)
    grad_q += grad_qk @ x.k
    grad_k += grad_qk.mT @ x.q
    grad_k += (grad_kk + grad_kk.mT) @ x.k
    grad_overlap *= x.kk
    grad_beta += grad_overlap.sum(-1)[..., None, :]
    logs = grad_overlap.mul_(x.beta.mT).addcmul_(grad_attention, x.qk)
    logs[..., -1:, :] += x.last * grad_last
    sums = logs.sum(-1) - logs.sum(-2) + x.entry.squeeze(-2) * grad_entry
    grad_g = (sums.flatten(2, 3) @ x.same.to(sums.dtype)).unflatten(2, sums.shape[2:4])[..., None, :]
    return grad_states[0].clone(), grad_q, grad_k, grad_v, grad_g, grad_beta


class _Chunks(NamedTuple):
    """What the chunks need, except states.

    Attributes:
        k, q: normalised, (N, B, Hk, C, dk).
        beta, entry, last: beta, a and r, (N, B, Hk, G, 1, C).
        inverse: of I + A, (N, B, Hk, G, C, C).
        v: (N, B, Hk, G, dv, C).
        decay: L, (N, B, Hk, G, C, C).
        qk, kk: Q K^T and K K^T, (N, B, Hk, 1, C, C).
        same: (N, B, C, C), token i does not lie before token j, and in its document.
    """

    k: Tensor
    beta: Tensor
    entry: Tensor
    last: Tensor
    inverse: Tensor
    q: Tensor
    v: Tensor
    decay: Tensor
    qk: Tensor
    kk: Tensor
    same: Tensor

    @classmethod
    def of(
        cls, chunk: int, before: Tensor, ids: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> "_Chunks":
        heads = k.shape[2]
        q = _split(_normalised(q, q.shape[-1] ** -0.5), chunk).transpose(2, 3).contiguous()
        k = _split(_normalised(k), chunk).transpose(2, 3).contiguous()
        qk, kk = ((x @ k.mT)[:, :, :, None] for x in (q, k))
        v = _values(v, chunk, heads)
        strength, logs = (_values(x[..., None], chunk, heads) for x in (beta, g))  # (N, B, Hk, G, 1, C)
        # Padding behind the row belongs to the row's last document. Its beta and g are 0: the state does not change.
        tail = ids[:, -1:].expand(-1, -ids.shape[1] % chunk)
        number = torch.cat((ids, tail), 1).unflatten(1, (-1, chunk)).transpose(0, 1)  # (N, B, C)
        same = (number[..., None] == number[..., None, :]).tril()
        enters = number == torch.cat((before[None], number[:-1, :, -1:]))  # the document of the state, (N, B, 1)
        # Each document is summed alone, so that no other document changes its rounding. In fp64, because the sums are
        # subtracted from each other, which would lose the digits of fp32.
        sums = logs.flatten(2, 4).double() @ same.double().mT  # (N, B, Hv, C)
        high = sums.to(k.dtype)
        low = (sums - high).to(k.dtype)
        decay = (high[..., None] - high[..., None, :]) + (low[..., None] - low[..., None, :])
        decay = _exp(decay.masked_fill_(~same[:, :, None], -torch.inf)).unflatten(2, (heads, -1))
        inverse = _inverse(_without_tiny((decay * kk * strength.mT).tril_(-1)))
        entry = _exp(high.masked_fill_(~enters[:, :, None], -torch.inf)).unflatten(2, (heads, -1))[..., None, :]
        return cls(k, strength, entry, decay[..., -1:, :], inverse, q, v, decay, qk, kk, same)


def _kernels(x: Tensor, value: int, key: int, tokens: int) -> Any:
    """The launches of the kernels, if they run on this device and have these sizes; else None."""
    if not runs("delta", x):
        return None
    from titan_mi100.model.fused import delta_launch

    return delta_launch if delta_launch.takes(value, key, tokens) else None


# The two loops over chunks. They are operators: torch.compile would unroll them, which takes minutes for a long row.


@custom_operator("titan_mi100::delta_rule_states")
def forward_states(state: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The state before each chunk and after the last one, and V' of each chunk. Args: parts: of _Chunks."""
    if launches := _kernels(state, state.shape[-2], state.shape[-1], parts[0].shape[-2]):
        return launches.forward_states(state, parts)
    k, beta, entry, last, inverse, v = parts
    states, changes = state.new_empty(len(v) + 1, *state.shape), torch.empty_like(v)
    states[0] = state
    for n, change in enumerate(changes):
        rest = torch.addcmul(v[n], entry[n], _queries_times_states(states[n], k[n]), value=-1)
        torch.matmul(rest.mul_(beta[n]), inverse[n].mT, out=change)
        torch.addcmul(_outer_product(change * last[n], k[n]), entry[n, ..., -1:], states[n], out=states[n + 1])
    return states, changes


@custom_operator("titan_mi100::delta_rule_states_backward")
def backward_states(grad_state: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of all states, of (I + A) V' of each chunk, and of its r.

    Args:
        grad_state: of the state after the last chunk.
        parts: of _Chunks; besides, `entering` and `inside`, the gradients of a Q S and of V' by the outputs of their
            own chunk, and `changes`, V'.
    """
    if launches := _kernels(grad_state, grad_state.shape[-2], grad_state.shape[-1], parts[0].shape[-2]):
        return launches.backward_states(grad_state, parts)
    k, beta, entry, last, inverse, q, entering, inside, changes = parts
    states, scaled = grad_state.new_empty(len(k) + 1, *grad_state.shape), torch.empty_like(inside)
    lasts = torch.empty_like(last)
    states[-1] = grad_state
    for n in reversed(range(len(k))):
        behind = _queries_times_states(states[n + 1], k[n])
        torch.sum(changes[n] * behind, -2, keepdim=True, out=lasts[n])
        torch.matmul(torch.addcmul(inside[n], last[n], behind), inverse[n], out=scaled[n])
        before = _outer_product(entering[n], q[n]) - _outer_product(scaled[n] * (entry[n] * beta[n]), k[n])
        torch.addcmul(before, entry[n, ..., -1:], states[n + 1], out=states[n])
    return states, scaled, lasts


@forward_states.operator.register_fake
def _(state: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return state.new_empty(len(parts[0]) + 1, *state.shape), torch.empty_like(parts[-1])


@backward_states.operator.register_fake
def _(grad_state: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    states = grad_state.new_empty(len(parts[0]) + 1, *grad_state.shape)
    return states, torch.empty_like(parts[-2]), torch.empty_like(parts[3])


@register_flop_formula([torch.ops.titan_mi100.delta_rule_states, torch.ops.titan_mi100.delta_rule_states_backward])
def _(state: Any, parts: Any, **_: Any) -> int:
    products = 2 if len(parts) == 6 else 3  # of state and keys; and one of the inverse
    return 2 * math.prod(parts[-1]) * (products * state[-1] + parts[0][-2])


def _queries_times_states(state: Tensor, keys: Tensor) -> Tensor:
    """Products of keys or queries, (..., Hk, C, dk), and states, (..., Hk, G, dv, dk): (..., Hk, G, dv, C)."""
    return (state.flatten(-3, -2) @ keys.mT).unflatten(-2, state.shape[-3:-1])


def _outer_product(values: Tensor, keys: Tensor) -> Tensor:
    """The sum over tokens of value and key, shaped like states."""
    return (values.flatten(-3, -2) @ keys).unflatten(-2, values.shape[-3:-1])


def _states_times_values(values: Tensor, state: Tensor) -> Tensor:
    """The sum over value heads of states times values, shaped like keys."""
    return values.flatten(-3, -2).mT @ state.flatten(-3, -2)


def _inverse(a: Tensor) -> Tensor:
    """(I + A)^-1 of strictly lower triangular A, (..., C, C).

    The halves are inverted, then merged. A power series over all of A would lose every digit if keys resemble each
    other.
    """
    size = a.shape[-1]
    if size <= SUBSTITUTED:
        rows = torch.arange(size, device=a.device)
        inverse = torch.eye(size, dtype=a.dtype, device=a.device) - a * _sibling(rows, 1)
        for half in (2, 4, 8):
            if half < size:
                inverse = _without_tiny(inverse - inverse @ (a * _sibling(rows, half)) @ inverse)
        return inverse
    half = size // 2
    first, second = _inverse(torch.stack((a[..., :half, :half], a[..., half:, half:])))
    lower = _without_tiny(second @ a[..., half:, :half] @ first).neg()
    return torch.cat((torch.cat((first, torch.zeros_like(first)), -1), torch.cat((lower, second), -1)), -2)


def _exp(x: Tensor) -> Tensor:
    """e^x, with 0 for tiny values, which are not computed: that would be slow, too. Overwrites x."""
    return _without_tiny(x.clamp_(min=2 * math.log(torch.finfo(x.dtype).eps) - 1).exp_())


def _without_tiny(x: Tensor) -> Tensor:
    """x, with 0 for values below eps^2. Products of them become denormal numbers, which take a CPU a hundred times as
    long: with freshly initialised decays they took two thirds of the rule's time.
    """
    return torch.nn.functional.hardshrink(x, torch.finfo(x.dtype).eps ** 2)


def _sibling(rows: Tensor, half: int) -> Tensor:
    """(C, C): whether i lies in the second and j in the first half of the same block of 2 x half rows."""
    block, second = rows // (2 * half), rows // half % 2 == 1
    return (block[:, None] == block) & second[:, None] & ~second


def _normalised(x: Tensor, scale: float = 1.0) -> Tensor:
    """scale x / |x|, in fp32 or fp64."""
    x = at_least_fp32(x)
    return x * (x.square().sum(-1, keepdim=True) + _EPS).rsqrt() * scale


def _normalised_backward(x: Tensor, grad: Tensor, scale: float = 1.0) -> Tensor:
    """The gradient of x. Args: grad: of _normalised(x, scale), (N, B, Hk, C, dk)."""
    wide = at_least_fp32(x)
    factor = (wide.square().sum(-1, keepdim=True) + _EPS).rsqrt()
    unit, grad = wide * factor, _tokens(grad.mT[:, :, :, None], wide)
    along = (unit * grad).sum(-1, keepdim=True)
    return (torch.addcmul(grad, unit, along, value=-1) * (scale * factor)).to(x.dtype)


def _split(x: Tensor, chunk: int) -> Tensor:
    """(B, seq, ...) -> (N, B, C, ...), with zeros after the row."""
    if missing := -x.shape[1] % chunk:
        x = torch.cat((x, x.new_zeros(len(x), missing, *x.shape[2:])), 1)
    return x.unflatten(1, (-1, chunk)).transpose(0, 1)


def _values(x: Tensor, chunk: int, heads: int) -> Tensor:
    """(B, seq, Hk x G, d) -> (N, B, Hk, G, d, C)."""
    return _split(at_least_fp32(x), chunk).unflatten(3, (heads, -1)).permute(0, 1, 3, 4, 5, 2).contiguous()


def _tokens(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of _values. Args: like: (B, seq, Hk x G, d), of the wanted size and dtype."""
    return x.permute(1, 0, 5, 2, 3, 4).reshape(len(like), -1, *like.shape[2:])[:, : like.shape[1]].to(like.dtype)


def trial(device: torch.device, dtype: torch.dtype) -> str:
    """What is wrong with the kernels on this device: against fp64, also where keys resemble each other, as in a text
    that repeats, so that errors add up. See running.Trial.
    """
    if problem := trial_of_inputs(device, dtype):
        return problem
    draw, ids = torch.Generator().manual_seed(1), document_ids(Documents(1, 300, (120, 3, 177)), device)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(1, 300, *shape, generator=draw).to(device)

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return delta_rule(q, k, v, g, beta, ids)[0]

    q, k, v, g, beta = drawn(2, 128), drawn(2, 128), drawn(4, 128), -drawn(4).exp(), drawn(4).sigmoid()
    for name, keys in {"random": k, "similar": k + 2 * k[:, :1], "equal": k[:, :1].expand_as(k)}.items():
        dtypes = torch.float64, torch.float32
        if problem := difference("delta", rule, (q, keys, v, g, beta), dtypes, 2e-6, at_once=True):
            return f"the delta rule {problem}, with {name} keys"
    return ""


def trial_of_inputs(device: torch.device, dtype: torch.dtype) -> str:
    """The same of the convolution and the gates."""
    draw, ids = torch.Generator().manual_seed(1), document_ids(Documents(1, 70, (33, 3, 34)), device)
    sizes = [(1, 70, 64), (1, 70, 64), (1, 70, 96), (64, 4), (64, 4), (96, 4)]
    cases: dict[str, tuple[Any, Any]] = {
        "the convolution": (lambda q, k, v, *weights: convolved((q, k, v), weights, ids), sizes),
        "the gates": (gates, [(1, 70, 6), (1, 70, 6), (6,), (6,)]),
    }
    for name, (function, sizes) in cases.items():
        inputs = [torch.randn(size, generator=draw).to(device, dtype) for size in sizes]
        if problem := difference("delta", function, inputs, (torch.float64, dtype), 8 * torch.finfo(dtype).eps):
            return f"{name} {problem}"
    return ""
