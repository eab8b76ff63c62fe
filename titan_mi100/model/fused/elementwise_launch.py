"""Launches the kernels between products, forward and backward, from autograd functions."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_mi100.model.fused import elementwise_kernels as kernels
from titan_mi100.model.fused.running import launch

_COLUMNS, _WARPS = 1024, 4  # of a program of SwiGLU
_TILE = 2048  # elements that a program of another kernel has at once, or one row
_PROGRAMS = 512  # that sum parts of a gain's gradient. Never by the card: it decides bits


class SwiGLU(torch.autograd.Function):
    """Computes silu(gate) * up of two tensors of one shape and dtype."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = _rows(gate), _rows(up)
        ctx.save_for_backward(gate, up)
        product = gate.new_empty(gate.shape)
        _swiglu(kernels.swiglu_kernel, gate, up, gate, up, product)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        grads = gate.new_empty(gate.shape), up.new_empty(up.shape)
        _swiglu(kernels.swiglu_backward_kernel, gate, up, grad.contiguous(), gate, up, *grads)
        return grads


def _swiglu(kernel: Any, gate: Tensor, up: Tensor, *tensors: Tensor) -> None:
    columns = gate.shape[-1]
    programs = (gate.numel() // columns, triton.cdiv(columns, _COLUMNS))
    if gate.numel():  # an expert of a batch may have no rows
        strides = (columns, _row_stride(gate), _row_stride(up))
        launch(kernel, programs, *tensors, *strides, BLOCK=_COLUMNS, num_warps=_WARPS)


def _row_stride(x: Tensor) -> int:
    return x.stride(-2) if x.dim() > 1 else x.shape[-1]


def _rows(x: Tensor) -> Tensor:
    """The tensor, copied unless it is rows of contiguous columns that one stride finds. Merged products give such."""
    fits = x.stride(-1) == 1 and all(x.stride(i) == x.shape[i + 1] * x.stride(i + 1) for i in range(x.dim() - 2))
    return x if fits else x.contiguous()


def _tile(size: int, rows: int) -> tuple[int, int, dict[str, int]]:
    """The blocks of rows of a matrix with these columns, how many of them a program that sums takes, and constants."""
    block = triton.next_power_of_2(size)
    height, warps = max(1, _TILE // block), 4 if block <= _TILE else 8
    blocks = triton.cdiv(rows, height)
    constants = {"SIZE": size, "BLOCK": block, "ROWS": height, "num_warps": warps}
    return blocks, max(1, triton.cdiv(blocks, _PROGRAMS)), constants


def _sum(sums: Tensor, counts: tuple[int, ...], gains: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The gradients of one gain or two. Args: sums: (rows, size), of the first gain `counts[0]`, then of the second."""
    size, outputs = sums.shape[1], tuple(gain.new_empty(gain.shape) for gain in gains)
    programs, constants = (triton.cdiv(size, 64), len(gains)), {"BLOCK": 64, "ROWS": 32, "num_warps": _WARPS}
    launch(kernels.sum_kernel, programs, sums, outputs[0], outputs[-1], counts[0], sum(counts), SIZE=size, **constants)
    return outputs


class Norm(torch.autograd.Function):
    """RMSNorm, see kernels.norm_kernel. Returns the norm, and with KIND "sum" also the sum."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor | None, gain: Tensor, eps: float, constants: dict[str, Any]
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Args: constants: KIND, CENTRED and ROUNDED of the kernel."""
        x, other = x.contiguous(), x if other is None else other.contiguous()
        is_sum, rows = constants["KIND"] == "sum", x.numel() // x.shape[-1]
        normed, total = x.new_empty(x.shape), x.new_empty(x.shape) if is_sum else x
        blocks, _, tile = _tile(x.shape[-1], rows)
        if rows:
            tensors = (x, other, gain, normed, total)
            launch(kernels.norm_kernel, (blocks,), *tensors, rows, eps, **tile, **constants)
        ctx.eps, ctx.constants = eps, constants
        ctx.save_for_backward(total, gain, *([other] if constants["KIND"] == "gate" else ()))
        return (normed, total) if is_sum else normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *of_sum: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, gain, *gate = ctx.saved_tensors
        grad, size, is_trained = grad.contiguous(), x.shape[-1], ctx.needs_input_grad[2]
        of_x, of_gate = x.new_empty(x.shape), gate[0].new_empty(x.shape) if gate else x
        others = (*gate, *(part.contiguous() for part in of_sum), x)
        rows = x.numel() // size
        blocks, steps, tile = _tile(size, rows)
        programs = triton.cdiv(blocks, steps)
        sums = x.new_empty(programs if is_trained else 0, size, dtype=torch.float32)
        if rows:
            tensors = (grad, x, others[0], gain, of_x, of_gate, sums)
            constants = {**tile, **ctx.constants, "TRAINED": is_trained}
            launch(kernels.norm_backward_kernel, (programs,), *tensors, rows, steps, ctx.eps, **constants)
        of_gain = _sum(sums, (programs,), (gain,))[0] if is_trained else None
        return of_x, of_gate if gate else of_x if of_sum else None, of_gain, None, None


class Turn(torch.autograd.Function):
    """The norm and the rotation of queries and keys: q, k, their gains, cos, sin, eps, whether gains are centred."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        q, k, q_gain, k_gain, cos, sin, ctx.eps, ctx.is_centred = inputs
        q, k = _heads(q), _heads(k)
        cos, sin = (table.expand(*q.shape[:2], 1, -1).contiguous() for table in (cos, sin))
        outputs = q.new_empty(q.shape), k.new_empty(k.shape)
        programs, shape, _, constants = _turn(q, k, cos, 1)
        tensors = (q, k, q_gain, k_gain, cos, sin, *outputs)
        launch(kernels.turn_kernel, (sum(programs),), *tensors, programs[0], *shape, ctx.eps,
               CENTRED=ctx.is_centred, **constants)  # fmt: skip
        ctx.save_for_backward(*tensors[:6])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, *gains, cos, _ = ctx.saved_tensors
        outputs, is_trained = (q.new_empty(q.shape), k.new_empty(k.shape)), any(ctx.needs_input_grad[2:4])
        programs, shape, steps, constants = _turn(q, k, cos, 0)
        sums = q.new_empty(sum(programs) if is_trained else 0, q.shape[-1], dtype=torch.float32)
        tensors = (*(grad.contiguous() for grad in grads), *ctx.saved_tensors, *outputs, sums)
        launch(kernels.turn_backward_kernel, (sum(programs),), *tensors, programs[0], *shape, steps, ctx.eps,
               CENTRED=ctx.is_centred, TRAINED=is_trained, **constants)  # fmt: skip
        of_gains = _sum(sums, programs, (gains[0], gains[1])) if is_trained else (None, None)
        return *outputs, *of_gains, None, None, None, None


def _turn(
    q: Tensor, k: Tensor, cos: Tensor, steps: int
) -> tuple[tuple[int, int], tuple[int, ...], int, dict[str, int]]:
    """The programs of q and k, their shapes and strides, the steps of a program (as given, or chosen), constants."""
    tokens, heads, size = q.shape[0] * q.shape[1], (q.shape[2], k.shape[2]), q.shape[3]
    _, by_rows, constants = _tile(size, tokens * sum(heads))
    steps = steps or by_rows
    of_q, of_k = (triton.cdiv(tokens * count, steps * constants["ROWS"]) for count in heads)
    strides = (stride for x in (q, k) for stride in x.stride()[1:3])
    return (of_q, of_k), (tokens, *heads, *strides), steps, {**constants, "TURNED": cos.shape[-1]}


def _heads(x: Tensor) -> Tensor:
    """The tensor (batch, seq, heads, size), copied unless one stride finds all tokens and one all heads of a token."""
    fits = x.stride(3) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if fits else x.contiguous()
