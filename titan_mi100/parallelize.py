"""How the model is wrapped: activation checkpointing, then compile, then FSDP2. No wrapper changes a parameter's name.

The order: checkpointing inside compile (torch 2.8 cannot do it the other way round), and both inside FSDP2, whose
gather and free must surround everything that reads the weights, the recomputation included.
"""

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titan_mi100.config import CompileConfig, ParallelismConfig, TrainingConfig
from titan_mi100.model.qwen3 import Qwen3

# What selective checkpointing keeps. Attention without a fused kernel is not among them: its scores are S x S.
_ATTENTION_KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}


def apply_activation_checkpointing(model: Qwen3, mode: str) -> None:
    """Let each block recompute its activations in backward: `full`, or `selective` (all but what _policy keeps)."""
    if mode == "none":
        return
    # nothing in a block is random, so no RNG state needs to be kept for the second run
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = _selective_contexts
    for layer in model.model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, **options)  # type: ignore[method-assign]


def _selective_contexts() -> tuple[Any, Any]:
    """Keep the attention kernels' outputs and every second matmul's; recompute the cheap rest and the other matmuls."""
    seen = {False: 0, True: 0}  # matmuls so far, in forward and in recomputation

    def policy(ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if func in _ATTENTION_KERNELS:
            return CheckpointPolicy.MUST_SAVE
        if func == torch.ops.aten.mm.default:
            seen[ctx.is_recompute] += 1
            if seen[ctx.is_recompute] % 2 == 1:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_compile(model: Qwen3, config: CompileConfig) -> None:
    """Compile each block's forward; the blocks are alike, so they share what is compiled."""
    if config.enable:
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward, backend=config.backend)  # type: ignore[method-assign]


def apply_fsdp(model: Qwen3, mesh: DeviceMesh, training: TrainingConfig, parallelism: ParallelismConfig) -> None:
    """Shard over the mesh's dp_shard axis and set the compute and reduction dtypes, also when that axis is one rank.

    Each block is a group. A tied embedding stays in the root's group, because the head reads it outside the
    embedding's forward; an untied embedding and head are groups of their own, so that they are not gathered together.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,  # the rotary tables stay fp32
    )
    options: dict[str, Any] = {"mesh": mesh["dp_shard"], "mp_policy": policy}
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
    apply_activation_checkpointing(model, activation_checkpoint_mode)
    apply_compile(model, compile_config)
    apply_fsdp(model, mesh, training, parallelism)


def free_gathered(model: nn.Module) -> None:
    """Free weights that a forward without backward left gathered: they would be stale after the next step."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
