"""Context parallel by Ulysses (Jacobs et al., 2023): ranks share the tokens of each row, and in what mixes tokens the heads.

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
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from titan_mi100.config.layout import Layout
from titan_mi100.data.microbatch import TOKENS, Microbatch
from titan_mi100.device.accelerator import to_device
from titan_mi100.device.operators import custom_operator
from titan_mi100.model.decoder import CausalLM
from titan_mi100.model.lora import LoRALinear
from titan_mi100.model.loss import SharedTokens
from titan_mi100.parallel.distributed import named_group


@dataclass(frozen=True)
class ContextRanks:
    """The ranks that share the tokens of each row: their number, this one's number, and their group."""

    size: int
    rank: int
    group: dist.ProcessGroup

    def cut(self, microbatch: Microbatch) -> Microbatch:
        """The microbatch with this rank's tokens and positions; the head and the mixing read whole rows of the others."""
        cut = {name: microbatch[name][:, self.rank :: self.size].contiguous() for name in (TOKENS, "positions")}
        return {**microbatch, **cut}

    def share(self, supervised: np.ndarray, device: torch.device) -> SharedTokens:
        """Find the supervised tokens that this rank has.

        Args:
            supervised: (n,): their index in the flattened rows, whose length is a multiple of `size`.
        """
        place = np.flatnonzero(supervised % self.size == self.rank)
        own = supervised[place] // self.size
        if not len(place):  # every rank must run the head: on any token, whose loss is not read
            place, own = np.array([len(supervised)]), np.zeros(1, np.int64)
        every, *of_rank = (to_device(torch.from_numpy(index), device) for index in (supervised, place, own))
        return SharedTokens(every, *of_rank, self.group)


def context_ranks(mesh: DeviceMesh, layout: Layout) -> ContextRanks | None:
    """This rank's context-parallel group; None: the layout has none. A collective.

    The mesh has no axis for it: FSDP2 shards over dp_shard and these ranks together.
    """
    size, inner = layout.context_ranks, layout.matrix_parts
    if size == 1:
        return None
    groups = np.arange(mesh.size()).reshape(-1, size, inner).swapaxes(1, 2).reshape(-1, size).tolist()
    own = next(ranks for ranks in groups if dist.get_rank() in ranks)
    group, _ = dist.new_subgroups_by_enumeration(groups)
    return ContextRanks(size, own.index(dist.get_rank()), group)


def apply_context_parallel(model: CausalLM, ranks: ContextRanks) -> None:
    """Let the layers exchange tokens for heads around what mixes tokens, in place."""
    for layer in model.model.blocks():
        layer.mix_rows = _MixByHeads(ranks)
    for module in model.modules():
        if isinstance(module, LoRALinear):
            module.tokens = ranks.rank, ranks.size


class _MixByHeads:
    """Replaces decoder.whole_rows."""

    def __init__(self, ranks: ContextRanks) -> None:
        self._ranks = ranks

    def __call__(
        self, mix: Callable[..., Tensor], parts: Sequence[Tensor], by_channel: Sequence[Tensor] = ()
    ) -> Tensor:
        size = self._ranks.size
        parts = [_repeated(x, size // x.shape[2]) if x.shape[2] < size else x for x in parts]
        whole = self._to_heads(parts)
        mixed = mix(*whole, *(weight.chunk(size)[self._ranks.rank] for weight in by_channel))
        batch, seq, heads, width = mixed.shape
        shards = exchange(mixed.reshape(batch, seq // size, size, -1), self._ranks.group.group_name)
        return shards.reshape(batch, seq // size, size * heads, width)

    def _to_heads(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Exchange (batch, seq / size, heads, ...) for (batch, seq, heads / size, ...): one all-to-all for each dtype."""
        size, whole = self._ranks.size, dict[int, Tensor]()
        for dtype in dict.fromkeys(x.dtype for x in parts):
            numbers = [number for number, x in enumerate(parts) if x.dtype == dtype]
            flat = [parts[number].reshape(*parts[number].shape[:2], size, -1) for number in numbers]
            received = exchange(torch.cat(flat, -1), self._ranks.group.group_name)
            for number, y in zip(numbers, received.split([x.shape[-1] for x in flat], -1), strict=True):
                batch, own, heads, *rest = parts[number].shape
                whole[number] = y.reshape(batch, own * size, heads // size, *rest)
        return [whole[number] for number in range(len(parts))]


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


class _Repeated(torch.autograd.Function):
    """Copies of heads of keys or values, which are fewer than the ranks; their gradients are summed in fp32 or wider."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int) -> Tensor:  # (batch, seq, heads, size) -> heads x copies
        ctx.copies = copies
        return x.repeat_interleave(copies, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        wide = torch.promote_types(grad.dtype, torch.float32)
        return grad.unflatten(2, (-1, ctx.copies)).sum(3, dtype=wide).to(grad.dtype), None


def _repeated(x: Tensor, copies: int) -> Tensor:
    return _Repeated.apply(x, copies)  # type: ignore[no-any-return]
