"""Runs under torchrun: a step of a preference or distillation run, in several splits, with the pass before it.

Arguments: input file (case with its data, splits), folder for the ranks' output files.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from gloo.job_parity import run_split

from titan_mi100.data.made_up import made_up, packed
from titan_mi100.data.prepared import PackedDataset, Prepared
from titan_mi100.parallel import distributed


def data_of(case: dict) -> Prepared:
    """Train and validation rows of the case's documents, which share a table as in a prepared folder."""
    rows = packed(case["documents"], case["seq_len"], together=case["together"])
    table = replace(rows.documents, labels=case["labels"])
    rows = PackedDataset(table, rows.packing, rows.seq_len, rows.pad_id)
    return made_up(rows, rows)


if __name__ == "__main__":
    here = distributed.init_distributed()
    job, output = torch.load(sys.argv[1], weights_only=False), Path(sys.argv[2])
    results = [run_split(here, job["case"], split, data=data_of(job["case"])) for split in job["splits"]]
    torch.save(results, output / f"rank-{here.rank}.pt")
    distributed.leave(0)
