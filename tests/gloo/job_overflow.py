"""Runs under torchrun: fp16 in several layouts; in step 2 one rank's gradient overflows. Each rank saves what it saw.

Arguments: folder for the ranks' output files.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from gloo.job_parity import save, whole
from parity.table import LAYOUTS, ROWS, Cell, config_of, dataset, spec_of

from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.run.faults import FaultWatch
from titan_mi100.workshop.made_up import made_up

WHERE = ("FSDP2 x2", "PP2 1F1B", "TP2", "DDP x2")


def let_step_overflow(run: Run, step: int, rank: int) -> None:
    plain = run.model.forward_backward

    def forward_backward(*arguments):
        losses = plain(*arguments)
        if run.progress.step + 1 == step and run.world.rank == rank:
            *_, (_, parameter) = run.model.trained_parameters()
            gradient = parameter.grad
            getattr(gradient, "_local_tensor", gradient).view(-1)[0] = torch.inf
        return losses

    run.model.forward_backward = forward_backward  # type: ignore[method-assign]


def leave_the_range(run: Run, layer: int) -> None:
    """In fp16 its output is infinite, in bf16 it is not."""
    with torch.no_grad():
        for name, parameter in run.model.named_parameters():
            if f"layers.{layer}.mlp." in name:
                getattr(parameter, "_local_tensor", parameter).fill_(200.0)


def cause_of(run: Run, folder: Path, knows: int) -> str:
    """What a step says that leaves the range of fp16, where only rank `knows` knows which microbatch has failed."""
    leave_the_range(run, 1)
    watch = FaultWatch(run.stream, folder, here, run.progress, 99, run.model)
    result = run.step()
    if here.rank != knows:
        result = replace(result, nonfinite_microbatches=[])
    watch._places = lambda *_: ["rows:1"]  # type: ignore[method-assign]  # made-up rows are in no file
    watch.after_step(run.progress.step, result)
    return watch._cause


def opened(cell: Cell, checkpoint: Path | None = None) -> Run:
    data = made_up(dataset(cell.seq_len, 2 * ROWS))
    return open_run(config_of(cell), here, spec=spec_of(cell), data=data, checkpoint=checkpoint)


def seen(run: Run, steps: int) -> list[tuple]:
    results = [run.step() for _ in range(steps)]
    return [(r.loss, r.grad_norm, r.skipped, r.overflowed, r.loss_scale) for r in results]


def weights(run: Run) -> list[torch.Tensor]:
    return [whole(parameter) for _, parameter in run.model.named_parameters()]


if __name__ == "__main__":
    here, folder = distributed.init_distributed(), Path(sys.argv[1])
    found = {}
    for name in WHERE:
        processes, parallelism = LAYOUTS[name]
        cell = Cell(name, processes, parallelism, tied=True, accumulation=2, precision="float16", steps=4, layers=2)
        run = opened(cell)
        let_step_overflow(run, step=2, rank=1)
        first = seen(run, 3)
        progress = run.progress.skipped_steps, run.progress.skipped_in_a_row
        save(run, folder / str(WHERE.index(name)))
        last, after = seen(run, 1), weights(run)
        resumed = opened(cell, folder / str(WHERE.index(name)) / "step-3")
        again = seen(resumed, 1)
        same = all(map(torch.equal, weights(resumed), after))
        found[name] = {"steps": first + last, "progress": progress, "again": again, "same": same}
        found[name]["cause"] = cause_of(resumed, folder, knows=int(name != "TP2"))
    torch.save(found, folder / f"rank-{here.rank}.pt")
    distributed.exit_process(0)
