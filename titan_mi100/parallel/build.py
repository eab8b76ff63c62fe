"""Builds the model of a run in its layout: which wrappers, in which order, and why."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from titan_mi100.attention.base import Backend
from titan_mi100.config.layout import SCHEDULES, Layout, Stage, stages_of
from titan_mi100.config.settings import CompileConfig, Config, MemoryConfig
from titan_mi100.log import log
from titan_mi100.model.decoder import CausalLM
from titan_mi100.model.experts import choose_products
from titan_mi100.model.families import MODELS
from titan_mi100.model.lora import apply_lora
from titan_mi100.model.loss import HeadMemory
from titan_mi100.objectives.base import Objective
from titan_mi100.objectives.sft import SFT
from titan_mi100.parallel.base import ParallelModel, read_on_host
from titan_mi100.parallel.context_parallel import ContextRanks, apply_context_parallel, context_ranks
from titan_mi100.parallel.ddp import ReplicatedModel
from titan_mi100.parallel.dtypes import compute_dtype, master_dtype
from titan_mi100.parallel.fsdp import ShardedModel, apply_fsdp
from titan_mi100.parallel.offload import HostGradients, inputs_on_host
from titan_mi100.parallel.tensor_parallel import apply_tensor_parallel
from titan_mi100.parallel.unsharded import UnshardedModel
from titan_mi100.planning.memory import piece_tokens, shares_copies
from titan_mi100.planning.workload import Workload


@dataclass(frozen=True)
class Computation:
    """Attention, loss and objective that a model computes."""

    backend: Backend  # of attention
    head: HeadMemory  # memory of the loss
    objective: Objective = SFT  # what is learned


class Placement:
    """The device of this rank, with its memory in bytes (0: not limited), and its mesh (see distributed.build_mesh)."""

    def __init__(self, mesh: DeviceMesh, device: torch.device, memory: int = 0) -> None:
        self.mesh, self.device, self.memory = mesh, device, memory

    @property
    def is_gpu(self) -> bool:
        """Whether to work as on a GPU."""
        return self.device.type != "cpu"

    def put(self, build: Callable[[], CausalLM], weights: torch.device, dtype: torch.dtype) -> CausalLM:
        """Build a part on the meta device and put it on its device, not initialised.

        Args:
            weights: where the weights are. dtype: of the computation.
        """
        model = build().to_empty(device=weights)
        choose_products(model, dtype, self.device)
        return model


def build_model(
    workload: Workload, computation: Computation, placement: Placement, layers: Sequence[int] = ()
) -> ParallelModel:
    """Build the model in its layout, on this rank's device. The weights are not initialised.

    Args:
        layers: of each pipeline stage, see layers_per_stage; empty without a pipeline.
    """
    config, spec, layout, batch = workload.config, workload.spec, workload.layout, workload.batch
    mesh, device, objective, head_memory = placement.mesh, placement.device, computation.objective, computation.head
    if layout.is_pipeline and SCHEDULES[config.parallelism.pipeline_parallel_schedule].forwards_first:
        # the kept logits of all microbatches exist at once
        kept = head_memory.kept_elements // batch.gradient_accumulation_steps
        head_memory = replace(head_memory, kept_elements=kept)
    loss, piece = functools.partial(objective, memory=head_memory), piece_tokens(workload, placement.memory)
    context = context_ranks(mesh, layout)
    if piece:
        log.info(f"MLPs and norms compute {piece:,} tokens at a time (memory.piece_tokens)")

    def build(stage: Stage | None) -> CausalLM:
        with torch.device("meta"):
            model = MODELS[spec.model_type](spec, computation.backend, stage)
        model.head_loss, model.columns, model.draft = loss, objective.columns, config.draft_head.train
        parallelize(model, config, layout, mesh, context)
        for module in model.modules():
            if hasattr(module, "piece_tokens"):
                module.piece_tokens = piece  # type: ignore[assignment]
        # last: a hook prepended later runs first, and this one must run before FSDP2's
        read_on_host(model, device, context)
        return model

    def part(stage: Stage | None = None) -> CausalLM:
        weights = torch.device("cpu") if config.memory.offload == "weights" else device
        return placement.put(lambda: build(stage), weights, compute_dtype(config.training))

    model: ParallelModel
    if layout.is_pipeline:
        from titan_mi100.parallel.pipeline import PipelinedModel  # half a second; other layouts skip it

        model = PipelinedModel(part, workload, stages_of(layers), mesh, device, objective)
    elif layout.zero_stage == 0:
        model = ReplicatedModel(part(), mesh, config.training, config.parallelism, device)
    elif is_sharded(layout, config.memory):
        model = ShardedModel(part(), mesh, layout.zero_stage, device)
    else:
        model = UnshardedModel(part(), mesh, device, placement.is_gpu)
    model.objective, model.draft = objective, config.draft_head.train
    if context is not None:
        model.share_rows(context)
    if shares_copies(workload, placement.memory):
        model.copy_weights()
    if config.memory.offload == "optimizer":  # pipelines and DDP do not have it
        model.host_gradients = HostGradients(model.parts, device)
    return model


def copied_embedding(model: CausalLM) -> nn.Module | None:
    """The copy of the embedding that the last stage of a pipeline has for its draft head alone."""
    stage = model.model.stage
    return model.model.embed_tokens if not stage.first and stage.last and model.lm_head is not None else None


def is_sharded(layout: Layout, memory: MemoryConfig) -> bool:
    """Whether `fully_shard` wraps the model. Without other ranks to reduce with, only offloaded weights need it."""
    return layout.zero_stage > 0 and (layout.gradient_ranks > 1 or memory.offload == "weights")


def parallelize(
    model: CausalLM, config: Config, layout: Layout, mesh: DeviceMesh, context: ContextRanks | None = None
) -> None:
    """Apply LoRA, tensor and context parallel, compile, activation checkpointing, FSDP2, in place, in this order.

    Args:
        model: the model or a pipeline stage, on the meta device. No parameter changes its name.
    """
    training, lora, master = config.training, config.lora, master_dtype(config.training, config.optimizer)
    # LoRA first: it replaces modules, and tensor parallel must split the adapters too.
    if lora.rank:
        apply_lora(model, lora, compute_dtype(training))
    copy = copied_embedding(model)
    is_frozen = lora.rank > 0 or config.draft_head.train == "after"
    if is_frozen and not lora.rank:
        model.requires_grad_(False)
    if model.mtp is not None:
        model.mtp.requires_grad_(True)
        if copy is not None:
            copy.requires_grad_(False)
    # a fresh draft head's router has yet to learn
    with_routers = model.model.blocks() if config.draft_head.fresh else model.blocks()
    for layer in () if training.train_router else with_routers:
        for name in layer.routers:
            layer.get_submodule(name).requires_grad_(False)
    # Trained weights get the master dtype, a base under adapters the compute dtype, which the DTensors made below keep.
    # What else is not trained goes into checkpoint and export as it was read, so it is not held in 16 bits.
    wide = {id(parameter) for layer in model.blocks() for parameter in layer.fp32_parameters()}
    drafting = {*map(id, model.mtp.parameters())} if model.mtp is not None else set()
    copied = {*map(id, copy.parameters())} if copy is not None else set()
    for parameter in model.parameters():
        is_base = is_frozen and not parameter.requires_grad and id(parameter) not in drafting
        is_wide = id(parameter) in wide or not (is_base or parameter.requires_grad or id(parameter) in copied)
        dtype = compute_dtype(training) if is_base else master
        dtype = torch.promote_types(dtype, torch.float32) if is_wide else dtype
        parameter.data = parameter.data.to(dtype)
    if layout.matrix_parts > 1:
        apply_tensor_parallel(model, mesh["tp"])
    if context is not None:
        apply_context_parallel(model, context)
    # Checkpointing wraps the compiled functions: these are then alike in all blocks, and torch compiles them once.
    mode = config.activation_checkpoint.mode
    apply_compile(model, config.compile, is_whole=mode != "selective")
    apply_activation_checkpointing(model, mode, lora.dropout > 0, config.memory.offload_activations)
    # FSDP2 last: it must gather before, and free after, everything that reads the weights, recomputation included.
    if is_sharded(layout, config.memory):
        apply_fsdp(model, mesh, training, layout, config.memory.offload == "weights")
    else:
        model.model.dtype = compute_dtype(training)  # fp32 weights are cast where they are used


def apply_compile(model: CausalLM, config: CompileConfig, is_whole: bool) -> None:
    """Compile each block, or the parts before and after its attention. All blocks share one compiled graph.

    Args:
        is_whole: compile the full block as one graph if the attention backend can be traced. False for selective
            checkpointing, which needs the parts separately.
    """
    one_graph = is_whole and model.model.backend.is_traceable
    if config.enable:
        for layer in model.blocks():
            is_one = one_graph and "forward" in layer.compiled
            for name in ("forward",) if is_one else {"project", "output"}.intersection(layer.compiled):
                part, dynamic = getattr(layer, name), layer.is_dynamic
                setattr(layer, name, torch.compile(part, backend=config.backend, fullgraph=True, dynamic=dynamic))


def apply_activation_checkpointing(model: CausalLM, mode: str, is_random: bool, on_host: bool) -> None:
    """Let each block recompute its activations in backward.

    Args:
        mode: `none`; `full`: recompute the full block; `selective`: all but attention, the most expensive part.
        is_random: there is dropout, so the recomputation must draw the same random numbers.
        on_host: with `full`: the input of a block, the only tensor it saves, waits in host memory.
    """
    parts = {"none": (), "selective": ("project", "output"), "full": ("forward",)}[mode]
    for layer in model.blocks():
        for name in parts:
            method, contexts = getattr(layer, name), layer.recompute_contexts
            recomputed = functools.partial(
                checkpoint, method, use_reentrant=False, preserve_rng_state=is_random, context_fn=contexts
            )
            setattr(layer, name, inputs_on_host(recomputed) if on_host else recomputed)
