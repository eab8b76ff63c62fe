"""One row of scripts/bench/sweep.py measured, as every process of its own torchrun job: `sweep_worker.py ROW.json`.

The trainer's own parts on made-up rows. Rank 0 writes what it found beside the row, as `result.json`. With
`--describe`, alone: print what the machine is.
"""

import ctypes
import json
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sweep import Row, config_of

from titan_mi100.data.made_up import made_up, random_rows
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.planning.costs import train_flops
from titan_mi100.run.communication import communication

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent is gone


def measure(row: Row, world: World) -> dict[str, Any]:
    """Times, memory and rates of the row's step; the same on every rank. A collective."""
    config = config_of(row)
    spec, batch = config.spec(), config.batch(world.size)
    # one step's rows, which every step learns again
    data = made_up(random_rows(batch.global_batch_size, row.seq, spec.vocab_size, row.supervised))
    trainer = open_run(config, world, spec=spec, data=data).trainer
    for _ in range(row.warmup):
        trainer.step()
    steps = [trainer.step() for _ in range(row.steps)]
    milliseconds = [1000 * (step.seconds - step.waited) for step in steps]
    low, q1, median, q3, high = np.percentile(milliseconds, (0, 25, 50, 75, 100)).tolist()
    first, seconds, machine = steps[0], median / 1000, describe(world.device)
    flops = train_flops(spec, first.tokens, first.supervised, first.attention_pairs)
    peak = machine["tflops"].get(row.dtype)
    return {
        "step_ms": median,
        "step_ms_min": low,
        "step_ms_q1": q1,
        "step_ms_q3": q3,
        "step_ms_max": high,
        "tokens_per_step": first.tokens,
        "tokens_per_second": first.tokens / seconds,
        "peak_memory_gib": steps[-1].peak_memory_gib,
        "mfu": flops / seconds / (peak * 1e12 * world.size) if peak else None,
        **communication(trainer.step, world),
    }


def describe(device: torch.device) -> dict[str, Any]:
    """The machine as a row's result depends on it."""
    words, gpu = distributed.device_name(device)[0], distributed.data_sheet(device)
    tflops = dict(gpu.tflops) if gpu else {}
    return {"device": words, "kind": gpu.name if gpu else "", "torch": torch.__version__, "tflops": tflops}


def main(arguments: Sequence[str]) -> None:
    if list(arguments) == ["--describe"]:
        print(json.dumps(describe(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))))
        return
    path = Path(arguments[0])
    if sys.platform == "linux":  # a killed torchrun would leave its workers, each in a session of its own
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        world = distributed.init_distributed()
        result = measure(Row(**json.loads(path.read_text(encoding="utf-8"))), world)
        if world.rank == 0:
            path.with_name("result.json").write_text(json.dumps(result), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
        distributed.leave(1, together=False)  # at once: tearing down would wait for the others
    distributed.leave(0)


if __name__ == "__main__":
    main(sys.argv[1:])
