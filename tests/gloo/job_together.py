"""Runs under torchrun: a mistake that only one rank sees ends all ranks alike. Argument: output folder."""

import sys
import time
from pathlib import Path

import torch.distributed as dist

from titan_mi100.errors import UserError
from titan_mi100.parallel import distributed


def fail_on(rank: int, here: int) -> str:
    try:
        with distributed.raise_together():
            if here == rank:
                raise UserError(f"rank {rank} has no such file")
    except UserError as error:
        return str(error)
    return "nothing"


def fail_on_rank_zero() -> str:
    def make() -> str:
        raise UserError("cannot be made")

    try:
        return distributed.from_rank_zero(make)
    except UserError as error:
        return str(error)


def crash_on_rank_zero(here: int) -> str:
    try:
        with distributed.raise_together():
            if here == 0:
                raise KeyError("a bug")
    except (KeyError, RuntimeError) as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


def meet_late(late: int, here: int) -> str:
    if here == late:
        time.sleep(0.5)
    arrived = time.monotonic()  # one clock for all processes of a machine
    distributed.wait_for_all()
    left, arrivals = time.monotonic(), [0.0] * dist.get_world_size()
    dist.all_gather_object(arrivals, arrived)
    return "met" if left >= max(arrivals) else "did not wait"


if __name__ == "__main__":
    world = distributed.init_distributed()
    said = [fail_on(rank, world.rank) for rank in (0, 1, 2)]
    said += [distributed.from_rank_zero(lambda: f"made by {world.rank}"), fail_on_rank_zero()]
    said += [crash_on_rank_zero(world.rank), meet_late(0, world.rank), meet_late(1, world.rank)]
    said += [str(distributed.sum_over_ranks([world.rank + 0.5, 2**53 - 1], world.device))]
    (Path(sys.argv[1]) / f"{world.rank}.txt").write_text("\n".join(said))
    distributed.exit_process(0)
