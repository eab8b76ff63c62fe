"""Stops a run before the scheduler ends its job, early enough for the last step and its checkpoint."""

import re
import time
from collections.abc import Mapping

from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.log import log
from titan_mi100.run.preemption import Preemption
from titan_mi100.trainer import StepResult

END_TIME = "SLURM_JOB_END_TIME"  # seconds since 1970; newer versions of SLURM set it (22.05 does not), job.sh for all
_MARGIN = 60.0  # seconds: for what was not measured, such as a slow file system and the end of all processes
_FIRST_SAVE = 120.0  # seconds for a save until one was measured


class TimeLimit:
    """Requests a stop when the remaining time is needed for two more steps and a checkpoint.

    The time that these take is the longest that this run has measured. An interval from step to step includes what
    happens between them: validation, and a save in the foreground.
    """

    def __init__(self, end: float, preemption: Preemption, checkpointer: Checkpointer) -> None:
        """
        Args:
            end: when the job ends, in seconds since 1970.
            preemption: gets the request.
            checkpointer: knows how long saves take.
        """
        self._end, self._preemption, self._checkpointer = end, preemption, checkpointer
        self._longest, self._last, self._steps = 0.0, 0.0, 0

    def after_step(self, step: int, result: StepResult) -> None:
        now, self._steps = time.time(), self._steps + 1
        if self._steps > 2:  # the first two steps do not count: they may include compilation
            self._longest = max(self._longest, now - self._last)
        self._last = now
        needed = 2 * self._longest + (1.5 * self._checkpointer.longest_save or _FIRST_SAVE) + _MARGIN
        if not self._preemption.reason and (left := self._end - now) < needed:
            self._preemption.reason = f"the job ends in {left:.0f} s, and a stop may need {needed:.0f} s"


def end_of_job(environ: Mapping[str, str]) -> float | None:
    """When the scheduler ends the job, in seconds since 1970; None: not known, or there is no limit."""
    if not (text := environ.get(END_TIME, "")):
        return None
    if not re.fullmatch("[0-9]{1,12}", text, re.ASCII):
        log.warning(f"{END_TIME} = {text!r} is not a time in seconds: the run cannot stop before its job ends")
        return None
    end = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(int(text)))
    log.info(f"the job ends at {end}: the run will stop and save before that")
    return float(text)
