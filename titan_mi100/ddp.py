"""DDP: every rank holds the whole model; gradients are summed once per step, whole or compressed (PowerSGD)."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from titan_mi100.data.loader import Microbatch
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.parallelize import ParallelModel, apply_activation_checkpointing, apply_compile, master_dtype
from titan_mi100.settings import Config


class ReplicatedModel(ParallelModel):
    """DDP with its own mixed precision: fp32 weights, cast where they are used (qwen3.held); gradients in fp32."""

    def __init__(self, model: Qwen3, mesh: DeviceMesh, config: Config, device: torch.device) -> None:
        """Wrap a model that is on the meta device."""
        model.to(master_dtype(config.training))
        model.model.dtype = getattr(torch, config.training.mixed_precision_param)
        apply_compile(model, config.compile)
        apply_activation_checkpointing(model, config.activation_checkpoint.mode)
        model.to_empty(device=device)
        self.parts, self.device = [model], device
        self._world_size = mesh.size()
        self._ddp = DistributedDataParallel(
            model,
            process_group=mesh["dp_replicate"].get_group(),
            init_sync=False,  # the weights are filled in later, alike on all ranks
            gradient_as_bucket_view=True,
        )

    def forward_backward(self, microbatches: Sequence[Microbatch], supervised: int) -> Tensor:
        loss_sum = torch.zeros(1, dtype=torch.float64, device=self.device)
        for number, microbatch in enumerate(microbatches, start=1):
            is_last = number == len(microbatches)
            with nullcontext() if is_last else self._ddp.no_sync():
                loss = self._ddp(**self._on_device(microbatch))
                # DDP averages over its ranks by construction; the loss is divided by all that they have together
                (loss * (self._world_size / max(supervised, 1))).sum().backward()
            loss_sum += loss.detach()
        return loss_sum

    @torch.no_grad()
    def evaluate(self, microbatches: Iterator[Microbatch]) -> Tensor:
        loss_sum = torch.zeros(1, dtype=torch.float64, device=self.device)
        for microbatch in microbatches:
            loss_sum += self.parts[0](**self._on_device(microbatch))
        return loss_sum
