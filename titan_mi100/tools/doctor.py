"""Check this machine for training, and print a remedy for each problem.

Exit codes: 0 no check fails (there may be warnings), 2 a check fails. docs/DOCTOR.md explains each check.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

from titan_mi100 import cli as tool
from titan_mi100.launch import torch_build
from titan_mi100.launch.machine_checks import CHECKS, FAIL, PASS, WARN, Result, judge, named
from titan_mi100.launch.machine_facts import read
from titan_mi100.wording import printable


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _show(_parser().parse_args(argv)))


def _show(options: argparse.Namespace) -> int:
    facts = read()
    if not options.fast:
        facts = replace(facts, torch=torch_build.ask(facts.torch, os.environ))
    verdicts = judge(facts)
    if options.json:
        print(json.dumps({"facts": asdict(facts), "verdicts": [asdict(verdict) for verdict in verdicts]}))
    else:
        if not options.fast:
            torch = facts.torch.version or "not installed"
            print(f"{named(facts.cards) or 'no GPU'}; torch {torch}; Linux {facts.kernel}\n")
        shown = [verdict for verdict in verdicts if not options.fast or verdict.state != PASS]
        for line in lines(shown):
            print(line)
        print(("\n" if shown else "") + summary(verdicts, len(CHECKS)))
    return 2 if any(verdict.state == FAIL for verdict in verdicts) else 0


def lines(verdicts: Sequence[Result]) -> Iterator[str]:
    """The verdicts as text. Remedies have lines of their own, so that commands can be copied."""
    column = max((len(verdict.name) for verdict in verdicts), default=0)
    margin = " " * (len("pass") + 2 + column + 2)
    for verdict in verdicts:
        yield f"{verdict.state}  {verdict.name:{column}}  {printable(verdict.fact)}"
        yield from (f"{margin}-> {line}" for line in printable(verdict.remedy).splitlines())


def summary(verdicts: Sequence[Result], checks: int) -> str:
    counts = [f"{sum(v.state == state for v in verdicts)} {state}" for state in (PASS, WARN, FAIL)]
    return f"{', '.join(counts)}; {checks - len(verdicts)} checks do not apply here"


def _parser() -> argparse.ArgumentParser:
    parser = tool.Parser(
        prog="titan-mi100 doctor",
        description=__doc__.splitlines()[0],
        epilog="Exit codes: 0 no check fails (there may be warnings), 2 a check fails. It changes nothing.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="print facts and verdicts as JSON, for scripts and bug reports")
    add("--fast", action="store_true", help="as at a run's start: torch is not asked (milliseconds); print problems")
    return parser
