"""How a run stands or ended, read from the file it leaves, and what its launcher or batch script does next.

    python -m titan_mi100.outcome RUN_FOLDER [--start NAME] [--srun CODE]

prints one line for a batch script: exit code, move (end, retry or requeue), and the run's own words. srun alone cannot
tell: it reports the highest exit code of its tasks. Standard library only: launchers import it.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ATTEMPTS = 4  # a start and three more
STATE = "run_state.json"
START = "TITAN_START"  # variable with a name for this start of a run; its state repeats it
RUNNING, LOST = "running", "lost_a_process"  # states of run_state.json
_MAY_GO_BETTER = ("", RUNNING, LOST, "crashed", "hung")  # next time; "": nothing was said


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


def combined(outcomes: Iterable[Outcome]) -> Outcome:
    """How a job has ended, from what each node's launcher found, the first to end first.

    A node that has nothing to say counts with code 0 where all went well, 1 where it did not.
    """
    every = list(outcomes)
    step = max((outcome.step for outcome in every if outcome.step is not None), default=None)
    failed = [outcome for outcome in every if outcome.code]
    decided = [outcome for outcome in failed if outcome.code != 1]  # all ranks have agreed on it, or it says more
    causes = [outcome for outcome in failed if outcome.message and outcome.state not in (RUNNING, LOST)]
    spoken = [outcome for outcome in failed if outcome.message]
    return (decided or causes or spoken or failed or [Outcome(0, state="done")])[0]._replace(step=step)


def next_move(outcome: Outcome) -> str:
    """What follows: `end`, `retry` at once (a start that failed before its first step), or `requeue` the job.

    A job is worth another turn when it was stopped from outside or hung, or when processes vanished without a word, as
    they do with their node. A crash that a process could report would happen again. Limits are the caller's.
    """
    if outcome.code in (1, 5) and outcome.step is None and outcome.state in _MAY_GO_BETTER:
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
