"""Runs under torchrun: for each split of one global batch, the trainer's own step; rank 0 saves loss and gradients.

Arguments: input file (model spec, weights, documents, splits), output file.
"""

import sys

import torch
from conftest import packed
from torch.distributed.tensor import DTensor

from titan_mi100 import distributed
from titan_mi100.data.loader import RowStream
from titan_mi100.layout import Batch, Layout
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.parallelize import parallelize
from titan_mi100.settings import ActivationCheckpointConfig, CompileConfig, Config, ParallelismConfig, TrainingConfig
from titan_mi100.train import Trainer


class CatchGradients:
    """In the optimizer's place: keeps the whole gradients of a step and updates nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.gradients = model, {}

    def step(self) -> None:
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, name
            self.gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()

    def zero_grad(self, set_to_none: bool) -> None:
        self.model.zero_grad(set_to_none=set_to_none)


def run_split(world: distributed.World, case: dict, split: dict) -> dict:
    """One step of `split` (local_batch_size, accumulation, options) on the case's documents."""
    training = TrainingConfig(max_norm=0.0, mixed_precision_param=split.get("param", "float32"))
    config = Config(
        training=training,
        parallelism=ParallelismConfig(
            fsdp_reduce_every_microbatch=split.get("reduce_every", True),
            fsdp_reshard_after_forward=split.get("reshard", "default"),
        ),
        activation_checkpoint=ActivationCheckpointConfig(mode=split.get("checkpointing", "none")),
        compile=CompileConfig(enable=split.get("compile", False), backend="aot_eager"),
    )
    with torch.device("meta"):
        model = Qwen3(case["spec"], split.get("backend", "sdpa_documents"))
    replicas = split.get("replicas", 1)
    mesh = distributed.build_mesh(Layout(world.size // replicas, replicas), world.device)
    mode = config.activation_checkpoint.mode
    parallelize(model, mesh, training, config.parallelism, mode, config.compile)
    model.to_empty(device="cpu")

    def read(name, shape, offset, size):
        part = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
        return case["weights"][name][part]

    distributed.fill_parameters(model, read)
    dataset = packed(case["documents"], split.get("seq_len", case["seq_len"]), pad_id=0)
    batch = Batch(split["local_batch_size"], split["accumulation"], world.size)
    optimizer = CatchGradients(model)
    stream = RowStream(dataset, batch, world.rank, seed=split.get("seed", 0))
    result = Trainer(config, world, batch, model, optimizer, iter(stream)).step()
    return {"loss": result.loss, "grad_norm": result.grad_norm, "gradients": optimizer.gradients,
            "supervised": result.supervised, "tokens": result.tokens}  # fmt: skip


if __name__ == "__main__":
    here = distributed.init_distributed()
    job = torch.load(sys.argv[1], weights_only=False)
    results = [run_split(here, job["cases"][split["case"]], split) for split in job["splits"]]
    if here.rank == 0:
        torch.save(results, sys.argv[2])
    distributed.leave(0)
