"""Runs under torchrun: a run's second step for each case, in which this rank's process groups note what they are told.

A process group of ours stands around gloo's: it sees the calls of Python and of C++ (DDP's reducer) alike, below
anything that counts operators. Arguments: input file (cases), folder for the ranks' output files.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gloo.job_parity import config_of
from packed_rows import packed
from torch.utils._pytree import tree_leaves

from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.workshop.made_up import made_up

# method -> the operation, and which argument has all bytes of it
METHODS = {
    "allreduce": ("all-reduce", 0),
    "allgather": ("all-gather", 0),
    "_allgather_base": ("all-gather", 0),
    "all_gather_single": ("all-gather", 0),
    "_reduce_scatter_base": ("reduce-scatter", 1),
    "reduce_scatter_single": ("reduce-scatter", 1),
    "broadcast": ("broadcast", 0),
    "send": ("send", 0),
    "recv": ("receive", 0),
    "barrier": ("barrier", None),
    "alltoall_base": ("all-to-all", 1),
}
FOUND: Counter[tuple[str, tuple[int, ...], int]] = Counter()  # (operation, ranks, bytes)


class Noting(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, ranks: list[int], timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.ranks = tuple(ranks)

    def getBackendName(self) -> str:
        return "noting"

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name


def noting(name: str) -> Any:
    operation, place = METHODS[name]

    def method(self: Noting, *arguments: Any, **options: Any) -> Any:
        tensors = [] if place is None else tree_leaves(arguments[place])
        FOUND[operation, self.ranks, sum(t.numel() * t.element_size() for t in tensors)] += 1
        plain = (
            name
            if hasattr(self.gloo, name)
            else {"all_gather_single": "_allgather_base"}.get(name, "_reduce_scatter_base")
        )
        return getattr(self.gloo, plain)(*arguments, **options)

    return method


for each in METHODS:
    setattr(Noting, each, noting(each))


def make(options: Any, _: Any) -> Noting:
    ranks = options.global_ranks_in_group or list(range(options.group_size))
    return Noting(options.store, options.group_rank, options.group_size, ranks, options.timeout)


def second_step(world: World, case: dict) -> Counter[tuple[str, tuple[int, ...], int]]:
    config = config_of(case, case["split"])
    run = open_run(config, world, spec=case["spec"], data=made_up(packed(case["documents"], config.training.seq_len)))
    run.step()
    FOUND.clear()
    run.step()
    return Counter({key: count for key, count in FOUND.items() if len(key[1]) > 1})


if __name__ == "__main__":
    dist.Backend.register_backend("noting", make, extended_api=True, devices=["cpu"])
    dist.init_process_group("noting")
    here = World(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    job = torch.load(sys.argv[1], weights_only=False)
    results = [second_step(here, case) for case in job]
    torch.save(results, Path(sys.argv[2]) / f"rank-{here.rank}.pt")
    distributed.exit_process(0)
