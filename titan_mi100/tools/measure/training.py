"""Measures training steps of a model together with the planner's forecast, and compares the losses of layouts."""

import statistics
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from titan_mi100.config.kernels import EXPLICIT
from titan_mi100.config.settings import LRSchedulerConfig, OptimizerConfig
from titan_mi100.data.made_up import made_up, random_rows
from titan_mi100.files.schema import if_finite
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import init_distributed
from titan_mi100.planning.costs import train_flops
from titan_mi100.run.communication import communication
from titan_mi100.shapes.families import PRESETS
from titan_mi100.tools.measure.configs import config_of
from titan_mi100.tools.measure.parts import parity

_WARM_UP, _STEPS = 2, 3
_SUPERVISED = 0.65  # share of supervised tokens, as in scripts/bench
_SEQ = 128
_TINY = {"model": "debug", "batch": 1, "seq": _SEQ, "checkpointing": "none", "dtype": "float32", "attention": EXPLICIT}


def steps(row: dict[str, Any], peak: float | None) -> dict[str, Any]:
    """Run training steps. A collective.

    Args:
        row: see configs.config_of.
        peak: TFLOP/s of the data sheet; None: not known.
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
    found = {
        **row, "ranks": world.size, "attention": run.about["chosen"]["attention"]["name"], "tokens": first.tokens,
        "flops": train_flops(spec, first.tokens, first.supervised, first.attention_pairs),
        "times": [result.seconds for result in results], "losses": [if_finite(result.loss) for result in results],
        "peak_memory_gib": results[-1].peak_memory_gib, "comm_ms": comm["comm_ms_by_rank"],
        "exposed_ms": comm["comm_exposed_ms_by_rank"], "profiled_seconds": comm["profiled_step_ms"] / 1000,
        "plan": {"least": plan.least, "most": plan.most, "seconds": plan.step},
    }  # fmt: skip
    return judged(found, peak, world.device.type == "cuda")


def judged(found: dict[str, Any], peak: float | None, is_card: bool) -> dict[str, Any]:
    """The verdict on measured steps. On a CPU the plan's memory is of another kind than the process's."""
    problems, seconds, plan = [], statistics.median(found["times"]), found["plan"]
    if None in found["losses"]:
        problems.append("the loss is not finite")
    said = [f"{1000 * seconds:,.0f} ms a step, {found['tokens'] / seconds:,.0f} tokens/s"]
    if plan["seconds"]:
        said.append(f"planned {1000 * plan['seconds']:,.0f} ms ({seconds / plan['seconds'] - 1:+.0%})")
    if peak:
        utilisation = found["flops"] / seconds / (peak * 1e12 * found["ranks"])
        said.append(f"mfu {utilisation:.1%}")
        if utilisation > 1:
            problems.append("faster than the data sheet allows: its time is wrong")
    held, low, high = found["peak_memory_gib"], plan["least"] / 2**30, plan["most"] / 2**30
    said.append(f"{held:.2f} GiB at the peak" + (f", planned {low:.2f} to {high:.2f}" if is_card else ""))
    if is_card and held > high:
        problems.append(f"takes {held:.2f} GiB, more than the {high:.2f} that were planned")
    said.append(f"{max(found['comm_ms']):,.0f} ms in collectives, {max(found['exposed_ms']):,.0f} exposed")
    return {**found, "ms": 1000 * seconds, "problem": "; ".join(problems), "said": ", ".join(said)}


def same_losses(rows: int, layouts: list[str]) -> dict[str, Any]:
    """Train a tiny model in fp32 on the same rows in each layout. Damaged collectives show here. A collective.

    Without clipping and with a large eps: clipping, and Adam with a small eps, would hide a wrong gradient scale.

    Args:
        rows: rows per step, one per forward; a multiple of the number of ranks.
        layouts: see configs.config_of.
    """
    world, spec, runs = init_distributed(), PRESETS["debug"], []
    data = made_up(random_rows(rows * _STEPS, _SEQ, spec.vocab_size, 0.5))
    for name in layouts:
        config = config_of({**_TINY, "layout": name, "ga": rows // world.size}, world.size)
        config = replace(
            config,
            training=replace(config.training, steps=_STEPS, max_norm=0.0),
            optimizer=OptimizerConfig(lr=1e-3, eps=1e-3),
            lr_scheduler=LRSchedulerConfig(warmup_steps=0, decay_type="constant"),
        )
        run = open_run(config, world, spec=spec, data=data)
        results = [run.step() for _ in range(_STEPS)]
        losses, norms = ([if_finite(getattr(r, value)) for r in results] for value in ("loss", "grad_norm"))
        shown = f"{name} on {world.size}" if world.size > 1 else "one rank"
        runs.append({"name": shown, "ranks": world.size, "losses": losses, "norms": norms})
    dist.barrier()  # no rank ends while another one still communicates
    problem, said = parity(runs)
    return {"runs": runs, "problem": problem, "said": said}
