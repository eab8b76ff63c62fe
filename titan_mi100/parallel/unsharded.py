"""The layout with one data-parallel rank: no FSDP2 or DDP wrapper, because there is nothing to gather or reduce."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from titan_mi100.model.decoder import CausalLM
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.offload import HostGradients


class UnshardedModel(ParallelModel):
    """The full model, or a tensor-parallel shard of it.

    Mixed precision as under DDP: fp32 weights that are cast where they are used (layers.local_weight), fp32 gradients.
    """

    def __init__(self, model: CausalLM, mesh: DeviceMesh, device: torch.device, is_gpu: bool) -> None:
        """Args:
        model: on `device`, see build.parallelize.
        is_gpu: train as on a GPU, without TiedRows.
        """
        self.wrapped, self.parts, self.device, self._tp = model, [model], device, mesh["tp"]
        self.is_whole = self._tp.size() == 1
        self.counts_rows = self.counts_loss = self._tp.get_local_rank() == 0
        self._tied: TiedRows | None = None
        embedding = model.model.embed_tokens
        is_plain = not is_gpu and self._tp.size() == 1
        if is_plain and model.lm_head is None and embedding is not None and embedding.weight.requires_grad:
            self._tied = TiedRows(embedding)

    @contextmanager
    def _microbatch(self, is_last: bool) -> Iterator[None]:
        yield
        if self._tied:
            self._tied.add(self.host_gradients)


class TiedRows:
    """Computes a tied embedding's gradient as a sparse tensor, separate from the head's gradient of the same weight.

    Autograd alone would build two dense gradients of (vocabulary, hidden), and the embedding's is nearly all zeros.
    Only on a CPU: a GPU adds repeated rows in an undefined order, so runs would not repeat.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        """Make the embedding read a second autograd leaf that shares the weight's memory."""
        self._weight: Any = embedding.weight
        self._rows = embedding.weight.detach().requires_grad_()
        embedding.forward = functools.partial(  # type: ignore[method-assign]
            F.embedding, weight=self._rows, padding_idx=embedding.padding_idx, sparse=True
        )

    def add(self, on_host: HostGradients | None) -> None:
        """Add the sparse gradient to the head's, which may be in `on_host`. Call it after each backward."""
        assert self._rows.grad is not None
        if on_host is not None:
            on_host.add_rows(self._weight, self._rows.grad)
        else:
            self._weight.grad += self._rows.grad
        self._rows.grad = None
