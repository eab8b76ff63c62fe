"""Certify this machine: measure whether attention, matrix products, memory, links between cards and training steps
are correct, and how fast they are.

Each part runs in its own process, so a crash or a hang does not end the others. docs/DOCTOR.md explains what is
measured and what the verdicts mean.
"""

import argparse
import datetime
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_mi100 import cli as tool
from titan_mi100.errors import did_you_mean
from titan_mi100.files import durable
from titan_mi100.log import log, setup_logging
from titan_mi100.tools.measure import tasks
from titan_mi100.tools.measure.page import page
from titan_mi100.tools.measure.parts import DTYPES, FAIL, FORMAT, NOT_RUN, Certificate, as_json, conclusions, ranking
from titan_mi100.tools.measure.session import Session, machine_here
from titan_mi100.wording import some

CERTIFICATE, PAGE = "certificate.json", "certificate.md"
_ROOM = 1 << 20  # bytes for certificate and page: checked before anything is measured


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _certify(_parser().parse_args(sys.argv[1:] if argv is None else argv)))


def _certify(options: argparse.Namespace) -> int:
    setup_logging(0)
    now = datetime.datetime.now(datetime.timezone.utc)
    folder = options.output or Path(f"certificate-{now:%Y%m%d-%H%M%S}")
    # On SIGTERM exit by an exception: then child processes are killed and the unfinished output folder is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with durable.atomic_output_folder(folder, _ROOM) as aside:
        certificate = make(options.minutes, options.model)
        durable.write_synced(aside / CERTIFICATE, as_json(certificate))
        durable.write_synced(aside / PAGE, page(certificate))
    _say(certificate, folder)
    return 0 if certificate.all_pass else 1


def make(minutes: float, models: Sequence[str] = ()) -> Certificate:
    """Measure this machine and return the certificate.

    Args:
        minutes: time limit for all parts.
        models: names in PRESETS; default: Qwen3-0.6B on a GPU, the debug model on a CPU.

    Raises:
        UserError: the device cannot be described.
    """
    machine = machine_here()
    log.info(f"{machine.device}, torch {machine.torch} {machine.runtime}; {minutes:g} minutes at most")
    session, models = Session(minutes), models or ("0.6B" if machine.memory else "debug",)
    # The training steps come last: they use the fastest attention backend that the parts before have found.
    before = tasks.before_steps(machine, models)
    count = len(before) + len(list(tasks.steps(machine, models, {})))
    session.measure(before, count)
    ranked = {dtype: ranking(session.parts, dtype) for dtype in DTYPES}
    fastest = {dtype: found[0]["backend"] for dtype, found in ranked.items() if found}
    session.measure(tasks.steps(machine, models, fastest), count)
    made = f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"
    return Certificate(FORMAT, made, minutes, machine, session.parts, conclusions(session.parts))


def _say(certificate: Certificate, folder: Path) -> None:
    """Log the conclusions, the failed parts and the files."""
    for part in certificate.conclusions:
        log.info(f"{part.name.removeprefix('conclusion/')}: {part.said}")
    for kind, words in ((FAIL, "failed"), (NOT_RUN, "not run")):
        if names := [part.name for part in (*certificate.parts, *certificate.conclusions) if part.verdict == kind]:
            log.warning(f"{len(names)} {words}: {some(names)}")
    log.info(f"certificate: {folder / CERTIFICATE}; readable: {folder / PAGE}; to send it, see docs/DOCTOR.md")


def _parser() -> argparse.ArgumentParser:
    parser = tool.Parser(
        prog="titan-mi100 certify",
        usage="%(prog)s [--output FOLDER] [--minutes 10] [--model qwen3-0.6b ...]",
        description=__doc__,
        epilog="Exit code: 0 all passed; 1 a part failed, or was not run because the time ended (the certificate is "
        "written and names the part); 2 a mistake in the command, or an unusable device; "
        "130 interrupted, nothing is written.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, metavar="FOLDER", help="a new folder (default: certificate-DATE-TIME)")
    add("--minutes", type=_minutes, default=10.0, help="time limit (default 10); parts that were not run are named")
    which = f"models whose shapes are measured: {', '.join(tasks.MODELS)}"
    add("--model", type=_model, nargs="+", default=(), help=which)
    return parser


def _model(name: str) -> str:
    if name not in tasks.MODELS:
        raise argparse.ArgumentTypeError(f"{name!r} is not known{did_you_mean(name, tasks.MODELS)}")
    return tasks.MODELS[name]


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes <= 1440:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of minutes above 0, at most a day")
    return minutes


if __name__ == "__main__":
    sys.exit(main())
