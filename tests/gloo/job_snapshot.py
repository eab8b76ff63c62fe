"""Runs under torchrun: the trainer, which takes its CPU for a GPU where snapshots of memory are concerned. Step 2
is traced, and memory runs out in step 3. Arguments: the trainer's.
"""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from titan_mi100.config.load import config_from_command_line
from titan_mi100.open_run import start as open_run
from titan_mi100.run.preemption import Preemption
from titan_mi100.run.profiling import Profiler
from titan_mi100.train import main
from titan_mi100.watch.heartbeat import Heartbeat

step = open_run.Run.step


def fail(run: open_run.Run) -> Any:
    if run.progress.step == 2:
        while not list(Path(run.config.job.run_folder).glob("memory_snapshot/step-2/*")):  # rank 1 may write it still
            time.sleep(0.05)
        raise torch.OutOfMemoryError("no more")
    return step(run)


# flushed at once: the launcher may end this process before its buffer is written
torch.cuda.memory = SimpleNamespace(  # type: ignore[assignment]
    _record_memory_history=lambda **options: print(f"remembers {options['max_entries']}", flush=True),
    _dump_snapshot=lambda path: Path(path).write_text("snapshot"),
)
open_run.Run.step = fail  # type: ignore[method-assign]
open_run.open_profiler = Profiler  # type: ignore[assignment]
config = config_from_command_line()
main(config, Preemption(), Heartbeat(config.watchdog))
