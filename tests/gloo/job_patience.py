"""Runs under torchrun: time-outs after the first step. Prints how long rank 0 waited for rank 1 in which group."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_mi100.parallel import distributed

distributed._RUNNING = timedelta(seconds=1)
world = distributed.init_distributed()
mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
group = dist.new_group([0, 1], timeout=timedelta(minutes=30))
patience = distributed.CollectiveTimeouts(mesh, is_watched=False)
patience._groups = [group]  # where an axis is the whole world, torch 2.13 takes the default group for it
patience.after_step(1, None)
patience.after_step(2, None)
if world.rank == 1:
    time.sleep(4)
began = time.monotonic()
try:
    dist.all_reduce(torch.ones(1), group=group)
except RuntimeError as error:
    what = "gave up" if distributed.is_about_a_lost_process(error) else repr(error)
    print(f"rank {world.rank} {what} after {time.monotonic() - began:.1f} s", flush=True)
os._exit(0)
