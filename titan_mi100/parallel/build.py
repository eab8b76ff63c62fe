"""From a config to the model of a run in its layout: which wrappers go around it, in which order, and why."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from titan_mi100.attention.base import Backend
from titan_mi100.config.costs import end_costs
from titan_mi100.config.layout import SCHEDULES, Batch, Layout, Stage, split_layers, stages_of
from titan_mi100.config.model_spec import ModelSpec
from titan_mi100.config.settings import CompileConfig, Config
from titan_mi100.logging import log
from titan_mi100.model.lora import apply_lora
from titan_mi100.model.loss import HeadMemory, head_loss
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.parallel.alone import AloneModel
from titan_mi100.parallel.base import ParallelModel, read_on_host
from titan_mi100.parallel.ddp import ReplicatedModel
from titan_mi100.parallel.dtypes import compute_dtype, master_dtype
from titan_mi100.parallel.fsdp import ShardedModel, apply_fsdp
from titan_mi100.parallel.offload import HostGradients, inputs_on_host
from titan_mi100.parallel.tensor_parallel import apply_tensor_parallel


def build_model(
    config: Config,
    spec: ModelSpec,
    layout: Layout,
    batch: Batch,
    mesh: DeviceMesh,
    device: torch.device,
    backend: Backend,
    supervised_share: float,
    head_memory: HeadMemory | None = None,
    make: Callable[[Callable[[], Qwen3]], Qwen3] | None = None,
    is_gpu: bool | None = None,
) -> ParallelModel:
    """The model in its layout, on this rank's device; its weights hold nothing yet.

    Args:
        backend: of attention.
        supervised_share: of the training data's tokens, by which a pipeline's stages are balanced.
        head_memory: None: what suits the device.
        make: calls what builds a part on the meta device, and takes the part to its own; None: by `to_empty`.
        is_gpu: work as on a GPU; None: if the device is one.
    """
    is_gpu = device.type != "cpu" if is_gpu is None else is_gpu
    head_memory = head_memory or HeadMemory.of(device)
    if layout.pp > 1 and config.parallelism.pipeline_parallel_schedule == "GPipe":  # all microbatches wait at once
        kept = head_memory.kept_elements // batch.gradient_accumulation_steps
        head_memory = replace(head_memory, kept_elements=kept)
    loss = functools.partial(head_loss, memory=head_memory)

    def build(stage: Stage | None) -> Qwen3:
        with torch.device("meta"):
            model = Qwen3(spec, backend, stage)
        model.head_loss = loss
        parallelize(model, config, layout, mesh)
        read_on_host(model, device)  # last: its hook must run before FSDP2's
        return model

    def part(stage: Stage | None = None) -> Qwen3:
        place = torch.device("cpu") if config.memory.offload == "weights" else device
        return make(lambda: build(stage)) if make else build(stage).to_empty(device=place)

    if layout.pp > 1:
        layers = layers_per_stage(config, spec, layout.pp, supervised_share)
        schedule, microbatches = config.parallelism.pipeline_parallel_schedule, batch.gradient_accumulation_steps
        log.info(f"pipeline: {schedule}, {microbatches} microbatches, layers per stage {', '.join(map(str, layers))}")
        boundary = (batch.local_batch_size, config.training.seq_len // layout.tp, spec.hidden_size)
        tied = spec.tie_word_embeddings and not config.lora.rank  # copies of a frozen weight stay as they are
        dtype = compute_dtype(config.training)
        from titan_mi100.parallel.pipeline import PipelinedModel  # half a second, which other layouts need not wait for

        return PipelinedModel(part, stages_of(layers), schedule, microbatches, boundary, dtype, tied, mesh, device)
    if layout.zero_stage == 0:
        return ReplicatedModel(part(), mesh, config.training, config.parallelism, device)
    model: ParallelModel
    if is_sharded(config, layout):
        model = ShardedModel(part(), mesh, layout.zero_stage, device)
    else:
        model = AloneModel(part(), mesh, device, is_gpu or config.memory.offload != "nothing")
    if config.memory.offload == "optimizer":
        model.host_gradients = HostGradients(model.parts, device)
    return model


def is_sharded(config: Config, layout: Layout) -> bool:
    """Whether `fully_shard` goes around the model: not on a single data-parallel rank, unless it fetches weights."""
    return layout.zero_stage > 0 and (layout.dp_degree > 1 or config.memory.offload == "weights")


def parallelize(model: Qwen3, config: Config, layout: Layout, mesh: DeviceMesh) -> None:
    """Wrap a model, or a pipeline stage of one, that is on the meta device, in place. No parameter changes its name."""
    training, lora, master = config.training, config.lora, master_dtype(config.training, config.optimizer)
    if lora.rank:
        apply_lora(model, lora, compute_dtype(training))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(master if parameter.requires_grad else compute_dtype(training))
    if layout.tp > 1:
        apply_tensor_parallel(model, mesh["tp"])
    # Checkpointing goes around what is compiled: the compiled parts are then alike in all blocks and compiled once.
    mode = config.activation_checkpoint.mode
    apply_compile(model, config.compile, is_whole=mode != "selective")
    apply_activation_checkpointing(model, mode, lora.dropout > 0, config.memory.offload_activations)
    # FSDP2 goes around all: its gather and free must surround whatever reads the weights, the recomputation included.
    if is_sharded(config, layout):
        apply_fsdp(model, mesh, training, layout, config.memory.offload == "weights")
    else:
        model.model.dtype = compute_dtype(training)  # fp32 weights are cast where they are used


def layers_per_stage(config: Config, spec: ModelSpec, pp: int, supervised_share: float) -> Sequence[int]:
    """As the config says, or balanced by what a microbatch costs in each stage.

    Args:
        supervised_share: supervised tokens per token of a row; the head runs on these only.
    """
    parallelism, training = config.parallelism, config.training
    if parallelism.pipeline_parallel_layers_per_stage:
        return parallelism.pipeline_parallel_layers_per_stage
    stages = pp * SCHEDULES[parallelism.pipeline_parallel_schedule].stages_per_rank
    recompute = config.activation_checkpoint.mode != "none"
    first, last = end_costs(
        spec, training.local_batch_size, training.seq_len, supervised_share, recompute, config.lora.rank > 0
    )
    return split_layers(spec.num_hidden_layers, stages, first, last)


def apply_compile(model: Qwen3, config: CompileConfig, is_whole: bool) -> None:
    """Compile each block, or what lies before and after its attention; the blocks are alike, so they share the result.

    Args:
        is_whole: compile a block as one graph, where its attention can be part of one.
    """
    whole = is_whole and model.model.backend.is_traceable
    if config.enable:
        for layer in model.model.blocks():
            for name in ("forward",) if whole else ("before_attention", "after_attention"):
                setattr(layer, name, torch.compile(getattr(layer, name), backend=config.backend, fullgraph=True))


def apply_activation_checkpointing(model: Qwen3, mode: str, is_random: bool, on_host: bool) -> None:
    """Let each block recompute its activations in backward: `full`, all of it; `selective`, all but attention.

    Args:
        is_random: there is dropout, and the second run must draw what the first did.
        on_host: with `full`, what a block keeps, its input, waits in the host's memory.
    """
    parts = {"none": (), "selective": ("before_attention", "after_attention"), "full": ("forward",)}[mode]
    for layer in model.model.blocks():
        for name in parts:
            method = getattr(layer, name)
            recomputed = functools.partial(checkpoint, method, use_reentrant=False, preserve_rng_state=is_random)
            setattr(layer, name, inputs_on_host(recomputed) if on_host else recomputed)
