"""One data-parallel rank: nobody to share weights with, so no wrapper that would gather, copy or reduce them."""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_mi100.data.loader import Microbatch
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.tensor_parallel import sum_replicated_gradients


class AloneModel(ParallelModel):
    """The whole model, or a tensor-parallel part of it. Mixed precision as under DDP: fp32 weights, cast where they are
    used (layers.local_weight), and fp32 gradients.
    """

    def __init__(self, model: Qwen3, mesh: DeviceMesh, device: torch.device, is_gpu: bool) -> None:
        """Args: model: on `device`, see build.parallelize."""
        self.parts, self.device, self._tp = [model], device, mesh["tp"]
        self.counts_rows = self.counts_loss = self._tp.get_local_rank() == 0
        self._tied: TiedRows | None = None
        embedding = model.model.embed_tokens
        is_plain = not is_gpu and self._tp.size() == 1
        if is_plain and model.lm_head is None and embedding is not None and embedding.weight.requires_grad:
            self._tied = TiedRows(embedding)

    def forward_backward(self, microbatches: Sequence[Microbatch], weight: float) -> Tensor:
        losses = []
        for microbatch in microbatches:
            loss = self.parts[0](**self._on_device(microbatch))
            (loss * weight).sum().backward()
            if self._tied:
                self._tied.add()
            losses.append(loss.detach().double())
        sum_replicated_gradients(self.parts, self._tp)
        return self._counted_once(torch.cat(losses))


class TiedRows:
    """Keeps the gradient of the embedding's few rows apart from that of the head, which has the same weight.

    Autograd would write both into tables as large as the vocabulary, of which the embedding's is nearly all zeros. Only
    on a CPU: a GPU would add equal rows in any order.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        """Let the embedding look up in the same memory, but for autograd in another leaf."""
        self._weight = embedding.weight
        self._rows = embedding.weight.detach().requires_grad_()
        embedding.forward = functools.partial(  # type: ignore[method-assign]
            F.embedding, weight=self._rows, padding_idx=embedding.padding_idx, sparse=True
        )

    def add(self) -> None:
        """After a backward: to the head's gradient."""
        assert self._weight.grad is not None and self._rows.grad is not None
        self._weight.grad += self._rows.grad
        self._rows.grad = None
