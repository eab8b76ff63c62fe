"""The loss: cross-entropy of supervised tokens, summed, without ever holding (tokens, vocabulary) logits.

Legend: n supervised tokens, V vocabulary, H hidden size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_mi100.layout import IGNORE

_BLOCK_ELEMENTS = 1 << 25  # logits held at a time: 128 MiB in fp32


def head_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropy over supervised tokens.

    Args:
        hidden: (batch, seq, H), after the final norm.
        weight: (V, H), the head's weight.
        labels: (batch, seq), already shifted; IGNORE where there is no supervision.

    Returns:
        (1,) in fp32: a 0-dim output breaks the pipeline schedules.

    The head runs on supervised tokens only. Without any it runs on one token of weight zero, so that backward reaches
    the same parameters, and starts the same collectives, on every rank.
    """
    flat = labels.flatten()
    index = (flat != IGNORE).nonzero().squeeze(1)  # (n,)
    if index.numel() == 0:
        index = torch.zeros(1, dtype=torch.long, device=labels.device)
    return _BlockedCrossEntropy.apply(hidden.flatten(0, 1)[index], weight, flat[index])


def _blocks(tokens: int, vocabulary: int) -> list[tuple[int, int]]:
    """Ranges of the vocabulary whose logits for all tokens stay within the bound."""
    size = max(1024, _BLOCK_ELEMENTS // tokens)
    return [(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size)]


class _BlockedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over blocks of the vocabulary; backward recomputes the logits block by block.

    Blocks of the vocabulary rather than of tokens: each row of the weight's gradient is one matrix product over all
    tokens, rounded once. Blocks of tokens would need a second (V, H) buffer in fp32 to be as exact.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:  # (n, H), (V, H), (n,) -> (1,)
        log_sum = torch.full(labels.shape, -torch.inf, dtype=torch.float32, device=hidden.device)  # (n,)
        target = torch.zeros_like(log_sum)  # (n,), the label's logit
        for start, stop in _blocks(len(labels), len(weight)):
            logits = (hidden @ weight[start:stop].t()).float()  # (n, block)
            log_sum = torch.logaddexp(log_sum, torch.logsumexp(logits, dim=1))
            inside = (labels >= start) & (labels < stop)
            column = (labels - start).clamp(0, stop - start - 1)
            target = torch.where(inside, logits.gather(1, column[:, None]).squeeze(1), target)
        ctx.save_for_backward(hidden, weight, labels, log_sum)
        return torch.where(labels != IGNORE, log_sum - target, 0.0).sum(dim=0, keepdim=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, labels, log_sum = ctx.saved_tensors
        scale = torch.where(labels != IGNORE, grad, 0.0)[:, None]  # (n, 1)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weight = torch.empty_like(weight)
        rows = torch.arange(len(labels), device=labels.device)
        for start, stop in _blocks(len(labels), len(weight)):
            block = weight[start:stop]
            delta = (hidden @ block.t()).float().sub_(log_sum[:, None]).exp_()  # softmax, (n, block)
            inside = (labels >= start) & (labels < stop)
            column = (labels - start).clamp(0, stop - start - 1)
            delta.index_put_((rows, column), -inside.to(delta.dtype), accumulate=True)
            delta = delta.mul_(scale).to(hidden.dtype)
            grad_hidden += delta @ block
            grad_weight[start:stop] = delta.t() @ hidden
        return grad_hidden.to(hidden.dtype), grad_weight, None
