"""What the checkpoint protocol promises, tried: real processes are killed, told to stop, lied to and run out of disk.

    python tests/chaos/run.py [--rows 1 6] [--quick] [--output chaos.jsonl] [--without "hash check"] [--table]

Every case that has ended is a line of the output file, so a run that is stopped goes on where it was; `--table` prints
what the file holds. `--without` leaves a protection out: its row must then fail. Exit code: 1: something was wrong;
3: a row could not be tried on this machine. Rows and their targets: `--help`.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

# the folder that holds the packages `chaos` and `parity`, in place of this script's own
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from chaos.case import PROTECTIONS, Case

_LEFT_OUT = 3  # exit code: nothing was wrong, but a row could not be tried


class Row(NamedTuple):
    measure: str
    target: str
    source: str  # package.module.function: (quick) -> cases; imported when it is needed, for all of them import torch
    needs: str = ""  # programs, "root", and @NAME: a host

    def missing(self) -> list[str]:
        """What it needs and this machine does not have."""
        return [need for need in self.needs.split() if not _has(need)]

    def cases(self, quick: bool) -> Iterator[Case]:
        module, _, function = self.source.rpartition(".")
        return getattr(importlib.import_module(module), function)(quick)


ROWS = {
    1: Row("SIGKILL of a rank or the launcher in step, save, load; then resumed",
           "100: no checkpoint lost, final parameters' SHA as uninterrupted", "chaos.runs.kills"),
    2: Row("kill at each open, write, fsync, rename, unlink of a save, sync and async, keep 2",
           "always >= 1 verified checkpoint", "chaos.files.kill_points"),
    3: Row("single-bit flips over all checkpoint files",
           "2,000: all detected; 50 end to end: all fell back", "chaos.files.flips"),
    4: Row("truncated, zeroed tail, missing, swapped, cross-step mixed shards",
           "300: all refused, file named", "chaos.files.damage"),
    5: Row("ENOSPC, EIO, EACCES at each write site", "every rank exits non-zero, previous intact",
           "chaos.files.faults"),
    6: Row("SIGTERM, SIGUSR1, Ctrl-C in step, save, validation, warm-up",
           "50: saved within 1 step, code 3, no orphan", "chaos.runs.signals"),
    7: Row("resume twice, same layout", "10 configurations: bit-identical", "chaos.runs.resumes"),
    8: Row("reshard dp 4->2->4, PP 2->1->2, mixed", "no row repeated or missed; loss within the bars",
           "chaos.runs.reshards"),
    9: Row("NaN on any rank or stage", "no parameter changed anywhere; ends at exactly K", "chaos.runs.nans"),
    10: Row("hostile checkpoints, HF folders, tokenizers", "40: no code run, nothing read outside",
            "chaos.hostile.cases"),
    11: Row("clean exits", "100 of 100", "chaos.runs.exits"),
    12: Row("cost of a save and of the finite flag", "stall, MB/s, ms a step", "chaos.cost.cases"),
    15: Row("a rank stopped, asleep, holding the GIL, or in a receive that no rank answers",
            "30: code 5 within limit + 10 s, the rank named, stacks of the others", "chaos.hangs.hangs"),
    16: Row("kills and hangs with --max_restarts", "50: final weights bit for bit as uninterrupted",
            "chaos.hangs.restarts"),
    17: Row("slow disk, long compile, long validation, slow rows", "100: no alarm", "chaos.hangs.slow"),
    14: Row("jobs in a real SLURM: plain, killed, near the wall, with a silent node, in a chain",
            "all train; a killed task ends its step in 60 s, and the job resumes", "chaos.slurm.jobs",
            "root munged munge slurmctld slurmd sbatch runuser @n1 @n2 @n3"),
}  # fmt: skip


def _has(need: str) -> bool:
    if need.startswith("@"):
        with suppress(OSError):
            return bool(socket.gethostbyname(need[1:]))
        return False
    return os.geteuid() == 0 if need == "root" else shutil.which(need) is not None


def main() -> int:
    listed = "\n".join(f"  {number:>2}  {row.measure}\n      {row.target}" for number, row in ROWS.items())
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=f"rows:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--quick", action="store_true", help="a sample of every row, in 19 minutes")
    parser.add_argument("--output", type=Path, default=Path("chaos.jsonl"))
    parser.add_argument("--without", nargs="+", choices=PROTECTIONS, default=[], help="leave protections out")
    parser.add_argument("--table", action="store_true", help="only print what the output file holds")
    options = parser.parse_args()
    lacking = {number: missing for number in options.rows if (missing := ROWS[number].missing()) and not options.table}
    for number, missing in lacking.items():  # said before the first row, not after twenty minutes
        print(f"row {number} is left out: it needs {', '.join(missing)} (tests/chaos/slurm.py says how to get it)")
    options.rows = [number for number in options.rows if number not in lacking]
    for number in options.rows if not options.table else ():
        for case in ROWS[number].cases(options.quick):
            run_case(number, case, options)
    return print_table(options) or (_LEFT_OUT if lacking else 0)


def run_case(number: int, case: Case, options: argparse.Namespace) -> None:
    """Run a case, unless the output file has it, and note what it found."""
    key = {"row": number, "case": case.name, "quick": options.quick, "without": options.without}
    if any(key.items() <= record.items() for record in read(options.output)):
        return
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as folder:
        outcome = case.run(Path(folder), tuple(options.without))
    seconds = round(time.perf_counter() - started, 1)
    record = {**key, **outcome._asdict(), "seconds": seconds, "torch": importlib.metadata.version("torch")}
    with options.output.open("a", encoding="utf-8") as file:
        file.write("\n" * (file.tell() > 0) + json.dumps(record))  # in front: what is there may be cut off
    found = "; ".join(outcome.wrong) or "as it should be"
    print(
        f"row {number}  {case.name}: {outcome.count} tried, {found} ({seconds} s) {outcome.figures or ''}", flush=True
    )


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(ValueError):  # a kill may have cut it
            found.append(json.loads(line))
    return found


def print_table(options: argparse.Namespace) -> int:
    """The rows as the file has them; 1 if anything was wrong."""
    failed, notes = False, list[str]()
    print("\n| row | measure | target | tried | wrong |\n|---|---|---|---|---|")
    for number in options.rows:
        records = [
            record
            for record in read(options.output)
            if (record["row"], record["quick"], record["without"]) == (number, options.quick, options.without)
        ]
        wrong = sum(len(record["wrong"]) for record in records)
        failed |= wrong > 0
        tried = sum(record["count"] for record in records)
        print(f"| {number} | {ROWS[number].measure} | {ROWS[number].target} | {tried:,} | {wrong} |")
        ends = [each["figures"] for each in records if "seconds_to_end" in each["figures"]]
        if ends:
            longest = max(each["seconds_to_end"] for each in ends)
            after = max(each["seconds_to_end"] - each["limit"] for each in ends)
            notes.append(f"row {number}: the longest hang took {longest:.1f} s; at most {after:.1f} s after its limit")
    for note in notes:
        print(note)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
