"""Certify this machine: measure whether attention, matrix products, memory, training steps and links between cards are
correct, and how fast they are.

Each part runs in its own process, so a crash or a hang does not end the others, and is written as soon as it is
measured. docs/DOCTOR.md explains what is measured and what the verdicts mean.
"""

import argparse
import datetime
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from titan_mi100 import cli as tool
from titan_mi100.errors import UserError
from titan_mi100.files import durable
from titan_mi100.log import log, setup_logging
from titan_mi100.planning.device import positive_float
from titan_mi100.run.machine import Machine
from titan_mi100.workshop.measure import children, tasks
from titan_mi100.workshop.measure.children import Task
from titan_mi100.workshop.measure.page import page
from titan_mi100.workshop.measure.parts import CERTIFICATE, FAIL, FORMAT, NOT_RUN, PAGE, PASS, Header, Part, conclusions

_ROOM = 1 << 20  # bytes for certificate and page: checked before anything is measured
_ON_GPU, _ON_CPU = 25.0, 10.0  # minutes


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _certify(_parser().parse_args(sys.argv[1:] if argv is None else argv)))


def _certify(options: argparse.Namespace) -> int:
    setup_logging(0)
    signals: list[int] = []  # only noted: an exception could cut off a line of the certificate
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: signals.append(number))
    now = datetime.datetime.now(datetime.timezone.utc)
    folder = options.output or Path(f"certificate-{now:%Y%m%d-%H%M%S}")
    _make_folder(folder)
    described = children.run(children.MACHINE, lambda: 0 if signals else children.MACHINE.seconds)
    if described.found:
        machine = Machine(**described.found)
        minutes = options.minutes or (_ON_GPU if machine.memory else _ON_CPU)
        header = Header(FORMAT, f"{now:%Y-%m-%d %H:%M} UTC", minutes, machine)
        log.info(f"{machine.device}, torch {machine.torch}; {minutes:g} minutes at most")
        _append(folder, header)
        durable.sync(folder)
        parts: list[Part] = []
        models = [tasks.MODELS[name] for name in options.model]
        measure(tasks.tasks(machine, models, parts), minutes, folder, parts, signals)
        durable.write_synced(folder / PAGE, page(header, parts))
        log.info(f"certificate: {folder / CERTIFICATE}; readable: {folder / PAGE}; to send it, see docs/DOCTOR.md")
    if signals:
        log.warning("interrupted")
        return 128 + signals[0]
    if not described.found:
        raise UserError(f"this machine's device cannot be described: {described.said}; run titan-mi100 doctor")
    return 0 if parts[-1].verdict == PASS else 1


def measure(wanted: Iterable[Task], minutes: float, folder: Path, parts: list[Part], signals: Sequence[int]) -> None:
    """Run the tasks in order, then draw the conclusions. Each part is written and logged at once.

    Args:
        parts: grows by each part.
        signals: grows when the command is asked to end. The parts that are left are then only named.
    """
    started = time.monotonic()

    def keep(part: Part) -> None:
        parts.append(part)
        _append(folder, part)
        elapsed = (time.monotonic() - started) / 60
        if signals and part.verdict == NOT_RUN:  # the last line names them all
            return
        text = f"[{elapsed:.1f} of {minutes:g} minutes] {part.name}: {part.verdict}: {part.said}"
        (log.warning if part.verdict in (FAIL, NOT_RUN) else log.info)(text)

    for task in wanted:
        end = started + 60 * minutes * tasks.SHARES[task.name.split("/")[0]]
        part = children.run(task, lambda end=end: 0 if signals else end - time.monotonic())  # type: ignore[misc]
        keep(replace(part, said="interrupted") if signals and part.verdict == NOT_RUN else part)
    for part in conclusions(parts, bool(signals)):
        keep(part)


def _make_folder(folder: Path) -> None:
    """Raises UserError: it has content, cannot be written to, or the disk has too little room."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = "less than 1 MB is free" if shutil.disk_usage(folder).free < _ROOM else ""
        problem = "exists already, and is not overwritten" if any(folder.iterdir()) else problem
    except OSError as error:
        problem = f"cannot be written to ({error.strerror})"
    if problem:
        raise UserError(f"{folder}: {problem}; name another --output")
    durable.probe(folder, "--output")
    durable.sync(folder.parent)


def _append(folder: Path, line: Header | Part) -> None:
    try:
        durable.write_synced(folder / CERTIFICATE, json.dumps(asdict(line)) + "\n", "ab")
    except OSError as error:
        raise UserError(f"{folder / CERTIFICATE}: {error.strerror}; what it has so far is kept") from None


def _parser() -> tool.Parser:
    parser = tool.Parser(
        prog="titan-mi100 certify",
        usage="%(prog)s [--output FOLDER] [--minutes 25] [--model NAME ...]",
        description=__doc__,
        epilog="Exit code: 0 all passed; 1 a part failed, or was not run because the time ended (the certificate names "
        "it); 2 a mistake in the command, or an unusable device; 130 or 143 interrupted: what was measured is kept.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, metavar="FOLDER", help="a new folder (default: certificate-DATE-TIME)")
    limits = f"default {_ON_GPU:g} on a GPU, {_ON_CPU:g} on a CPU"
    add("--minutes", type=positive_float, metavar="N", help=f"time limit ({limits}); parts that were not run are named")
    which = f"{', '.join(tasks.MODELS)} (default: by the card's memory)"
    add("--model", nargs="+", default=(), choices=tasks.MODELS, metavar="NAME", help=which)
    return parser


if __name__ == "__main__":
    sys.exit(main())
