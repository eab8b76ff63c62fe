"""Runs under torchrun, with Triton's interpreter: the head's loss by our kernels, each rank with a shard of the
vocabulary, against fp64."""

import torch
import torch.distributed as dist
from test_fused_head import BARS, VOCABULARY, assert_near, case, in_fp64

from titan_mi100.model import loss
from titan_mi100.model.fused.running import only
from titan_mi100.parallel import distributed


def sharded(world: distributed.World, k: int, kept: int) -> None:
    hidden, weight, ids, factors = tensors = case(7, k, torch.bfloat16)
    group, columns = dist.new_group(list(range(world.size))), VOCABULARY // world.size
    shard = slice(columns * world.rank, columns * (world.rank + 1))
    leaves = hidden.clone().requires_grad_(), weight[shard].clone().requires_grad_()
    with only(["head"]):
        targets = loss.Targets(torch.arange(len(hidden)), ids)
        losses, best, _ = loss.token_losses(leaves[0][None], leaves[1], targets, group, loss.HeadMemory(1, kept))
    of_hidden, of_weight = torch.autograd.grad((losses * factors).sum(), leaves)
    summed = of_hidden.float()
    dist.all_reduce(summed, group=group)
    expected = in_fp64(tensors)
    assert_near([losses.detach(), best, summed, of_weight], [*expected[:3], expected[3][shard]], BARS[torch.bfloat16])


if __name__ == "__main__":
    here = distributed.init_distributed()
    for k in (1, 3):
        for kept in (0, 1 << 25):
            sharded(here, k, kept)
    distributed.exit_process(0)
