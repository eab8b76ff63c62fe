"""Functions of single tokens, computed in pieces of the sequence, so that a long row's temporaries are a piece's.

Forward keeps the function's inputs alone. Backward computes each piece again, differentiates it and adds up the
gradients of what all pieces read. A recomputed block (torch.utils.checkpoint) does not compute the pieces once more:
their inputs are kept before the first of them, and there its recomputation stops if nothing behind them is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def in_pieces(
    function: Callable[..., Tensor],
    size: int,
    cut: Sequence[Tensor | None],
    whole: Sequence[Tensor | None] = (),
    ready: Callable[..., Sequence[Tensor | None]] = lambda *whole: whole,
    again: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Compute function(*cut, *ready(*whole)), which is like the first tensor of `cut`, in pieces of tokens.

    The gradients of `whole` are added up in fp32, or in fp64.

    Args:
        function: computes each token by itself; it gets pieces (1, tokens, ...).
        size: tokens of a piece at most; 0, or if there are no more: the function is called as it is.
        cut: (batch, seq, ...) each, or None.
        whole: what all pieces read, such as weights, in the dtype that they are read in.
        ready: makes of `whole` what `function` takes, in the same places, once for all pieces and once more in
            backward: a weight in 4 bits is restored. It changes only what has no gradient.
        again: the function for backward, if there is a cheaper one: only the gradient of its result counts.
    """
    first = cut[0]
    assert first is not None
    if not 0 < size < first.shape[:2].numel():
        return function(*cut, *ready(*whole))
    flat: list[Any] = [x if x is None else x.flatten(0, 1)[None] for x in cut]
    kept = _Kept.apply(again or function, size, ready, len(flat), *flat, *whole)
    with torch.no_grad():
        y, others = torch.empty_like(flat[0]), ready(*whole)
        for part in _parts(y, size):
            y[:, part] = function(*_piece(flat, part), *others)
    return _Computed.apply(kept, y).view(first.shape)  # type: ignore[no-any-return]


def uncomputed(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Values that nobody reads, without memory: they carry a shape, and a gradient."""
    return like.new_zeros(()).expand(*shape)


def _parts(x: Tensor, size: int) -> Iterator[slice]:
    """Pieces of x, (1, tokens, ...), of as many tokens each as can be: the last is not much smaller."""
    tokens = x.shape[1]
    count = -(-tokens // size)
    return (slice(tokens * number // count, tokens * (number + 1) // count) for number in range(count))


def _piece(tensors: Sequence[Tensor | None], part: slice) -> list[Tensor | None]:
    return [x if x is None else x[:, part] for x in tensors]


def _leaves(tensors: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """The tensors as leaves of a graph of their own. Args: needed: whether it needs a gradient, of each."""
    return [x if x is None else x.detach().requires_grad_(own) for x, own in zip(tensors, needed, strict=True)]


class _Kept(torch.autograd.Function):
    """Keeps what the pieces read. Its output stands for theirs and takes no memory."""

    @staticmethod
    def forward(ctx: Any, function: Any, size: int, ready: Any, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.function, ctx.size, ctx.ready, ctx.count = function, size, ready, count
        return uncomputed(tensors[0], tensors[0].shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors, needed, count = ctx.saved_tensors, ctx.needs_input_grad[4:], ctx.count
        cut, leaves = tensors[:count], _leaves(ctx.ready(*tensors[count:]), needed[count:])
        trained = [number for number, is_needed in enumerate(needed) if is_needed]
        sums: dict[int, Tensor] = {number: torch.empty_like(tensors[number]) for number in trained if number < count}
        for part in _parts(grad, ctx.size):
            inputs: list[Any] = [*_leaves(_piece(cut, part), needed[:count]), *leaves]
            with torch.enable_grad():
                y = ctx.function(*inputs)
            gradients = torch.autograd.grad(y, [inputs[number] for number in trained], grad[:, part])
            for number, gradient in zip(trained, gradients, strict=True):
                if number < count:
                    sums[number][:, part] = gradient
                elif number in sums:
                    sums[number] += gradient
                else:
                    wide = torch.promote_types(gradient.dtype, torch.float32)
                    sums[number] = gradient.to(wide, copy=True)  # its memory may be another gradient's, too
            del inputs, y, gradients, gradient
        for number in trained:
            sums[number] = sums[number].to(tensors[number].dtype)
        return None, None, None, None, *map(sums.get, range(len(tensors)))


class _Computed(torch.autograd.Function):
    """The pieces' values, with the gradient of what stands for them."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, y: Tensor) -> Tensor:
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None
