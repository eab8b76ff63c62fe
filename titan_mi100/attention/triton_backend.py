"""Attention by our Triton kernels (kernels.py): launched directly, or as operators for torch.compile and counters.

An operator costs the host twice as much as the autograd.Function that launches directly: 158 and 82 us, forward and
backward, without the launches (a Xeon, torch 2.8).
"""

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from titan_mi100.attention import kernels
from titan_mi100.attention.base import Backend, Documents, boundaries
from titan_mi100.attention.launches import Launch, Tile, candidates, options
from titan_mi100.device import accelerator
from titan_mi100.device.accelerator import to_device
from titan_mi100.device.operators import custom_operator


@functools.cache
def _arch(device: torch.device) -> str:
    """ "gfx908" on AMD's cards; "" elsewhere, where no option depends on it."""
    is_amd = accelerator.is_cuda(device) and accelerator.is_rocm()
    return accelerator.properties(device).gcnArchName.split(":")[0] if is_amd else ""


@functools.cache
def _launch(text: str, head_dim: int, itemsize: int) -> Launch:
    """Args: text: of a Launch, or an architecture."""
    return Launch.parse(text) if " " in text else Launch.first_of(candidates(text, head_dim, itemsize))


@functools.cache
def _constants(tile: Tile, device: torch.device) -> dict[str, Any]:
    return {"BLOCK_Q": tile.block_q, "BLOCK_K": tile.block_k, **options(tile, _arch(device))}


def _start(
    kernel: Any, tile: Tile, q: Tensor, k: Tensor, programs: tuple[int, int], *arguments: Any, **fixed: bool
) -> None:
    """Launch a kernel on a grid of `programs`."""
    shape = {"GROUP": q.shape[2] // k.shape[2], "HEAD_DIM": q.shape[3], **fixed}
    with accelerator.device_guard(q.device):
        kernel[programs](*arguments, **shape, **_constants(tile, q.device))


def _flat(x: Tensor) -> Tensor:
    """The tensor in the kernels' layout, copied if needed: the batch as one row of tokens, heads contiguous."""
    batch, seq, _, dim = x.shape
    fits = x.stride()[2:] == (dim, 1) and (batch == 1 or x.stride(0) == seq * x.stride(1))
    return x if fits else x.contiguous()


@custom_operator("titan_mi100::attention")
def attention(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, launch: str) -> tuple[Tensor, Tensor]:
    """Attention inside documents.

    Args:
        q: (batch, seq, heads, head_dim). k, v: (batch, seq, kv_heads, head_dim).
        boundaries: (2, batch x seq) int32, see base.boundaries.
        launch: see Triton.

    Returns:
        The output, shaped like q, and the log-sum-exp of the scores for backward, (heads, batch x seq) fp32.
    """
    q, k, v = _flat(q), _flat(k), _flat(v)
    batch, seq, heads, dim = q.shape
    out, lse = q.new_empty(q.shape), q.new_empty((heads, batch * seq), dtype=torch.float32)
    tile = _launch(launch, dim, q.itemsize).forward
    programs = (triton.cdiv(batch * seq, tile.block_q), heads)
    strides = [x.stride(1) for x in (q, k, v, out)]  # from token to token; see _flat
    arguments = (q, k, v, out, lse, boundaries, dim**-0.5, batch * seq, *strides)
    _start(kernels.forward_kernel, tile, q, k, programs, *arguments)
    return out, lse


@custom_operator("titan_mi100::attention_backward")
def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, boundaries: Tensor, launch: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v.

    Args:
        grad: the gradient of the output. The other arguments are those and the results of `attention`.
    """
    grad, q, k, v = _flat(grad), _flat(q), _flat(k), _flat(v)
    batch, seq, heads, dim = q.shape
    tokens, kv_heads, tiles = batch * seq, k.shape[2], _launch(launch, dim, q.itemsize)
    grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
    # (heads, tokens): sum(out * grad) per query. The first kernel writes it, the second one reads it.
    delta = torch.empty_like(lse)
    strides = [x.stride(1) for x in (q, k, v)]
    arguments = (q, k, v, out, grad, grad_q, lse, delta, boundaries, dim**-0.5, tokens, *strides)
    programs = (triton.cdiv(tokens, tiles.queries.block_q), heads)
    other_strides = (out.stride(1), grad.stride(1))
    _start(kernels.queries_gradient_kernel, tiles.queries, q, k, programs, *arguments, *other_strides)
    arguments = (q, k, v, grad, grad_k, grad_v, lse, delta, boundaries, dim**-0.5, tokens, *strides)
    # One program per block of keys and per key head: it sums over its query heads, so no atomics are needed.
    programs = (triton.cdiv(tokens, tiles.keys.block_k), kv_heads)
    other_strides = (grad.stride(1), grad_k.stride(1))
    for parts in ((True, True),) if tiles.keys.parts == 1 else ((True, False), (False, True)):
        which = dict(zip(("KEYS", "VALUES"), parts, strict=True))
        _start(kernels.keys_gradient_kernel, tiles.keys, q, k, programs, *arguments, *other_strides, **which)
    return grad_q, grad_k, grad_v


@attention.operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, launch: str) -> tuple[Tensor, Tensor]:
    batch, seq, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((heads, batch * seq), dtype=torch.float32)


@attention_backward.operator.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, boundaries: Tensor, launch: str
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.launch = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    q, k, v, boundaries, out, lse = ctx.saved_tensors
    return *attention_backward(grad, q, k, v, out, lse, boundaries, ctx.launch), None, None


attention.differentiable(_gradients, _keep)


class Triton(Backend):
    """Our own kernels; see kernels.py."""

    is_traceable = True

    def __init__(self, launch: str) -> None:
        """Args:
        launch: the text of a Launch, or an architecture, whose first candidate is taken.
        """
        self.launch = launch

    def prepare(self, documents: Documents, device: torch.device) -> Tensor:
        return to_device(torch.from_numpy(boundaries(documents)), device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Tensor) -> Tensor:
        output: Tensor = attention(q, k, v, prepared, self.launch)[0]
        return output
