"""Runs under torchrun: for each split of one global batch, the trainer's own step; each rank saves loss and gradients.

Arguments: input file (model spec, weights, documents, splits), folder for the ranks' output files.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from held_names import check_names
from packed_rows import packed
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.config.settings import (
    ActivationCheckpointConfig,
    CheckpointConfig,
    CompileConfig,
    Config,
    DraftHeadConfig,
    LoRAConfig,
    LRSchedulerConfig,
    MemoryConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from titan_mi100.model.fused.running import use
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import build, distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.weights.load import fill_base
from titan_mi100.workshop.made_up import made_up

CONSTANT = LRSchedulerConfig(warmup_steps=0, decay_type="constant")


def config_of(case: dict, split: dict) -> Config:
    """The config of a split: its options, the rest as in the case."""
    return Config(
        model=ModelConfig(attention_backend=split.get("backend", "sdpa")),
        training=TrainingConfig(
            seq_len=split.get("seq_len", case["seq_len"]),
            local_batch_size=split["local_batch_size"],
            gradient_accumulation_steps=split["accumulation"],
            max_norm=split.get("max_norm", 0.0),
            seed=split.get("seed", 0),
            mixed_precision_param=split.get("param", "float32"),
        ),
        optimizer=OptimizerConfig(lr=1e-2, eps=1e-3, **split.get("optimizer", {})),
        lr_scheduler=CONSTANT,
        parallelism=ParallelismConfig(**split.get("parallelism", {})),
        activation_checkpoint=ActivationCheckpointConfig(mode=split.get("checkpointing", "none")),
        compile=CompileConfig(enable=split.get("compile", False), backend="aot_eager"),
        lora=LoRAConfig(**split.get("lora", {})),
        memory=MemoryConfig(**split.get("memory", {})),
        checkpoint=CheckpointConfig(initial_load_path=split.get("load", "")),
        objective=ObjectiveConfig(**split.get("objective", {})),
        draft_head=DraftHeadConfig(**split.get("draft_head", {})),
    )


def open_split(world: World, case: dict, split: dict, **options: Any) -> Run:
    """The split's run on the case's documents, with the case's weights; resumed, only with what a checkpoint lacks."""
    config = config_of(case, split)
    rows = packed(case["documents"], config.training.seq_len)
    options = {"data": made_up(rows, validation=rows), **options}
    shared = mock.patch.object(build, "shares_copies", return_value=split["copies"]) if "copies" in split else None
    with shared or nullcontext():
        run = open_run(config, world, spec=case["spec"], **options)
    for part in run.model.parts:
        check_names(part, case["spec"], config.lora)
    if "kinds" in split:  # of our kernels; the next run has none
        use(split["kinds"])

    def read(name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        part = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
        return case["weights"][name][part]

    resumed = options.get("checkpoint") is not None
    if not resumed:
        distributed.fill_parameters(run.model.trained_parameters(), read)
    if not resumed or split.get("lora"):
        fill_base(run.model, read)
    return run


def save(run: Run, folder: Path) -> None:
    """A checkpoint of the step that the run has come to. A collective."""
    checkpointer = Checkpointer(folder, run.model, run.optimizer, run.world, run.config.layout(run.world.size))
    checkpointer.save(run.progress.step, run.progress.trainer_state(), run.about)


def whole(tensor: Tensor | None) -> Tensor:
    """A tensor's global value, a copy. A collective."""
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def like(parameter: Tensor, local: Tensor) -> Tensor:
    """This rank's part of a tensor that is sharded as the parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )


def keep_gradients(run: Run) -> list[tuple[str, Tensor]]:
    """Will hold the whole gradients of the next step, as they come to the optimizer."""
    kept: list[tuple[str, Tensor]] = []
    update = run.optimizer.update

    def keep(*factors: float | None) -> None:
        if not kept:
            there = run.model.host_gradients or {}
            for name, p in run.model.trained_parameters():
                gradient = like(p, there[p]) if p in there else p.grad
                factor = factors[run.model.is_draft(name)]
                kept.append((name, whole(gradient) * (0.0 if factor is None else factor)))
        update(*factors)

    run.optimizer.update = keep  # type: ignore[method-assign]
    return kept


def run_split(world: World, case: dict, split: dict, **options: Any) -> dict:
    """One step of `split` on the case's documents."""
    run = open_split(world, case, split, **options)
    gradients = keep_gradients(run)
    result = run.step()
    return {"loss": result.loss, "measures": dict(result.measures), "grad_norm": result.grad_norm,
            "gradients": gradients, "supervised": result.supervised, "tokens": result.tokens}  # fmt: skip


if __name__ == "__main__":
    here = distributed.init_distributed()
    job = torch.load(sys.argv[1], weights_only=False)
    results = [run_split(here, job["cases"][split["case"]], split) for split in job["splits"]]
    torch.save(results, Path(sys.argv[2]) / f"rank-{here.rank}.pt")
    distributed.exit_process(0)
