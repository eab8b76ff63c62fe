"""A process group without other processes, whose collectives do nothing; and what torch's layouts ask of the others."""

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
    """Be one rank of so many."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def agree(_: Any, stages: Sequence[Any], *others: Any) -> None:
    """In place of a pipeline's vote among its stages (torch 2.13), whose result has no value here."""
    for stage in stages:
        stage._inference_mode = schedules.InferenceMode.STATIC


def answer_ddp(ddp: DistributedDataParallel) -> None:
    """Let DDP work on tensors without values."""
    if not ddp._comm_hooks:  # what it does without one needs the collective's result
        ddp.register_comm_hook(ddp.process_group, _reduce)
    ddp.reducer = _Reducer(ddp.reducer)  # type: ignore[assignment]


def _reduce(group: dist.ProcessGroup, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer(), group=group)
    return noop_hook(group, bucket)


class _Reducer:
    """DDP's reducer. Before the second step it makes other buckets, and sends their sizes, which it reads again."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        with _RealIntegers():
            return self._reducer._rebuild_buckets()


class _RealIntegers(TorchDispatchMode):
    """The integers of 32 bits have values."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtypes = {kwargs.get("dtype"), *(leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor))}
        with unset_fake_temporarily() if torch.int32 in dtypes else nullcontext():
            return function(*args, **kwargs)
