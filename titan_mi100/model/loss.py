"""The loss: summed cross-entropy over supervised tokens, computed in blocks of the vocabulary.

The full (tokens, vocabulary) logits exist only if a small microbatch lets them fit (HeadMemory.kept_elements).

Legend: n supervised tokens, V vocabulary, H hidden size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_mi100.config.layout import IGNORE
from titan_mi100.device import accelerator
from titan_mi100.planning.memory import HEAD_BLOCK, HEAD_BLOCK_CPU, HEAD_BYTES_PER_LOGIT, HEAD_COLUMNS


@dataclass(frozen=True)
class HeadMemory:
    """Number of logits that `token_losses` holds. The block size sets the order of sums: it must not change on resume.

    Attributes:
        block_elements: logits (tokens x columns) per block.
        kept_elements: if a microbatch has at most this many logits, forward keeps them and backward does not compute
            them again.
    """

    block_elements: int = HEAD_BLOCK_CPU
    kept_elements: int = 0

    @classmethod
    def of(cls, device: torch.device) -> "HeadMemory":
        """The setting for a device. A CPU keeps no logits: allocating their memory costs as much as the product."""
        if device.type == "cpu":
            return cls()
        return cls.of_gpu(accelerator.properties(device).total_memory)

    @classmethod
    def of_gpu(cls, total_memory: int) -> "HeadMemory":
        """The setting for a GPU of `total_memory` bytes."""
        return cls(HEAD_BLOCK, total_memory // HEAD_BYTES_PER_LOGIT)


class Targets(NamedTuple):
    """Ids that tokens should predict.

    Attributes:
        tokens: (n,), n > 0: their positions in the flattened batch. The host computes it; counting labels on the device
            would make the host wait for it.
        ids: (n, k): k token ids for each; k = 1: its label. IGNORE: no id.
    """

    tokens: Tensor
    ids: Tensor


class Predicted(NamedTuple):
    """Predictions of the model for tokens, in fp32 or fp64.

    Attributes:
        losses: (n, k): minus the log probability of each of a token's ids; 0 for IGNORE.
        best: (n,): log probability of the likeliest id. It has no gradient.
        known: (n, k) bool: not IGNORE.
    """

    losses: Tensor
    best: Tensor
    known: Tensor


def of_labels(labels: Tensor, tokens: Tensor) -> Targets:
    """The targets of labels, (batch, seq), already shifted, at these tokens."""
    return Targets(tokens, labels.flatten()[tokens][:, None])


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    targets: Targets,
    group: dist.ProcessGroup | None = None,
    memory: HeadMemory = HeadMemory(),
) -> Predicted:
    """The cross-entropy of each token with each of its targets.

    Args:
        hidden: (batch, seq, H), after the final norm.
        weight: (V, H), the head's weight, in the dtype of `hidden` or a wider one. Its gradient has the same dtype.
        group: ranks that hold equal shards of the head, in rank order (vocabulary parallel). `weight` is then this
            rank's shard, (V / ranks, H). The gradient of `hidden` is then a partial sum; the caller sums it over ranks.
        memory: how many logits are held; it changes results only by rounding.

    The head runs only on these tokens. A batch without supervised tokens passes one such
    token, so backward reaches the same parameters on every rank and every rank starts the same collectives.
    """
    chosen = hidden.flatten(0, 1)[targets.tokens]
    losses, best = _BlockedCrossEntropy.apply(chosen, weight, targets.ids, group, memory)
    return Predicted(losses, best, targets.ids != IGNORE)


def head_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, tokens: Tensor, columns: Any = None, **options: Any
) -> Tensor:
    """The losses of labels, summed: (1,), not 0-dim, which would break the pipeline schedules. See decoder.HeadLoss."""
    losses = token_losses(hidden, weight, of_labels(labels, tokens), **options).losses
    return losses[:, 0].sum(dim=0, keepdim=True)


class _BlockedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over blocks of the vocabulary. Backward reads the logits that forward kept, or recomputes them.

    Why blocks of the vocabulary and not of tokens: each row of the weight's gradient is then one matrix product over
    all tokens and is rounded once. Blocks of tokens would need a second (V, H) buffer in fp32 for the same precision.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        group: dist.ProcessGroup | None,
        memory: HeadMemory,
    ) -> tuple[Tensor, Tensor]:  # (n, H), (V, H), (n, k) -> (n, k), (n,)
        known = ids != IGNORE
        ids = ids if group is None else ids - dist.get_rank(group) * len(weight)  # columns of this shard
        blocks = _Blocks(hidden, weight, memory)
        # Online softmax: the maximum so far and the sum of exp(logit - maximum), (n,), and the ids' logits, (n, k). A
        # new maximum rescales the sum, so one pass over the blocks is enough.
        highest = torch.full(ids.shape[:1], -torch.inf, dtype=blocks.wide, device=hidden.device)
        total, target = torch.zeros_like(highest), highest.new_zeros(ids.shape)
        for start, stop in blocks:
            logits = blocks.in_fp32(blocks.compute(blocks.weight(start, stop), start))
            inside, column = _columns(ids, start, stop)
            target += torch.where(inside, logits.gather(1, column), 0.0)
            raised = torch.maximum(highest, logits.amax(dim=1))
            total.mul_(highest.sub_(raised).exp_()).add_(blocks.exponential(logits, raised).sum(dim=1))
            highest = raised
        if group is not None:  # combine the shards: rescale this shard's sum to the maximum of all shards
            own = highest.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
            total *= (own - highest).exp()
            dist.all_reduce(total, group=group)
            dist.all_reduce(target, group=group)  # of each id, it is zero except on the rank whose shard has it
        log_sum = highest + total.log()
        ctx.save_for_backward(hidden, weight, ids, known, log_sum)
        blocks.holds_logits = blocks.keeps_logits
        ctx.blocks, ctx.memory = blocks if blocks.keeps_logits else None, memory
        best = highest - log_sum
        ctx.mark_non_differentiable(best)
        return torch.where(known, log_sum[:, None] - target, 0.0), best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, ids, known, log_sum = ctx.saved_tensors
        # ctx.blocks is None if no logits are kept, and when a zero-bubble pipeline calls backward a second time.
        blocks: _Blocks = ctx.blocks or _Blocks(hidden, weight, ctx.memory)
        grad = torch.where(known, grad, 0.0)  # (n, k)
        # One id: its gradient scales the whole row at the end, which rounds once.
        scale, shares = (grad, known.to(grad.dtype)) if ids.shape[1] == 1 else (None, grad)
        grad_hidden = torch.zeros(hidden.shape, dtype=log_sum.dtype, device=hidden.device)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # None: the head is frozen
        rows = torch.arange(len(ids), device=ids.device)[:, None].expand(ids.shape)
        for start, stop in blocks:
            part = blocks.weight(start, stop)
            logits = blocks.buffer(start, stop) if blocks.holds_logits else blocks.compute(part, start)
            # d loss / d logit = sum of the gradients x softmax - gradient x one_hot(id), here (n, block)
            delta = blocks.in_fp32(logits).sub_(log_sum[:, None]).exp_()
            inside, column = _columns(ids, start, stop)
            if scale is None:
                delta.mul_(grad.sum(1, keepdim=True))
            delta.index_put_((rows, column), -torch.where(inside, shares, 0.0).to(delta.dtype), accumulate=True)
            if scale is not None:
                delta.mul_(scale)
            delta = delta if logits.dtype == delta.dtype else logits.copy_(delta)
            if delta.dtype == grad_hidden.dtype:
                grad_hidden.addmm_(delta, part)
            else:
                grad_hidden += delta @ part
            if grad_weight is not None and weight.dtype == hidden.dtype:
                torch.mm(delta.t(), hidden, out=grad_weight[start:stop])
            elif grad_weight is not None:
                grad_weight[start:stop] = delta.t() @ hidden
        # Free the kept logits now: a pipeline holds its outputs, and through them ctx, until the step ends.
        ctx.blocks = None
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None


class _Blocks:
    """Iterates over (start, stop) column ranges of the vocabulary, and owns the buffers of the call.

    The buffers hold one block, or all blocks if the logits are kept. They are reused: on a CPU, allocating a new buffer
    per block takes longer than the arithmetic, because the system fills new memory with zeros.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, memory: HeadMemory) -> None:
        self._hidden, self._weight = hidden, weight
        tokens, vocabulary = len(hidden), len(weight)
        self._size = min(max(HEAD_COLUMNS, memory.block_elements // tokens), vocabulary)
        self.keeps_logits = tokens * vocabulary <= memory.kept_elements  # there is a buffer for every block
        self.holds_logits = False  # forward has filled them all
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        self._logits = hidden.new_empty(tokens * (vocabulary if self.keeps_logits else self._size))
        # A second buffer is needed if the logits must not be overwritten, or if fp32 copies of them are needed.
        own = self.keeps_logits or hidden.dtype != self.wide
        self._wide = hidden.new_empty(tokens * self._size, dtype=self.wide) if own else self._logits

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for start in range(0, len(self._weight), self._size):
            yield start, min(start + self._size, len(self._weight))

    def compute(self, weight: Tensor, start: int) -> Tensor:
        """Logits of one block, (n, block), in the dtype of the activations.

        Args:
            weight: the block of the weight, (block, H). start: its first column of the vocabulary.
        """
        return torch.mm(self._hidden, weight.t(), out=self.buffer(start, start + len(weight)))

    def weight(self, start: int, stop: int) -> Tensor:
        """A block of the weight, cast to the dtype of the activations. The full weight is never copied."""
        return self._weight[start:stop].to(self._hidden.dtype)

    def buffer(self, start: int, stop: int) -> Tensor:
        """The buffer for a block's logits, (n, stop - start)."""
        tokens, first = len(self._hidden), start if self.keeps_logits else 0
        return self._logits[tokens * first : tokens * (first + stop - start)].view(tokens, stop - start)

    def in_fp32(self, logits: Tensor) -> Tensor:
        """The logits in fp32 (or fp64): the same tensor if it is wide enough, else a copy in the second buffer."""
        return logits if logits.dtype == self.wide else self._scratch(logits).copy_(logits)

    def exponential(self, logits: Tensor, highest: Tensor) -> Tensor:
        """Computes exp(logits - highest). Overwrites the logits unless they are kept."""
        return torch.sub(logits, highest[:, None], out=self._scratch(logits)).exp_()

    def _scratch(self, like: Tensor) -> Tensor:
        return self._wide[: like.numel()].view(like.shape)


def _columns(ids: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Whether each id is in the block, (n, k) bool, and its column in the block, (n, k); clamped for other ids."""
    return (ids >= start) & (ids < stop), (ids - start).clamp(0, stop - start - 1)


@torch.no_grad()
def likeliest(
    hidden: Tensor,
    weight: Tensor,
    predicted: Predicted,
    k: int,
    vocabulary: int,
    group: dist.ProcessGroup | None = None,
    memory: HeadMemory = HeadMemory(),
) -> tuple[Tensor, Tensor]:
    """The k likeliest ids to follow each token, and their log probabilities: (n, k) int64, (n, k), best first.

    Args:
        hidden: (n, hidden).
        predicted: of these tokens, any ids.
        k: at most `vocabulary`, below which the ids are.

    Others: see token_losses. Ties at the k-th place are broken arbitrarily.
    """
    blocks = _Blocks(hidden, weight, memory)
    best = torch.empty(len(hidden), 0, dtype=blocks.wide, device=hidden.device)
    ids = torch.empty(len(hidden), 0, dtype=torch.long, device=hidden.device)
    highest = torch.full_like(predicted.best, -torch.inf)
    first = 0 if group is None else dist.get_rank(group) * len(weight)
    for start, stop in blocks:
        logits = blocks.in_fp32(blocks.compute(blocks.weight(start, stop), start))
        highest = torch.maximum(highest, logits.amax(1))
        logits[:, max(0, vocabulary - first - start) :] = -torch.inf
        top = logits.topk(min(k, stop - start))
        best, ids = _best_of(torch.cat((best, top.values), 1), torch.cat((ids, top.indices + start), 1), k)
    if group is not None:  # of each shard its best, as many on every rank
        ids = ids + first
        dist.all_reduce(highest, dist.ReduceOp.MAX, group)
        both = [[torch.empty_like(x) for _ in range(dist.get_world_size(group))] for x in (best, ids)]
        for every, own in zip(both, (best, ids), strict=True):
            dist.all_gather(every, own.contiguous(), group)
        best, ids = _best_of(torch.cat(both[0], 1), torch.cat(both[1], 1), k)
    return ids, best - (highest - predicted.best)[:, None]


def _best_of(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest of (n, m) logits with their ids, the greatest first, of equal ones the least id."""
    order = ids.argsort(1)
    logits, ids = logits.gather(1, order), ids.gather(1, order)
    order = logits.argsort(stable=True, dim=1, descending=True)[:, :k]
    return logits.gather(1, order), ids.gather(1, order)
