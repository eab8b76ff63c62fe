"""A fake process group without other processes: collectives do nothing. It also patches torch's DDP and pipeline code
that needs real answers from the other ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def group(rank: int, ranks: int) -> Iterator[None]:
    """Context: this process is one rank of a fake process group of `ranks` ranks."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def agree(_: Any, stages: Sequence[Any], *others: Any) -> None:
    """Replace the vote among pipeline stages (torch 2.13): its result would be a fake tensor without a value."""
    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC


def patch_ddp(ddp: DistributedDataParallel) -> None:
    """Patch a DDP wrapper so that it works on tensors without values."""
    if not ddp._comm_hooks:  # DDP's built-in reduction needs the collective's result; a hook does not
        ddp.register_comm_hook(ddp.process_group, _reduce)
    ddp.reducer = _Reducer(ddp.reducer)  # type: ignore[assignment]


def _reduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer(), group=group)
    return noop_hook(group, bucket)


class _Reducer:
    """Wraps DDP's reducer. Before the second step it rebuilds its buckets and broadcasts their sizes as int32 tensors,
    whose values it reads.
    """

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        with _RealIntegers():
            return self._reducer._rebuild_buckets()


class _RealIntegers(TorchDispatchMode):
    """Run operations on int32 tensors for real, not on fake tensors."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtypes = {kwargs.get("dtype"), *(leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor))}
        with unset_fake_temporarily() if torch.int32 in dtypes else nullcontext():
            return function(*args, **kwargs)
