"""Runs under torchrun: a step of a full run in several splits, and a checkpoint of each.

Arguments: input file (splits, each with the folder that it loads), folder for the checkpoints.
"""

import sys
from pathlib import Path

import torch
from gloo.job_parity import config_of, save

from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.families import read_hf_config
from titan_mi100.workshop.made_up import made_up, random_rows


def steps(world: World, splits: list[dict], output: Path) -> None:
    for split in splits:
        config = config_of({"seq_len": 32}, {"local_batch_size": 2, "accumulation": 2, **split})
        spec = read_hf_config(Path(split["load"]))
        run = open_run(config, world, spec=spec, data=made_up(random_rows(16, 32, 700, 0.5)))
        run.step()
        save(run, output / split["name"])


if __name__ == "__main__":
    here = distributed.init_distributed()
    job, folder = torch.load(sys.argv[1], weights_only=False), Path(sys.argv[2])
    steps(here, job["splits"], folder)
    distributed.exit_process(0)
