"""The checks of the machine before a run starts."""

import os
import re
import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from titan_mi100.checkpoint.sealed import list_checkpoints
from titan_mi100.errors import UserError
from titan_mi100.files.durable import is_locked
from titan_mi100.launch.machine_checks import PASS, Result, judge
from titan_mi100.launch.machine_facts import System, read
from titan_mi100.watch.outcome import STATE, read_outcome

_BY_TIME = re.compile(r"(.+)-\d{8}-\d{6}(?:-\d+)?")  # names that make_run_folder gives: config, time


def before_start(
    processes: int, say: Callable[[str], None], environ: Mapping[str, str] = os.environ, system: System | None = None
) -> None:
    """Run the checks that take milliseconds and report those that do not pass.

    Args:
        processes: processes of the run on this machine.
        say: prints a line.
        environ: environment of these processes.
        system: where the facts are read; tests pass their own.

    Raises:
        UserError: no run can work on this machine.
    """
    try:
        verdicts = judge(read(system or System(environ=environ), processes))
    except Exception as error:  # a bug in the checks must not stop a run
        say(f"doctor: the checks of this machine failed ({error!r}); starting without them")
        return
    for verdict in verdicts:
        if verdict.state != PASS and not verdict.stops:
            say(f"doctor: {verdict.state}: {_line(verdict)}")
    if stopping := [_line(verdict) for verdict in verdicts if verdict.stops]:
        raise UserError("\n".join([*stopping, "no run can work here; titan-mi100 doctor shows all checks"]))


def unfinished_run(folder: Path) -> str:
    """A line about the newest run of a config of the same name that has saved something and is not done; "": none.

    Args:
        folder: the new folder of a run without job.run_folder, see make_run_folder.
    """
    named = _BY_TIME.fullmatch(folder.name)
    if not named or any(folder.iterdir()):  # it has a name of its own, or is resumed
        return ""
    others = {path: _BY_TIME.fullmatch(path.name) for path in sorted(folder.parent.iterdir(), reverse=True)}
    for path in [path for path, name in others.items() if name and name[1] == named[1]]:
        with suppress(OSError):  # another user's, or removed meanwhile
            outcome, saved = read_outcome(path / STATE), list_checkpoints(path / "checkpoint")
            if outcome and saved and outcome.state != "done" and not is_locked(path):
                message = f"{path} has an unfinished run of {named[1]}.toml, saved up to {saved[-1].name}"
                return f"{message}; to resume it, end this one and add --job.run_folder {shlex.quote(str(path))}"
    return ""


def _line(verdict: Result) -> str:
    return f"{verdict.name}: {verdict.fact}; {verdict.remedy}".replace("\n", "; or ").replace("; or or", "; or")
