"""Runs under torchrun: for each split of one global batch, the trainer's own step; each rank saves loss and gradients.

Arguments: input file (model spec, weights, documents, splits), folder for the ranks' output files.
"""

import sys
from pathlib import Path

import torch
from conftest import packed
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_mi100 import train
from titan_mi100.data.epochs import ShuffledEpochs
from titan_mi100.data.loader import RowStream
from titan_mi100.parallel import distributed
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.build import build_model
from titan_mi100.parallel.distributed import World
from titan_mi100.settings import (
    ActivationCheckpointConfig,
    CompileConfig,
    Config,
    LoRAConfig,
    ModelConfig,
    ParallelismConfig,
    TrainingConfig,
)


class CatchGradients:
    """In the optimizer's place: keeps the whole gradients of a step and updates nothing."""

    def __init__(self, model: ParallelModel) -> None:
        self.model, self.gradients = model, []

    def step(self) -> None:
        for name, parameter in self.model.trained_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
            self.gradients.append((name, whole))

    def zero_grad(self, set_to_none: bool) -> None:
        for _, parameter in self.model.named_parameters():
            parameter.grad = None


def config_of(case: dict, split: dict) -> Config:
    """The config of a split: its options, the rest as in the case."""
    return Config(
        model=ModelConfig(attention_backend=split.get("backend", "sdpa")),
        training=TrainingConfig(
            seq_len=split.get("seq_len", case["seq_len"]),
            local_batch_size=split["local_batch_size"],
            gradient_accumulation_steps=split["accumulation"],
            max_norm=0.0,
            mixed_precision_param=split.get("param", "float32"),
        ),
        parallelism=ParallelismConfig(**split.get("parallelism", {})),
        activation_checkpoint=ActivationCheckpointConfig(mode=split.get("checkpointing", "none")),
        compile=CompileConfig(enable=split.get("compile", False), backend="aot_eager"),
        lora=LoRAConfig(**split.get("lora", {})),
    )


def build(world: World, case: dict, config: Config) -> tuple[ParallelModel, int]:
    """The case's model in the config's layout, with the case's weights, and this rank's data-parallel rank."""
    mesh = distributed.build_mesh(config.layout(world.size), world.device)
    model = build_model(config, case["spec"], mesh, world, supervised_share=0.5)

    def read(name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        part = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
        return case["weights"][name][part]

    distributed.fill_parameters(model.named_parameters(), read)
    return model, distributed.data_parallel_rank(mesh)


def run_split(world: World, case: dict, split: dict) -> dict:
    """One step of `split` on the case's documents."""
    config = config_of(case, split)
    model, dp_rank = build(world, case, config)
    dataset = packed(case["documents"], config.training.seq_len, pad_id=0)
    layout, batch = config.layout(world.size), config.batch(world.size)
    optimizer = CatchGradients(model)
    stream = RowStream(ShuffledEpochs(dataset, split.get("seed", 0), batch.global_batch_size), batch, dp_rank)
    result = train.Trainer(layout, batch, 0.0, model, optimizer, iter(stream)).step()
    return {"loss": result.loss, "grad_norm": result.grad_norm, "gradients": optimizer.gradients,
            "supervised": result.supervised, "tokens": result.tokens}  # fmt: skip


if __name__ == "__main__":
    here = distributed.init_distributed()
    job = torch.load(sys.argv[1], weights_only=False)
    results = [run_split(here, job["cases"][split["case"]], split) for split in job["splits"]]
    torch.save(results, Path(sys.argv[2]) / f"rank-{here.rank}.pt")
    distributed.leave(0)
