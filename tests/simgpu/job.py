"""A rank of a run on the pretended device, or on the CPU with its block sizes: python job.py LEDGER [ARGUMENTS]

It runs titan_mi100.train as the launcher does. LEDGER-RANK is a file for the host waits of each step, save and
validation of a rank, a JSON line each; the last save's has a digest of weights and state. SIMGPU_FAULT: see `plant`.
"""

import faulthandler
import hashlib
import importlib
import inspect
import json
import os
import runpy
import sys
from functools import wraps
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

if __name__ == "__main__":
    sys.path += [str(Path(__file__).parent), os.environ["SIMGPU_LIBRARY"]]
    if os.environ["SIMGPU_SCHEDULE"] != "cpu":
        torch._import_device_backends()  # as torch's import does at its end; where this was forked, there is no device

import torch_simgpu

from titan_mi100.device import accelerator
from titan_mi100.model import loss
from titan_mi100.open_run.run import Run
from titan_mi100.optim import lean, optimizer
from titan_mi100.parallel import build, distributed, offload


def as_on_the_device() -> None:
    """The same block sizes on the CPU and the device, and several of each; the same operators."""
    loss.HeadMemory.of = classmethod(lambda cls, _: cls.of_gpu(torch_simgpu.PROPERTIES.total_memory))  # type: ignore
    lean.ELEMENTS = dict.fromkeys((False, True), 1 << 14)
    offload._PIECE = 1 << 14
    distributed.PIECE = 1 << 40  # of a norm on the CPU
    start = optimizer.AdamW.__init__
    optimizer.AdamW.__init__ = lambda *a, **named: start(*a, **{**named, "fused": True})  # type: ignore
    if accelerator.kind() == "cpu":
        alone = build.UnshardedModel
        build.UnshardedModel = lambda model, mesh, device, is_gpu: alone(model, mesh, device, True)  # type: ignore


def keep_ledger(path: Path) -> None:
    ledger = torch_simgpu.Ledger() if accelerator.kind() == torch_simgpu.NAME else None

    def counted(name: str) -> Any:
        method = getattr(Run, name)

        @wraps(method)
        def call(run: Run) -> Any:
            if ledger:
                ledger.take()
            result = method(run)
            line = [name, run.progress.step, ledger.take() if ledger else [], ""]
            if name == "save" and run.is_finished:
                line[-1] = digest(run)
            with path.open("a") as file:
                file.write(json.dumps(line) + "\n")
            return result

        return call

    for name in ("step", "validate", "save"):
        setattr(Run, name, counted(name))


def digest(run: Run) -> str:
    """Of this rank's weights and optimizer state."""
    found = hashlib.sha256()
    for name, tensor in run.checkpointer._tensors():
        local = distributed.local_part(tensor)[0].cpu().contiguous()
        found.update(name.encode() + local.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def plant(module: str, old: str, new: str) -> None:
    """Break the product in this process: its functions take the code of a broken copy of their module."""
    sound = importlib.import_module(module)
    assert sound.__file__ is not None
    text = Path(sound.__file__).read_text(encoding="utf-8")
    assert text.count(old) == 1
    broken = ModuleType(module)
    sys.modules[module] = broken  # dataclasses look for it
    exec(compile(text.replace(old, new), sound.__file__, "exec"), vars(broken))
    sys.modules[module] = sound
    take_code(vars(sound), vars(broken), module)


def take_code(sound: Any, broken: Any, module: str) -> None:
    for name, thing in sound.items():
        if getattr(thing, "__module__", "") != module:
            continue
        if isinstance(thing, type):
            take_code(vars(thing), vars(broken[name]), module)
        elif isinstance(function := inspect.unwrap(thing), FunctionType):
            function.__code__ = inspect.unwrap(broken[name]).__code__


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(os.environ.get("SIMGPU_PATIENCE", "100")), exit=True)  # says where it hangs
    as_on_the_device()
    if "SIMGPU_FAULT" in os.environ:
        plant(*json.loads(os.environ["SIMGPU_FAULT"]))
    path, *sys.argv[1:] = sys.argv[1:]
    keep_ledger(Path(f"{path}-{os.environ.get('RANK', '0')}"))
    sys.modules.pop("titan_mi100.train", None)
    runpy.run_module("titan_mi100.train", run_name="__main__", alter_sys=True)
