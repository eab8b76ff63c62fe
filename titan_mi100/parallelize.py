"""How the model is wrapped: compile, then activation checkpointing, then FSDP2. No wrapper changes a parameter's name.

The order: checkpointing around what is compiled, because the compiled parts are then alike in all blocks and compiled
once; both inside FSDP2, whose gather and free must surround all that reads the weights, the recomputation included.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.settings import CompileConfig, ParallelismConfig, TrainingConfig


def apply_compile(model: Qwen3, config: CompileConfig) -> None:
    """Compile what lies before and after attention in each block; the blocks are alike, so they share the result."""
    if config.enable:
        for layer in model.model.layers:
            for name in ("before_attention", "after_attention"):
                setattr(layer, name, torch.compile(getattr(layer, name), backend=config.backend, fullgraph=True))


def apply_activation_checkpointing(model: Qwen3, mode: str) -> None:
    """Let each block recompute its activations in backward: `full`, all of it; `selective`, all but attention."""
    parts = {"none": (), "selective": ("before_attention", "after_attention"), "full": ("forward",)}[mode]
    for layer in model.model.layers:
        for name in parts:
            # nothing in a block is random, so no RNG state needs to be kept for the second run
            again = functools.partial(checkpoint, getattr(layer, name), use_reentrant=False, preserve_rng_state=False)
            setattr(layer, name, again)


def apply_fsdp(model: Qwen3, mesh: DeviceMesh, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    """Shard over the mesh's dp_shard axis, also when that is one rank, replicate over dp_replicate if it has one, and
    set the compute and reduction dtypes.

    Each block is a group. A tied embedding stays in the root's group, because the head reads it outside the
    embedding's forward; an untied embedding and head are groups of their own, so that they are not gathered together.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,  # the rotary tables stay fp32
    )
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
    setting = parallelism.fsdp_reshard_after_forward
    blocks = list(model.model.layers)
    for layer in blocks:
        reshard = setting != "never" and not (setting == "default" and layer is blocks[-1])
        fully_shard(layer, reshard_after_forward=reshard, **options)
    if model.lm_head is not None:
        fully_shard(model.model.embed_tokens, reshard_after_forward=setting != "never", **options)
        fully_shard(model.lm_head, reshard_after_forward=setting == "always", **options)
    fully_shard(model, reshard_after_forward=setting == "always" and model.lm_head is not None, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is already divided by the whole step's supervised tokens: gradients are summed, never averaged.
            # Both calls: on torch 2.8 over gloo the averaging reduce-scatter sums, on later ones it averages.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def parallelize(
    model: Qwen3,
    mesh: DeviceMesh,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    activation_checkpoint_mode: str,
    compile_config: CompileConfig,
) -> None:
    """Wrap a model that is on the meta device, in place."""
    apply_compile(model, compile_config)
    apply_activation_checkpointing(model, activation_checkpoint_mode)
    apply_fsdp(model, mesh, training, parallelism)


def free_gathered(model: nn.Module) -> None:
    """Free weights that a forward without backward left gathered: they would be stale after the next step."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
