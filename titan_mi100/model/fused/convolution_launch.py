"""Launches the kernels of the short convolution and its SiLU from an autograd function."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_mi100.model.fused import convolution_kernels as kernels
from titan_mi100.model.fused.elementwise_launch import flat, sum_of_parts
from titan_mi100.model.fused.running import launch

TOKENS, BLOCK, WARPS = 16, 64, 4  # of a program at once
PROGRAMS = 64  # that share the tokens: each sums a part of the gradient of the taps. Never by the card: it decides bits


class Convolution(torch.autograd.Function):
    """silu(convolution) of queries, keys and values: ids, the three, their weights of 4 taps."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = [x.new_empty(x.shape) for x in inputs[:3]]
        parts, weights, ids = [flat(x, 1) for x in inputs[:3]], [x.contiguous() for x in inputs[3:]], ids.flatten()
        ctx.save_for_backward(ids, *parts, *weights)
        programs, shape, constants = _shape(parts)
        launch(kernels.convolution_kernel, programs, *parts, *weights, *outputs, ids, *shape, **constants)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ids, *saved = ctx.saved_tensors
        parts, weights, is_trained = saved[:3], saved[3:], any(ctx.needs_input_grad[4:])
        outputs = [x.new_empty(grad.shape) for x, grad in zip(parts, grads, strict=True)]
        programs, shape, constants = _shape(parts)
        taps = weights[0].new_empty(sum(map(len, weights)), weights[0].shape[1])
        sums = taps.new_empty(programs[1] if is_trained else 0, taps.numel(), dtype=torch.float32)
        launch(kernels.convolution_backward_kernel, programs, *(x.contiguous() for x in grads), *parts, *weights,
               *outputs, sums, ids, *shape, TRAINED=is_trained, **constants)  # fmt: skip
        if is_trained:
            (taps,) = sum_of_parts(sums, (programs[1],), (taps,))
        return None, *outputs, *(taps.split([len(x) for x in weights]) if is_trained else (None,) * 3)


def _shape(parts: list[Tensor]) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """The programs, sizes and constants of both kernels. Args: parts: (tokens, channels)."""
    tokens, channels = len(parts[0]), [x.shape[1] for x in parts]
    blocks, tiles = triton.cdiv(max(channels), BLOCK), triton.cdiv(tokens, TOKENS)
    steps = triton.cdiv(tiles, PROGRAMS)
    sizes = (tokens, *channels, *(x.stride(0) for x in parts), blocks, steps)
    return (3 * blocks, triton.cdiv(tiles, steps)), sizes, {"TOKENS": TOKENS, "BLOCK": BLOCK, "num_warps": WARPS}
