"""Runs under torchrun: the trainer's own steps under DDP and PowerSGD, with checkpoints; each rank saves what it saw.

Argument: a folder for checkpoints and the ranks' output files.
"""

import itertools
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from conftest import packed
from torch import Tensor

from titan_mi100 import train
from titan_mi100.checkpoint import Checkpointer
from titan_mi100.data.epochs import ShuffledEpochs
from titan_mi100.data.loader import RowStream
from titan_mi100.logging import log
from titan_mi100.model_spec import ModelSpec
from titan_mi100.optimizer import build_optimizer
from titan_mi100.parallel import build, distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.settings import Config, OptimizerConfig, ParallelismConfig, TrainingConfig

SPEC = ModelSpec(320, 64, 128, 2, 4, 2, 16, True, rope_theta=10_000.0)
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
        mixed_precision_param="float32",
        mixed_precision_reduce=reduce,
    )
    return Config(training=training, optimizer=OptimizerConfig(lr=lr), parallelism=ParallelismConfig(**parallelism))


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
    mesh = distributed.build_mesh(config.layout(world.size), world.device)
    model = build.build_model(config, SPEC, mesh, world, supervised_share=0.5)
    build.load_weights(model, config, SPEC, resume)
    optimizer = build_optimizer(model.trained_parameters(), config.optimizer, world.device)
    folder.mkdir(exist_ok=True)
    checkpointer = Checkpointer(folder, 0, model, optimizer, world)
    done = 0 if resume is None else checkpointer.load(resume)["step"]
    batch = config.batch(world.size)
    source = ShuffledEpochs(packed(documents(), 32, 0), 0, batch.global_batch_size)
    stream = RowStream(source, batch, distributed.data_parallel_rank(mesh))
    rows = itertools.islice(iter(stream), done * batch.gradient_accumulation_steps, None)
    trainer = train.Trainer(config.layout(world.size), batch, 1.0, model, optimizer, rows)
    record: dict[str, Any] = {"losses": {}, "bytes": {}, "reduced": {}, "kept": {}}
    for step in range(done + 1, stop + 1):
        with Reduced() as reduced:
            result = trainer.step()
        record["losses"][step], record["bytes"][step] = result.loss, result.gradient_bytes
        record["reduced"][step] = reduced.bytes
        if step in save_at:
            checkpointer.save(step, {"step": step}, about={})
        if step in keep_at:
            weights = {name: local(parameter.detach()) for name, parameter in model.named_parameters()}
            memory = {name: tensor.clone() for name, tensor in model.extra_state().items()}
            record["kept"][step] = {"weights": weights, "memory": memory}
    log.removeHandler(messages)
    return {**record, "messages": messages.lines}


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
    ddp, rank_1, cold, shards = folder / "ddp", folder / "rank-1", folder / "cold", folder / "shards"
    found = {
        "ddp": run(world, ddp, config_of({"zero_stage": 0}), 50, keep_at=(START - 1, START), save_at=(9, 50)),
        "ddp on": run(world, ddp, config_of({"zero_stage": 0}, lr=1e-3), 100, resume=ddp / "step-50"),
        "ddp to rank 1": run(world, ddp, config_of(RANK_1, lr=1e-3), 100, resume=ddp / "step-50"),
        "bf16": run(world, folder / "bf16", config_of({"zero_stage": 0}, reduce="bfloat16"), 2),
        "rank 4": run(world, folder / "rank-4", config_of({**RANK_1, "powersgd_rank": 4}), 50, keep_at=(50,)),
        "rank 1": run(world, rank_1, config_of(RANK_1), 12, save_at=(3, 9), keep_at=(START - 1, START, 9, 12)),
        "rank 1 from 3": run(world, rank_1, config_of(RANK_1), 12, resume=rank_1 / "step-3", keep_at=(12,)),
        "rank 1 from 9": run(world, rank_1, config_of(RANK_1), 12, resume=rank_1 / "step-9", keep_at=(12,)),
        "cold": run(world, cold, config_of(COLD, 2), 12, save_at=(9,), keep_at=(12,)),
        "cold from 9": run(world, cold, config_of(COLD, 2), 12, resume=cold / "step-9", keep_at=(12,)),
        "rank 1 to FSDP2": run(world, shards, config_of({}), 12, resume=rank_1 / "step-9", save_at=(12,)),
        "FSDP2 to rank 1": run(world, rank_1, config_of(RANK_1), 14, resume=shards / "step-12", keep_at=(14,)),
        "rank 1 to rank 2": run(
            world, rank_1, config_of({**RANK_1, "powersgd_rank": 2}), 10, resume=rank_1 / "step-9", keep_at=(10,)
        ),
    }
    torch.save(found, folder / f"rank-{world.rank}.pt")
    distributed.leave(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
