"""What a run says of its machine before it starts."""

import os
from collections.abc import Callable, Mapping

from titan_mi100.errors import UserError
from titan_mi100.machine.checks import PASS, Verdict, judge
from titan_mi100.machine.facts import System, read


def before_start(
    processes: int, say: Callable[[str], None], environ: Mapping[str, str] = os.environ, system: System | None = None
) -> None:
    """Say what does not pass of the checks that take milliseconds.

    Args:
        processes: that will run on this machine.
        environ: that they will get.
        system: where to look, for tests.

    Raises:
        UserError: they cannot run.
    """
    try:
        verdicts = judge(read(system or System(environ=environ), processes), fast=True)
    except Exception as error:  # a mistake in here must not cost a run
        say(f"doctor: this machine could not be looked at ({error!r}); starting without")
        return
    for verdict in verdicts:
        if verdict.state != PASS and not verdict.stops:
            say(f"doctor: {verdict.state}: {_line(verdict)}")
    if stopping := [_line(verdict) for verdict in verdicts if verdict.stops]:
        raise UserError("\n".join([*stopping, "no run can work here; python -m titan_mi100.doctor shows all checks"]))


def _line(verdict: Verdict) -> str:
    return f"{verdict.name}: {verdict.fact}; {verdict.remedy}".replace("\n", "; or ").replace("; or or", "; or")
