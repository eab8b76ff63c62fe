"""Runs under torchrun: steps of a made-up objective, in several splits.

Arguments: input file (case, splits), folder for the ranks' output files.
"""

import sys
from pathlib import Path

import torch
from gloo.job_parity import run_split
from made_up_objective import PairLoss, pairs

from titan_mi100.open_run import start
from titan_mi100.parallel import distributed
from titan_mi100.workshop.made_up import made_up

if __name__ == "__main__":
    here = distributed.init_distributed()
    job, output = torch.load(sys.argv[1], weights_only=False), Path(sys.argv[2])
    data = made_up(pairs(job["case"]["documents"]), pairs(job["case"]["documents"]))
    start.choose = lambda *_: PairLoss()
    results = [run_split(here, job["case"], split, data=data) for split in job["splits"]]
    torch.save(results, output / f"rank-{here.rank}.pt")
    distributed.exit_process(0)
