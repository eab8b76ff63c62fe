"""Launches the kernels between products, forward and backward, from autograd functions."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_mi100.model.fused import elementwise_kernels as kernels
from titan_mi100.model.fused.running import launch

_COLUMNS, _WARPS = 1024, 4  # of a program of SwiGLU
_TILE = 1024  # elements that a program of another kernel has at once, or one row
PROGRAMS = 512  # that sum parts of a gain's gradient. Never by the card: it decides bits


class SwiGLU(torch.autograd.Function):
    """Computes silu(gate) * up, or sigmoid(gate) * up, of two tensors of one shape and dtype."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, is_silu: bool = True) -> Tensor:
        product, ctx.is_silu = gate.new_empty(gate.shape), is_silu
        gate, up = flat(gate, -2), flat(up, -2)
        ctx.save_for_backward(gate, up)
        _swiglu(kernels.swiglu_kernel, gate, up, is_silu, gate, up, product)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        of_gate, of_up = gate.new_empty(grad.shape), up.new_empty(grad.shape)
        _swiglu(kernels.swiglu_backward_kernel, gate, up, ctx.is_silu, grad.contiguous(), gate, up, of_gate, of_up)
        return of_gate, of_up, None


def _swiglu(kernel: Any, gate: Tensor, up: Tensor, is_silu: bool, *tensors: Tensor) -> None:
    rows, columns = gate.shape
    if rows:  # an expert of a batch may have none
        programs, strides = (rows, triton.cdiv(columns, _COLUMNS)), (gate.stride(0), up.stride(0))
        block = min(_COLUMNS, max(64, triton.next_power_of_2(columns)))
        launch(kernel, programs, *tensors, columns, *strides, BLOCK=block, SILU=is_silu, num_warps=_WARPS)


def flat(x: Tensor, last: int) -> Tensor:
    """The tensor with its dimensions up to `last` as one. It is copied where one stride does not find those, or values
    are apart; parts of a merged product are not.
    """
    flat = x.flatten(0, last)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _tile(size: int, rows: int) -> tuple[int, int, dict[str, Any]]:
    """The blocks of rows of a matrix with these columns, how many of them a program that sums takes, and constants."""
    block = triton.next_power_of_2(size)
    height, warps = max(1, _TILE // block), 4 if block <= 2 * _TILE else 8
    blocks = triton.cdiv(rows, height)
    constants = {"SIZE": size, "BLOCK": block, "ROWS": height, "num_warps": warps}
    return blocks, max(1, triton.cdiv(blocks, PROGRAMS)), constants


def sum_of_parts(sums: Tensor, counts: tuple[int, ...], gains: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of one gain or two. Args: sums: (rows, size), of the first gain `counts[0]`, then of the second."""
    size, outputs = sums.shape[1], tuple(gain.new_empty(gain.shape) for gain in gains)
    launch(kernels.sum_kernel, (triton.cdiv(size, 64), len(gains)), sums, outputs[0], outputs[-1], counts[0],
           sum(counts), SIZE=size, BLOCK=64, ROWS=32, num_warps=_WARPS)  # fmt: skip
    return outputs


class Norm(torch.autograd.Function):
    """RMSNorm, see kernels.norm_kernel. Returns the norm, and with KIND "sum" also the sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor | None, gain: Tensor, eps: float, constants: dict[str, Any]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Args: constants: KIND, CENTRED and ROUNDED of the kernel."""
        x, other = x.contiguous(), x if other is None else other.contiguous()
        kind, rows = constants["KIND"], x.numel() // x.shape[-1]
        normed, total = x.new_empty(x.shape), x.new_empty(x.shape) if kind == "sum" else x
        blocks, _, tile = _tile(x.shape[-1], rows)
        if rows:
            launch(kernels.norm_kernel, (blocks,), x, other, gain, normed, total, rows, eps, **tile, **constants)
        ctx.eps, ctx.constants = eps, constants
        ctx.save_for_backward(total, gain, *([other] if kind == "gate" else ()))
        return (normed, total) if kind == "sum" else normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *of_sum: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, gain, *gate = ctx.saved_tensors
        size, is_trained = x.shape[-1], ctx.needs_input_grad[2]
        of_x, of_gate = x.new_empty(x.shape), gate[0].new_empty(x.shape) if gate else x
        other = (*gate, *(part.contiguous() for part in of_sum), x)[0]
        rows = x.numel() // size
        blocks, steps, tile = _tile(size, rows)
        programs = triton.cdiv(blocks, steps)
        sums = x.new_empty(programs if is_trained else 0, size, dtype=torch.float32)
        if rows:
            launch(kernels.norm_backward_kernel, (programs,), grad.contiguous(), x, other, gain, of_x, of_gate, sums,
                   rows, steps, ctx.eps, TRAINED=is_trained, **tile, **ctx.constants)  # fmt: skip
        of_gain = sum_of_parts(sums, (programs,), (gain,))[0] if is_trained else None
        return of_x, of_gate if gate else of_x if of_sum else None, of_gain, None, None


class Turn(torch.autograd.Function):
    """The norm and the rotation of queries and keys: q, k, their gains, cos, sin, eps, whether gains are centred."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, q_gain, k_gain, cos, sin, ctx.eps, ctx.is_centred = inputs
        q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
        cos, sin = (table.expand(*q.shape[:2], 1, -1).contiguous() for table in (cos, sin))
        q, k = flat(q, 1), flat(k, 1)
        ctx.save_for_backward(q, k, q_gain, k_gain, cos, sin)
        programs, shape, _, constants = _turn(q, k, cos, 1)
        launch(kernels.turn_kernel, (sum(programs),), q, k, q_gain, k_gain, cos, sin, q_out, k_out,
               programs[0], *shape, ctx.eps, CENTRED=ctx.is_centred, **constants)  # fmt: skip
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, q_gain, k_gain, cos, sin = ctx.saved_tensors  # read once: recomputation unpacks it
        of_q, of_k, is_trained = q.new_empty(q_grad.shape), k.new_empty(k_grad.shape), any(ctx.needs_input_grad[2:4])
        programs, shape, steps, constants = _turn(q, k, cos, 0)
        sums = q.new_empty(sum(programs) if is_trained else 0, q.shape[-1], dtype=torch.float32)
        launch(kernels.turn_backward_kernel, (sum(programs),), q_grad.contiguous(), k_grad.contiguous(),
               q, k, q_gain, k_gain, cos, sin, of_q, of_k, sums, programs[0], *shape, steps, ctx.eps,
               CENTRED=ctx.is_centred, TRAINED=is_trained, **constants)  # fmt: skip
        of_gains = sum_of_parts(sums, programs, (q_gain, k_gain)) if is_trained else (None, None)
        return of_q, of_k, *of_gains, None, None, None, None


def _turn(
    q: Tensor, k: Tensor, cos: Tensor, steps: int
) -> tuple[tuple[int, int], tuple[int, ...], int, dict[str, Any]]:
    """The programs of q and k, their shapes and strides, the steps of a program (as given, or chosen), constants.

    Args:
        q, k: (tokens, heads, size).
    """
    heads = q.shape[1], k.shape[1]
    _, by_rows, constants = _tile(q.shape[2], len(q) * sum(heads))
    steps = steps or by_rows
    of_q, of_k = (triton.cdiv(len(q) * count, steps * constants["ROWS"]) for count in heads)
    shape = (len(q), *heads, *q.stride()[:2], *k.stride()[:2])
    return (of_q, of_k), shape, steps, {**constants, "TURNED": cos.shape[-1]}
