"""Checks the layout of ranks: against their number, the model, and settings that do not go with an axis. No torch."""

from collections.abc import Iterator
from dataclasses import fields

from titan_mi100.config.as_text import toml_value
from titan_mi100.config.layout import SCHEDULES, check_schedule
from titan_mi100.config.problem import ConfigError, Problem
from titan_mi100.config.settings import NF4_BLOCK, CompileConfig, Config, LoRAConfig, ParallelismConfig, TrainingConfig
from titan_mi100.shapes.base import EXPERTS, ModelSpec
from titan_mi100.wording import some

MODEL_KEYS = ("model.flavor", "checkpoint.initial_load_path")  # settings that name the model's shape


def check_layout(config: Config, world_size: int) -> Iterator[Problem]:
    """Problems that depend on the number of processes."""
    p, training = config.parallelism, config.training
    accumulation = 0 if training.target_tokens_per_step else max(1, training.gradient_accumulation_steps)
    pp, is_ddp = p.pipeline_parallel_degree, p.zero_stage == 0
    try:
        layout = config.layout(world_size)
        is_ddp = layout.zero_stage == 0
        accumulation = config.batch(world_size).gradient_accumulation_steps
    except ConfigError as error:
        yield from error.problems
    degrees = tuple(f"parallelism.{field.name}" for field in fields(p) if "powersgd" not in field.name)
    if config.memory.offload != "nothing" and is_ddp:
        text = f'= "{config.memory.offload}" is not for DDP; set [parallelism] zero_stage = 3'
        yield Problem("memory.offload", text, degrees)
    reduce, master, dtype = training.mixed_precision_reduce, config.optimizer.master, training.mixed_precision_param
    for is_wrong, text, key, value in (
        (not is_ddp, "needs DDP", "parallelism.zero_stage", 0),
        (reduce != "float32", "compresses float32", "training.mixed_precision_reduce", "float32"),
        (master != "fp32", "compresses float32, not bfloat16 gradients", "optimizer.master", "fp32"),
        (dtype == "float16", "keeps errors that ignore float16's scale", "training.mixed_precision_param", "bfloat16"),
    ):
        if p.powersgd_rank and is_wrong:
            text = f"= {p.powersgd_rank} {text}; set [{key.replace('.', '] ')} = {toml_value(value)}"
            yield Problem("parallelism.powersgd_rank", text, (key, *degrees))
    if pp > 1 and accumulation and (refused := check_schedule(p.pipeline_parallel_schedule, pp, accumulation)):
        yield refused


def check_split(p: ParallelismConfig, lora: LoRAConfig, training: TrainingConfig, spec: ModelSpec) -> Iterator[Problem]:
    """Problems of splitting a model over tensor-parallel ranks and pipeline stages."""
    seq_len, targets = training.seq_len, lora.target_modules
    tp, pp = p.tensor_parallel_degree, p.pipeline_parallel_degree
    if lora.base == "nf4" and (size := _not_in_blocks(spec, tp)):
        text = f'= "nf4" needs blocks of {NF4_BLOCK} values, which {size} does not have; use "whole"'
        yield Problem("lora.base", text, (*MODEL_KEYS, "parallelism.tensor_parallel_degree"))
    without = {layer.kind for layer in spec.layers if not {*layer.adapted} & {*targets}}
    if lora.rank and pp > 1 and without:
        text = f"leaves layers of kind {some(sorted(without))} without an adapter, so a pipeline's stage might have "
        text += "none; name a linear layer of each kind"
        yield Problem("lora.target_modules", text, (*MODEL_KEYS, "parallelism.pipeline_parallel_degree"))
    named = spec.tensor_parallel_sizes()
    if wrong := [f"{name} = {n}" for name, n in {**named, "seq_len": seq_len}.items() if n % tp]:
        divisors = range(1, min(tp, *named.values()) + 1)
        fit = [str(n) for n in divisors if not any(value % n for value in named.values())]
        text = f"= {tp} does not divide {', '.join(wrong)}; this model can be split over {', '.join(fit)}, and seq_len "
        yield Problem(
            "parallelism.tensor_parallel_degree", f"{text}must be a multiple", (*MODEL_KEYS, "training.seq_len")
        )
    yield from _check_context(p, lora, training, spec)
    if pp == 1:
        return
    schedule, counts = SCHEDULES[p.pipeline_parallel_schedule], p.pipeline_parallel_layers_per_stage
    layers, stages = spec.num_hidden_layers, pp * schedule.stages_per_rank
    read = (*MODEL_KEYS, "parallelism.pipeline_parallel_schedule")
    if counts:
        fits = len(counts) == stages or (schedule.looped and len(counts) > stages and len(counts) % pp == 0)
        if not fits or sum(counts) != layers or 0 in counts:
            text = f"= {list(counts)} must be {stages} numbers "
            text += f"{f'or more, a multiple of {pp}, ' if schedule.looped else ''}above 0 that sum to the model's "
            key = "parallelism.pipeline_parallel_layers_per_stage"
            yield Problem(key, f"{text}{layers} layers", (*read, "parallelism.pipeline_parallel_degree"))
    elif stages > layers:
        text = f"= {pp} makes {stages} stages of {layers} layers; lower it"
        yield Problem("parallelism.pipeline_parallel_degree", text, read)


def _check_context(
    p: ParallelismConfig, lora: LoRAConfig, training: TrainingConfig, spec: ModelSpec
) -> Iterator[Problem]:
    """Problems of sharing the tokens of a row: each rank computes with as many heads of whole rows."""
    cp, tp, key = p.context_parallel_degree, p.tensor_parallel_degree, "parallelism.context_parallel_degree"
    if cp == 1:
        return
    heads, kv_heads = spec.mixing_heads(), spec.num_key_value_heads
    read = (*MODEL_KEYS, "parallelism.tensor_parallel_degree")

    def fits(degree: int) -> bool:
        each = kv_heads // tp
        is_shared = each and (each % degree == 0 or degree % each == 0)  # else each rank has a copy of a head
        return bool(is_shared) and all(n % (tp * degree) == 0 for n in heads.values())

    if not fits(cp):
        sizes = ", ".join(f"{name} = {n}" for name, n in {**heads, "num_key_value_heads": kv_heads}.items())
        possible = ", ".join(str(n) for n in range(1, max(heads.values()) + 1) if fits(n))
        with_tp = f" with tensor_parallel_degree = {tp}" if tp > 1 else ""
        yield Problem(key, f"= {cp} does not fit {sizes}{with_tp}; possible: {possible or 'none'}", read)
    if training.seq_len % (cp * tp) and not training.seq_len % tp:
        text = f"= {cp}{f' x tensor_parallel_degree = {tp}' if tp > 1 else ''} does not divide seq_len = "
        text += f"{training.seq_len}; use {-(-training.seq_len // (cp * tp)) * cp * tp}"
        yield Problem(key, text, (*read, "training.seq_len"))
    if lora.dropout and lora.rank and EXPERTS in lora.target_modules and any(layer.slots for layer in spec.layers):
        text = f"= {cp} does not go with dropout of experts' adapters, whose tokens lie on several ranks; set [lora] "
        yield Problem(key, f"{text}dropout = 0", (*read, "lora.dropout", "lora.target_modules"))


def _not_in_blocks(spec: ModelSpec, tp: int) -> str:
    """The first input size of a linear layer that NF4_BLOCK does not divide on each tensor-parallel rank; "": none."""
    inputs = ((name, size, tp if is_split else 1) for name, (size, is_split) in spec.input_sizes().items())
    return next((f"{name} = {size} over {n} ranks" for name, size, n in inputs if size % (NF4_BLOCK * n)), "")


def uncuttable(compiled: CompileConfig, lora: LoRAConfig) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Why a config's tokens cannot be computed in pieces, and the other keys that say so."""
    if compiled.enable:
        yield "is for pieces, which are not compiled; set it to 0, or [compile] enable = false", ("compile.enable",)
    if lora.rank and lora.dropout and EXPERTS in lora.target_modules:
        text = "is for pieces, for which the adapters of experts have no dropout; set it to 0, or [lora] dropout = 0"
        yield text, ("lora.dropout", "lora.target_modules")


def check_offload(config: Config) -> Iterator[Problem]:
    """Problems of keeping things in the host's memory."""
    offload, p, conflicts = config.memory.offload, config.parallelism, list[tuple[str, str]]()
    if offload != "nothing" and p.pipeline_parallel_degree > 1:
        text = "is not for a pipeline; set pipeline_parallel_degree = 1"
        conflicts.append((text, "parallelism.pipeline_parallel_degree"))
    if offload == "weights" and p.tensor_parallel_degree > 1:
        text = "is not for tensor parallel; set tensor_parallel_degree = 1"
        conflicts.append((text, "parallelism.tensor_parallel_degree"))
    if offload == "weights" and config.lora.base == "nf4":
        conflicts.append(('is not for [lora] base = "nf4", which takes little; use "nothing"', "lora.base"))
    if offload == "optimizer" and config.lora.rank:
        text = 'moves next to nothing, as adapters alone are trained; use "weights", or [lora] base = "nf4"'
        conflicts.append((text, "lora.rank"))
    yield from (Problem("memory.offload", f'= "{offload}" {text}', (key,)) for text, key in conflicts)
    if config.memory.offload_activations and config.activation_checkpoint.mode != "full":
        text = 'keeps blocks\' inputs; set [activation_checkpoint] mode = "full"'
        yield Problem("memory.offload_activations", text, ("activation_checkpoint.mode",))
    if config.memory.piece_tokens > 0:
        yield from (Problem("memory.piece_tokens", *reason) for reason in uncuttable(config.compile, config.lora))
