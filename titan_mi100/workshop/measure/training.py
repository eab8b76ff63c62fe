"""Measures training steps of a model together with the planner's forecast, and compares the losses of layouts."""

from functools import reduce
from typing import Any

import torch.distributed as dist

from titan_mi100.config.settings import Config
from titan_mi100.device import accelerator
from titan_mi100.files.schema import if_finite
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World, init_distributed
from titan_mi100.planning.plan import GIB
from titan_mi100.planning.workload import with_settings
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.workshop.made_up import made_up, random_rows
from titan_mi100.workshop.measure.communication import communication
from titan_mi100.workshop.measure.parts import parity

_WARM_UP, _STEPS = 2, 3
_SUPERVISED = 0.65  # share of supervised tokens, as in scripts/bench


def steps(row: dict[str, str], changes: list[dict[str, Any]]) -> dict[str, Any]:
    """Run training steps. A collective.

    Args:
        row: the first columns of the row in the table.
        changes: of the default config, see plan.with_settings; a later one counts more.
    """
    return timed(on_random_rows(changes, init_distributed(), steps=1), row)  # every step trains on the same rows


def timed(run: Run, row: dict[str, str]) -> dict[str, Any]:
    """The times and losses of an open run's next steps. A collective. Args: row: see `steps`."""
    results = [run.step() for _ in range(_WARM_UP + _STEPS)][_WARM_UP:]
    median, plan = sorted(results, key=lambda step: step.seconds)[_STEPS // 2], run.forecast.plan
    comm_ms = communication(run.trainer.step, run.world)["comm_ms"] if run.world.size > 1 else 0.0
    dist.barrier()  # no rank ends while another one still communicates
    measured = {
        "row": row, "attention": run.about["chosen"]["attention"]["name"], "tokens": median.tokens,
        "times": [step.seconds for step in results], "seconds": median.seconds, "mfu": run.forecast.mfu(median),
        "losses": [if_finite(step.loss) for step in results], "peak_memory_gib": results[-1].peak_memory_gib,
        "comm_ms": comm_ms, "plan": {"least": plan.least, "most": plan.most, "seconds": plan.step},
    }  # fmt: skip
    return judged(measured, accelerator.is_gpu(run.world.device))


def judged(found: dict[str, Any], is_card: bool) -> dict[str, Any]:
    """The verdict on measured steps, and their row of the table. On a CPU the plan's memory is of another kind than
    the process's.
    """
    problems, plan, seconds, mfu = [], found["plan"], found["seconds"], found["mfu"]
    held, low, high = found["peak_memory_gib"], plan["least"] / GIB, plan["most"] / GIB
    if None in found["losses"]:
        problems.append("the loss is not finite")
    if mfu and mfu > 1:
        problems.append("faster than the data sheet allows: its time is wrong")
    if is_card and held > high:
        problems.append(f"takes {held:.2f} GiB, more than the {high:.2f} that were planned")
    rate = found["tokens"] / seconds
    columns = {
        "step_ms": f"{1000 * seconds:,.0f}", "toks/s": f"{rate:,.0f}", "mfu": f"{mfu:.1%}" if mfu else "n/a",
        "peak_mem": f"{held:.2f}", "comm_ms": f"{found['comm_ms']:,.0f}",
        "planned_ms": f"{1000 * plan['seconds']:,.0f}" if plan["seconds"] else "n/a",
        "planned_mem": f"{low:.2f} to {high:.2f}" if is_card else "n/a",
    }  # fmt: skip
    summary = ", ".join(f"{name} {cell}" for name, cell in columns.items())
    row = {**found["row"], **columns}
    return {**found, "tokens_per_second": rate, "row": row, "problem": "; ".join(problems), "said": summary}


def same_losses(rows: int, layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Train a tiny model in fp32 on the same rows in each layout. Damaged collectives show here. A collective.

    Without clipping and with a large eps: clipping, and Adam with a small eps, would hide a wrong gradient scale.

    Args:
        rows: rows per step, one per forward; a multiple of the number of ranks.
        layouts: name -> settings of parallelism.
    """
    world, runs = init_distributed(), []
    training = {"seq_len": 128, "gradient_accumulation_steps": rows // world.size, "mixed_precision_param": "float32"}
    tiny: dict[str, Any] = {
        "model": {"flavor": "debug", "attention_backend": "chunked"}, "optimizer": {"lr": 1e-3, "eps": 1e-3},
        "training": {**training, "steps": _STEPS, "max_norm": 0.0}, "activation_checkpoint": {"mode": "none"},
        "lr_scheduler": {"warmup_steps": 0, "decay_type": "constant"},
    }  # fmt: skip
    for layout, settings in layouts.items():
        run = on_random_rows([tiny, {"parallelism": settings}], world, _STEPS)
        results = [run.step() for _ in range(_STEPS)]
        losses, norms = ([if_finite(getattr(r, metric)) for r in results] for metric in ("loss", "grad_norm"))
        runs.append({"name": f"{layout} on {world.size}", "ranks": world.size, "losses": losses, "norms": norms})
    dist.barrier()  # no rank ends while another one still communicates
    problem, numbers = parity(runs)
    return {"runs": runs, "problem": problem, "said": numbers}


def on_random_rows(changes: list[dict[str, Any]], world: World, steps: int, spec: ModelSpec | None = None) -> Run:
    """A run on random rows, so many that they are enough for some steps. A collective. Args: spec: see open_run."""
    config = reduce(with_settings, changes, Config())
    spec, rows = spec or config.spec(), steps * config.batch(world.size).global_batch_size
    prepared = made_up(random_rows(rows, config.training.seq_len, spec.vocab_size, _SUPERVISED))
    return open_run(config, world, spec=spec, data=prepared)
