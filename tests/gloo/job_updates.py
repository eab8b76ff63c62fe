"""Runs under torchrun: updates from gradients that are a function of the element's place, and what a checkpoint of them
becomes in this layout. Arguments: JSON list of cases (parallelism, optimizer, save_to, load_from), output folder.
"""

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from gloo.job_parity import CONSTANT, save, whole
from packed_rows import packed
from torch import Tensor

from titan_mi100.config.settings import Config, ModelConfig, OptimizerConfig, ParallelismConfig, TrainingConfig
from titan_mi100.model.init import draw
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.workshop.made_up import made_up

# its matrices have blocks of 16 to 32
SPEC = Qwen3Spec(324, 128, 256, 4, 4, 2, 64, True, rope_theta=10_000.0, initializer_range=0.1, pad_token_id=208)


def open_case(world: World, case: dict[str, Any], processes: int) -> Run:
    parallelism = ParallelismConfig(**case["parallelism"])
    layout = Config(parallelism=parallelism).layout(processes)
    config = Config(
        model=ModelConfig(attention_backend="sdpa"),
        training=TrainingConfig(
            seq_len=16, local_batch_size=1, gradient_accumulation_steps=8 // layout.dp_degree, max_norm=0.0, steps=8
        ),
        optimizer=OptimizerConfig(lr=1e-2, **case["optimizer"]),
        lr_scheduler=CONSTANT,
        parallelism=parallelism,
    )
    rows = packed([(torch.arange(16).numpy(), torch.ones(16, dtype=torch.bool).numpy())] * 64, 16)
    checkpoint = Path(case["load_from"]) if case.get("load_from") else None
    return open_run(config, world, spec=SPEC, data=made_up(rows, validation=rows), checkpoint=checkpoint)


def set_gradients(run: Run, step: int) -> None:
    """The same in every layout, for every element."""

    def read(name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        seed = zlib.crc32(f"{step}/{name}".encode())
        whole_shape = shape if len(shape) == 2 else torch.Size((1, *shape))
        drawn = draw(seed, name, whole_shape, (0, 0), tuple(whole_shape), lambda rows, by: rows.normal_(generator=by))
        part = drawn.view(shape)[tuple(slice(a, a + n) for a, n in zip(offset, size, strict=True))]
        return part.to(torch.bfloat16)

    # read into the weights, because a new tensor may be sharded otherwise (torch 2.8), and then taken from there
    weights = [(name, p, p.detach().clone()) for name, p in run.model.trained_parameters()]
    distributed.fill_parameters(((name, p.detach()) for name, p, _ in weights), read)
    for _, parameter, value in weights:
        parameter.grad = parameter.detach().clone()
        parameter.detach().copy_(value)


def everything(run: Run) -> dict[str, Tensor]:
    """Weights and optimizer state, whole. A collective."""
    found = {name: whole(p) for name, p in run.model.trained_parameters()}
    return found | {f"optimizer.{name}": whole(value) for name, value in run.optimizer.named_state()}


def run_case(world: World, case: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    run = open_case(world, case, world.size)
    start, first = everything(run), 3 if case.get("load_from") else 0
    for step in range(first, first + 3):
        set_gradients(run, step)
        run.optimizer.update(0.5)
        run.optimizer.zero_grad()
    if case.get("save_to"):
        run.progress.step = 3
        save(run, Path(case["save_to"]))
    return {"start": start, "end": everything(run)}


if __name__ == "__main__":
    here = distributed.init_distributed()
    results = [run_case(here, case) for case in json.loads(sys.argv[1])]
    torch.save(results, Path(sys.argv[2]) / f"rank-{here.rank}.pt")
    distributed.exit_process(0)
