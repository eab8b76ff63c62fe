"""Runs under torchrun: a step of a preference or distillation run, in several splits, with the pass before it.

Arguments: input file (case with its data, splits), folder for the ranks' output files.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from gloo.job_parity import open_split, run_split
from packed_rows import packed

from titan_mi100.data.answer_store import Arrays
from titan_mi100.data.prepared import PackedDataset, Prepared
from titan_mi100.open_run.inputs import RunInputs
from titan_mi100.open_run.logprob_pass import LogprobPass
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.workshop.made_up import made_up


def data_of(case: dict) -> Prepared:
    """Train and validation rows of the case's documents, which share a table as in a prepared folder."""
    rows = packed(case["documents"], case["seq_len"], together=case["together"])
    table = replace(rows.documents, labels=case["labels"], origins=case.get("origins"))
    rows = PackedDataset(table, rows.packing, rows.seq_len, rows.pad_id)
    return made_up(rows, rows)


def recorded(world: World, case: dict, split: dict) -> Arrays:
    """What the case's weights think of all rows, with split["k"] ids per token; on rank 0."""
    data = data_of(case)
    run = open_split(world, case, {**split, "objective": {}}, data=data)
    inputs = RunInputs(run.config, world.size, case["spec"], world, None, data, {}, None, run.progress)
    reading = LogprobPass(inputs, run.stream.dp_rank)
    return reading.read(run.model, range(2 * len(data.train)), reading.about(split["k"], ""), lambda: None)


if __name__ == "__main__":
    here = distributed.init_distributed()
    job, output = torch.load(sys.argv[1], weights_only=False), Path(sys.argv[2])
    case, results = job["case"], []
    for split in job["splits"]:
        found = run_split(here, case, split, data=data_of(case)) if split.get("objective") else {}
        results.append({**found, "recorded": recorded(here, case, split) if "k" in split else None})
    torch.save(results, output / f"rank-{here.rank}.pt")
    distributed.exit_process(0)
