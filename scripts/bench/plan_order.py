"""Whether the plan ranks layouts as they are: predicted against measured seconds per step on two CPU processes.

Each layout is timed by scripts/bench/step.py, in --rounds interleaved rounds; its median stands against the plan's step
for a device that is measured by itself: the rate of one process's step, and what gloo's collectives reach with FSDP2's
copies around them. Nothing is sent while it computes, as the same cores do both. Prints both and Spearman's rank
correlation.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step import MODELS

from titan_mi100.cli import exit_code
from titan_mi100.config.hardware import Gpu
from titan_mi100.config.plan import EFFICIENCY, make_plan
from titan_mi100.config.settings import ActivationCheckpointConfig, Config, ParallelismConfig, TrainingConfig

LAYOUTS: dict[str, dict[str, int]] = {
    "one process": {}, "ZeRO-3": {"zero_stage": 3}, "ZeRO-2": {"zero_stage": 2}, "ZeRO-1": {"zero_stage": 1},
    "DDP": {"zero_stage": 0}, "TP2": {"tensor_parallel_degree": 2}, "PP2": {"pipeline_parallel_degree": 2},
}  # fmt: skip
CALIBRATION = ("one process", 4, "none")  # its speed is the device's
ROWS = 8  # per step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="281m-4096", choices=MODELS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--link", action="store_true", help=argparse.SUPPRESS)  # as a worker
    options = parser.parse_args()
    if options.link:
        print(f"{measure_link():.4f}")
        return
    cases = [(name, rows, mode) for name in LAYOUTS for rows in (1, 4) for mode in ("none", "full")]
    cases = [case for case in cases if case[0] != "one process" or case == CALIBRATION]
    times: dict[Any, list[float]] = {case: [] for case in cases}
    link = float(job(2, __file__, "--link"))
    for _ in range(options.rounds):
        for case in cases:
            times[case].append(measure(options, *case))
            print(f"{case}: {times[case][-1]:.2f} s", file=sys.stderr, flush=True)
    measured = {case: statistics.median(seconds) for case, seconds in times.items()}
    unit = predict(options, Gpu("CPU", {"float32": 1.0}, 64, 1, overlap=0), *CALIBRATION)
    rate = unit / measured[CALIBRATION]
    device = Gpu("CPU", {"float32": rate}, 64, 2 * link, overlap=0)
    cases.remove(CALIBRATION)
    planned = {case: predict(options, device, *case) for case in cases}
    print(f"a core computes {1000 * rate * EFFICIENCY:.1f} GFLOP/s in a step; gloo sends {link:.2f} GB/s\n")
    print("| layout | rows x forwards | recomputation | planned, s | measured, s |\n|---|---|---|---|---|")
    for case in sorted(cases, key=lambda case: planned[case]):
        name, rows, mode = case
        print(f"| {name} | {rows} x {accumulation(name, rows)} | {mode} | {planned[case]:.2f} | {measured[case]:.2f} |")
    print(f"\nSpearman {spearman([planned[c] for c in cases], [measured[c] for c in cases]):.2f}")


def job(processes: int, *command: str) -> str:
    """The last line that it prints."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *launch, *command], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return done.stdout.splitlines()[-1]


def measure(options: argparse.Namespace, name: str, rows: int, mode: str) -> float:
    layout = LAYOUTS[name]
    found = job(
        1 if name == "one process" else 2,
        str(Path(__file__).with_name("step.py")), "--json", "--model", options.model, "--layers", str(options.layers),
        "--seq", str(options.seq), "--batch", str(rows), "--accumulation", str(accumulation(name, rows)),
        "--checkpointing", mode, "--steps", "2", "--supervised", "1", "--document", str(options.seq),
        "--zero_stage", str(layout.get("zero_stage", -1)),
        "--pipeline", str(layout.get("pipeline_parallel_degree", 1)),
        "--tensor", str(layout.get("tensor_parallel_degree", 1)),
    )  # fmt: skip
    return json.loads(found)["seconds"]


def measure_link() -> float:
    """GB/s that a process sends when weights of 64 MB are gathered and gradients reduced: the mean of both."""
    dist.init_process_group("gloo")
    count = 1 << 24
    mine, whole, part = torch.randn(count), torch.empty(2 * count), torch.empty(count)
    copied = torch.randn(2 * count)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, mine.clone())
        copied.copy_(whole)

    def reduce() -> None:
        whole.copy_(copied)
        dist.reduce_scatter_tensor(part, whole)
        mine.add_(part)

    collectives: list[Callable[[], Any]] = [gather, reduce]
    rates = []
    for collective in collectives:
        collective()
        started = time.perf_counter()
        for _ in range(5):
            collective()
        rates.append(5 * mine.nbytes / (time.perf_counter() - started) / 1e9)
    dist.destroy_process_group()
    return statistics.mean(rates)


def accumulation(name: str, rows: int) -> int:
    """The same rows per step: data-parallel ranks share them, the ranks of other layouts take all."""
    return ROWS // rows // (2 if "zero_stage" in LAYOUTS[name] else 1)


def predict(options: argparse.Namespace, device: Gpu, name: str, rows: int, mode: str) -> float:
    training = TrainingConfig(
        seq_len=options.seq, local_batch_size=rows, gradient_accumulation_steps=accumulation(name, rows),
        mixed_precision_param="float32",
    )  # fmt: skip
    config = Config(
        training=training,
        parallelism=ParallelismConfig(**LAYOUTS[name]),
        activation_checkpoint=ActivationCheckpointConfig(mode),
    )
    spec = replace(MODELS[options.model], num_hidden_layers=options.layers)
    return make_plan(config, 1 if name == "one process" else 2, 64 << 30, device, spec).seconds


def spearman(one: list[float], other: list[float]) -> float:
    ranks = [
        [sum(x < value for x in values) + sum(x == value for x in values) / 2 for value in values]
        for values in (one, other)
    ]
    return statistics.correlation(*ranks)


if __name__ == "__main__":
    sys.exit(exit_code(main))
