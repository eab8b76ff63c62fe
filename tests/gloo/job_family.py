"""Runs under torchrun: job_parity's splits and job_lora's runs of a made-up family.

Arguments: input file (cases, splits, runs), folder for checkpoints and the ranks' output files.
"""

import sys
from pathlib import Path

import made_up_family  # noqa: F401  (registers the family)
import torch
from gloo.job_lora import run
from gloo.job_parity import run_split

from titan_mi100.parallel import distributed

if __name__ == "__main__":
    here = distributed.init_distributed()
    job, output = torch.load(sys.argv[1], weights_only=False), Path(sys.argv[2])
    splits = [run_split(here, job["cases"][split["case"]], split) for split in job["splits"]]
    runs = {name: run(here, job["cases"][split["case"]], split, output) for name, split in job["runs"].items()}
    torch.save({"splits": splits, "runs": runs}, output / f"rank-{here.rank}.pt")
    distributed.leave(0)
