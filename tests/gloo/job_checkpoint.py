"""Runs under torchrun on four ranks as HSDP 2 x 2: what a save and a load write and send, and what they refuse.

Argument: folder; each rank leaves its record there.
"""

import errno
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from titan_mi100.checkpoint import checkpointer as module
from titan_mi100.checkpoint import resume, sealed
from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.config.settings import Config, ParallelismConfig, TrainingConfig
from titan_mi100.errors import SaveError, UserError
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel import distributed
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.workshop.made_up import made_up, random_rows

SPEC = Qwen3Spec(64, 16, 32, 2, 2, 1, 8, True, rope_theta=10_000.0)
DEGREES = ParallelismConfig(data_parallel_replicate_degree=2, data_parallel_shard_degree=2)


@contextmanager
def counted() -> Iterator[list[int]]:
    """The bytes of every object that this rank hands to a collective, whichever one it is."""
    sent: list[int] = []
    real = distributed_c10d._object_to_tensor

    def count(*arguments: Any, **options: Any) -> Any:
        found = real(*arguments, **options)
        sent.append(found[0].numel())
        return found

    distributed_c10d._object_to_tensor = count
    try:
        yield sent
    finally:
        distributed_c10d._object_to_tensor = real


def open_small(world: World, layers: int) -> Run:
    """A small model that has made a step."""
    config = Config(training=TrainingConfig(seq_len=8), parallelism=DEGREES)
    data = made_up(random_rows(4, 8, SPEC.vocab_size, supervised_share=1.0))
    run = open_run(config, world, spec=replace(SPEC, num_hidden_layers=layers), data=data)
    run.step()
    return run


def checkpointer_of(run: Run, folder: Path, **options: Any) -> Checkpointer:
    layout = run.config.layout(run.world.size)
    return Checkpointer(folder, run.model, run.optimizer, run.world, layout, **options)


def values(checkpointer: Checkpointer) -> dict[str, torch.Tensor]:
    found = dict(checkpointer._tensors())
    return {name: (t.full_tensor() if isinstance(t, DTensor) else t).clone() for name, t in found.items()}


def save(checkpointer: Checkpointer, step: int) -> None:
    checkpointer.save(step, {"step": step}, {"layout": {}})


def said(work: Callable[[], object]) -> str:
    try:
        work()
    except (SaveError, UserError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def measure(run: Run, folder: Path) -> dict[str, Any]:
    """Bytes of objects that this rank hands over in a save and in a load, by call; and of the checkpoint."""
    checkpointer = checkpointer_of(run, folder)
    with counted() as in_save:
        save(checkpointer, 1)
    before = values(checkpointer)
    run.step()
    assert not all(before[name].equal(tensor) for name, tensor in values(checkpointer).items())
    with counted() as in_load:
        checkpointer.load(folder / "step-1")
    after = values(checkpointer)
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    whole = sum(tensor.nbytes for tensor in before.values())
    return {"save": in_save, "load": in_load, "planned": checkpointer._bytes, "whole": whole}


def refusals(run: Run, folder: Path, here: int) -> dict[str, str]:
    """What all ranks say of a checkpoint if something is wrong on one rank only."""
    path, world = folder / "layers-2" / "step-1", run.world
    checkpointer = checkpointer_of(run, path.parent)
    tensors, found = checkpointer._tensors, {}
    for what, change in {
        "a tensor more": ("model.extra.weight", torch.zeros(2)),
        "another shape": ("model.norm.weight", torch.zeros(4)),
        "another dtype": ("model.norm.weight", torch.zeros(16, dtype=torch.float16)),
    }.items():
        if world.rank == here:
            checkpointer._tensors = lambda change=change: iter([*tensors(), change])  # type: ignore[method-assign]
        found[what] = said(lambda: checkpointer.load(path))
        checkpointer._tensors = tensors  # type: ignore[method-assign]
    checkpointer._tensors = lambda: ((n, t) for n, t in tensors() if n != "model.norm.weight")  # type: ignore
    found["no rank has it"] = said(lambda: checkpointer.load(path))
    checkpointer._tensors = tensors  # type: ignore[method-assign]

    def damaged(*_: object) -> None:
        raise sealed.DamagedError("__0_0.distcp: damaged")

    real = module.open_dcp, sealed.verify
    if world.rank == here:
        module.open_dcp = lambda *_: real[0](folder / "layers-4" / "step-1")
    found["another folder"] = said(lambda: checkpointer.load(path))
    module.open_dcp = real[0]
    if world.rank == here:
        sealed.verify = damaged
    found["damaged for one"] = said(lambda: resume.find_checkpoint(path.parent, world))
    module.open_dcp, sealed.verify = real
    found["nothing wrong"] = said(lambda: checkpointer.load(path))
    return found


def failing(run: Run, folder: Path, in_background: bool) -> dict[str, Any]:
    """A save in which the disk of one writer is full, and the one before it."""
    checkpointer, world = checkpointer_of(run, folder, in_background=in_background), run.world
    save(checkpointer, 1)
    checkpointer.wait()
    record: dict[str, Any] = {"first": sorted(path.name for path in folder.iterdir())}
    torch.distributed.barrier()
    real = module.HashedFiles.create_stream

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if world.rank == 1:
        module.HashedFiles.create_stream = full  # type: ignore[method-assign]

    def work() -> None:
        save(checkpointer, 2)
        record["thread"] = checkpointer._thread is not None
        checkpointer.wait()

    record["said"] = said(work)
    record["failed here"] = checkpointer.has_failed()
    record["again"] = said(checkpointer.wait)
    module.HashedFiles.create_stream = real  # type: ignore[method-assign]
    torch.distributed.barrier()
    record["left"] = sorted(path.name for path in folder.iterdir())
    return record


if __name__ == "__main__":
    target, everybody = Path(sys.argv[1]), distributed.init_distributed()
    runs = {layers: open_small(everybody, layers) for layers in (2, 4)}
    result: dict[str, Any] = {f"{n} layers": measure(run, target / f"layers-{n}") for n, run in runs.items()}
    result |= {f"wrong on {here}": refusals(runs[2], target, here) for here in (1, 3)}
    result |= {f"failing, {b}": failing(runs[2], target / f"failing-{b}", b) for b in (False, True)}
    (target / f"{everybody.rank}.json").write_text(json.dumps(result))
    distributed.exit_process(0)
