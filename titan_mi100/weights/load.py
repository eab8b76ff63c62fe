"""The weights of a run's model, from wherever they come."""

import math
from functools import partial
from pathlib import Path

import torch.distributed as dist

from titan_mi100.config import model_spec
from titan_mi100.config.settings import Config
from titan_mi100.logging import log
from titan_mi100.model.init import Read, initial_values
from titan_mi100.model.lora import base_fingerprint, is_adapter, lora_values
from titan_mi100.parallel import distributed
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import raise_together
from titan_mi100.weights.base import Weights
from titan_mi100.weights.peft import open_adapter
from titan_mi100.weights.source import open_weights, verify_files


def load_weights(model: ParallelModel, config: Config, spec: model_spec.ModelSpec, checkpoint: Path | None) -> None:
    """Each rank fills its own parts, from what the config names or at random, unless a checkpoint will: a LoRA run's
    holds the adapters only.
    """
    source = config.checkpoint.initial_load_path
    origin = f"resumed from {checkpoint}"
    if checkpoint is None or config.lora.rank:
        read: Read = partial(initial_values, spec, config.training.seed)
        origin = f"random weights, seed {config.training.seed}"
        if source:
            with raise_together():
                read, origin = _open_base(source, spec).read, f"weights from {source}"
                verify_files(Path(source), dist.get_rank(), dist.get_world_size())
        distributed.fill_parameters(((name, p) for name, p in model.named_parameters() if not is_adapter(name)), read)
    name = config.model.flavor or Path(source).name
    log.info(f"Qwen3 {name}: {model_spec.parameter_count(spec):,} parameters, {origin}")
    if config.lora.rank:
        _load_adapter(model, config, spec, checkpoint)


def _load_adapter(model: ParallelModel, config: Config, spec: model_spec.ModelSpec, checkpoint: Path | None) -> None:
    """As load_weights, LoRA's matrices."""
    lora = config.lora
    shapes = model_spec.adapter_shapes(spec, lora.rank, lora.target_modules)
    origin = f"resumed from {checkpoint}"
    if checkpoint is None:
        read: Read = partial(lora_values, config.training.seed)
        origin = f"fresh, seed {config.training.seed}"
        if lora.initial_load_path:
            with raise_together():
                read, origin = open_adapter(lora, shapes).read, f"from {lora.initial_load_path}"
        distributed.fill_parameters(model.trained_parameters(), read)
    trained = sum(map(math.prod, shapes.values()))
    everything = model_spec.parameter_count(spec) + trained
    log.info(
        f"LoRA: {trained:,} of {everything:,} parameters are trained ({trained / everything:.2%}), of rank "
        f"{lora.rank} and alpha {lora.alpha:g} beside {', '.join(lora.target_modules)}; {origin}"
    )


def base_identity(config: Config, spec: model_spec.ModelSpec) -> str:
    """What the frozen weights of a LoRA run are known by: no checkpoint of it holds them. A collective."""
    source, shapes = config.checkpoint.initial_load_path, model_spec.parameter_shapes(spec)
    if not source:
        return f"random weights, seed {config.training.seed}"
    return distributed.from_rank_zero(lambda: base_fingerprint(_open_base(source, spec).read, shapes))


def _open_base(source: str, spec: model_spec.ModelSpec) -> Weights:
    weights = open_weights(source)
    weights.check(model_spec.parameter_shapes(spec))
    return weights
