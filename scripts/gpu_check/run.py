"""The GPU check: measures whether this card computes and trains right, and how fast. docs/CARDS.md introduces it.

Results: results.txt (what is printed), certificate.jsonl (every number), certificate.md, log.txt (errors). The second
call continues the certificate of the first one, if it is in the same folder. Needs no network: a package that is
missing is taken from .whl/, such as torchdata's by
  pip download --no-deps -d .whl torchdata==0.11.0
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_check.sections import CALLS, Section, sections_of
from titan_mi100 import cli
from titan_mi100.errors import UserError
from titan_mi100.files import durable, isolated
from titan_mi100.run.machine import Machine
from titan_mi100.workshop.measure import children, parts
from titan_mi100.workshop.measure.children import MEASURED, Outcome, Task
from titan_mi100.workshop.measure.page import page
from titan_mi100.workshop.measure.parts import NOT_RUN, PASS, UNAVAILABLE, Header, Part

ROOT = Path(__file__).resolve().parents[2]
RESULTS, LOG = "results.txt", "log.txt"
WORK = "TITAN_GPU_CHECK"  # names the folder of files that live as long as a call
_MACHINE = Task("machine", "titan_mi100.workshop.measure.device:machine", seconds=30)
_LOOK, _LEAST = 0.1, 3.0  # seconds: between two looks at a process; of time without which no task starts
_BOARD = ("model", "method", "bf16", "N", "toks/s", "mfu")  # columns of certificates/README.md


def main(argv: Sequence[str] | None = None) -> int:
    return cli.exit_code(lambda: _check(_parser().parse_args(argv)))


def _check(options: argparse.Namespace) -> int:
    folder, signals = options.output, list[int]()
    chosen = [s for s in sections_of(options.call, options.tiny) if s.name in options.only or not options.only]
    header, before = _begin(folder, options.call)
    for number in (signal.SIGINT, signal.SIGTERM):  # only noted: an exception could cut off a line of the certificate
        signal.signal(number, lambda number, _: signals.append(number))
    with tempfile.TemporaryDirectory(prefix="titan_mi100-gpu-check-") as work, (folder / LOG).open("ab") as log:
        os.environ[WORK] = work
        inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        paths = [str(ROOT), str(ROOT / "scripts"), *_unpack_wheels(Path(work)), *inherited]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        report = _Report(folder, header, before)
        if header is None:
            report.begin(_describe(), sum(section.seconds for section in chosen) / 60)
        for section in chosen:
            measure(section, report.keep, lambda: _Child(log.fileno()), signals)
            report.say(f"== {section.name}: {report.lap():.0f} s of at most {section.seconds}")
        report.end(bool(signals))
    if signals:
        return 128 + signals[0]
    return 0 if report.parts[-1].verdict == PASS else 1


def measure(
    section: Section, keep: Callable[[Part], None], start: Callable[[], "_Child"], signals: Sequence[int]
) -> None:
    """Run a section's tasks in order. Each outcome is kept at once; a process that failed is replaced.

    Args:
        start: starts a process that measures.
        signals: grows when the check is asked to end.
    """
    end, waiting, child = time.monotonic() + section.seconds, list(section.tasks), None
    while waiting:
        task, began = waiting.pop(0), time.monotonic()
        if task.refused:
            keep(Part(task.name, UNAVAILABLE, task.refused))
        elif signals or end - began < _LEAST:
            keep(Part(task.name, NOT_RUN, "interrupted" if signals else f"the section's {section.seconds} s were over"))
        else:
            child = child or start()
            outcome = child.ask(task, min(task.seconds, end - began), signals)
            part = children.part_of(task, outcome, time.monotonic() - began)
            if outcome[0] not in (MEASURED, UNAVAILABLE):  # after an error of the device all further calls would fail
                child = child.kill()
            waiting[:0] = [Task(**more) for more in (part.found or {}).pop("tasks", ())]
            keep(part)
    if child:
        child.kill()


class _Child:
    """A process that measures one task after the other."""

    def __init__(self, log: int) -> None:
        """Args: log: file descriptor of its errors."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "gpu_check.child", str(os.getpid())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, start_new_session=True,
        )  # fmt: skip

    def ask(self, task: Task, seconds: float, signals: Sequence[int]) -> Outcome:
        assert self._process.stdin and self._process.stdout
        end = time.monotonic() + seconds
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([task.name, task.target, dict(task.arguments)]) + "\n")
            self._process.stdin.flush()
        while not select.select([self._process.stdout], [], [], _LOOK)[0]:
            if signals or time.monotonic() > end:
                return "hung", "interrupted" if signals else f"did not end within {seconds:.0f} s", None
        if line := self._process.stdout.readline():
            status, message, measured = json.loads(line)
            return status, message, measured
        return "crashed", f"{isolated.ended(self._process.wait())}; see {LOG}", None

    def kill(self) -> None:
        """Kill it and all that it started."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class _Report:
    """What is printed and written."""

    def __init__(self, folder: Path, header: Header | None, before: Sequence[Part]) -> None:
        self.parts, self._folder, self._header = list(before), folder, header
        self._started = self._lap = time.monotonic()

    def begin(self, machine: Machine, minutes: float) -> None:
        now = datetime.datetime.now(datetime.timezone.utc)
        self._header = Header(parts.FORMAT, f"{now:%Y-%m-%d %H:%M} UTC", minutes, machine)
        self._append(self._header)
        self.say(f"{machine.device}, torch {machine.torch}, {machine.runtime}: {minutes:.1f} minutes at most")

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self._folder / RESULTS).open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self._lap = self._lap, time.monotonic()
        return self._lap - before

    def keep(self, part: Part) -> None:
        self.parts.append(part)
        self._append(part)
        verdict = part.verdict if part.verdict == PASS else part.verdict.upper()
        self.say(f"[{time.monotonic() - self._started:4.0f} s] {verdict} {part.name}: {part.said}")
        for line in (part.found or {}).get("lines", ()):
            self.say(f"         {line}")

    def end(self, interrupted: bool) -> None:
        assert self._header is not None
        for part in parts.conclusions(self.parts, interrupted):
            self.keep(part)
        for line in board(self._header, self.parts):
            self.say(f"for certificates/README.md: {line}")
        durable.write_synced(self._folder / parts.PAGE, page(self._header, self.parts))
        self.say(f"{time.monotonic() - self._started:.0f} s; {self._folder / parts.PAGE}, {RESULTS}, {LOG}")

    def _append(self, line: Header | Part) -> None:
        durable.write_synced(self._folder / parts.CERTIFICATE, json.dumps(asdict(line)) + "\n", "ab")


def board(header: Header, measured: Sequence[Part]) -> Iterator[str]:
    """Rows for certificates/README.md: the fastest step of each model and method."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for steps in parts.measured(measured, "steps"):
        key = steps["row"]["model"], steps["row"]["method"]
        if key not in rows or steps["tokens_per_second"] > rows[key]["tokens_per_second"]:
            rows[key] = steps
    machine, day = header.machine, header.made.split()[0]
    for steps in rows.values():
        software = f"{machine.torch}, {machine.runtime}".removesuffix(", ")
        cells = [machine.device, *(steps["row"][name] for name in _BOARD), software, f"[{day}](NAME/{parts.PAGE})"]
        yield f"| {' | '.join(cells)} |"


def _begin(folder: Path, call: str) -> tuple[Header | None, list[Part]]:
    """Header and parts of the certificate that the second call continues. Raises UserError: there is one already."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (path := folder / parts.CERTIFICATE).exists():
        return None, []
    if call == CALLS[0]:
        raise UserError(f"{path} exists already, and is not overwritten; name another folder: OUT=FOLDER")
    header, before = parts.read(path)
    return header, [part for part in before if part.kind != "conclusion"]


def _describe() -> Machine:
    """This machine; asked in a process of its own, because a broken driver can hang."""
    part = children.run(_MACHINE, lambda: _MACHINE.seconds)
    if part.found:
        return Machine(**part.found)
    raise UserError(f"this machine's device cannot be described: {part.said}; run titan-mi100 doctor")


def _unpack_wheels(work: Path) -> list[str]:
    """The folder with the packages of .whl/ that are missing here."""
    site = work / "site"
    for wheel in sorted((ROOT / ".whl").glob("*.whl")):
        if importlib.util.find_spec(wheel.name.split("-")[0]) is None:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
    return [str(site)] if site.exists() else []


def _parser() -> cli.Parser:
    parser = cli.Parser(prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=CALLS)
    output = Path(os.environ.get("OUT") or ROOT / "outputs" / "gpu_check")
    parser.add_argument("--output", type=Path, default=output, help="folder of the results (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=(), metavar="SECTION", help="these sections only")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try the check itself on a CPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
