"""FSDP2, HSDP, and tensor parallel below them: how weights are sharded, and the step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from titan_mi100.config.layout import Layout
from titan_mi100.config.settings import TrainingConfig
from titan_mi100.data.loader import Microbatch
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.dtypes import reduce_dtype
from titan_mi100.parallel.tensor_parallel import sum_replicated_gradients


class ShardedModel(ParallelModel):
    """FSDP2, HSDP, and tensor parallel below them."""

    def __init__(self, model: Qwen3, mesh: DeviceMesh, zero_stage: int, device: torch.device) -> None:
        """Args: model: on `device`, parallelised over the mesh (see build.parallelize)."""
        self.parts, self.device = [model], device
        self._model: Any = model  # with FSDPModule's methods
        self._tp, self._zero_stage = mesh["tp"], zero_stage
        self.counts_rows = self.counts_loss = self._tp.get_local_rank() == 0

    def forward_backward(self, microbatches: Sequence[Microbatch], weight: float) -> Tensor:
        losses = []
        for number, microbatch in enumerate(microbatches, start=1):
            is_last = number == len(microbatches)
            # ZeRO-1 sums the step's gradients before they are reduced, ZeRO-2 and 3 reduce after each forward. The
            # weights are gathered anew for each forward by ZeRO-3 only.
            self._model.set_requires_gradient_sync(is_last or self._zero_stage > 1)
            self._model.set_reshard_after_backward(is_last or self._zero_stage == 3)
            self._model.set_requires_all_reduce(is_last)  # among replicas: once is enough
            loss = self._model(**self._on_device(microbatch))
            (loss * weight).sum().backward()
            losses.append(loss.detach().double())
        if self.weights_device != self.device:
            # Gradients have then arrived. Under HSDP torch 2.8 waits for an event of another stream.
            torch.get_device_module(self.device).current_stream().synchronize()
        sum_replicated_gradients(self.parts, self._tp)
        return self._counted_once(torch.cat(losses))

    def _after_evaluation(self) -> None:
        free_gathered(self.parts)


def apply_fsdp(model: Qwen3, mesh: DeviceMesh, training: TrainingConfig, layout: Layout, on_host: bool = False) -> None:
    """Shard over the mesh's dp_shard axis, replicate over dp_replicate if it has several, and set the compute
    and reduction dtypes.

    Each block is a group. A tied embedding stays in the root's group, because the head reads it outside the
    embedding's forward; an untied embedding and head are groups of their own, so that they are not gathered together.

    Args:
        on_host: weights, gradients and optimizer state live there; each group comes to the device when it is used.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=reduce_dtype(training),
        cast_forward_inputs=False,  # the rotary tables stay fp32
    )
    axes = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
    options: dict[str, Any] = {"mesh": mesh[axes], "mp_policy": policy}
    if on_host:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    reshard = layout.zero_stage == 3
    blocks = model.model.blocks()
    for layer in blocks:  # backward needs the last block first: it stays gathered
        fully_shard(layer, reshard_after_forward=reshard and layer is not blocks[-1], **options)
    if model.lm_head is not None:
        fully_shard(model.lm_head, reshard_after_forward=False, **options)
    if model.model.embed_tokens is not None and model.lm_head is not None:
        fully_shard(model.model.embed_tokens, reshard_after_forward=reshard, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the whole step's supervised tokens: gradients are summed, never averaged.
            # Both calls: on torch 2.8 over gloo the averaging reduce-scatter sums, on later ones it averages.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def free_gathered(parts: Sequence[nn.Module]) -> None:
    """Free weights that a forward without backward left gathered: they would be stale after the next step."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
