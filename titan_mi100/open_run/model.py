"""Opening a run: how attention and the loss compute, and its checkpoints."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from titan_mi100.attention.base import Shape
from titan_mi100.attention.choice import Choice, choose
from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.config.layout import PIPELINE
from titan_mi100.config.settings import Config
from titan_mi100.data.prepare import cache_folder
from titan_mi100.data.prepared import Prepared
from titan_mi100.log import log
from titan_mi100.model.fused.running import choose as choose_kinds
from titan_mi100.model.fused.running import use
from titan_mi100.model.fused.trials import OF_FAMILIES, SAME_BITS, TRIALS
from titan_mi100.model.loss import HeadMemory
from titan_mi100.open_run.inputs import RunInputs
from titan_mi100.open_run.rows import usual_lengths
from titan_mi100.optim.state import NamedState
from titan_mi100.parallel import distributed
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import World, from_rank_zero, raise_together
from titan_mi100.planning.memory import layers_per_stage
from titan_mi100.planning.workload import Workload, with_settings
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.text.assets import ending_turns, run_assets


def choose_backend(inputs: RunInputs) -> tuple[Choice, HeadMemory]:
    """Choose the attention backend and the memory of the loss head. Both decide the order of floating-point sums, so a
    resumed run on the same kind of device keeps its choice; else rank 0 chooses for all. A collective.
    """
    config, device, resumed = inputs.config, inputs.world.device, inputs.found
    training, arch = config.training, distributed.device_name(device)[1]
    rows, dtype = (training.local_batch_size, training.seq_len), training.mixed_precision_param
    shape = Shape(*rows, *inputs.layout.local(inputs.spec.attention), dtype)
    chosen = resumed.manifest.get("chosen", {}) if resumed else {}
    before = Choice(**chosen["attention"]) if "attention" in chosen else None
    backend, cache, data = config.model.attention_backend, cache_folder(config.data), inputs.data
    choice, warnings = from_rank_zero(lambda: choose(backend, shape, usual_lengths(data), device, arch, cache, before))
    for line in warnings:
        log.warning(line)
    if before and (choice.name, choice.launch) != (before.name, before.launch):
        log.warning(f"attention was {before.name} until now: sums are added in another order from here on")
    log.info(f"attention: {choice.name} ({choice.why})")
    if before and before.arch == choice.arch and "head" in chosen:
        return choice, HeadMemory(**chosen["head"])
    return choice, from_rank_zero(partial(HeadMemory.of, device))


def choose_fused(inputs: RunInputs, arch: str) -> dict[str, list[str]]:
    """Choose the kinds of fused kernels that run in this process, as a checkpoint's manifest has them; empty without
    any. As most decide bits, a run resumed on the same kind of device has no others than before. A collective.

    Args:
        arch: of the device, see Choice.
    """
    config, candidates = inputs.config, {*TRIALS} - OF_FAMILIES.difference(inputs.spec.kernels)
    if config.lora.base != "nf4":
        candidates.discard("nf4")
    if not any(parameter.experts for parameter in inputs.spec.parameters.values()):
        candidates.discard("experts")
    if config.compile.enable:  # inductor fuses the plain forms
        candidates.discard("elementwise")
    chosen = inputs.found.manifest.get("chosen", {}) if inputs.found else {}
    if chosen.get("attention", {}).get("arch") == arch:
        candidates &= SAME_BITS.union(chosen.get("fused", ()))
    dtype = getattr(torch, config.training.mixed_precision_param)
    kinds = from_rank_zero(partial(choose_kinds, TRIALS, candidates, inputs.world.device, dtype))
    use(kinds, inputs.world.device.type)
    if kinds:
        log.info(f"fused kernels: {', '.join(kinds)}")
    return {"fused": kinds} if kinds else {}


def keep_stages(config: Config, world: World, spec: ModelSpec, data: Prepared, manifest: dict[str, Any]) -> Config:
    """A resumed run's config with the stages that it has had, if it has as many: they order sums and seed dropout."""
    layout, saved = config.layout(world.size), manifest.get("chosen", {}).get("stages")
    if not layout.is_pipeline or manifest["layout"].get(PIPELINE) != layout.pipeline_ranks:
        return config
    share = data.train_counts.supervised_share(config.training.seq_len)
    # the only cut of earlier versions, which kept no note
    by_cost = layers_per_stage(Workload(config, world.size, spec), share)
    if config.parallelism.pipeline_parallel_layers_per_stage or len(saved or by_cost) != len(by_cost):
        return config
    return with_settings(config, {"parallelism": {"pipeline_parallel_layers_per_stage": tuple(saved or by_cost)}})


def open_checkpointer(inputs: RunInputs, model: ParallelModel, optimizer: NamedState) -> Checkpointer:
    """The run's checkpoints, which get the files that an export needs beside the weights. A collective."""
    config, folder = inputs.config, inputs.folder
    with raise_together():
        assets, facts = dict[str, bytes](), inputs.data.facts
        if inputs.world.rank == 0 and folder is not None:
            assets = run_assets(
                inputs.spec, config.checkpoint.initial_load_path, config.tokenizer_path(), config.model.chat_template,
                facts.enable_thinking, facts.system_prompt, facts.variables,
            )  # fmt: skip
        if assets and facts.end_of_turn_id is not None:
            assets = ending_turns(assets, facts.end_of_turn, facts.end_of_turn_id)
    keep, in_background = config.checkpoint.keep_latest_k, config.checkpoint.async_mode == "async"
    path = (folder or Path()) / "checkpoint"
    return Checkpointer(path, model, optimizer, inputs.world, inputs.layout, keep, in_background, assets)
