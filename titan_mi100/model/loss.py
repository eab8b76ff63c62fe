"""The loss: cross-entropy of supervised tokens, summed, without ever holding (tokens, vocabulary) logits.

Legend: n supervised tokens, V vocabulary, H hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_mi100.config.layout import IGNORE
from titan_mi100.config.memory import HEAD_BLOCK, HEAD_SHARE

_LEAST_BLOCK = 1024  # columns; matrix products of fewer are slow


@dataclass(frozen=True)
class HeadMemory:
    """How much of the logits head_loss holds. It decides in which order numbers are added, so a run keeps it.

    Attributes:
        block_elements: logits that are worked on at a time.
        kept_elements: if a microbatch has no more logits than these, backward does not compute them again.
    """

    block_elements: int = 1 << 20  # in fp32 4 MiB, which a CPU's caches hold
    kept_elements: int = 0

    @classmethod
    def of(cls, device: torch.device) -> "HeadMemory":
        """What suits the device. A CPU would spend a matrix product's time on getting the memory to keep logits."""
        if device.type == "cpu":
            return cls()
        return cls.of_gpu(torch.cuda.get_device_properties(device).total_memory)

    @classmethod
    def of_gpu(cls, total_memory: int) -> "HeadMemory":
        """Args: total_memory: in bytes."""
        return cls(HEAD_BLOCK, total_memory // HEAD_SHARE)  # in 16 bits that is a 32nd of the memory


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    supervised: Tensor,
    group: dist.ProcessGroup | None = None,
    memory: HeadMemory = HeadMemory(),
) -> Tensor:
    """Sum of the cross-entropy over supervised tokens.

    Args:
        hidden: (batch, seq, H), after the final norm.
        weight: (V, H), the head's weight, in the dtype of `hidden` or a wider one; so is its gradient.
        labels: (batch, seq), already shifted; IGNORE where there is no supervision.
        supervised: (n,), n > 0: positions of the supervised tokens in the flattened batch. Its length comes from the
            host; counting labels here would make the host wait for the device.
        group: ranks that hold equal shards of the head, in order (vocabulary parallel): `weight` is then this rank's
            shard, (V / ranks, H), and the gradient of `hidden` is this rank's share of the sum over the ranks.
        memory: see there; it changes no number but by rounding.

    Returns:
        (1,) in fp32 at least: a 0-dim output breaks the pipeline schedules.

    The head runs on the tokens of `supervised` only. A token labelled IGNORE weighs zero: a batch without supervision
    names one such token, so that backward reaches the same parameters, and starts the same collectives, on every rank.
    """
    return _BlockedCrossEntropy.apply(
        hidden.flatten(0, 1)[supervised], weight, labels.flatten()[supervised], group, memory
    )


class _BlockedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over blocks of the vocabulary. Backward takes the logits that forward kept, or computes them again.

    Blocks of the vocabulary rather than of tokens: each row of the weight's gradient is one matrix product over all
    tokens, rounded once. Blocks of tokens would need a second (V, H) buffer in fp32 to be as exact.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, group: dist.ProcessGroup | None, memory: HeadMemory
    ) -> Tensor:  # (n, H), (V, H), (n,) -> (1,)
        supervised = labels != IGNORE
        labels = labels if group is None else labels - dist.get_rank(group) * len(weight)  # columns of this shard
        blocks = _Blocks(hidden, weight, memory)
        highest = torch.full(labels.shape, -torch.inf, dtype=blocks.wide, device=hidden.device)  # (n,)
        total, target = torch.zeros_like(highest), torch.zeros_like(highest)  # sum of exp(logit - highest); the label's
        for start, stop in blocks:
            logits = blocks.widened(blocks.compute(blocks.weight(start, stop), start))
            inside, column = _columns(labels, start, stop)
            target = torch.where(inside, logits.gather(1, column).squeeze(1), target)
            raised = torch.maximum(highest, logits.amax(dim=1))
            total.mul_(highest.sub_(raised).exp_()).add_(blocks.exponential(logits, raised).sum(dim=1))
            highest = raised
        if group is not None:
            own = highest.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
            total *= (own - highest).exp()
            dist.all_reduce(total, group=group)
            dist.all_reduce(target, group=group)  # zero, except on the rank that holds the label
        log_sum = highest + total.log()
        ctx.save_for_backward(hidden, weight, labels, supervised, log_sum)
        blocks.holds_logits = blocks.keeps_logits
        ctx.blocks, ctx.memory = blocks if blocks.keeps_logits else None, memory
        return torch.where(supervised, log_sum - target, 0.0).sum(dim=0, keepdim=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, labels, supervised, log_sum = ctx.saved_tensors
        # there are none if no logits are kept, or when a zero-bubble pipeline calls this a second time
        blocks: _Blocks = ctx.blocks or _Blocks(hidden, weight, ctx.memory)
        scale = torch.where(supervised, grad, 0.0)[:, None]  # (n, 1)
        grad_hidden = torch.zeros(hidden.shape, dtype=log_sum.dtype, device=hidden.device)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # not of a frozen head
        rows = torch.arange(len(labels), device=labels.device)
        for start, stop in blocks:
            part = blocks.weight(start, stop)
            logits = blocks.place(start, stop) if blocks.holds_logits else blocks.compute(part, start)
            delta = blocks.widened(logits).sub_(log_sum[:, None]).exp_()  # softmax, (n, block)
            inside, column = _columns(labels, start, stop)
            delta.index_put_((rows, column.squeeze(1)), -inside.to(delta.dtype), accumulate=True)
            delta = delta.mul_(scale) if logits.dtype == delta.dtype else logits.copy_(delta.mul_(scale))
            if delta.dtype == grad_hidden.dtype:
                grad_hidden.addmm_(delta, part)
            else:
                grad_hidden += delta @ part
            if grad_weight is not None and weight.dtype == hidden.dtype:
                torch.mm(delta.t(), hidden, out=grad_weight[start:stop])
            elif grad_weight is not None:
                grad_weight[start:stop] = delta.t() @ hidden
        ctx.blocks = None  # their memory: a pipeline keeps its outputs, and with them ctx, until the step ends
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


class _Blocks:
    """The blocks of one call, as ranges of the vocabulary, and its buffers: of one block, or of all if they are kept.

    Allocating memory anew for each block would take longer than what is done in it: on a CPU the system fills it with
    zeros first.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, memory: HeadMemory) -> None:
        self._hidden, self._weight = hidden, weight
        tokens, vocabulary = len(hidden), len(weight)
        self._size = max(_LEAST_BLOCK, memory.block_elements // tokens)
        self.keeps_logits = tokens * vocabulary <= memory.kept_elements
        self.holds_logits = False
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        self._logits = hidden.new_empty(tokens * (vocabulary if self.keeps_logits else min(self._size, vocabulary)))
        # beside logits in the same dtype that are not to be overwritten, or for their values in fp32
        own = self.keeps_logits or hidden.dtype != self.wide
        self._wide = hidden.new_empty(tokens * self._size, dtype=self.wide) if own else self._logits

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self._weight), self._size):
            yield start, min(start + self._size, len(self._weight))

    def compute(self, weight: Tensor, start: int) -> Tensor:
        """Logits of the block of the weight that begins at `start`, (n, block), in the dtype of the activations."""
        return torch.mm(self._hidden, weight.t(), out=self.place(start, start + len(weight)))

    def weight(self, start: int, stop: int) -> Tensor:
        """A block of the weight, in the dtype of the activations: the whole one is never copied."""
        return self._weight[start:stop].to(self._hidden.dtype)

    def place(self, start: int, stop: int) -> Tensor:
        """The place of a block's logits."""
        tokens, first = len(self._hidden), start if self.keeps_logits else 0
        return self._logits[tokens * first : tokens * (first + stop - start)].view(tokens, stop - start)

    def widened(self, logits: Tensor) -> Tensor:
        """The same in fp32 at least."""
        return logits if logits.dtype == self.wide else self._scratch(logits).copy_(logits)

    def exponential(self, logits: Tensor, highest: Tensor) -> Tensor:
        """exp(logits - highest); the logits are lost where they need not be kept."""
        return torch.sub(logits, highest[:, None], out=self._scratch(logits)).exp_()

    def _scratch(self, like: Tensor) -> Tensor:
        return self._wide[: like.numel()].view(like.shape)


def _columns(labels: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Which labels lie in a block, (n,), and their columns in it, (n, 1); any column for the others."""
    return (labels >= start) & (labels < stop), (labels - start).clamp(0, stop - start - 1)[:, None]
