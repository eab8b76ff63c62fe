"""Context parallel by Ulysses (Jacobs et al., 2023): ranks share the tokens of a row, and where tokens mix the heads.

Rank r of c has the tokens r, c + r, 2 c + r, ... of each row: answers, and so the work of the head, are spread evenly.
Before attention or the delta rule an all-to-all exchanges tokens for heads: each rank then has whole rows of its heads,
and computes with the documents of whole rows what one rank would. Another one brings the outputs back. Weights are
sharded over these ranks as over data-parallel ranks. Each rank has all labels and columns; the losses of tokens are
gathered (model.loss.SharedTokens), so that every objective computes the loss of whole rows, on every rank the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_mi100.config.layout import Layout
from titan_mi100.data.microbatch import TOKENS, Microbatch
from titan_mi100.device.accelerator import to_device
from titan_mi100.device.operators import custom_operator
from titan_mi100.model.decoder import CausalLM
from titan_mi100.model.lora import LoRALinear
from titan_mi100.model.loss import SharedTokens
from titan_mi100.parallel.distributed import named_group, new_groups


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that share the tokens of each row: their number, this one's number, and their group."""

    size: int
    rank: int
    group: dist.ProcessGroup

    def cut(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with this rank's tokens and positions; of the rest the model reads whole rows."""
        cut = {name: microbatch[name][:, self.rank :: self.size].contiguous() for name in (TOKENS, "positions")}
        return {**microbatch, **cut}

    def share(self, supervised: np.ndarray, device: torch.device) -> SharedTokens:
        """Find the supervised tokens that this rank has.

        Args:
            supervised: (n,): their index in the flattened rows, whose length is a multiple of `size`.
        """
        numbers = np.flatnonzero(supervised % self.size == self.rank)
        own = supervised[numbers] // self.size
        if not len(numbers):  # every rank must run the head: on any token, whose loss is not read
            numbers, own = np.array([len(supervised)]), np.zeros(1, np.int64)
        on_device = [to_device(torch.from_numpy(index), device) for index in (supervised, numbers, own)]
        return SharedTokens(on_device[0], on_device[1], on_device[2], self.group)


def context_ranks(mesh: DeviceMesh, layout: Layout) -> ContextRanks | None:
    """This rank's context-parallel group; None: the layout has none. A collective.

    The mesh has no axis for it: FSDP2 shards over dp_shard and these ranks together.
    """
    size, inner = layout.context_ranks, layout.matrix_parts
    if size == 1:
        return None
    groups = np.arange(mesh.size()).reshape(-1, size, inner).swapaxes(1, 2).reshape(-1, size).tolist()
    own = next(ranks for ranks in groups if dist.get_rank() in ranks)
    return ContextRanks(size, own.index(dist.get_rank()), new_groups(groups))


def apply_context_parallel(model: CausalLM, ranks: ContextRanks) -> None:
    """Let the layers exchange tokens for heads around what mixes tokens, in place."""
    for layer in model.model.blocks():
        layer.mix_rows = MixByHeads(ranks)
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.tokens = ranks.rank, ranks.size


class MixByHeads:
    """Replaces decoder.whole_rows."""

    def __init__(self, ranks: ContextRanks) -> None:
        self._ranks = ranks

    def __call__(
        self, mix: Callable[..., Tensor], parts: Sequence[Tensor], by_channel: Sequence[Tensor] = ()
    ) -> Tensor:
        size = self._ranks.size
        by_heads = [self._to_heads(repeated(x, size // x.shape[2]) if x.shape[2] < size else x) for x in parts]
        mixed = mix(*by_heads, *(weight.chunk(size)[self._ranks.rank] for weight in by_channel))
        batch, seq, heads, width = mixed.shape
        shards = exchange(mixed.reshape(batch, seq // size, size, -1), self._ranks.group.group_name)
        return shards.reshape(batch, seq // size, size * heads, width)

    def _to_heads(self, x: Tensor) -> Tensor:
        """Exchange (batch, seq / size, heads, ...) for (batch, seq, heads / size, ...)."""
        (batch, own, heads, *rest), size = x.shape, self._ranks.size
        by_heads = exchange(x.reshape(batch, own, size, -1), self._ranks.group.group_name)
        return by_heads.reshape(batch, own * size, heads // size, *rest)


@custom_operator("titan_mi100::exchange_tokens_for_heads")
def exchange(x: Tensor, group_name: str) -> Tensor:
    """All-to-all: y[:, :, r] of rank s is x[:, :, s] of rank r; (batch, n, ranks, width) -> the same shape.

    The third dimension is the rank for which a part is, of this rank's tokens; or the rank whose token it is, of this
    rank's heads. So the way back is the same, and its backward, too.
    """
    group = named_group(group_name)[0]
    sent = x.permute(2, 0, 1, 3).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.permute(1, 2, 0, 3).contiguous()


@exchange.operator.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return x.new_empty(x.shape)


def _keep_group(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    ctx.group_name = inputs[1]


exchange.differentiable(lambda ctx, gradient: (exchange(gradient, ctx.group_name), None), _keep_group)


def repeated(x: Tensor, copies: int) -> Tensor:
    """Copies of heads of keys or values: (batch, seq, heads, size) -> (batch, seq, heads x copies, size).

    Backward sums their gradients in fp32 or wider and rounds once; that of repeat_interleave may round each time.
    """
    return x[:, :, :, None].expand(-1, -1, -1, copies, -1).flatten(2, 3)
