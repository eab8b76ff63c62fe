"""The trainer with something going wrong in it: run by runs.py in place of `-m titan_mi100.train`, same arguments.

The environment's CHAOS is JSON: {"events": FILE, "actions": [...], "without": [...], "lock_patience": SECONDS}. Every
rank appends what it comes to to the file, a line `rank event number` each: for the how many-th time, or its process id
(import), row (row: read, some steps ahead; trained: in the current step), step (sealed, remove, changed, unchanged). An
action is {"at": EVENT, "number": N, "rank": R, "do": WHAT, "to": WHOM, "delay": SECONDS}: done by rank R when it comes
to the event for the N-th time. WHAT is a signal's name, to rank WHOM, to the "launcher", or to the "script" that
started that; or, in a step, what is not finite on rank R: "nan loss", "nan gradient" (after the ranks' sum), "nan
activation"; or what has no end: "sleep", "hold the GIL", "wait for nobody" (a message that no rank sends); or one after
"seconds": "slow". With "turn": T it is done only in the run's start number T, the first being 0.
"""
# ruff: noqa: E402  # a signal while torch is imported is an event as well

import ctypes
import functools
import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from titan_mi100.config.load import config_from_command_line
from titan_mi100.run.preemption import Preemption
from titan_mi100.watch.heartbeat import Heartbeat

RANK = int(os.environ.get("RANK", "0"))


def wait_for_nobody(_: float) -> None:
    import torch

    torch.distributed.recv(torch.ones(1), (RANK + 1) % int(os.environ["WORLD_SIZE"]), tag=77)


HANGS: dict[str, Callable[[float], object]] = {
    "sleep": time.sleep,
    "slow": time.sleep,
    "hold the GIL": lambda seconds: ctypes.PyDLL(None).sleep(int(seconds)),
    "wait for nobody": wait_for_nobody,
}


class Chaos:
    """Notes events, and does what was asked for at them."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._path = Path(plan["events"])
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._actions = [action for action in plan.get("actions", []) if action.get("rank", 0) == RANK]
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self.watches_changes = any(action["do"].startswith("nan") for action in plan.get("actions", []))

    def event(self, name: str, number: int | None = None) -> list[str]:
        """An event happens; returns what is to be done by the caller."""
        with self._lock:  # threads read rows
            self._seen[name] += 1
            now = (name, self._seen[name])
        self._note(name, now[1] if number is None else number)
        asked = [action for action in self._actions if (action["at"], action.get("number", 1)) == now]
        for action in asked:
            if action["do"].startswith("nan") or ("turn" in action and action["turn"] != self._starts() - 1):
                continue
            if action["do"] in HANGS:
                self._note("does", os.getpid())
                HANGS[action["do"]](action.get("seconds", 100_000))
            elif delay := action.get("delay", 0.0):
                threading.Timer(delay, self._signal, [action]).start()
            else:
                self._signal(action)
        return [action["do"] for action in asked]

    def _starts(self) -> int:
        return len(re.findall(rf"^{RANK} start ", self._path.read_text(), re.MULTILINE))

    def _note(self, name: str, number: int) -> None:
        os.write(self._file, f"{RANK} {name} {number}\n".encode())  # whole: one call, to the end of the file

    def _signal(self, action: dict[str, Any]) -> None:
        whom = action.get("to", RANK)
        if whom == "launcher":
            process = os.getppid()
        elif whom == "script":
            process = int(os.environ["TITAN_LAUNCHER_PID"])
        else:
            process = int(re.findall(rf"^{whom} import (\d+)$", self._path.read_text(), re.MULTILINE)[-1])
        self._note("does", process)
        os.kill(process, signal.Signals[f"SIG{action['do']}"])


class NotedPreemption(Preemption):
    """Being told to stop is an event as well."""

    def __init__(self, chaos: Chaos) -> None:
        self._chaos = chaos
        super().__init__()

    def _told(self, number: int, frame: FrameType | None) -> None:
        super()._told(number, frame)
        self._chaos.event("told")


if __name__ == "__main__":
    plan = json.loads(os.environ["CHAOS"])
    chaos = Chaos(plan)
    preemption = NotedPreemption(chaos)
    config = config_from_command_line()
    heartbeat = Heartbeat.of_process(config.watchdog)
    chaos.event("import", os.getpid())

import torch

from titan_mi100 import train, trainer
from titan_mi100.checkpoint import checkpointer as checkpoint
from titan_mi100.checkpoint import sealed
from titan_mi100.data.loader import RowStream
from titan_mi100.data.microbatch import Microbatch
from titan_mi100.files import durable
from titan_mi100.model.qwen3 import Block
from titan_mi100.open_run import run as of_run
from titan_mi100.open_run import start as open_run
from titan_mi100.parallel.distributed import Gradients
from titan_mi100.run import folder as run_folder
from titan_mi100.trainer import StepResult, Trainer


def around(
    owner: Any, name: str, before: Callable[..., Any], after: Callable[..., Any] = lambda *_, **__: None
) -> None:
    whole = getattr(owner, name)

    @functools.wraps(whole)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        before(*arguments, **options)
        found = whole(*arguments, **options)
        after(*arguments, **options)
        return found

    setattr(owner, name, wrapped)


def observe(chaos: Chaos) -> None:
    """Steps, saves, loads, validations and the rows that are read become events."""

    def events(before: str, after: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
        return lambda *_, **__: chaos.event(before), lambda *_, **__: chaos.event(after)

    rows_in: dict[int, list[int]] = {}  # id of a microbatch -> its rows; an id that is used again is overwritten
    read = RowStream.microbatch

    def microbatch(stream: RowStream, first_row: int, number: int) -> Microbatch:  # mostly in threads, steps ahead
        rows = stream.row_numbers(first_row, [number])
        for row in rows:
            chaos.event("row", row)
        found = read(stream, first_row, number)
        rows_in[id(found)] = rows
        return found

    RowStream.microbatch = microbatch  # type: ignore[method-assign]
    around(open_run, "build_model", *events("build", "built"))
    around(of_run, "validation_losses", *events("validate", "validated"))
    around(checkpoint.Checkpointer, "load", *events("load", "loaded"))
    around(checkpoint.Checkpointer, "save", *events("save", "saved"))
    around(checkpoint.Checkpointer, "_write_part", *events("write", "written"))
    around(sealed, "seal", lambda *_: chaos.event("seal"), lambda _, __, record: chaos.event("sealed", record["step"]))
    around(sealed, "remove", lambda path: chaos.event("remove", sealed.step_of(path)), lambda _: chaos.event("removed"))
    whole_step, steps = Trainer.step, Counter[str]()

    def step(self: Trainer, update: bool = True) -> StepResult:
        if not update:  # after the last one, to see whether its weights are sound
            return whole_step(self, update)
        asked = chaos.event("step")
        for row in [row for each in self._microbatches for row in rows_in[id(each)]]:
            chaos.event("trained", row)
        before = digest(self) if chaos.watches_changes else ""
        with faults(self._model, asked):
            result = whole_step(self)
        steps["taken"] += 1
        if before:
            chaos.event("unchanged" if digest(self) == before else "changed", steps["taken"])
        chaos.event("stepped")
        return result

    Trainer.step = step  # type: ignore[method-assign]


def digest(trainer: Trainer) -> str:
    """Of this rank's part of the parameters and of the optimizer's state."""
    found = hashlib.sha256()
    for _, tensor in [*trainer._model.named_parameters(), *trainer._optimizer.named_state()]:
        local = getattr(tensor, "_local_tensor", tensor).detach()
        found.update(local.contiguous().view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


@contextmanager
def faults(model: Any, asked: list[str]) -> Iterator[None]:
    """A step in which something is not finite on this rank."""
    hooks, whole = [], model.forward_backward
    if "nan activation" in asked:
        block = next(module for module in model.parts[-1].modules() if isinstance(module, Block))
        hooks.append(block.register_forward_hook(lambda _, __, output: output * float("nan")))

    def forward_backward(*arguments: Any) -> torch.Tensor:
        losses = whole(*arguments)
        if "nan loss" in asked:
            losses = losses.clone()
            losses[0] = float("nan")
        if "nan gradient" in asked:
            gradients = [getattr(p.grad, "_local_tensor", p.grad) for _, p in model.named_parameters()]
            max(gradients, key=torch.Tensor.numel).view(-1)[-1] = float("nan")
        return losses

    model.forward_backward = forward_backward
    yield
    del model.forward_backward
    for hook in hooks:
        hook.remove()


def switch_off(protections: list[str]) -> None:
    """Leave out what protects; the row that tests it must then fail."""
    if "hash check" in protections:
        sealed.check_file = lambda *_: None
    if "finite flag" in protections:
        real, one, yes = trainer.measure_gradients, torch.ones((), dtype=torch.float64), torch.tensor(True)
        trainer.measure_gradients = lambda *a: Gradients(real(*a).local, one, yes)
        trainer.math.isfinite = lambda _: True  # type: ignore[assignment]
    if "lock" in protections:
        durable.FolderLock._take = lambda *_: None  # type: ignore[method-assign]


if __name__ == "__main__":
    if "lock_patience" in plan:
        run_folder.FolderLock = functools.partial(run_folder.FolderLock, patience=plan["lock_patience"])
    switch_off(plan.get("without", []))
    observe(chaos)
    chaos.event("start")
    sys.argv[0] = train.__file__
    train.main(config, preemption, heartbeat)
