"""Measures training steps of a model on one device, together with the planner's forecast."""

from functools import reduce
from typing import Any

from titan_mi100.config.settings import Config
from titan_mi100.device import accelerator
from titan_mi100.files.schema import if_finite
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.planning.plan import GIB
from titan_mi100.planning.workload import with_settings
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.workshop.made_up import made_up, random_rows

_WARM_UP, _STEPS = 2, 3
_SUPERVISED = 0.65  # share of supervised tokens, as in scripts/bench


def timed(run: Run, row: dict[str, str]) -> dict[str, Any]:
    """The times and losses of an open run's next steps. Args: row: the first columns of their row in the table."""
    results = [run.step() for _ in range(_WARM_UP + _STEPS)][_WARM_UP:]
    median, plan = sorted(results, key=lambda step: step.seconds)[_STEPS // 2], run.forecast.plan
    measured = {
        "row": row, "attention": run.about["chosen"]["attention"]["name"], "tokens": median.tokens,
        "times": [step.seconds for step in results], "seconds": median.seconds, "mfu": run.forecast.mfu(median),
        "losses": [if_finite(step.loss) for step in results], "peak_memory_gib": results[-1].peak_memory_gib,
        "plan": {"least": plan.least, "most": plan.most, "seconds": plan.step},
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
        "peak_mem": f"{held:.2f}",
        "planned_ms": f"{1000 * plan['seconds']:,.0f}" if plan["seconds"] else "n/a",
        "planned_mem": f"{low:.2f} to {high:.2f}" if is_card else "n/a",
    }  # fmt: skip
    summary = ", ".join(f"{name} {cell}" for name, cell in columns.items())
    row = {**found["row"], **columns}
    return {**found, "tokens_per_second": rate, "row": row, "problem": "; ".join(problems), "said": summary}


def on_random_rows(changes: list[dict[str, Any]], world: World, steps: int, spec: ModelSpec | None = None) -> Run:
    """A run on random rows, so many that they are enough for some steps. A collective. Args: spec: see open_run."""
    config = reduce(with_settings, changes, Config())
    spec, rows = spec or config.spec(), steps * config.batch(world.size).global_batch_size
    prepared = made_up(random_rows(rows, config.training.seq_len, spec.vocab_size, _SUPERVISED))
    return open_run(config, world, spec=spec, data=prepared)
