"""The loss: cross-entropy of supervised tokens, summed, without ever holding (tokens, vocabulary) logits.

Legend: n supervised tokens, V vocabulary, H hidden size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_mi100.config.layout import IGNORE

_BLOCK_ELEMENTS = 1 << 25  # logits held at a time: 128 MiB in fp32, or tokens x _LEAST_BLOCK if that is more
_LEAST_BLOCK = 1024


def at_least_fp32(x: Tensor) -> Tensor:
    """In fp32, or fp64 where it is that already: checks in fp64 keep their precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def head_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, supervised: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Sum of the cross-entropy over supervised tokens.

    Args:
        hidden: (batch, seq, H), after the final norm.
        weight: (V, H), the head's weight.
        labels: (batch, seq), already shifted; IGNORE where there is no supervision.
        supervised: (n,), n > 0: positions of the supervised tokens in the flattened batch. Its length comes from the
            host; counting labels here would make the host wait for the device.
        group: ranks that hold equal shards of the head, in order (vocabulary parallel): `weight` is then this rank's
            shard, (V / ranks, H), and the gradient of `hidden` is this rank's share of the sum over the ranks.

    Returns:
        (1,) in fp32 at least: a 0-dim output breaks the pipeline schedules.

    The head runs on the tokens of `supervised` only. A token labelled IGNORE weighs zero: a batch without supervision
    names one such token, so that backward reaches the same parameters, and starts the same collectives, on every rank.
    """
    return _BlockedCrossEntropy.apply(hidden.flatten(0, 1)[supervised], weight, labels.flatten()[supervised], group)


def _blocks(tokens: int, vocabulary: int) -> list[tuple[int, int]]:
    """Ranges of the vocabulary; see _BLOCK_ELEMENTS."""
    size = max(_LEAST_BLOCK, _BLOCK_ELEMENTS // tokens)
    return [(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size)]


class _BlockedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over blocks of the vocabulary; backward recomputes the logits block by block.

    Blocks of the vocabulary rather than of tokens: each row of the weight's gradient is one matrix product over all
    tokens, rounded once. Blocks of tokens would need a second (V, H) buffer in fp32 to be as exact.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:  # (n, H), (V, H), (n,) -> (1,)
        supervised = labels != IGNORE
        labels = labels if group is None else labels - dist.get_rank(group) * len(weight)  # columns of this shard
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_sum = torch.full(labels.shape, -torch.inf, dtype=wide, device=hidden.device)  # (n,)
        target = torch.zeros_like(log_sum)  # (n,), logit of the label
        for start, stop in _blocks(len(labels), len(weight)):
            logits = at_least_fp32(hidden @ weight[start:stop].t())  # (n, block)
            log_sum = torch.logaddexp(log_sum, torch.logsumexp(logits, dim=1))
            inside = (labels >= start) & (labels < stop)
            column = (labels - start).clamp(0, stop - start - 1)
            target = torch.where(inside, logits.gather(1, column[:, None]).squeeze(1), target)
        if group is not None:
            highest = log_sum.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
            sums = (log_sum - highest).exp()
            dist.all_reduce(sums, group=group)
            log_sum = highest + sums.log()
            dist.all_reduce(target, group=group)  # zero, except on the rank that holds the label
        ctx.save_for_backward(hidden, weight, labels, supervised, log_sum)
        return torch.where(supervised, log_sum - target, 0.0).sum(dim=0, keepdim=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, labels, supervised, log_sum = ctx.saved_tensors
        scale = torch.where(supervised, grad, 0.0)[:, None]  # (n, 1)
        grad_hidden = torch.zeros(hidden.shape, dtype=log_sum.dtype, device=hidden.device)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # not of a frozen head
        rows = torch.arange(len(labels), device=labels.device)
        for start, stop in _blocks(len(labels), len(weight)):
            block = weight[start:stop]
            delta = at_least_fp32(hidden @ block.t()).sub_(log_sum[:, None]).exp_()  # softmax, (n, block)
            inside = (labels >= start) & (labels < stop)
            column = (labels - start).clamp(0, stop - start - 1)
            delta.index_put_((rows, column), -inside.to(delta.dtype), accumulate=True)
            delta = delta.mul_(scale).to(hidden.dtype)
            grad_hidden += delta @ block
            if grad_weight is not None:
                grad_weight[start:stop] = delta.t() @ hidden
        return grad_hidden.to(hidden.dtype), grad_weight, None, None
