"""Measures training steps of a model in one layout, together with the planner's forecast."""

from typing import Any

import torch.distributed as dist

from titan_mi100.data.made_up import made_up, random_rows
from titan_mi100.files.schema import if_finite
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import init_distributed
from titan_mi100.planning.costs import train_flops
from titan_mi100.run.communication import communication
from titan_mi100.tools.measure.layouts import config_of

_WARM_UP, _STEPS = 2, 3
_SUPERVISED = 0.65  # share of supervised tokens, as in scripts/bench


def measure(row: dict[str, Any]) -> dict[str, Any]:
    """Run training steps; the result is a form.Steps. A collective.

    Args:
        row: see layouts.config_of.
    """
    world = init_distributed()
    config = config_of(row, world.size)
    spec = config.spec()
    # the rows of one step; every step trains on them again
    rows = config.batch(world.size).global_batch_size
    data = made_up(random_rows(rows, config.training.seq_len, spec.vocab_size, _SUPERVISED))
    run = open_run(config, world, spec=spec, data=data)
    for _ in range(_WARM_UP):
        run.step()
    results = [run.step() for _ in range(_STEPS)]
    first, plan = results[0], run.forecast.plan
    comm = communication(run.trainer.step, world)
    dist.barrier()  # no rank ends while another one still communicates
    return {
        **row, "ranks": world.size, "attention": run.about["chosen"]["attention"]["name"], "tokens": first.tokens,
        "flops": train_flops(spec, first.tokens, first.supervised, first.attention_pairs),
        "seconds": [result.seconds for result in results], "losses": [if_finite(result.loss) for result in results],
        "peak_memory_gib": results[-1].peak_memory_gib, "comm_ms": comm["comm_ms_by_rank"],
        "exposed_ms": comm["comm_exposed_ms_by_rank"], "profiled_seconds": comm["profiled_step_ms"] / 1000,
        "plan": {"least": plan.least, "most": plan.most, "seconds": plan.step},
    }  # fmt: skip
