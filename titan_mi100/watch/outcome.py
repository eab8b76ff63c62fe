"""The state of a run (run_state.json), and what its launcher or batch script does next.

    titan-mi100 outcome RUN_FOLDER [--start NAME] [--srun CODE]

prints one line for a batch script: the exit code, the next move (end, retry or requeue), and the run's message. srun's
own exit code is not enough: it is the highest exit code of its tasks. Imports no torch, because launchers import it.
"""

import errno
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from titan_mi100 import cli
from titan_mi100.files.durable import replace
from titan_mi100.files.plain import LARGEST_CONFIG, read_plain
from titan_mi100.log import log, write_or_say
from titan_mi100.wording import printable

_STARTS = 4  # how many in a row may fail before their first step
STATE = "run_state.json"
START = "TITAN_START"  # environment variable that names this start of a run; run_state.json repeats it
RUNNING, HUNG, LOST, INTERRUPTED = "running", "hung", "lost_a_process", "interrupted"  # states of run_state.json


class Outcome(NamedTuple):
    """How a run stands or ended, as run_state.json has it.

    Attributes:
        code: exit code, see docs/DESIGN.md.
        message: the run's own message; "": it has none.
        step: the last step that this start is known to have finished; None: no step.
        state: running, done, crashed, ...; see docs/RUN_FOLDER.md; "": no process has written one.
        next: what the user can do next; "": that was not read.
    """

    code: int
    message: str = ""
    step: int | None = None
    state: str = ""
    next: str = ""


def read_state(path: Path) -> dict[str, Any]:
    """The content of a run_state.json; {}: it is missing, unreadable, or something else."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_plain(path, LARGEST_CONFIG))
        return content if isinstance(content, dict) else {}
    return {}


def read_outcome(path: Path, start: str = "") -> Outcome | None:
    """Read a run's state file. None: it is missing, unreadable or from another start.

    Args:
        start: value of TITAN_START; "": any start.
    """
    content = read_state(path)
    if start and content.get("start") != start:
        return None
    try:
        state, step = str(content["state"]), content.get("step")
        # A run that still says "running" although it has ended could not write its last state.
        message = "killed, or ended without a message" if state == RUNNING else content.get("message", "")
        return Outcome(int(content["exit_code"]), str(message), step if step is None else int(step), state)
    except (ValueError, KeyError, TypeError):
        return None


def _may_go_better(outcome: Outcome) -> bool:
    """Whether another start may succeed: after a crash, a hang or a lost process, but not after a wrong config."""
    return outcome.code in (1, 5) and outcome.state in ("", RUNNING, LOST, "crashed", HUNG)


def launcher_is_told() -> bool:
    """Whether the launcher named a file to read the outcome from. A cleaner of /tmp may have removed its folder; then
    the launcher reads run_state.json.
    """
    return os.path.isdir(os.path.dirname(os.environ.get("TITAN_OUTCOME", "")))


def write_run_state(folder: Path | None, outcome: Outcome) -> None:
    """Write the state into the run folder, and into the file that the launcher named.

    The launcher needs the file because torchrun turns every worker's exit code into 1.

    Args:
        folder: the run folder; None: the folder does not belong to this run, so nothing is written there.
    """
    paths = [folder / STATE] if folder is not None else []
    if launcher_is_told():
        paths.append(Path(os.environ["TITAN_OUTCOME"]))
    for path in paths:
        with write_or_say(path, log.error):
            _write(path, outcome)


def _write(path: Path, outcome: Outcome) -> None:
    restarts = restarts_of(path)
    try:
        replace(path, _as_json(outcome, restarts))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        # On a full disk a new file is impossible: overwrite the old one in place. Its first block holds a short state.
        with path.open("r+", encoding="utf-8") as file:
            short = outcome._replace(message=outcome.message[:300], next=outcome.next[:300])
            file.write(_as_json(short, restarts[-3:]))
            file.truncate()


def _as_json(outcome: Outcome, restarts: list[Any]) -> str:
    start = {"start": os.environ[START]} if os.environ.get(START) else {}
    words = {"message": printable(outcome.message), "next": outcome.next}  # launchers print the first
    state = {"state": outcome.state, "exit_code": outcome.code, **words, "step": outcome.step, **start}
    return json.dumps(state | ({"restarts": restarts} if restarts else {}), indent=1) + "\n"


def restarts_of(path: Path) -> list[Any]:
    """The list of restarts in a run_state.json; [] if there is none."""
    restarts = read_state(path).get("restarts")
    return restarts if isinstance(restarts, list) else []


class Restarts:
    """Decides whether a run that has ended is started again, and counts the restarts.

    A run that has trained is restarted after a crash, a hang or a lost process, up to `most` times, but not after a
    second failure at the same step. If `most` is not 0, a start that fails before its first step is tried again, up to
    three times in a row.
    """

    def __init__(self, most: int) -> None:
        self._starts, self._most = _STARTS if most else 1, most
        self._failed_starts, self._restarts, self._steps = 0, 0, set[int]()

    def next(self, outcome: Outcome) -> str:
        """Decide about an outcome: a message for the log if the run is started again, "" if not."""
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
    """Add an entry about a restart to run_state.json. The next start keeps the list of restarts."""
    path = folder / STATE
    restarts = restarts_of(path)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    fields = {"state": outcome.state, "exit_code": outcome.code, "step": outcome.step}
    restart = {"time": now, "attempt": len(restarts) + 1, **fields, "message": printable(outcome.message)}
    with write_or_say(path):
        replace(path, json.dumps(read_state(path) | {"restarts": [*restarts, restart]}, indent=1) + "\n")


def append_to_log(folder: Path, lines: Iterable[str]) -> None:
    """Append errors to a run's train.log that its own processes could not write."""
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    path = folder / "train.log"
    with write_or_say(path), path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{now} ERROR {printable(line)}\n" for line in lines)


def next_move(outcome: Outcome) -> str:
    """The next move of a batch script: `end`, `retry` at once, or `requeue` the job.

    `retry`: the start failed before its first step. `requeue`: the job was stopped from outside or hung, or processes
    vanished, as they do when their node fails. `end`: also after a crash with a message, because it would happen again.
    The caller limits the number of retries.
    """
    if outcome.step is None and _may_go_better(outcome):
        return "retry"
    return "requeue" if outcome.code in (3, 5) or outcome.state in (RUNNING, LOST) else "end"


def main() -> int:
    parser = cli.Parser(prog="titan-mi100 outcome", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="run folder of the job")
    parser.add_argument("--start", default="", help="the start's TITAN_START; states of other starts are ignored")
    parser.add_argument("--srun", type=int, default=1, help="srun's exit code; 2 is used if the run left no state")
    options = parser.parse_args()
    silent = Outcome(2 if options.srun == 2 else 1, f"the run has left no {STATE} in {options.folder}")
    outcome = read_outcome(options.folder / STATE, options.start) or silent
    print(outcome.code, next_move(outcome), " ".join(outcome.message.split()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
