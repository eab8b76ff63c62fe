"""The GPU check: measures whether this card computes and trains right, and how fast. docs/CARDS.md introduces it.

Results: results.txt (what is printed), certificate.jsonl (every number), certificate.md, log.txt (errors). The second
call continues the certificate of the first one, if it is in the same folder. Needs no network: a package that is
missing is imported from its wheel in .whl/, such as torchdata, by
  pip download --no-deps -d .whl torchdata==0.11.0
"""

import argparse
import contextlib
import datetime
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gpu_check.page import page
from gpu_check.sections import CALLS, RESULTS, WORK, Section, sections_of
from titan_mi100 import cli
from titan_mi100.errors import UserError
from titan_mi100.files import durable, isolated
from titan_mi100.run.machine import Machine
from titan_mi100.workshop.measure import children, parts
from titan_mi100.workshop.measure.children import MEASURED, Outcome, Task
from titan_mi100.workshop.measure.parts import NOT_RUN, PASS, UNAVAILABLE, Header, Part

ROOT = Path(__file__).resolve().parents[2]
PRINTED, LOG = "results.txt", "log.txt"
_LOOK, LEAST = 0.1, 3.0  # seconds: between two looks at a process; of time without which no task starts
_BOARD = ("model", "method", "bf16", "N", "toks/s", "mfu")  # columns of certificates/README.md


def main(argv: Sequence[str] | None = None) -> int:
    parser = cli.Parser(prog="gpu_check", description=__doc__, formatter_class=cli.RawHelp)
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="the sections whose names begin so")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes and long limits, to try the check on a CPU")
    return cli.exit_code(lambda: _check(parser.parse_args(argv)))


def _check(options: argparse.Namespace) -> int:
    signals, folder = list[int](), Path(os.environ.get("OUT") or ROOT / "outputs" / "gpu_check")
    chosen = sections_of(options.call, options.tiny, tuple(options.only or ("",)))
    for number in (signal.SIGINT, signal.SIGTERM):  # only noted: an exception could cut off a line of the certificate
        signal.signal(number, lambda number, _: signals.append(number))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="titan_mi100-gpu-check-") as work:
        os.environ |= {WORK: work, RESULTS: str(folder)}
        paths = [ROOT, ROOT / "scripts", *(ROOT / ".whl").glob("*.whl"), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        report = Report(folder, options.call, sum(section.seconds for section in chosen) / 60)
        for section in chosen:
            began = time.monotonic()
            measure(section, report.keep, folder / LOG, signals)
            report.say(f"== {section.name}: {time.monotonic() - began:.0f} s of at most {section.seconds}")
        report.end(bool(signals))
    return 128 + signals[0] if signals else int(report.parts[-1].verdict != PASS)


def measure(section: Section, keep: Callable[[Part], None], log: Path, signals: Sequence[int]) -> None:
    """Run a section's tasks in order. Each outcome is kept at once; a process that failed is replaced.

    Args:
        log: gets the errors.
        signals: grows when the check is asked to end.
    """
    end, waiting, child = time.monotonic() + section.seconds, list(section.tasks), None
    while waiting:
        task, began = waiting.pop(0), time.monotonic()
        if signals or end - began < LEAST:
            keep(Part(task.name, NOT_RUN, "interrupted" if signals else f"the section's {section.seconds} s were over"))
            continue
        child = child or _Child(log)
        outcome = child.ask(task, min(task.seconds, end - began), signals)
        part = children.part_of(task, outcome, time.monotonic() - began)
        if outcome[0] not in (MEASURED, UNAVAILABLE):  # after an error of the device all further calls would fail
            child.kill()
            child = None
        waiting[:0] = [Task(**further) for further in (part.found or {}).pop("tasks", ())]
        keep(part)
    if child:
        child.kill()


class _Child:
    """A process that measures one task after the other."""

    def __init__(self, log: Path) -> None:
        command = [sys.executable, "-m", "gpu_check.child", str(os.getpid())]
        options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
        with log.open("ab") as errors:
            self._process = subprocess.Popen(command, stderr=errors, cwd=ROOT, **options)

    def ask(self, task: Task, seconds: float, signals: Sequence[int]) -> Outcome:
        assert self._process.stdin and self._process.stdout
        end, answered = time.monotonic() + seconds, select.poll()  # select() takes no file number above 1,023
        answered.register(self._process.stdout)
        with contextlib.suppress(BrokenPipeError):
            question = json.dumps([task.name, task.target, dict(task.arguments)])
            print(question, file=self._process.stdin, flush=True)
        while not answered.poll(1000 * _LOOK):
            if signals or time.monotonic() > end:
                return "hung", "interrupted" if signals else f"did not end within {seconds:.0f} s", None
        if line := self._process.stdout.readline():
            return tuple(json.loads(line))  # type: ignore[return-value]
        return "crashed", f"{isolated.ended(self._process.wait())}; see {LOG}", None

    def kill(self) -> None:
        """Kill it and all that it started."""
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Report:
    """What is printed and written."""

    def __init__(self, folder: Path, call: str, minutes: float) -> None:
        """Begin a certificate, or continue the first call's. Raises UserError: there is one; no device."""
        self._folder, self._path, self._started = folder, folder / parts.CERTIFICATE, time.monotonic()
        self.parts: list[Part] = []
        if self._path.exists():
            if call == CALLS[0]:
                raise UserError(f"{self._path} exists, and is not overwritten; name another folder: OUT=FOLDER")
            self._header, before = parts.read(self._path)
            self.parts = [part for part in before if part.kind != "conclusion"]
            return
        described = children.run(replace(children.MACHINE, seconds=30))  # in a process, as a broken driver can hang
        if not described.found:
            raise UserError(f"this machine's device cannot be described: {described.said}; run titan-mi100 doctor")
        now, machine = datetime.datetime.now(datetime.timezone.utc), Machine(**described.found)
        self._header = Header(parts.FORMAT, f"{now:%Y-%m-%d %H:%M} UTC", minutes, machine)
        self._append(self._header)
        self.say(f"{machine.device}, torch {machine.torch}, {machine.runtime}: {minutes:.1f} minutes at most")

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self._folder / PRINTED).open("a", encoding="utf-8") as file:
            print(text, file=file)

    def keep(self, part: Part) -> None:
        self.parts.append(part)
        self._append(part)
        verdict = part.verdict if part.verdict == PASS else part.verdict.upper()
        lines = [f"[{time.monotonic() - self._started:4.0f} s] {verdict} {part.name}: {part.said}"]
        self.say("\n         ".join([*lines, *(part.found or {}).get("lines", ())]))

    def end(self, interrupted: bool) -> None:
        for part in parts.conclusions(self.parts, interrupted):
            self.keep(part)
        self.say("\n".join(["rows for certificates/README.md:", *board(self._header, self.parts)]))
        durable.write_synced(self._folder / parts.PAGE, page(self._header, self.parts))
        self.say(f"{time.monotonic() - self._started:.0f} s; {self._folder / parts.PAGE}, {PRINTED}, {LOG}")

    def _append(self, line: Header | Part) -> None:
        durable.write_synced(self._path, json.dumps(asdict(line)) + "\n", "ab")


def board(header: Header, measured: Sequence[Part]) -> Iterator[str]:
    """Rows for certificates/README.md: the fastest step of each model and method."""
    steps = sorted(parts.measured(measured, "steps"), key=lambda one: float(one["tokens_per_second"]))
    software = f"{header.machine.torch}, {header.machine.runtime}".removesuffix(", ")
    for row in {(one["row"]["model"], one["row"]["method"]): one["row"] for one in steps}.values():
        made = f"[{header.made.split()[0]}](NAME/{parts.PAGE})"
        yield f"| {' | '.join([header.machine.device, *(row[name] for name in _BOARD), software, made])} |"


if __name__ == "__main__":
    sys.exit(main())
