"""The loss: summed cross-entropy over supervised tokens, computed in blocks of the vocabulary.

The full (tokens, vocabulary) logits exist only if a small microbatch lets them fit (HeadMemory.kept_elements).

Legend: n supervised tokens, V vocabulary, H hidden size.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_mi100.config.layout import IGNORE
from titan_mi100.device import accelerator
from titan_mi100.model.fused.running import difference, runs
from titan_mi100.model.token_rows import TokenRows
from titan_mi100.planning.memory import HEAD_BLOCK, HEAD_BLOCK_CPU, HEAD_BYTES_PER_LOGIT, HEAD_COLUMNS

HEAD_MULTIPLE = 64
_ALIGNED = 128  # columns of a fused block are a multiple of it: products and kernels then read whole rows of tiles
_MOST_IDS = 1024  # per token, that the kernels take


@dataclass(frozen=True)
class HeadMemory:
    """Number of logits that `token_losses` holds. The block size sets the order of sums: it must not change on resume.

    Attributes:
        block_elements: logits (tokens x columns) per block.
        kept_elements: if a microbatch has at most this many logits, forward keeps them and backward does not compute
            them again.
        multiple: a block has a multiple of so many columns; 1 in runs of before. By a reading from
            outside a CPU had 74 GFLOP/s with 1,664 columns and 53 with 1,727; see docs/LOG.md.
    """

    block_elements: int = HEAD_BLOCK_CPU
    kept_elements: int = 0
    multiple: int = 1

    @classmethod
    def of(cls, device: torch.device) -> "HeadMemory":
        """The setting for a device. A CPU keeps no logits: allocating their memory costs as much as the product."""
        if device.type == "cpu":
            return cls(multiple=HEAD_MULTIPLE)
        return cls.of_gpu(accelerator.properties(device).total_memory)

    @classmethod
    def of_gpu(cls, total_memory: int) -> "HeadMemory":
        """The setting for a GPU of `total_memory` bytes."""
        return cls(HEAD_BLOCK, total_memory // HEAD_BYTES_PER_LOGIT, HEAD_MULTIPLE)


class Targets(NamedTuple):
    """Ids that tokens should predict.

    Attributes:
        tokens: (n,), n > 0: their positions in the flattened batch. The host computes it; counting labels on the device
            would make the host wait for it.
        ids: (n, k): k token ids for each; k = 1: its label. IGNORE: no id.
    """

    tokens: Tensor
    ids: Tensor


class SharedTokens(NamedTuple):
    """Supervised tokens of rows whose tokens the ranks of a group share (context parallel).

    Attributes:
        every: (n,): their index in the flattened rows.
        numbers: (m,), m > 0: the numbers of those that this rank has; [n]: it has none.
        own: (m,): the index of these in this rank's part of the flattened rows.
    """

    every: Tensor
    numbers: Tensor
    own: Tensor
    group: dist.ProcessGroup

    def of_rank(self, values: Tensor, missing: float = 0) -> Tensor:
        """This rank's of the values of all tokens: (n, k) -> (m, k). Args: missing: if it has none."""
        return torch.cat((values, values.new_full((1, values.shape[1]), missing)))[self.numbers]

    def gathered(self, values: Tensor) -> Tensor:
        """The values of all tokens: (m, k) of each rank -> (n, k), on every rank. A gradient goes back to the rank that
        has the token: each rank computes the same loss of them, so it is not summed over the ranks.
        """
        return _Gathered.apply(values, self)  # type: ignore[no-any-return]


class _Gathered(torch.autograd.Function):
    """See SharedTokens.gathered."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tokens: SharedTokens) -> Tensor:
        ctx.tokens = tokens
        every = values.new_zeros(len(tokens.every) + 1, values.shape[1]).index_put((tokens.numbers,), values)
        dist.all_reduce(every, group=tokens.group)
        return every[:-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.tokens.of_rank(grad), None


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
    rows: TokenRows | None = None,
    shared: SharedTokens | None = None,
) -> Predicted:
    """The cross-entropy of each token with each of its targets.

    Args:
        hidden: (batch, seq, H), after the final norm.
        weight: (V, H), the head's weight, in the dtype of `hidden` or a wider one. Its gradient has the same dtype.
        group: ranks that hold equal shards of the head, in rank order (vocabulary parallel). `weight` is then this
            rank's shard, (V / ranks, H). The gradient of `hidden` is then a partial sum; the caller sums it over ranks.
        memory: how many logits are held; it changes results only by rounding.
        rows: trained rows that stand for the weight's own.
        shared: the tokens of `targets`; `hidden` is then this rank's part of the rows, and the result that of all.

    The head runs only on these tokens. A batch without supervised tokens passes one such
    token, so backward reaches the same parameters on every rank and every rank starts the same collectives.
    """
    chosen = hidden.flatten(0, 1)[targets.tokens if shared is None else shared.own]
    ids = targets.ids if shared is None else shared.of_rank(targets.ids, IGNORE)
    trained = None if rows is None else rows.rows(hidden.dtype)
    losses, best = _BlockedCrossEntropy.apply(chosen, weight, ids, _Shard(group, rows), memory, trained)
    if shared is not None:
        every = shared.gathered(torch.cat((losses, best[:, None]), 1))
        losses, best = every[:, :-1], every[:, -1].detach()
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
        shard: "_Shard",
        memory: HeadMemory,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # (n, H), (V, H), (n, k), (tokens, H) -> (n, k), (n,)
        known, group = ids != IGNORE, shard.group
        ids = ids if group is None else ids - dist.get_rank(group) * len(weight)  # columns of this shard
        if rows is not None and shard.rows is not None:
            shard.rows.write(rows, weight)
        blocks = _form(hidden, ids)(hidden, weight, memory)
        highest = torch.full(ids.shape[:1], -torch.inf, dtype=blocks.wide, device=hidden.device)
        total, target = torch.zeros_like(highest), highest.new_zeros(ids.shape)
        sums = _Sums(highest, total, target)
        for start, stop in blocks:
            blocks.add(sums, blocks.compute(blocks.weight(start, stop), start), ids, start)
        if group is not None:  # combine the shards: rescale this shard's sum to the maximum of all shards
            own = highest.clone()
            dist.all_reduce(highest, dist.ReduceOp.MAX, group)
            total *= (own - highest).exp()
            dist.all_reduce(total, group=group)
            dist.all_reduce(target, group=group)  # of each id, it is zero except on the rank whose shard has it
        log_sum = highest + total.log()
        ctx.save_for_backward(hidden, weight, ids, known, log_sum, target if blocks.needs_target(ids) else None, rows)
        blocks.holds_logits = blocks.keeps_logits
        ctx.blocks, ctx.form, ctx.memory = blocks if blocks.keeps_logits else None, type(blocks), memory
        ctx.of = shard.rows
        best = highest - log_sum
        ctx.mark_non_differentiable(best)
        return torch.where(known, log_sum[:, None] - target, 0.0), best

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, ids, known, log_sum, target, rows = ctx.saved_tensors
        # ctx.blocks is None if no logits are kept, and when backward is called a second time.
        blocks: _Blocks = ctx.blocks or ctx.form(hidden, weight, ctx.memory)
        gradient = blocks.gradient(_Softmax(ids, known, log_sum, target), torch.where(known, grad, 0.0))
        grad_hidden = torch.zeros(hidden.shape, dtype=log_sum.dtype, device=hidden.device)
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # None: the head is frozen
        grad_rows = None
        if rows is not None:
            grad_rows = torch.zeros_like(rows)
            ctx.of.write(rows, weight)
        for start, stop in blocks:
            part = blocks.weight(start, stop)
            delta = gradient(blocks.buffer(start, stop) if blocks.holds_logits else blocks.compute(part, start), start)
            if delta.dtype == grad_hidden.dtype:
                grad_hidden.addmm_(delta, part)
            else:
                grad_hidden += delta @ part
            if grad_weight is not None and weight.dtype == hidden.dtype:
                torch.mm(delta.t(), hidden, out=grad_weight[start:stop])
            elif grad_weight is not None:
                grad_weight[start:stop] = delta.t() @ hidden
            if grad_rows is not None:
                for column, row in ctx.of.columns(start, stop):
                    grad_rows[row] = delta[:, column] @ hidden
        # Free the kept logits now: a pipeline holds its outputs, and through them ctx, until the step ends.
        ctx.blocks = None
        return grad_hidden.to(hidden.dtype), grad_weight, None, None, None, grad_rows


class _Shard(NamedTuple):
    """The ranks that share the vocabulary, and tokens whose rows stand for the weight's own."""

    group: dist.ProcessGroup | None
    rows: TokenRows | None = None


class _Sums(NamedTuple):
    """Online softmax over the blocks so far. A new maximum rescales the sum, so one pass over the blocks is enough.

    Attributes:
        highest: (n,): the greatest logit.
        total: (n,): the sum of exp(logit - highest).
        target: (n, k): the ids' logits; 0 for an id that no block had.
    """

    highest: Tensor
    total: Tensor
    target: Tensor


class _Softmax(NamedTuple):
    """What the gradient of the logits needs of forward.

    Attributes:
        ids: (n, k), columns of this shard.
        known: (n, k).
        log_sum: (n,).
        target: (n, k): see _Sums; None: not needed.
    """

    ids: Tensor
    known: Tensor
    log_sum: Tensor
    target: Tensor | None


class _Blocks:
    """Iterates over (start, stop) column ranges of the vocabulary, and owns the buffers of the call. The work between
    its products is in plain operations here; see _FusedBlocks.

    The buffers hold one block, or all blocks if the logits are kept. They are reused: on a CPU, allocating a new buffer
    per block takes longer than the arithmetic, because the system fills new memory with zeros.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, memory: HeadMemory) -> None:
        self._hidden, self._weight = hidden, weight
        tokens, vocabulary = len(hidden), len(weight)
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        planned = max(HEAD_COLUMNS, memory.block_elements // tokens // memory.multiple * memory.multiple)
        self._size = min(self._width(planned), vocabulary)
        self.keeps_logits = tokens * vocabulary <= memory.kept_elements  # there is a buffer for every block
        self.holds_logits = False  # forward has filled them all
        self._logits = hidden.new_empty(tokens * (vocabulary if self.keeps_logits else self._size))

    @cached_property
    def _wide(self) -> Tensor:
        """A second buffer, if the logits must not be overwritten, or if fp32 copies of them are needed."""
        own = self.keeps_logits or self._hidden.dtype != self.wide
        return self._hidden.new_empty(len(self._hidden) * self._size, dtype=self.wide) if own else self._logits

    def _width(self, planned: int) -> int:
        """Columns of a block. Args: planned: those that HeadMemory asks for."""
        return planned

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

    def needs_target(self, ids: Tensor) -> bool:
        """Whether the gradient needs _Sums.target."""
        return False

    def add(self, sums: _Sums, logits: Tensor, ids: Tensor, start: int) -> None:
        """Add a block's logits to the sums."""
        logits = self.in_fp32(logits)
        inside, column = _columns(ids, start, start + logits.shape[1])
        sums.target.add_(torch.where(inside, logits.gather(1, column), 0.0))
        raised = torch.maximum(sums.highest, logits.amax(dim=1))
        shrunk = sums.highest.sub_(raised).exp_()
        sums.total.mul_(shrunk).add_(self.exponential(logits, raised).sum(dim=1))
        sums.highest.copy_(raised)

    def gradient(self, softmax: _Softmax, grad: Tensor) -> Callable[[Tensor, int], Tensor]:
        """A function of a block's logits and its first column. It computes the gradient of the logits in their dtype
        and in their memory: sum of the gradients x softmax - gradient x one_hot(id).

        Args:
            grad: (n, k), the gradient of the losses, 0 for IGNORE.
        """
        ids, known, log_sum, _ = softmax
        # One id: its gradient scales the whole row at the end, which rounds once.
        scale, shares = (grad, known.to(grad.dtype)) if ids.shape[1] == 1 else (None, grad)
        rows = torch.arange(len(ids), device=ids.device)[:, None].expand(ids.shape)

        def of_block(logits: Tensor, start: int) -> Tensor:
            delta = self.in_fp32(logits).sub_(log_sum[:, None]).exp_()
            inside, column = _columns(ids, start, start + logits.shape[1])
            if scale is None:
                delta.mul_(grad.sum(1, keepdim=True))
            delta.index_put_((rows, column), -torch.where(inside, shares, 0.0).to(delta.dtype), accumulate=True)
            if scale is not None:
                delta.mul_(scale)
            return delta if logits.dtype == delta.dtype else logits.copy_(delta)

        return of_block

    def in_fp32(self, logits: Tensor) -> Tensor:
        """The logits in fp32 (or fp64): the same tensor if it is wide enough, else a copy in the second buffer."""
        return logits if logits.dtype == self.wide else self._scratch(logits).copy_(logits)

    def exponential(self, logits: Tensor, highest: Tensor) -> Tensor:
        """Computes exp(logits - highest). Overwrites the logits unless they are kept."""
        return torch.sub(logits, highest[:, None], out=self._scratch(logits)).exp_()

    def _scratch(self, like: Tensor) -> Tensor:
        return self._wide[: like.numel()].view(like.shape)


class _FusedBlocks(_Blocks):
    """The same with the kernels of fused/head_kernel.py, which need no second buffer.

    A block takes the memory that is planned for both buffers (planning/memory.py: 6 bytes a logit in 16 bits) and for
    the copies of a block of the weight that is to be cast, and has as many more columns.
    """

    def _width(self, planned: int) -> int:
        tokens, vocabulary = len(self._hidden), len(self._weight)
        logit, second = self._hidden.itemsize, self.wide.itemsize if self._hidden.dtype != self.wide else 0
        cast = 2 * logit * self._hidden.shape[1] if self._weight.dtype != self._hidden.dtype else 0  # and its gradient
        most = planned * (tokens * (logit + second) + cast) // (tokens * logit + cast) // _ALIGNED * _ALIGNED
        return math.ceil(vocabulary / math.ceil(vocabulary / most) / _ALIGNED) * _ALIGNED  # blocks of equal size

    def needs_target(self, ids: Tensor) -> bool:
        return ids.shape[1] > 1

    def add(self, sums: _Sums, logits: Tensor, ids: Tensor, start: int) -> None:
        from titan_mi100.model.fused import head_launch

        head_launch.add(logits, start, ids.contiguous(), *sums)

    def gradient(self, softmax: _Softmax, grad: Tensor) -> Callable[[Tensor, int], Tensor]:
        from titan_mi100.model.fused import head_launch

        ids, grad = softmax.ids.contiguous(), grad.contiguous()
        scale = grad.sum(1) if softmax.target is not None else grad[:, 0]

        def of_block(logits: Tensor, start: int) -> Tensor:
            head_launch.subtract(logits, start, ids, scale, softmax.log_sum)
            if softmax.target is not None:
                head_launch.subtract_several(logits, start, ids, grad, scale, softmax.log_sum, softmax.target)
            return logits

        return of_block


def _form(hidden: Tensor, ids: Tensor) -> type[_Blocks]:
    """The form of the work between the products of these tokens. The kernel for ids compares them in pairs."""
    return _FusedBlocks if runs("head", hidden) and ids.shape[1] <= _MOST_IDS else _Blocks


def trial(device: torch.device, dtype: torch.dtype) -> str:
    """What is wrong with the kernels on this device: results against those of the plain form in fp32.

    See running.Trial. The vocabulary has more than one block, and a block more columns than a kernel takes at a time.
    """
    draw, bar, tokens, vocabulary = torch.Generator().manual_seed(1), 2 * torch.finfo(dtype).eps + 1e-5, 17, 33_000
    hidden, weight = ((torch.randn(n, 64, generator=draw) / 3).to(device, dtype) for n in (tokens, vocabulary))
    for k in (1, 3):
        ids = torch.randint(vocabulary, (tokens, k), generator=draw)
        ids[3, -1], ids[5] = IGNORE, 7
        compute = partial(_trial_losses, ids.to(device))
        if problem := difference("head", compute, (hidden, weight), (torch.float32, dtype), bar):
            return f"with {k} ids per token the loss {problem}"
    return ""


def _trial_losses(ids: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    losses, best = _BlockedCrossEntropy.apply(hidden, weight, ids, _Shard(None), HeadMemory(len(ids) * 10_000))
    return torch.cat((losses, best[:, None]), 1)


def _columns(ids: Tensor, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Whether each id is in the block, (n, k) bool, and its column in the block, (n, k); clamped for other ids."""
    return (ids >= start) & (ids < stop), (ids - start).clamp(0, stop - start - 1)


@torch.no_grad()
def likeliest(
    hidden: Tensor,
    weight: Tensor,
    likeliest_log_p: Tensor,
    k: int,
    vocabulary: int,
    group: dist.ProcessGroup | None = None,
    memory: HeadMemory = HeadMemory(),
) -> tuple[Tensor, Tensor]:
    """The k likeliest ids to follow each token, and their log probabilities: (n, k) int64, (n, k), best first.

    Args:
        likeliest_log_p: (n,): Predicted.best of these tokens.
        k: at most `vocabulary`, below which the ids are.

    Others: see token_losses. Ties at the k-th place are broken arbitrarily.
    """
    blocks = _Blocks(hidden, weight, memory)
    best = torch.empty(len(hidden), 0, dtype=blocks.wide, device=hidden.device)
    ids = torch.empty(len(hidden), 0, dtype=torch.long, device=hidden.device)
    highest = torch.full_like(likeliest_log_p, -torch.inf)
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
    return ids, best - (highest - likeliest_log_p)[:, None]


def _best_of(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k greatest of (n, m) logits with their ids, the greatest first, of equal ones the least id."""
    order = ids.argsort(1)
    logits, ids = logits.gather(1, order), ids.gather(1, order)
    order = logits.argsort(stable=True, dim=1, descending=True)[:, :k]
    return logits.gather(1, order), ids.gather(1, order)
