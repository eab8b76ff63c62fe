"""Measures the parts one after the other within a time limit, and logs the progress. Imports no torch."""

import sys
import time
from collections.abc import Iterable, Sequence

from titan_mi100.errors import UserError
from titan_mi100.files.schema import validated
from titan_mi100.log import log
from titan_mi100.tools.certificate.form import MEASURED, NOT_RUN, UNAVAILABLE, Machine, Part, parse_found
from titan_mi100.tools.certificate.verdicts import FAIL, ranking, verdicts
from titan_mi100.tools.measure import children
from titan_mi100.tools.measure.children import Ended, Task
from titan_mi100.tools.measure.tasks import SHARES
from titan_mi100.wording import duration_in_words

_MACHINE = Task("machine", "titan_mi100.tools.measure.device:machine", seconds=120)


def machine_here() -> Machine:
    """Describe this machine in a child process, because asking a device for its name can hang.

    Raises:
        UserError: the device cannot be described.
    """
    ended = children.run(_MACHINE, time.monotonic() + _MACHINE.seconds)
    if ended.status != MEASURED:
        raise UserError(
            f"this machine's device cannot be described: {ended.status}: {ended.said}; "
            "to find the cause, run titan-mi100 doctor"
        )
    found: Machine = validated(ended.found, Machine, "machine")
    return found


class Session:
    """The time limit and the results so far."""

    def __init__(self, machine: Machine, minutes: float) -> None:
        self._machine, self._started, self._seconds = machine, time.monotonic(), 60 * minutes
        # attention backends that cannot be built; not tried again for other dtypes
        self._missing: dict[str, Ended] = {}
        self.parts: list[Part] = []

    def measure(self, tasks: Iterable[Task], of: int) -> None:
        """Run the tasks in order.

        Args:
            of: total number of parts, for the log.
        """
        from tqdm import tqdm

        with tqdm(total=of, initial=len(self.parts), unit="part", disable=not sys.stderr.isatty()) as bar:
            for task in tasks:
                part = self._run(task)
                self.parts.append(part)
                self._say(part, of)
                bar.update(1)

    def _run(self, task: Task) -> Part:
        kind, _, rest = task.name.partition("/")
        backend = rest.split("/")[0] if kind == "attention" else ""
        ended = self._missing.get(backend) or children.run(task, self._started + SHARES[kind] * self._seconds)
        if backend and ended.status == UNAVAILABLE:
            self._missing[backend] = Ended(UNAVAILABLE, ended.said, 0.0)
        status, said, found = ended.status, ended.said, None
        if status == MEASURED:
            try:
                found = parse_found(kind, ended.found, task.name)
            except ValueError as error:  # impossible numbers, for example a time of 0 seconds
                status, said = "failed", str(error)
        if status == "failed" and task.optional:
            status = UNAVAILABLE
        return Part(task.name, status, said, ended.seconds, found)

    def _say(self, part: Part, of: int) -> None:
        verdict = verdicts(self._machine, [part])[0]
        done, elapsed = len(self.parts), time.monotonic() - self._started
        left = min(elapsed / done * (of - done), max(0.0, self._seconds - elapsed))
        text = f"[{done}/{of}] {part.name}: {verdict.verdict}: {verdict.said} (about {duration_in_words(left)} left)"
        (log.warning if verdict.verdict in (FAIL, NOT_RUN) else log.info)(text)


def backends(parts: Sequence[Part], dtypes: Iterable[str]) -> dict[str, str]:
    """Dtype -> the fastest attention backend among the correct ones; a dtype without one is left out."""
    ranked = {dtype: ranking(parts, dtype) for dtype in dtypes}
    return {dtype: found[0].backend for dtype, found in ranked.items() if found}
