"""Runs under torchrun: the trainer's own steps under DDP and PowerSGD, with checkpoints; each rank saves what it saw.

Argument: a folder for checkpoints and the ranks' output files.
"""

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gloo.job_parity import CONSTANT, save
from packed_rows import packed
from torch import Tensor

from titan_mi100.config.settings import Config, OptimizerConfig, ParallelismConfig, TrainingConfig
from titan_mi100.log import log
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.workshop.made_up import made_up

SPEC = Qwen3Spec(320, 64, 128, 2, 4, 2, 16, True, rope_theta=10_000.0)
START = 6  # the first compressed step
RANK_1 = {"zero_stage": 0, "powersgd_rank": 1, "powersgd_start_step": START}
COLD = {**RANK_1, "powersgd_rank": 2, "powersgd_warm_start": False}


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows in which each of 16 tokens is followed by one of two: something to learn."""
    random = np.random.default_rng(0)
    followers, found = random.integers(0, 16, (16, 2)), []
    for _ in range(400):
        ids = [random.integers(0, 16)]
        while len(ids) < 32:
            ids.append(followers[ids[-1], random.integers(0, 2)])
        found.append((np.array(ids, dtype=np.int32), np.ones(32, dtype=bool)))
    return found


class Messages(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def config_of(parallelism: dict[str, Any], accumulation: int = 1, reduce: str = "float32", lr: float = 1e-2) -> Config:
    training = TrainingConfig(
        seq_len=32,
        local_batch_size=4 // accumulation,
        gradient_accumulation_steps=accumulation,
        steps=100,
        seed=42,
        mixed_precision_param="float32",
        mixed_precision_reduce=reduce,
    )
    return Config(
        training=training,
        optimizer=OptimizerConfig(lr=lr),
        lr_scheduler=CONSTANT,
        parallelism=ParallelismConfig(**parallelism),
    )


def run(
    world: World,
    folder: Path,
    config: Config,
    stop: int,
    *,
    resume: Path | None = None,
    save_at: tuple[int, ...] = (),
    keep_at: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Train up to step `stop`; losses and bytes by step, and at the steps `keep_at` weights and communication state."""
    messages = Messages()
    log.addHandler(messages)
    data = made_up(rows := packed(documents(), 32), validation=rows)
    run = open_run(config, world, spec=SPEC, data=data, checkpoint=resume)
    record: dict[str, Any] = {"losses": {}, "bytes": {}, "reduced": {}, "kept": {}}
    for step in range(run.progress.step + 1, stop + 1):
        with Reduced() as reduced:
            result = run.step()
        record["losses"][step], record["bytes"][step] = result.loss, result.gradient_bytes
        record["reduced"][step] = reduced.bytes
        if step in save_at:
            save(run, folder)
        if step in keep_at:
            weights = {name: local(parameter.detach()) for name, parameter in run.model.named_parameters()}
            memory = {name: tensor.clone() for name, tensor in run.model.extra_state().items()}
            record["kept"][step] = {"weights": weights, "memory": memory}
    log.removeHandler(messages)
    return {**record, "loss on all rows": run.validation_losses()[0]["loss"], "messages": messages.lines}


def local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor).clone()


class Reduced:
    """Counts the bytes that hooks give to all_reduce; they alone call it asynchronously."""

    def __enter__(self) -> "Reduced":
        self.bytes, self._all_reduce = 0, dist.all_reduce
        dist.all_reduce = self._counted
        return self

    def _counted(self, tensor: Tensor, *arguments: Any, async_op: bool = False, **options: Any) -> Any:
        self.bytes += tensor.nbytes if async_op else 0
        return self._all_reduce(tensor, *arguments, async_op=async_op, **options)

    def __exit__(self, *_: object) -> None:
        dist.all_reduce = self._all_reduce


def main(folder: Path) -> None:
    world = distributed.init_distributed()
    log.setLevel(logging.INFO)
    rank_2, rank_4 = (config_of({**RANK_1, "powersgd_rank": rank}) for rank in (2, 4))
    ddp, rank_1, cold, shards = folder / "ddp", folder / "rank-1", folder / "cold", folder / "shards"
    found = {
        "ddp": run(world, ddp, config_of({"zero_stage": 0}), 50, keep_at=(START - 1, START), save_at=(50,)),
        "bf16": run(world, folder / "bf16", config_of({"zero_stage": 0}, reduce="bfloat16"), 2),
        "rank 1": run(world, rank_1, config_of(RANK_1), 12, save_at=(3, 9), keep_at=(START - 1, START, 9, 12)),
        "rank 1 from 9": run(world, rank_1, config_of(RANK_1), 12, resume=rank_1 / "step-9", keep_at=(12,)),
        "rank 1 to FSDP2": run(world, shards, config_of({}), 12, resume=rank_1 / "step-9", save_at=(12,)),
        "FSDP2 to rank 1": run(world, rank_1, config_of(RANK_1), 14, resume=shards / "step-12", keep_at=(14,)),
        "rank 1 to rank 2": run(world, rank_1, rank_2, 10, resume=rank_1 / "step-9", save_at=(10,)),
        "rank 1 from 3": run(world, rank_1, config_of(RANK_1), 12, resume=rank_1 / "step-3", keep_at=(12,)),
        "cold": run(world, cold, config_of(COLD, 2), 12, save_at=(9,), keep_at=(12,)),
        "cold from 9": run(world, cold, config_of(COLD, 2), 12, resume=cold / "step-9", keep_at=(12,)),
        "ddp on": run(world, ddp, config_of({"zero_stage": 0}, lr=1e-3), 100, resume=ddp / "step-50"),
        "ddp to rank 1": run(world, ddp, config_of(RANK_1, lr=1e-3), 100, resume=ddp / "step-50"),
        "rank 2 from 10": run(world, rank_1, rank_2, 11, resume=rank_1 / "step-10"),
        "rank 4": run(world, folder / "rank-4", rank_4, 50, keep_at=(50,)),
    }
    torch.save(found, folder / f"rank-{world.rank}.pt")
    distributed.exit_process(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
