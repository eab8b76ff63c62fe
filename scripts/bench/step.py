"""One optimizer step on this machine: tokens/s, the share of the measured matrix rate, memory, and where the time goes.

    python scripts/bench/step.py [--model 103m 281m 281m-4096 ...] [--seq 1024] [--document 0] [--dtype float32]
    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node=2 scripts/bench/step.py ...   # on two processes

The trainer's own step on made-up rows of the real model's shapes. `share` is the step's FLOPs, as planning/costs.py
counts them (recomputation is not work), over the rate at which this machine multiplies two of the model's matrices,
times the processes. Documents of random lengths from 100 to 500 tokens, or with --document of that length each. With
--profile the ten operators that take most time by themselves, and the share of copies and casts.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from titan_mi100.cli import exit_code
from titan_mi100.config.settings import (
    ActivationCheckpointConfig,
    CompileConfig,
    Config,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from titan_mi100.data.prepared import PackedDataset
from titan_mi100.errors import UserError
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.planning.costs import train_flops
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import PRESETS
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.workshop.made_up import made_up, packed, random_rows

_LONG = {"rope_theta": 1e6, "max_position_embeddings": 40_960}
MODELS = {
    "103m": Qwen3Spec(151_936, 512, 1536, 8, 8, 4, 64, True, **_LONG),
    "281m": Qwen3Spec(151_936, 1024, 3072, 8, 16, 8, 128, True, **_LONG),
    "281m-4096": Qwen3Spec(4096, 1024, 3072, 8, 16, 8, 128, True, **_LONG),
    **PRESETS,
}
COPIES = (
    "aten::copy_",
    "aten::_to_copy",
    "aten::cat",
    "aten::clone",
    "aten::fill_",
    "aten::zero_",
    "aten::_foreach_copy_",
)


def rows_of(options: argparse.Namespace, spec: ModelSpec, rows: int) -> PackedDataset:
    if not options.document:
        return random_rows(rows, options.seq, spec.vocab_size, options.supervised)
    random = np.random.default_rng(7)
    lengths = [*(options.document,) * (options.seq // options.document), options.seq % options.document]
    documents = [
        (random.integers(0, spec.vocab_size, n).astype(np.int32), random.random(n) < options.supervised)
        for _ in range(rows)
        for n in lengths
        if n
    ]
    return packed(documents, options.seq)


def open_bench(options: argparse.Namespace, spec: ModelSpec, world: distributed.World) -> Run:
    training = TrainingConfig(
        seq_len=options.seq,
        local_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulation,
        steps=1_000_000,
        mixed_precision_param=options.dtype,
        mixed_precision_reduce=options.reduce,
    )
    parallelism = ParallelismConfig(
        zero_stage=options.zero_stage,
        pipeline_parallel_degree=options.pipeline,
        tensor_parallel_degree=options.tensor,
    )
    config = Config(
        model=ModelConfig(attention_backend=options.backend),
        training=training,
        optimizer=OptimizerConfig(state=options.state, master=options.master_weights),
        parallelism=parallelism,
        activation_checkpoint=ActivationCheckpointConfig(options.checkpointing),
        compile=CompileConfig(options.compile),
    )
    rows = rows_of(options, spec, config.batch(world.size).global_batch_size)
    return open_run(config, world, spec=spec, data=made_up(rows))


def matrix_rate(spec: ModelSpec, tokens: int, dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s of a microbatch's tokens times an MLP matrix: the best of five, on all processes at a time."""
    x = torch.randn(tokens, spec.hidden_size, dtype=dtype, device=device)
    w = torch.randn(spec.intermediate_size, spec.hidden_size, dtype=dtype, device=device)
    out = x @ w.t()
    times = []
    for _ in range(5):
        wait(device)
        started = time.perf_counter()
        torch.mm(x, w.t(), out=out)
        wait(device)
        times.append(time.perf_counter() - started)
    return 2 * tokens * w.numel() / min(times)


def wait(device: torch.device) -> None:
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(options: argparse.Namespace, name: str, world: distributed.World) -> dict[str, Any]:
    spec, device = MODELS[name], world.device
    spec = replace(spec, num_hidden_layers=options.layers or spec.num_hidden_layers)
    run = open_bench(options, spec, world)
    for _ in range(options.warmup):
        run.step()
    results = [run.step() for _ in range(options.steps)]
    seconds = statistics.median(result.seconds for result in results)
    first = results[0]
    rate = matrix_rate(spec, options.batch * options.seq, getattr(torch, options.dtype), device) * world.size
    flops = train_flops(spec, first.tokens, first.supervised, first.attention_pairs)
    found = {
        "model": name,
        "seq": options.seq,
        "batch": options.batch,
        "document": options.document,
        "seconds": seconds,
        "tokens_per_second": first.tokens / seconds,
        "matrix_gflops": rate / 1e9,
        "share": flops / seconds / rate,
        "peak_memory_gib": results[-1].peak_memory_gib,
        "attention": run.about["chosen"]["attention"]["name"],
    }
    return {**found, **(_profile(run, device) if options.profile else {})}


def _profile(run: Run, device: torch.device) -> dict[str, Any]:
    """What one step's operators take by themselves, in shares of all of them."""
    on_device = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_device) as profiler:
        run.step()
    key = "self_device_time_total" if on_device else "self_cpu_time_total"
    times = {event.key: getattr(event, key) for event in profiler.key_averages()}
    total = sum(times.values())
    top = sorted(times.items(), key=lambda item: -item[1])[:10]
    return {
        "top": {name: spent / total for name, spent in top},
        "copies": sum(times.get(name, 0) for name in COPIES) / total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["103m"], choices=MODELS)
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1, help="rows per process and forward")
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--document", type=int, default=0, help="tokens of each document; 0: random, 100 to 500")
    parser.add_argument("--supervised", type=float, default=0.65, help="share of the tokens")
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--checkpointing", default="full", choices=["none", "selective", "full"])
    parser.add_argument("--layers", type=int, default=0, help="of the model instead of its own number")
    parser.add_argument("--zero_stage", type=int, default=-1)
    parser.add_argument("--pipeline", type=int, default=1, help="degree")
    parser.add_argument("--tensor", type=int, default=1, help="degree")
    parser.add_argument("--state", default="fp32", choices=["fp32", "bf16", "8bit"], help="of the optimizer")
    parser.add_argument("--master_weights", default="fp32", choices=["fp32", "bf16_sr", "24bit"])
    parser.add_argument("--reduce", default="float32", choices=["float32", "bfloat16"], help="gradients")
    parser.add_argument("--backend", default="auto", help="of attention")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true", help="a JSON object per model instead of a table")
    options = parser.parse_args()
    world = distributed.init_distributed()
    rows = (_measured(options, name, world) for name in options.model)
    for line in map(json.dumps, rows) if options.json else _table(options, rows, world):  # all ranks measure
        if world.rank == 0:
            print(line, flush=True)
    distributed.leave(0)


def _measured(options: argparse.Namespace, name: str, world: distributed.World) -> dict[str, Any]:
    """A model's row; one that is refused, because it does not fit, does not end the others."""
    try:
        return measure(options, name, world)
    except UserError as error:
        return {"model": name, "refused": str(error)}


def _table(options: argparse.Namespace, rows: Iterable[dict[str, Any]], world: distributed.World) -> Iterable[str]:
    threads = f"OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS')}"
    words = distributed.device_name(world.device)[0]
    yield f"torch {torch.__version__}, {world.size} x {words}, {options.dtype}, {threads}\n"
    yield "| model | seq | batch | document | s/step | tok/s | GEMM GFLOP/s | share of it | peak GiB | attention |"
    yield "|---" * 10 + "|"
    found = []
    for row in rows:
        if "refused" in row:
            yield f"| {row['model']} | refused: {row['refused']} " + "| " * 8 + "|"
            continue
        found.append(row)
        cells = [row["model"], row["seq"], row["batch"], row["document"] or "100-500"]
        cells += [f"{row['seconds']:.2f}", f"{row['tokens_per_second']:,.0f}", f"{row['matrix_gflops']:,.0f}"]
        cells += [f"{row['share']:.1%}", f"{row['peak_memory_gib']:.2f}", row["attention"]]
        yield "| " + " | ".join(map(str, cells)) + " |"
    for row in found:
        if "top" in row:
            yield f"\n{row['model']}: copies and casts {row['copies']:.1%}; " + ", ".join(
                f"{name.removeprefix('aten::')} {share:.1%}" for name, share in row["top"].items()
            )


if __name__ == "__main__":
    sys.exit(exit_code(main))
