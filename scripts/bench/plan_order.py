"""Whether the plan ranks layouts as they are: predicted against measured seconds per step on two CPU processes.

Each layout is timed by scripts/bench/step.py, in --rounds interleaved rounds; its median stands against the plan's step
for a device of the rate that step.py measures for matrix products, with --link GB/s between the processes. Prints both
and Spearman's rank correlation.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_mi100.cli import exit_code
from titan_mi100.config.hardware import Gpu
from titan_mi100.config.model_spec import PRESETS
from titan_mi100.config.plan import make_plan
from titan_mi100.config.settings import ActivationCheckpointConfig, Config, ParallelismConfig, TrainingConfig

LAYOUTS: dict[str, dict[str, int]] = {
    "ZeRO-3": {"zero_stage": 3}, "ZeRO-2": {"zero_stage": 2}, "ZeRO-1": {"zero_stage": 1},
    "DDP": {"zero_stage": 0}, "PP2": {"pipeline_parallel_degree": 2},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flavor", default="0.6B")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--link", type=float, default=1.0, help="GB/s between two processes (default 1.0)")
    options = parser.parse_args()
    cases = [(name, rows, mode) for name in LAYOUTS for rows in (1, 4) for mode in ("none", "full")]
    times: dict[Any, list[float]] = {case: [] for case in cases}
    rates: list[float] = []
    for _ in range(options.rounds):
        for case in cases:
            found = measure(options, *case)
            times[case].append(found["seconds"])
            rates.append(found["matrix_gflops"] / 2)
            print(f"{case}: {found['seconds']:.2f} s", file=sys.stderr, flush=True)
    device = Gpu("CPU", {"float32": statistics.median(rates) / 1000}, 64, options.link)
    planned = {case: predict(options, device, *case) for case in cases}
    measured = {case: statistics.median(seconds) for case, seconds in times.items()}
    print("| layout | rows x forwards | recomputation | planned, s | measured, s |\n|---|---|---|---|---|")
    for case in sorted(cases, key=lambda case: planned[case]):
        name, rows, mode = case
        print(f"| {name} | {rows} x {4 // rows} | {mode} | {planned[case]:.2f} | {measured[case]:.2f} |")
    print(f"\nSpearman {spearman([planned[c] for c in cases], [measured[c] for c in cases]):.2f}")


def measure(options: argparse.Namespace, name: str, rows: int, mode: str) -> dict[str, Any]:
    layout = LAYOUTS[name]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
        str(Path(__file__).with_name("step.py")), "--json", "--model", options.flavor, "--layers", str(options.layers),
        "--seq", str(options.seq), "--batch", str(rows), "--accumulation", str(accumulation(name, rows)),
        "--checkpointing", mode, "--steps", "2", "--supervised", "1", "--document", str(options.seq),
        "--zero_stage", str(layout.get("zero_stage", -1)),
        "--pipeline", str(layout.get("pipeline_parallel_degree", 1)),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def accumulation(name: str, rows: int) -> int:
    """8 rows per step in every layout: two ranks share them, or a pipeline takes all."""
    return (8 if name == "PP2" else 4) // rows


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
    spec = replace(PRESETS[options.flavor], num_hidden_layers=options.layers)
    return make_plan(config, 2, 64 << 30, device, spec).seconds


def spearman(one: list[float], other: list[float]) -> float:
    ranks = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*ranks)


if __name__ == "__main__":
    sys.exit(exit_code(main))
