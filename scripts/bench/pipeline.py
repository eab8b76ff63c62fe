"""The pipeline: how idle its ranks are against the theory, and how evenly the automatic split loads the stages.

    python scripts/bench/pipeline.py bubble [--schedule 1F1B GPipe] [--microbatches 2 4 8 16]
    python scripts/bench/pipeline.py stages --data.path train.jsonl --model.tokenizer_path Qwen3-0.6B/

Both start their processes themselves, print Markdown and, with --json FILE, write every interval there.

`bubble` runs an untied model of equal stages and next to no head over two processes. A rank's idle share is what its
stages' forwards, backwards and reduction of gradients leave of the step, from the first rank's start of the schedule to
the last one's end. The replay puts the measured computations together again with nothing to wait for but each other:
what it is idle comes from the schedule, from computations that did not take equally long and from the reduction, which
the theory does not know; what the measured idle share is greater, from transfers and all that surrounds computations.
Well under 100% on a core, something else ran on the machine: measure again.

`stages` trains Qwen3-0.6B in the trainer's own step on the data that the command line names, from random weights. Every
key of the trainer's config can be given there; DEFAULTS hold against a config file, not against the command line.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchrun_job
from pipeline_figures import Operation, RankStep, bubble_rows, bubble_table, busy, rank_step, slower_by, stages_table
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from titan_mi100.cli import exit_code
from titan_mi100.config.layout import SCHEDULES, check_schedule
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import ActivationCheckpointConfig, Config, ParallelismConfig, TrainingConfig
from titan_mi100.data.made_up import made_up, packed
from titan_mi100.data.microbatch import collate
from titan_mi100.data.prepare import prepare_run
from titan_mi100.data.prepared import PackedDataset
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.trainer import peak_memory_gib

RANKS, WARMUP = 2, 2  # processes of `bubble`, and its steps before those that count
DEFAULTS = [  # of `stages`
    "--model.flavor=0.6B",
    "--training.gradient_accumulation_steps=4",
    "--training.steps=3",
    "--parallelism.pipeline_parallel_degree=2",
]


@dataclass(frozen=True)
class Cell:
    """One run of `bubble`."""

    schedule: str
    microbatches: int
    layers: int
    hidden: int
    seq_len: int
    steps: int
    precision: str


class Watch:
    """Notes every computation of this process's pipeline stages, and the bounds of each schedule's step."""

    def __init__(self, device: torch.device) -> None:
        """Replaces methods of torch's classes, until the process ends."""
        self._device = device
        self.steps: list[RankStep] = []
        self._operations: list[Operation] = []
        for kind, name in (
            ("forward", "forward_one_chunk"),
            ("backward", "backward_one_chunk"),
            ("weight", "backward_weight_one_chunk"),
            ("reduction", "perform_reduce_grad"),  # torch 2.8 has none: there it is a part of the last backward
        ):
            if hasattr(PipelineStage, name):
                setattr(PipelineStage, name, self._computation(kind, getattr(PipelineStage, name)))
        for schedule in (PipelineScheduleSingle, PipelineScheduleMulti):
            schedule.step = self._step(schedule.step)  # type: ignore[method-assign]

    def now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()

    def _computation(self, kind: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(stage: PipelineStage, first: int, *args: Any, **kwargs: Any) -> Any:
            start, on_core = self.now(), time.thread_time()
            result = method(stage, first, *args, **kwargs)
            end, on_core = self.now(), time.thread_time() - on_core
            microbatch = -1 if kind == "reduction" else first
            self._operations.append(Operation(kind, stage.stage_index, microbatch, start, end, on_core))
            return result

        return timed

    def _step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._operations = []
            start = self.now()
            result = method(*args, **kwargs)
            self.steps.append(RankStep(start, self.now(), self._operations))
            return result

        return timed


def spec_of(cell: Cell) -> ModelSpec:
    """Equal layers; the embedding and the head are as good as nothing."""
    heads = max(2, cell.hidden // 64)
    return Qwen3Spec(64, cell.hidden, 3 * cell.hidden, cell.layers, heads, heads // 2, cell.hidden // heads, False)


def config_of(cell: Cell) -> Config:
    stages = RANKS * SCHEDULES[cell.schedule].stages_per_rank
    return Config(
        training=TrainingConfig(
            seq_len=cell.seq_len,
            gradient_accumulation_steps=cell.microbatches,
            mixed_precision_param=cell.precision,
        ),
        parallelism=ParallelismConfig(
            pipeline_parallel_degree=RANKS,
            pipeline_parallel_schedule=cell.schedule,
            pipeline_parallel_layers_per_stage=(cell.layers // stages,) * stages,
        ),
        activation_checkpoint=ActivationCheckpointConfig(mode="none"),  # zero bubble wants it so
    )


def one_document_rows(cell: Cell, vocabulary: int) -> PackedDataset:
    """A step's rows: each one document of random tokens, all supervised."""
    ids = np.random.default_rng(0).integers(0, vocabulary, (cell.microbatches, cell.seq_len))
    return packed([(row, np.ones(cell.seq_len, dtype=bool)) for row in ids], cell.seq_len)


def run_cell(cell: Cell, world: World, watch: Watch) -> list[RankStep]:
    """This rank's steps that count. A collective."""
    config, spec = config_of(cell), spec_of(cell)
    model = open_run(config, world, spec=spec, data=made_up(rows := one_document_rows(cell, spec.vocab_size))).model
    microbatches = [collate([rows.row(number)]) for number in range(cell.microbatches)]
    watch.steps.clear()
    for _ in range(WARMUP + cell.steps):
        dist.barrier()
        model.forward_backward(microbatches, 1 / (cell.microbatches * cell.seq_len))
        for _, parameter in model.named_parameters():
            parameter.grad = None
    return watch.steps[WARMUP:]


def run_stages(arguments: Sequence[str], world: World, watch: Watch) -> list[dict[str, Any]]:
    """The figures of this rank's stages. A collective."""
    config = load_config(arguments, world.size)
    run = open_run(config, world)
    model, optimizer, trainer = run.model, run.optimizer, run.trainer
    supervised_share = run.data.train_counts.supervised_share(config.training.seq_len)
    bounds: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: bounds.append(watch.now()))
    optimizer.register_step_post_hook(lambda *_: bounds.append(watch.now()))
    trainer.step()  # the first one makes AdamW's state
    watch.steps.clear()
    bounds.clear()
    reset_peak_memory(world.device)
    results = [trainer.step() for _ in range(config.training.steps)]
    rows = []
    stages = sorted({operation.stage for operation in watch.steps[0].operations})  # as the parts are
    for stage, part in zip(stages, model.parts, strict=True):
        mine = [[operation for operation in step.operations if operation.stage == stage] for step in watch.steps]
        rows.append(
            {
                "stage": stage,
                "rank": world.rank,
                "layers": len(part.model.stage.layers),
                "parameters": sum(parameter.numel() for parameter in part.parameters()),
                "forward": median(busy(operations, "forward") for operations in mine),
                "backward": median(busy(operations, "backward", "weight") for operations in mine),
                "reduction": median(busy(operations, "reduction") for operations in mine),
                "busy": median(map(busy, mine)),
                "on_core": median(sum(operation.on_core for operation in operations) for operations in mine),
                "optimizer": median(end - start for start, end in zip(bounds[::2], bounds[1::2], strict=True)),
                "peak_memory_gib": peak_memory_gib(world.device),
                "step": median(result.seconds for result in results),
                "supervised_share": supervised_share,
                "results": [asdict(result) for result in results],
                "steps": watch.steps,
            }
        )
    return rows


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak starts anew from what is resident


def launch(job: dict[str, Any], ranks: int, folder: Path) -> list[Any]:
    """Run a job on so many processes; what each left.

    Raises:
        RuntimeError: the job failed; its output is the message.
    """
    (folder / "job.json").write_text(json.dumps(job))
    code, errors = torchrun_job.run(Path(__file__), ["worker", str(folder)], ranks)
    if code:
        raise RuntimeError(errors)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


def worker(folder: Path) -> None:
    world = distributed.init_distributed()
    watch, job = Watch(world.device), json.loads((folder / "job.json").read_text())
    found: list[Any]
    if "cells" in job:
        found = [run_cell(Cell(**cell), world, watch) for cell in job["cells"]]
    else:
        found = run_stages(job["arguments"], world, watch)
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(found))
    distributed.leave(0)


def bubble(options: argparse.Namespace, folder: Path) -> tuple[str, Any]:
    cells = [
        Cell(schedule, number, options.layers, options.hidden, options.seq_len, options.steps, options.precision)
        for schedule in options.schedule
        for number in options.microbatches
        if check_schedule(schedule, RANKS, number) is None
    ]
    by_rank = launch({"cells": [asdict(cell) for cell in cells]}, RANKS, folder)
    rows, record = [], []
    for cell, runs in zip(cells, zip(*by_rank, strict=True), strict=True):
        steps = [[rank_step(*step) for step in ranks] for ranks in zip(*runs, strict=True)]
        rows += bubble_rows(cell.schedule, cell.microbatches, steps)
        record.append({**asdict(cell), "steps": steps})
    return bubble_table(rows), {"rows": rows, "cells": record}


def stages(arguments: Sequence[str], folder: Path) -> tuple[str, Any]:
    """
    Raises:
        UserError: of the config or the data.
    """
    given = {argument.partition("=")[0] for argument in arguments}
    arguments = [*(default for default in DEFAULTS if default.partition("=")[0] not in given), *arguments]
    ranks = load_config(arguments, world_size=None).parallelism.pipeline_parallel_degree
    config = load_config(arguments, ranks)
    prepare_run(config, None)  # the ranks then find it
    by_rank = launch({"arguments": arguments}, ranks, folder)
    rows = sorted((row for rows in by_rank for row in rows), key=lambda row: row["stage"])
    shape = f"{config.model.flavor}, seq_len {config.training.seq_len}, {config.training.mixed_precision_param}"
    text = f"{shape}, activation checkpointing {config.activation_checkpoint.mode}, "
    text += f"supervised share {rows[0]['supervised_share']:.3f}, a step {rows[0]['step']:.2f} s"
    slower = f"The slower stage is {slower_by([row['busy'] for row in rows]):.1%} slower"
    if all(row["on_core"] for row in rows):
        slower += f", {slower_by([row['on_core'] for row in rows]):.1%} by time on a core"
    return f"{text}\n\n{stages_table(rows)}\n{slower}.\n", rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("--json", type=Path, metavar="FILE", help="where all figures and intervals go")
    commands = parser.add_subparsers(dest="command", required=True)
    options = commands.add_parser("bubble", parents=[output], help="idle shares against the theory")
    options.add_argument("--schedule", nargs="+", default=["1F1B", "GPipe", "Interleaved1F1B"], choices=list(SCHEDULES))
    options.add_argument("--microbatches", nargs="+", type=int, default=[2, 4, 8, 16])
    options.add_argument("--steps", type=int, default=5, help=f"that count; {WARMUP} come before")
    options.add_argument("--layers", type=int, default=8, help="a multiple of the number of stages")
    options.add_argument("--hidden", type=int, default=512)
    options.add_argument("--seq_len", type=int, default=256)
    options.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    commands.add_parser("stages", parents=[output], help="the automatic split of Qwen3-0.6B", allow_abbrev=False)
    commands.add_parser("worker").add_argument("folder", type=Path)
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "worker":
        worker(arguments.folder)
    if rest and arguments.command == "bubble":
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    with tempfile.TemporaryDirectory() as folder:
        text, record = bubble(arguments, Path(folder)) if arguments.command == "bubble" else stages(rest, Path(folder))
    print(f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n\n{text}")
    if arguments.json:
        arguments.json.write_text(json.dumps(record) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
