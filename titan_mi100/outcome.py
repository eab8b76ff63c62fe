"""How a run stands or ended, read from the file it leaves, and what its launcher or batch script does next.

    python -m titan_mi100.outcome RUN_FOLDER [--start NAME] [--srun CODE]

prints one line for a batch script: exit code, move (end, retry or requeue), and the run's own words. srun alone cannot
tell: it reports the highest exit code of its tasks. Imports no torch: launchers import it.
"""

import argparse
import dataclasses
import errno
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100.files.durable import replace
from titan_mi100.logging import log
from titan_mi100.wording import printable

ATTEMPTS = 4  # a start and three more
STATE = "run_state.json"
START = "TITAN_START"  # variable with a name for this start of a run; its state repeats it
RUNNING, LOST = "running", "lost_a_process"  # states of run_state.json
HUNG, HUNG_ELSEWHERE = "hung", "hung_elsewhere"  # by a process of the node that says so; or it only waits


class Outcome(NamedTuple):
    """What a run has left.

    Attributes:
        code: exit code, as docs/DESIGN.md lists them.
        message: the run's own words; "" where there are none.
        step: the last step that is known to be finished since the last start; None: none is.
        state: of run_state.json; "" where no process has left one.
    """

    code: int
    message: str = ""
    step: int | None = None
    state: str = ""


def read_outcome(path: Path, start: str = "") -> Outcome | None:
    """What a run has left in a file; None: nothing that can be read.

    Args:
        start: value of TITAN_START; what another start has left is nothing. "": any.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if start and found.get("start") != start:
            return None
        state, step = str(found["state"]), found.get("step")
        message = "killed, or ended without a word" if state == RUNNING else found.get("message", "")
        return Outcome(int(found["exit_code"]), str(message), step if step is None else int(step), state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _may_go_better(outcome: Outcome) -> bool:
    """Whether the next start may not end like this: a crash, a hang, or processes that are gone."""
    return outcome.code in (1, 5) and outcome.state in ("", RUNNING, LOST, "crashed", HUNG, HUNG_ELSEWHERE)


@dataclass(frozen=True)
class RunState:
    """How a run stands or ended: `run_state.json`.

    Attributes:
        next: what to do about it.
        step: the last step of which the writer knows that this start has finished it; None: none.
    """

    state: str
    exit_code: int
    message: str
    next: str
    step: int | None = None


def launcher_is_told() -> bool:
    """Whether the launcher named a file to read the outcome from."""
    return bool(os.environ.get("TITAN_OUTCOME"))


def write_run_state(folder: Path | None, state: RunState) -> None:
    """Into the folder, and into the file that the launcher named: torchrun turns every worker's exit code into 1.

    Args:
        folder: None: it is not this run's, and nothing is written there.
    """
    paths = [folder / STATE] if folder is not None else []
    if launcher_is_told():
        paths.append(Path(os.environ["TITAN_OUTCOME"]))
    for path in paths:
        try:
            _write(path, state)
        except OSError as error:
            log.error(f"{path}: cannot be written to: {error.strerror}")


def _write(path: Path, state: RunState) -> None:
    restarts = restarts_of(path)
    try:
        replace(path, _as_json(state, restarts))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # on a full disk, over what is there: its first block can hold this, whose former content would be wrong
        with path.open("r+", encoding="utf-8") as file:
            short = dataclasses.replace(state, message=state.message[:300], next=state.next[:300])
            file.write(_as_json(short, restarts[-3:]))
            file.truncate()


def _as_json(state: RunState, restarts: list[Any]) -> str:
    start = {"start": os.environ[START]} if os.environ.get(START) else {}
    shown = {**asdict(state), "message": printable(state.message), **start}  # launchers print it
    return json.dumps(shown | ({"restarts": restarts} if restarts else {}), indent=1) + "\n"


def restarts_of(path: Path) -> list[Any]:
    """What a run_state.json says of restarts so far."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))["restarts"]
        return found if isinstance(found, list) else []
    except (OSError, ValueError, KeyError, TypeError):
        return []


class Restarts:
    """Decides whether a run that has ended is started again, and keeps count.

    A start that fails before its first step is tried again, up to so many starts in a row. A run that has trained is
    started again after a crash, a hang or a lost process, but not after a second failure at the same step.
    """

    def __init__(self, starts: int = 1, most: int = 0) -> None:
        """Args: starts: in a row that may fail; most: restarts of a run that has trained."""
        self._starts, self._most = starts, most
        self._failed_starts, self._restarts, self._steps = 0, 0, set[int]()

    def next(self, outcome: Outcome) -> str:
        """What comes next, in words for the log; "": nothing, the run has ended."""
        if not _may_go_better(outcome):
            return ""
        if outcome.step is None:
            self._failed_starts += 1
            if self._failed_starts >= self._starts:
                return ""
            return f"the start failed before its first step; attempt {self._failed_starts + 1} of {self._starts} ..."
        self._failed_starts, self._restarts = 0, self._restarts + 1
        if self._restarts > self._most:
            return ""
        if outcome.step in self._steps:
            log.error(f"two failures after step {outcome.step}: no more restarts")
            return ""
        self._steps.add(outcome.step)
        return f"restart {self._restarts} of {self._most}, from the newest intact checkpoint if there is one ..."


def note_restart(folder: Path, outcome: Outcome) -> None:
    """Add a line about a restart to the run's state, which is kept until the run's next start writes its own."""
    path = folder / STATE
    restarts = restarts_of(path)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    found = {"state": outcome.state, "exit_code": outcome.code, "step": outcome.step}
    entry = {"time": now, "attempt": len(restarts) + 1, **found, "message": printable(outcome.message)}
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        replace(path, json.dumps(state | {"restarts": [*restarts, entry]}, indent=1) + "\n")
    except (OSError, ValueError, TypeError) as error:
        log.warning(f"{path}: the restart could not be noted: {error}")


def append_to_log(folder: Path, lines: Iterable[str]) -> None:
    """Add errors to a run's train.log, for what its own processes can no longer say."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        with (folder / "train.log").open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(f"{now} ERROR {printable(line)}\n" for line in lines)
    except OSError as error:
        log.warning(f"{folder}/train.log: cannot be written to: {error.strerror}")


def combined(outcomes: Iterable[Outcome]) -> Outcome:
    """How a job has ended, from what each node's launcher found, the first to end first.

    A node that has nothing to say counts with code 0 where all went well, 1 where it did not.
    """
    every = list(outcomes)
    step = max((outcome.step for outcome in every if outcome.step is not None), default=None)
    failed = sorted((outcome for outcome in every if outcome.code), key=lambda outcome: outcome.state == HUNG_ELSEWHERE)
    decided = [outcome for outcome in failed if outcome.code != 1]  # all ranks have agreed on it, or it says more
    causes = [outcome for outcome in failed if outcome.message and outcome.state not in (RUNNING, LOST)]
    spoken = [outcome for outcome in failed if outcome.message]
    return (decided or causes or spoken or failed or [Outcome(0, state="done")])[0]._replace(step=step)


def next_move(outcome: Outcome) -> str:
    """What follows: `end`, `retry` at once (a start that failed before its first step), or `requeue` the job.

    A job is worth another turn when it was stopped from outside or hung, or when processes vanished without a word, as
    they do with their node. A crash that a process could report would happen again. Limits are the caller's.
    """
    if outcome.step is None and _may_go_better(outcome):
        return "retry"
    return "requeue" if outcome.code in (3, 5) or outcome.state in (RUNNING, LOST) else "end"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="run folder of the job")
    parser.add_argument("--start", default="", help="the start's TITAN_START; what others wrote is left out")
    parser.add_argument("--srun", type=int, default=1, help="srun's exit code; 2 counts where the run has said nothing")
    options = parser.parse_args()
    silent = Outcome(2 if options.srun == 2 else 1, "no word from the run")
    outcome = read_outcome(options.folder / STATE, options.start) or silent
    print(outcome.code, next_move(outcome), " ".join(outcome.message.split()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
