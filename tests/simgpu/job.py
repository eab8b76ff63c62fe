"""A rank of a run on the pretended device, or on the CPU with its block sizes: python job.py LEDGER [ARGUMENTS]

It runs titan_mi100.train as the launcher does. LEDGER is a file for the host waits of each step, save and validation
of this rank, a JSON line each; "": none.
"""

import json
import os
import runpy
import sys
from functools import wraps
from pathlib import Path
from typing import Any

import torch  # noqa: F401, I001  # first: it loads the device
import simgpu_device

from titan_mi100.device import accelerator
from titan_mi100.model import loss
from titan_mi100.open_run.run import Run
from titan_mi100.optim import lean, optimizer
from titan_mi100.parallel import build, offload


def as_on_the_device() -> None:
    """The same block sizes on the CPU and the device, and several of each; the same operators."""
    loss.HeadMemory.of = classmethod(lambda cls, _: cls.of_gpu(simgpu_device.PROPERTIES.total_memory))  # type: ignore
    lean.ELEMENTS = dict.fromkeys((False, True), 1 << 13)
    offload._PIECE = 1 << 13
    start = optimizer.AdamW.__init__
    optimizer.AdamW.__init__ = lambda *a, **named: start(*a, **{**named, "fused": True})  # type: ignore
    if accelerator.kind() == "cpu":
        model = build.build_model
        build.build_model = lambda *a, **named: model(*a, **{**named, "is_gpu": True})


def keep_ledger(path: Path) -> None:
    ledger = simgpu_device.Ledger()

    def counted(name: str) -> Any:
        method = getattr(Run, name)

        @wraps(method)
        def call(run: Run) -> Any:
            ledger.take()
            result = method(run)
            with path.open("a") as file:
                file.write(json.dumps([name, run.progress.step, ledger.take()]) + "\n")
            return result

        return call

    for name in ("step", "validate", "save"):
        setattr(Run, name, counted(name))


if __name__ == "__main__":
    as_on_the_device()
    if accelerator.kind() == simgpu_device.NAME:
        simgpu_device.choose_schedule()
    path, *sys.argv[1:] = sys.argv[1:]
    if path:
        keep_ledger(Path(f"{path}-{os.environ.get('RANK', '0')}"))
    sys.modules.pop("titan_mi100.train", None)
    runpy.run_module("titan_mi100.train", run_name="__main__", alter_sys=True)
