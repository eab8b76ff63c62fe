"""FSDP2 and HSDP, with or without tensor parallel: how weights are sharded, and forward and backward of a step."""

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from titan_mi100.config.layout import Layout
from titan_mi100.config.settings import TrainingConfig
from titan_mi100.model.decoder import CausalLM
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.dtypes import compute_dtype, reduce_dtype


class ShardedModel(ParallelModel):
    """A model that `apply_fsdp` has sharded; tensor parallel may have split its weights before."""

    def __init__(self, model: CausalLM, mesh: DeviceMesh, zero_stage: int, device: torch.device) -> None:
        """Args:
        model: on `device`, parallelised over the mesh (see build.parallelize).
        zero_stage: 1, 2 or 3.
        """
        self.wrapped, self.parts, self.device = model, [model], device
        self._tp, self._zero_stage = mesh["tp"], zero_stage
        self.counts_rows = self.counts_loss = self._tp.get_local_rank() == 0

    @contextmanager
    def _microbatch(self, is_last: bool) -> Iterator[None]:
        begin_microbatch(self.parts, is_last, self._zero_stage)
        yield

    def _after_backward(self) -> None:
        if self.weights_device != self.device:
            # Wait until the gradients have arrived in host memory. torch 2.8 with HSDP waits for the wrong stream.
            torch.get_device_module(self.device).current_stream().synchronize()
        super()._after_backward()

    def _after_evaluation(self) -> None:
        free_gathered(self.parts)


def apply_fsdp(
    model: CausalLM, mesh: DeviceMesh, training: TrainingConfig, layout: Layout, on_host: bool = False
) -> None:
    """Shard over the mesh's dp_shard axis, replicate over dp_replicate (HSDP), and set compute and reduction dtypes.

    Each block is an FSDP group: its weights are gathered together; those that stay in fp32 are another. A tied
    embedding stays in the root's group, because the head reads it outside the embedding's forward. An untied embedding
    and head are groups of their own, so that they are not gathered at the same time.

    Args:
        model: on the meta device; changed in place.
        on_host: weights, gradients and optimizer state are in host memory; a group is copied to the GPU for its use.
    """
    param, reduce = compute_dtype(training), reduce_dtype(training)
    policy = MixedPrecisionPolicy(param, reduce, cast_forward_inputs=False)  # the rotary tables stay fp32
    param, reduce = (torch.promote_types(dtype, torch.float32) for dtype in (param, reduce))
    wide = MixedPrecisionPolicy(param, reduce, cast_forward_inputs=False)
    axes = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
    options: dict[str, Any] = {"mesh": mesh[axes], "mp_policy": policy}
    if on_host:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    reshard = layout.zero_stage == 3
    blocks = model.model.blocks()
    for layer in blocks:
        if layer.in_fp32:
            layer.small = _GatherGroup(layer.get_submodule(name) for name in layer.in_fp32)
            fully_shard(layer.small, reshard_after_forward=False, **{**options, "mp_policy": wide})
            layer.register_forward_pre_hook(lambda layer, _: layer.small())
    for layer in blocks:  # the last block stays gathered after forward: backward needs it first
        ignored = {*layer.fp32_parameters()}  # those of the group above
        is_resharded = reshard and layer is not blocks[-1]
        fully_shard(layer, reshard_after_forward=is_resharded, ignored_params=ignored, **options)
    for before, layer in itertools.pairwise(blocks):  # else the groups above are prefetched, which are here already
        layer.set_modules_to_backward_prefetch([before])  # type: ignore[operator]
    if model.mtp is not None:
        # a CPU's norm returns a view, see elementwise.py; nothing writes into it
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        fully_shard(model.mtp, reshard_after_forward=False, **options)
    if model.lm_head is not None:
        fully_shard(model.lm_head, reshard_after_forward=False, **options)
    if model.model.embed_tokens is not None and model.lm_head is not None:
        fully_shard(model.model.embed_tokens, reshard_after_forward=reshard, **options)
        if model.mtp is not None:  # read last in forward, but needed by no backward
            model.mtp.set_modules_to_backward_prefetch([blocks[-1]])  # type: ignore[operator]
            model.model.embed_tokens.set_modules_to_backward_prefetch([model.model.embed_tokens])  # type: ignore[operator]
    fully_shard(model, reshard_after_forward=False, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sum the gradients, do not average them: the loss is already divided by the step's supervised tokens of
            # all ranks. Both calls are needed: over gloo, an averaging reduce-scatter sums on torch 2.8 and averages
            # on later versions.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def begin_microbatch(parts: Iterable[nn.Module], is_last: bool, zero_stage: int) -> None:
    """Say what the next backward does. ZeRO-1 reduces gradients once, after the last microbatch; ZeRO-2 and 3 reduce
    them after each microbatch. Only ZeRO-3 frees the gathered weights between microbatches and gathers them again.
    """
    for part in parts:
        if isinstance(part, FSDPModule):
            part.set_requires_gradient_sync(is_last or zero_stage > 1)
            part.set_reshard_after_backward(is_last or zero_stage == 3)
            part.set_requires_all_reduce(is_last)  # HSDP: the replicas sum once per step


class _GatherGroup(nn.Module):
    """Weights that FSDP2 gathers as one group when this is called; they stay gathered until backward is done. If the
    modules themselves were the group, their hooks would gather, inside of the block's compiled graph.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, module in enumerate(modules):  # FSDP2 of torch 2.8 takes no ModuleList
            self.add_module(str(number), module)

    def forward(self) -> None:
        pass


def free_gathered(parts: Sequence[nn.Module]) -> None:
    """Free weights that a forward without backward left gathered. They would be stale after the next step."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
