"""Runs under torchrun: job_parity's splits, then LoRA runs with checkpoints; each rank saves what it saw.

Arguments: input file (cases, splits, runs), folder for checkpoints and the ranks' output files.
"""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from conftest import packed
from gloo.job_parity import build, config_of, run_split
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_mi100 import train
from titan_mi100.checkpoint import Checkpointer
from titan_mi100.data.epochs import ShuffledEpochs
from titan_mi100.data.loader import RowStream
from titan_mi100.evaluate import validation_loss
from titan_mi100.model.lora import is_adapter
from titan_mi100.optimizer import build_optimizer
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.settings import OptimizerConfig


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def run(world: World, case: dict, split: dict, folder: Path) -> dict[str, Any]:
    """Train up to step `stop`, from the checkpoint `resume` if it is named; saves one under `save` at the end."""
    config = replace(config_of(case, split), optimizer=OptimizerConfig(lr=1e-2, eps=1e-3))
    layout, batch = config.layout(world.size), config.batch(world.size)
    model, dp_rank = build(world, case, config)
    mesh = distributed.build_mesh(layout, world.device)
    before = {name: whole(p) for name, p in model.named_parameters()}
    optimizer = build_optimizer(model.trained_parameters(), config.optimizer, world.device)
    done = 0
    if "resume" in split:
        path = folder / split["resume"] / f"step-{split['from']}"
        done = Checkpointer(path.parent, 0, model, optimizer, world).load(path)["step"]
    dataset = packed(case["documents"], config.training.seq_len, pad_id=0)
    stream = RowStream(ShuffledEpochs(dataset, 0, batch.global_batch_size), batch, dp_rank)
    rows = itertools.islice(iter(stream), done * batch.gradient_accumulation_steps, None)
    trainer = train.Trainer(layout, batch, 1.0, model, optimizer, rows)
    losses, sent = [], []
    for step in range(done + 1, split["stop"] + 1):
        distributed.seed_dropout(0, step, mesh)
        result = trainer.step()
        losses.append(result.loss)
        sent.append(result.gradient_bytes)
    state = torch.get_rng_state()
    validation = [validation_loss(model, dataset, batch, dp_rank) for _ in range(2)]
    drew = not torch.equal(state, torch.get_rng_state())
    if "save" in split:
        Checkpointer(folder / split["save"], 0, model, optimizer, world).save(
            split["stop"], {"step": split["stop"]}, about={}
        )
    after = {name: whole(p) for name, p in model.named_parameters()}
    distributed.seed_dropout(0, 1, mesh)
    return {
        "losses": losses,
        "sent": sent,
        "validation": validation,
        "validation_drew": drew,
        "weights": {name: tensor for name, tensor in after.items() if is_adapter(name)},
        "changed": {name for name, tensor in after.items() if not torch.equal(tensor, before[name])},
        "dtypes": {name: tensor.dtype for name, tensor in after.items()},
        "copies": len(model.copies()),
        "draw": torch.rand(1).item(),
    }


if __name__ == "__main__":
    here = distributed.init_distributed()
    job, output = torch.load(sys.argv[1], weights_only=False), Path(sys.argv[2])
    splits = [run_split(here, job["cases"][split["case"]], split) for split in job["splits"]]
    runs = {name: run(here, job["cases"][split["case"]], split, output) for name, split in job["runs"].items()}
    torch.save({"splits": splits, "runs": runs}, output / f"rank-{here.rank}.pt")
    distributed.leave(0)
