"""The model as a layout runs it: how a part of it is wrapped, and the step of FSDP2, HSDP and tensor parallel.

The order of wrapping: tensor parallel; compile; activation checkpointing around what is compiled, because the compiled
parts are then alike in all blocks and compiled once; FSDP2 around all, whose gather and free must surround whatever
reads the weights, the recomputation included. No wrapper changes a parameter's name.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from titan_mi100.data.loader import Microbatch
from titan_mi100.layout import Layout
from titan_mi100.model.inputs import model_inputs, read_on_host
from titan_mi100.model.lora import apply_lora
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.settings import CompileConfig, Config, TrainingConfig
from titan_mi100.tensor_parallel import apply_tensor_parallel, sum_replicated_gradients


class ParallelModel(ABC):
    """What this rank holds of the model, and how it goes through a step with the others.

    Attributes:
        parts: the model, or this rank's pipeline stages; materialised, values to be filled in.
        gradient_bytes: of gradients that this rank gave to collectives in the last step; None: not counted.
        has_memory: whether a resume needs communication_state back.
    """

    parts: list[Qwen3]
    device: torch.device
    gradient_bytes: int | None = None
    has_memory = False

    @abstractmethod
    def forward_backward(self, microbatches: Sequence[Microbatch], supervised: int) -> Tensor:
        """Leave the gradient of (summed loss / supervised), summed over all ranks, in every parameter's `grad`.

        Args:
            supervised: supervised tokens of the whole step, over all ranks.

        Returns:
            The microbatches' summed losses on this rank, (microbatches,) fp64: every rank of a tensor-parallel group
            has the whole of them, and in a pipeline only the last stage has any, the others zeros.
        """

    @torch.no_grad()
    def evaluate(self, microbatches: Iterator[Microbatch]) -> Tensor:
        """The loss summed over the microbatches, (1,) fp64, without gradients; where forward_backward has losses."""
        loss_sum = torch.zeros(1, dtype=torch.float64, device=self.device)
        with without_dropout(self.parts):
            for microbatch in microbatches:
                loss_sum += self.parts[0](**self._on_device(microbatch))
        free_gathered(self.parts)
        return loss_sum

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter that this rank holds, by its HF name."""
        for part in self.parts:
            yield from part.named_parameters()

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of them that are not frozen: of the optimizer, the gradient norm and the checkpoints."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def communication_state(self) -> dict[str, Tensor]:
        """What the reduction of gradients carries from step to step, by name: this rank's own, for the checkpoint."""
        return {}

    def resume(self, step: int, communication: dict[str, Tensor]) -> None:  # noqa: B027  # most layouts carry nothing
        """Go on after this step of the run.

        Args:
            communication: what communication_state gave this rank then; empty if a layout without it, or as many ranks,
                made the checkpoint. Only where has_memory.
        """

    def copies(self) -> list[nn.Parameter]:
        """Parameters that are held elsewhere too, and are not to be counted here: a pipeline's second tied copy."""
        return []

    def _on_device(self, microbatch: Microbatch) -> Microbatch:
        return model_inputs(microbatch, self.device)


class ShardedModel(ParallelModel):
    """FSDP2, HSDP, and tensor parallel below them."""

    def __init__(self, model: Qwen3, mesh: DeviceMesh, config: Config, layout: Layout, device: torch.device) -> None:
        """Wrap a model that is on the meta device."""
        wrap(model, mesh, config, layout, device)
        model.to_empty(device=device)
        self.parts, self.device = [model], device
        self._model: Any = model  # with FSDPModule's methods
        self._tp, self._zero_stage = mesh["tp"], layout.zero_stage

    def forward_backward(self, microbatches: Sequence[Microbatch], supervised: int) -> Tensor:
        losses = []
        for number, microbatch in enumerate(microbatches, start=1):
            is_last = number == len(microbatches)
            # ZeRO-1 sums the step's gradients before they are reduced, ZeRO-2 and 3 reduce after each forward. The
            # weights are gathered anew for each forward by ZeRO-3 only.
            self._model.set_requires_gradient_sync(is_last or self._zero_stage > 1)
            self._model.set_reshard_after_backward(is_last or self._zero_stage == 3)
            self._model.set_requires_all_reduce(is_last)  # among replicas: once is enough
            loss = self._model(**self._on_device(microbatch))
            (loss / max(supervised, 1)).sum().backward()
            losses.append(loss.detach().double())
        sum_replicated_gradients(self.parts, self._tp)
        return torch.cat(losses)


def wrap(model: Qwen3, mesh: DeviceMesh, config: Config, layout: Layout, device: torch.device) -> None:
    """Wrap a model, or a pipeline stage of one, that is on the meta device, in place."""
    prepare(model, config)
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh["tp"])
    apply_compile(model, config.compile)
    apply_activation_checkpointing(model, config.activation_checkpoint.mode, is_random=config.lora.dropout > 0)
    apply_fsdp(model, mesh, config.training, layout)
    read_on_host(model, device)  # last: its hook must run before FSDP2's


def prepare(model: Qwen3, config: Config) -> None:
    """Add LoRA's adapters, and give what is trained the masters' dtype, what is frozen the computation's."""
    if config.lora.rank:
        apply_lora(model, config.lora)
    for parameter in model.parameters():
        frozen = getattr(torch, config.training.mixed_precision_param)
        parameter.data = parameter.data.to(master_dtype(config.training) if parameter.requires_grad else frozen)


def master_dtype(training: TrainingConfig) -> torch.dtype:
    """Of weights and optimizer state: float32, or float64 where the computation is that."""
    return torch.promote_types(getattr(torch, training.mixed_precision_param), torch.float32)


def apply_compile(model: Qwen3, config: CompileConfig) -> None:
    """Compile what lies before and after attention in each block; the blocks are alike, so they share the result."""
    if config.enable:
        for layer in model.model.blocks():
            for name in ("before_attention", "after_attention"):
                setattr(layer, name, torch.compile(getattr(layer, name), backend=config.backend, fullgraph=True))


def apply_activation_checkpointing(model: Qwen3, mode: str, is_random: bool) -> None:
    """Let each block recompute its activations in backward: `full`, all of it; `selective`, all but attention.

    Args:
        is_random: there is dropout, and the second run must draw what the first did.
    """
    parts = {"none": (), "selective": ("before_attention", "after_attention"), "full": ("forward",)}[mode]
    for layer in model.model.blocks():
        for name in parts:
            plain = getattr(layer, name)
            again = functools.partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=is_random)
            setattr(layer, name, again)


def apply_fsdp(model: Qwen3, mesh: DeviceMesh, training: TrainingConfig, layout: Layout) -> None:
    """Shard over the mesh's dp_shard axis, also when that is one rank, replicate over dp_replicate if it has more, and
    set the compute and reduction dtypes.

    Each block is a group. A tied embedding stays in the root's group, because the head reads it outside the
    embedding's forward; an untied embedding and head are groups of their own, so that they are not gathered together.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=reduce_dtype(training),
        cast_forward_inputs=False,  # the rotary tables stay fp32
    )
    axes = ("dp_replicate", "dp_shard") if layout.dp_replicate > 1 else ("dp_shard",)
    options: dict[str, Any] = {"mesh": mesh[axes], "mp_policy": policy}
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


def reduce_dtype(training: TrainingConfig) -> torch.dtype:
    """In which gradients are reduced: as configured, but float64 where the computation is that, for checks in it must
    not lose digits.
    """
    least = torch.float64 if training.mixed_precision_param == "float64" else torch.bfloat16
    return torch.promote_types(getattr(torch, training.mixed_precision_reduce), least)


def free_gathered(parts: Sequence[nn.Module]) -> None:
    """Free weights that a forward without backward left gathered: they would be stale after the next step."""
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


@contextmanager
def without_dropout(parts: Sequence[nn.Module]) -> Iterator[None]:
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for part in parts:
            part.train()
