"""Row 12: how long a save holds training up, and what hashing and the finite flag cost, on two processes."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from chaos.case import Case, Outcome
from conftest import torchrun

from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.config.settings import Config, TrainingConfig
from titan_mi100.files import durable
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import gather_values, measure_gradients
from titan_mi100.shapes.base import ModelSpec, parameter_count
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.workshop.made_up import made_up, random_rows

SMALL = Qwen3Spec(8192, 256, 768, 4, 8, 4, 32, True, rope_theta=10_000.0)
LARGE = Qwen3Spec(32_768, 1024, 3072, 8, 16, 8, 64, True, rope_theta=10_000.0)
SEQ_LEN = 128


def cases(quick: bool) -> Iterator[Case]:
    yield Case("saves and the flag", partial(_measure, quick))


def _measure(quick: bool, folder: Path, _: tuple[str, ...]) -> Outcome:
    job = torchrun(__file__, str(folder), "1" if quick else "3", "small" * quick, check=False, timeout=900)
    if job.returncode:
        return Outcome(0, [job.stderr[-1000:]])
    return Outcome(1, [], json.loads((folder / "figures.json").read_text()))


def worker(folder: Path, repeats: int, spec: ModelSpec) -> None:
    world = distributed.init_distributed()
    config = Config(training=TrainingConfig(seq_len=SEQ_LEN, mixed_precision_param="float32"))
    data = made_up(random_rows(world.size, SEQ_LEN, spec.vocab_size, supervised_share=1.0))
    run = open_run(config, world, spec=spec, data=data)
    model, optimizer, trainer, layout = run.model, run.optimizer, run.trainer, config.layout(world.size)
    for _ in range(2):
        trainer.step()

    def seconds(work: Callable[[], Any]) -> float:
        torch.distributed.barrier()
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    size, number = 0, 0
    for _ in range(repeats):  # side by side: the machine's speed drifts
        for in_background, hashed in ((False, True), (False, False), (True, True)):
            number += 1
            real, durable.hashlib.sha256 = durable.hashlib.sha256, durable.hashlib.sha256 if hashed else _NoHash
            checkpointer = Checkpointer(folder / "checkpoint", model, optimizer, world, layout, 1, in_background)
            name = f"{'async' if in_background else 'sync'}{'' if hashed else ' without hashing'}"
            stall = seconds(lambda c=checkpointer, n=number: c.save(n, {"step": n}, about={}))
            note(f"{name}, stall s", stall)
            if in_background:
                started = time.perf_counter()
                thread = checkpointer._thread
                # threads end at different times, and a step is everybody's
                while distributed.any_rank(thread is not None and thread.is_alive(), world.device):
                    note("step beside an async save s", seconds(trainer.step))
                checkpointer.wait()
                note("async, whole s", stall + time.perf_counter() - started)
            durable.hashlib.sha256 = real
            newest = folder / "checkpoint" / f"step-{number}"
            torch.distributed.barrier()
            size = sum(file.stat().st_size for file in newest.iterdir())
            note("step alone s", seconds(trainer.step))
    model.forward_backward(run.stream.step(0), 1 / SEQ_LEN)
    parameters = [parameter for _, parameter in model.named_parameters()]
    for _ in range(100):
        both, alone = (1000 * seconds(lambda do=do: do(parameters, world.device)) for do in (_flag, _norm))
        note("norm and flag ms", both)
        note("flag alone ms", both - alone)
    medians = {name: statistics.median(values) for name, values in found.items()}
    figures = {
        **{name: round(value, 4) for name, value in medians.items()},
        "parameters": parameter_count(spec),
        "checkpoint MB": round(size / 1e6),
        "sync MB/s": round(size / 1e6 / medians["sync, stall s"]),
        "sync without hashing MB/s": round(size / 1e6 / medians["sync without hashing, stall s"]),
        "async stall / sync stall": round(medians["async, stall s"] / medians["sync, stall s"], 4),
    }
    if world.rank == 0:
        (folder / "figures.json").write_text(json.dumps(figures))
    distributed.exit_process(0)


class _NoHash:
    """Stands in for SHA-256."""

    def __init__(self, _: bytes = b"") -> None: ...

    def update(self, _: Any) -> None: ...

    def hexdigest(self) -> str:
        return "0" * 64


def _flag(parameters: list[torch.nn.Parameter], device: torch.device) -> list[list[float]]:
    gradients = measure_gradients(parameters)
    return gather_values(torch.stack([gradients.squares, gradients.finite.double()]), device).tolist()


def _norm(parameters: list[torch.nn.Parameter], device: torch.device) -> list[list[float]]:
    """What clipping alone needs."""
    local = [distributed.local_part(parameter.grad)[0] for parameter in parameters]  # type: ignore[arg-type]
    squares = torch.stack(torch._foreach_norm(local)).double().square().sum()
    return gather_values(squares[None], device).tolist()


if __name__ == "__main__":
    worker(Path(sys.argv[1]), int(sys.argv[2]), SMALL if sys.argv[3] else LARGE)
