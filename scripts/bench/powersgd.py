"""What PowerSGD saves on Qwen3-0.6B's shapes: bytes per step and the time of the reduction, on two gloo processes.

    python scripts/bench/powersgd.py [--flavor 0.6B] [--rank 1] [--json FILE]

One run of the trainer's DDP model with random weights and a row of 16 tokens: its first steps are reduced whole, the
others compressed. No optimizer, so 20 GB of memory are enough for both processes. The time is of the collectives and
the arithmetic alone; between two processes of one machine it says what compressing costs, not what a network gains.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchrun_job

from titan_mi100.cli import exit_code
from titan_mi100.config.settings import Config, ModelConfig, ParallelismConfig, TrainingConfig
from titan_mi100.data.made_up import made_up, random_rows
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.parallel.ddp import PowerSGD
from titan_mi100.shapes.families import PRESETS
from titan_mi100.trainer import peak_memory_gib
from titan_mi100.wording import bytes_in_words

WHOLE, STEPS, BAR = 2, 5, 50  # steps reduced whole, steps in all, least factor between the bytes


def worker(flavor: str, rank: int, output: Path) -> None:
    world = distributed.init_distributed()
    config = Config(
        model=ModelConfig(flavor=flavor),
        training=TrainingConfig(seq_len=16, mixed_precision_param="float32"),
        parallelism=ParallelismConfig(zero_stage=0, powersgd_rank=rank, powersgd_start_step=WHOLE + 1),
    )
    spec = PRESETS[flavor]
    data = made_up(random_rows(world.size, 16, spec.vocab_size, supervised_share=1.0))
    run = open_run(config, world, spec=spec, data=data)
    model, row = run.model, run.stream.step(0)
    reduce, compressing = PowerSGD.reduce, []

    def timed_reduce(self: PowerSGD, step: int) -> int:
        dist.barrier()
        started = time.perf_counter()
        sent = reduce(self, step)
        compressing.append(time.perf_counter() - started)
        return sent

    PowerSGD.reduce = timed_reduce  # type: ignore[method-assign]
    sent, reducing = [], []
    for step in range(1, STEPS + 1):
        model.forward_backward(row, 1 / (16 * world.size))
        sent.append(model.gradient_bytes)
        if step <= WHOLE:  # DDP hides its collectives behind backward; here they are alone
            dist.barrier()
            started = time.perf_counter()
            for _, parameter in model.named_parameters():
                dist.all_reduce(parameter.grad)
            reducing.append(time.perf_counter() - started)
        for _, parameter in model.named_parameters():
            parameter.grad = None
    memory = model.extra_state()
    record = {
        "torch": torch.__version__,
        "flavor": flavor,
        "rank": rank,
        "bytes": {"DDP": sent[0], "PowerSGD": sent[-1]},
        "seconds": {"DDP": min(reducing), "PowerSGD": min(compressing)},
        "memory_bytes": sum(tensor.nbytes for tensor in memory.values()),
        "peak_gib": max(distributed.gather(peak_memory_gib(world.device))),
    }
    if world.rank == 0:
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    distributed.leave(0)


def table(record: dict[str, Any]) -> str:
    sent, seconds = record["bytes"], record["seconds"]
    factor = sent["DDP"] / sent["PowerSGD"]
    return (
        f"Qwen3-{record['flavor']}, 2 gloo processes, fp32, torch {record['torch']}\n\n"
        "| | bytes per step and rank | reduction |\n|---|---|---|\n"
        f"| DDP | {bytes_in_words(sent['DDP'])} | {seconds['DDP']:.2f} s |\n"
        f"| PowerSGD rank {record['rank']} | {bytes_in_words(sent['PowerSGD'])} | {seconds['PowerSGD']:.2f} s |\n\n"
        f"{factor:,.0f}x fewer bytes (bar: {BAR}x, {'ok' if factor >= BAR else '**UNDER**'}). PowerSGD keeps "
        f"{bytes_in_words(record['memory_bytes'])} per rank between steps; "
        f"peak of a process {record['peak_gib']:.1f} GiB."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", default="0.6B", choices=list(PRESETS))
    parser.add_argument("--rank", type=int, default=1, help="PowerSGD's rank")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments.flavor, arguments.rank, arguments.worker)
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "record.json"
        given = ["--flavor", arguments.flavor, "--rank", str(arguments.rank), "--worker", str(output)]
        code, errors = torchrun_job.run(Path(__file__), given, processes=2)
        if code:
            raise RuntimeError(errors)
        record = json.loads(output.read_text(encoding="utf-8"))
    print(table(record))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if record["bytes"]["DDP"] >= BAR * record["bytes"]["PowerSGD"] else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
