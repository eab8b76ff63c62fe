"""The checks of the machine before a run starts."""

import os
from collections.abc import Callable, Mapping

from titan_mi100.errors import UserError
from titan_mi100.launch.machine_checks import PASS, Result, judge
from titan_mi100.launch.machine_facts import System, read


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
        verdicts = judge(read(system or System(environ=environ), processes), fast=True)
    except Exception as error:  # a bug in the checks must not stop a run
        say(f"doctor: the checks of this machine failed ({error!r}); starting without them")
        return
    for verdict in verdicts:
        if verdict.state != PASS and not verdict.stops:
            say(f"doctor: {verdict.state}: {_line(verdict)}")
    if stopping := [_line(verdict) for verdict in verdicts if verdict.stops]:
        raise UserError("\n".join([*stopping, "no run can work here; titan-mi100 doctor shows all checks"]))


def _line(verdict: Result) -> str:
    return f"{verdict.name}: {verdict.fact}; {verdict.remedy}".replace("\n", "; or ").replace("; or or", "; or")
