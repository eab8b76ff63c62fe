"""The first lines of a process of a run, before torch is imported."""

import os

from titan_mi100.config.load import config_from_command_line
from titan_mi100.config.settings import Config
from titan_mi100.log import log, setup_logging
from titan_mi100.run.preemption import Preemption
from titan_mi100.watch.heartbeat import Heartbeat


def start_process() -> tuple[Config, Preemption, Heartbeat]:
    """Listen for signals and read the config; --help and config errors are printed at once, and end the process."""
    preemption = Preemption()  # first: a signal to stop may arrive while torch is imported
    config = config_from_command_line()
    heartbeat = Heartbeat.of_process(config.watchdog)
    setup_logging(int(os.environ.get("RANK", "0")))
    log.info("loading torch ...")
    return config, preemption, heartbeat
