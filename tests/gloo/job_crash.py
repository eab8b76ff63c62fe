"""Runs under torchrun: the trainer, whose rank 1 fails in step 2. Arguments: how (bug, killed), then the trainer's."""

import os
import signal
import sys
from typing import Any

from titan_mi100.config.load import config_from_command_line
from titan_mi100.open_run.run import Run
from titan_mi100.run.preemption import Preemption
from titan_mi100.train import main
from titan_mi100.watch.heartbeat import Heartbeat

step = Run.step


def fail(run: Run) -> Any:
    if run.progress.step == 1 and run.world.rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("a bug")
    return step(run)


how = sys.argv.pop(1)
Run.step = fail
preemption = Preemption()
config = config_from_command_line()
main(config, preemption, Heartbeat(config.watchdog))
