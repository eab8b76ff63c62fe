"""Runs under torchrun: job_parity's splits, then LoRA runs with checkpoints; each rank saves what it saw.

Arguments: input file (cases, splits, runs), folder for checkpoints and the ranks' output files.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from gloo.job_parity import open_split, run_split, save, whole

from titan_mi100.model.lora import is_adapter
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World


def run(world: World, case: dict, split: dict, folder: Path) -> dict[str, Any]:
    """Train up to step `stop`, from the checkpoint `resume` if it is named; saves one under `save` at the end."""
    checkpoint = folder / split["resume"] / f"step-{split['from']}" if "resume" in split else None
    run = open_split(world, case, {**split, "max_norm": 1.0}, checkpoint=checkpoint)
    base = {name: whole(p) for name, p in run.model.named_parameters()}
    losses, sent = [], []
    while run.progress.step < split["stop"]:
        result = run.step()
        losses.append(result.loss)
        sent.append(result.gradient_bytes)
    state = torch.get_rng_state()
    validation = [run.validation_losses()[0]["loss"] for _ in range(2)]
    drew = not torch.equal(state, torch.get_rng_state())
    if "save" in split:
        save(run, folder / split["save"])
    after = {name: whole(p) for name, p in run.model.named_parameters()}
    distributed.seed_dropout(0, 1, run.stream.dp_rank, run.mesh)
    return {
        "losses": losses,
        "sent": sent,
        "validation": validation,
        "validation_drew": drew,
        "weights": {name: tensor for name, tensor in after.items() if is_adapter(name)},
        "changed": {name for name, tensor in after.items() if not torch.equal(tensor, base[name])},
        "dtypes": {name: tensor.dtype for name, tensor in after.items()},
        "copies": len(run.model.replicated_parameters()),
        "draw": torch.rand(1).item(),
    }


if __name__ == "__main__":
    here = distributed.init_distributed()
    job, output = torch.load(sys.argv[1], weights_only=False), Path(sys.argv[2])
    splits = [run_split(here, job["cases"][split["case"]], split) for split in job["splits"]]
    runs = {name: run(here, job["cases"][split["case"]], split, output) for name, split in job["runs"].items()}
    torch.save({"splits": splits, "runs": runs}, output / f"rank-{here.rank}.pt")
    distributed.exit_process(0)
