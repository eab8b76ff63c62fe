"""Measures the parts one after the other within a time limit, and logs the progress. Imports no torch."""

import sys
import time
from collections.abc import Iterable
from dataclasses import replace

from titan_mi100.errors import UserError
from titan_mi100.log import log
from titan_mi100.run.machine import Machine
from titan_mi100.tools.measure import children
from titan_mi100.tools.measure.children import Task
from titan_mi100.tools.measure.parts import FAIL, NOT_RUN, PASS, UNAVAILABLE, Part
from titan_mi100.tools.measure.tasks import SHARES
from titan_mi100.wording import duration_in_words

_MACHINE = Task("machine", "titan_mi100.tools.measure.device:machine", seconds=120)


def machine_here() -> Machine:
    """Describe this machine in a child process, because asking a device for its name can hang.

    Raises:
        UserError: the device cannot be described.
    """
    part = children.run(_MACHINE, time.monotonic() + _MACHINE.seconds)
    if part.verdict != PASS or not part.found:
        raise UserError(
            f"this machine's device cannot be described: {part.said}; to find the cause, run titan-mi100 doctor"
        )
    return Machine(**part.found)


class Session:
    """The time limit and the results so far."""

    def __init__(self, minutes: float) -> None:
        self._started, self._seconds = time.monotonic(), 60 * minutes
        # attention backends that cannot be built; not tried again for other dtypes
        self._missing: dict[str, Part] = {}
        self.parts: list[Part] = []

    def measure(self, tasks: Iterable[Task], of: int) -> None:
        """Run the tasks in order.

        Args:
            of: total number of parts, for the log.
        """
        from tqdm import tqdm

        with tqdm(total=of, initial=len(self.parts), unit="part", disable=not sys.stderr.isatty()) as bar:
            for task in tasks:
                self.parts.append(self._run(task))
                self._say(self.parts[-1], of)
                bar.update(1)

    def _run(self, task: Task) -> Part:
        kind, name, *_ = task.name.split("/")
        if kind == "attention" and name in self._missing:
            return replace(self._missing[name], name=task.name, seconds=0.0)
        part = children.run(task, self._started + SHARES[kind] * self._seconds)
        if kind == "attention" and part.verdict == UNAVAILABLE:
            self._missing[name] = part
        return part

    def _say(self, part: Part, of: int) -> None:
        done, elapsed = len(self.parts), time.monotonic() - self._started
        left = min(elapsed / done * (of - done), max(0.0, self._seconds - elapsed))
        text = f"[{done}/{of}] {part.name}: {part.verdict}: {part.said} (about {duration_in_words(left)} left)"
        (log.warning if part.verdict in (FAIL, NOT_RUN) else log.info)(text)
