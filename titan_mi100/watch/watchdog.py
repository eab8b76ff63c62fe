"""Watches the training processes of one node from outside: `python -m titan_mi100.watch.watchdog FOLDER PROCESSES`, or
inside of run_train.sh's launcher. How long a part may take is in heartbeat.py.

A process hangs if its record (watch/heartbeat.py) has not changed for longer than the time limit in the record. Then
the watcher makes each process write its Python stacks; for one that cannot, it notes what /proc shows. It names the
rank that the others wait for, and ends all processes. It counts time only between its own looks, so a suspended job or
a sleeping laptop is not taken for a hang. Imports no torch.
"""

import os
import re
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from titan_mi100.checkpoint.sealed import DamagedError, all_checkpoints, damaged, list_checkpoints, read_manifest
from titan_mi100.errors import UserError
from titan_mi100.watch.heartbeat import ENDED, FOLDER_FILE, WRITE_STACKS, Beat, read_beats, record_file
from titan_mi100.watch.outcome import HUNG, STATE, Outcome, read_outcome, write_run_state

LOOK = 1.0  # seconds between two looks
_LONGEST_LOOK = 4.0  # seconds counted at most between two looks: after a longer gap the watcher itself was stopped
_FIRST_SIGN = 1800.0  # seconds until each process must have started: thousands may load Python from one file system
_DUMP = 3.0  # seconds to write stacks
_STOPPED = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "in a call that the kernel does not end"}
_INNER = 6  # innermost frames of a stack that may show a collective
# Where a thread is that waits for other ranks. Below `_pre_forward` DDP's ranks agree on their buckets, in C++.
_WAITS = re.compile(r'".*(torch/distributed/|titan_mi100/parallel/distributed\.py|/multiprocessing/)|in _pre_forward$')
_OURS = re.compile(r'File "[^"]*?(titan_mi100/[^"]+)", line (\d+) in (\S+)')


class ProcessSnapshot(NamedTuple):
    """A process at the time of a hang.

    Attributes:
        state: letter in /proc: R running, S sleeping, T stopped, D in the kernel; "": the process is gone.
        waits_in: kernel function that it waits in; "": unknown.
        stacks: Python stacks of its threads, innermost call first; "": it could not write them.
    """

    beat: Beat
    state: str
    waits_in: str
    stacks: str

    def main_stack(self) -> list[str]:
        """The main thread's calls, the innermost first."""
        blocks = re.split(r"^(?=(?:Current t|T)hread 0x)", self.stacks, flags=re.MULTILINE)
        thread = f"hread 0x{self.beat.thread:016x}"
        main_block = next((block for block in blocks if thread in block.partition("\n")[0]), "")
        return [line.strip() for line in main_block.splitlines()[1:] if line.strip().startswith("File")]

    def waits_for_others(self) -> bool:
        """Whether one of its threads is in a collective."""
        threads = self.stacks.split("\n\n")
        return any(_WAITS.search(line) for thread in threads for line in thread.splitlines()[1 : 1 + _INNER])

    def doing(self) -> str:
        """What its record says that it is doing, in words."""
        phase, doing, step = self.beat.phase, self.beat.doing, self.beat.step
        words = ", ".join(part for part in (phase + f" after step {step}" * (step >= 0), doing) if part)
        return "in " + (doing if doing.startswith("step ") else words)

    def where(self) -> str:
        """What it is doing, and where, in words."""
        words = self.doing()
        if self.state in _STOPPED:
            return f"{words}: {_STOPPED[self.state]} (state {self.state})"
        if not self.state:
            return f"{words}: the process is gone"
        if not self.stacks:
            waits = f", waits in {self.waits_in}" if self.waits_in else ""
            return f"{words}: cannot write its stacks (state {self.state}{waits})"
        stack = self.main_stack()
        ours = next((match for line in stack if (match := _OURS.search(line))), None)
        inner = re.sub(r'^File "(?:.*/)?([^/"]+)", line (\d+) in (\S+)', r"\3 (\1:\2)", stack[0]) if stack else "?"
        return f"{words}: in {inner}" + (f", called from {ours[1]}:{ours[2]} in {ours[3]}" if ours else "")


def behind(processes: Sequence[ProcessSnapshot]) -> list[ProcessSnapshot]:
    """The processes that the others wait for; empty: all wait, for a rank on another node or for each other.

    These are the processes that are gone or stopped. If there are none: the ones with the fewest events in their
    record, since all ranks pass the same events in the same order. If all have equally many: those that are in no
    collective.
    """
    if ill := [seen for seen in processes if not seen.state or seen.state in _STOPPED]:
        return ill
    least = min(seen.beat.events for seen in processes)
    last = [seen for seen in processes if seen.beat.events == least]
    if len(last) < len(processes):
        return last
    return [seen for seen in last if not seen.waits_for_others()]


class Watch:
    """Watches the processes of one node.

    Attributes:
        outcome: the run's, once it hangs.
        is_cause_here: whether the process that hangs is on this node; else all of this node's wait.
    """

    outcome: Outcome | None = None
    is_cause_here = False

    def __init__(self, folder: Path, processes: int, run_folder: str = "", first_sign: float = _FIRST_SIGN) -> None:
        """Args:
        folder: the folder of the processes' records.
        processes: their number.
        run_folder: where stacks are written; "": what the processes say.
        first_sign: seconds for each to begin.
        """
        self._folder, self._processes, self._first_sign = folder, processes, first_sign
        self._run_folder = run_folder
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> beats, seconds since they have changed
        self._missing, self._looked = 0.0, time.monotonic()
        self._vanished = list[Beat]()  # the first ones, in one look

    def beats(self) -> list[Beat]:
        """The processes' records."""
        return read_beats(self._folder)

    def look(self) -> bool:
        """Check all processes; whether the run hangs. If so, `outcome` is set and the stacks are written."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_LOOK), now
        beats = self.beats()
        self._missing = self._missing + passed if len(beats) < self._processes else float("-inf")  # all have begun
        late = []
        self._look_for_vanished(beats)
        for beat in beats:
            before, waited = self._seen.get(beat.rank, (-1, 0.0))
            waited = waited + passed if before == beat.beats else 0.0
            self._seen[beat.rank] = beat.beats, waited
            if 0 < beat.limit < waited and _state(beat.pid)[0]:  # a process that has ended is the launcher's concern
                late.append((waited, beat))
        if not late and self._missing <= self._first_sign:
            return False
        if late:
            waited, beat = max(late)
            reason = f"no progress for {waited:.0f} s, {beat.limit:.0f} are allowed in this phase ({beat.phase})"
        else:
            missing = self._processes - len(beats)
            reason = f"{missing} of {self._processes} processes did not begin in {self._missing:.0f} s"
        self.outcome = self._describe(reason, beats)
        return True

    def _look_for_vanished(self, beats: Sequence[Beat]) -> None:
        """Remember the first processes that are gone. Later ones were ended by torchrun or by errors that follow."""
        if not self._vanished:
            gone = [beat for beat in beats if not os.path.exists(f"/proc/{beat.pid}")]  # cheaper than its state
            self._vanished = [beat for beat in gone if not beat.doing.endswith(ENDED)]

    def vanished(self) -> list[str]:
        """A line for each process that was the first to end without an error message."""
        self._look_for_vanished(self.beats())
        host = socket.gethostname()
        return [
            f"rank {beat.rank} on {host} was killed, or ended without a word, "
            f"{ProcessSnapshot(beat, 'S', '', '').doing()}; where memory ran out, dmesg says so"
            for beat in self._vanished
        ]

    def last_step(self) -> int | None:
        """The last step that any process has finished, by the records; None: none."""
        return max((beat.step for beat in self.beats() if beat.step >= 0), default=None)

    def run_folder(self) -> Path | None:
        with suppress(OSError):
            return Path(self._run_folder or (self._folder / FOLDER_FILE).read_text(errors="surrogateescape"))
        return None

    def _describe(self, what: str, beats: Sequence[Beat]) -> Outcome:
        processes, host = _examine(self._folder, beats), socket.gethostname()
        late = behind(processes) if processes else []
        lines = [f"rank {seen.beat.rank} on {host} is behind: {seen.where()}" for seen in late]
        if not late and processes:
            lines = [f"all ranks on {host} wait for others, the first {processes[0].where()}"]
        message, folder = "\n".join([*lines, what]), self.run_folder()
        report = f"{time.strftime('%Y-%m-%d %H:%M:%S')} hang on {host}: {message}\n"
        for seen in processes:
            is_late = " (behind)" if seen in late else ""
            report += f"\nrank {seen.beat.rank}, process {seen.beat.pid}{is_late}: {seen.where()}\n{seen.stacks}"
        if folder is not None:
            path = folder / "logs" / f"hang-{host}.txt"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8", errors="replace") as file:
                    file.write(report + "\n")
                message += f"\nstacks of all: {path}"
            except OSError as error:
                message += f"\n{path} cannot be written to: {error.strerror}"
        self.is_cause_here = bool(late or not processes)
        return Outcome(5, message, self.last_step(), HUNG)


def _examine(folder: Path, beats: Sequence[Beat]) -> list[ProcessSnapshot]:
    """Make each process write its stacks, and read its state from /proc."""

    def written() -> dict[int, bytes]:
        files = {beat.rank: record_file(folder, beat.rank, "stacks") for beat in beats}
        return {rank: file.read_bytes() if file.exists() else b"" for rank, file in files.items()}

    before = last = written()
    for beat in beats:
        with suppress(OSError):  # it is gone
            os.kill(beat.pid, WRITE_STACKS)
    until, now = time.monotonic() + _DUMP, dict[int, bytes]()
    while time.monotonic() < until and not (now == last and all(len(now[rank]) > len(before[rank]) for rank in now)):
        time.sleep(0.3)
        last, now = now, written()
    stacks = {rank: now[rank][len(before[rank]) :].decode(errors="replace") for rank in now}
    return [ProcessSnapshot(beat, *_state(beat.pid), stacks[beat.rank]) for beat in beats]


def _state(pid: int) -> tuple[str, str]:
    """The letter of a process's state and the kernel's function it waits in; "" where there is none."""
    letter = waits = ""
    with suppress(OSError):  # it is gone
        letter = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    with suppress(OSError):
        waits = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    return ("" if letter in "ZX" else letter), waits


def how_to_start_again(folder: Path | None) -> str:
    """What the user can do after a hang or a lost process."""
    for path in list_checkpoints(folder / "checkpoint")[::-1] if folder else ():
        with suppress(DamagedError, UserError, OSError):
            read_manifest(path)
            return f"to resume, start again with job.run_folder = {folder}, without checkpoint.fresh and load_step"
    if folder and (all_checkpoints(folder / "checkpoint") or damaged(folder / "checkpoint")):
        return (
            "no intact checkpoint is there; --checkpoint.load_step N takes a suspect one, --checkpoint.fresh starts "
            "over beside them"
        )
    return "no intact checkpoint was saved; start again from step 0 with the same command"


def write_end(folder: Path | None, outcome: Outcome) -> None:
    """Write the state of a run whose processes could not. Args: folder: of the run; None: not known."""
    write_run_state(folder, outcome._replace(next=how_to_start_again(folder)))


def main(folder: Path, processes: int) -> None:
    """Watch processes that torchrun or srun has started, until they have ended."""
    watch, first_has_ended = Watch(folder, processes), False
    try:
        while not watch.look():
            if first_has_ended:
                if not any(_state(beat.pid)[0] for beat in watch.beats()):
                    return
                time.sleep(LOOK)
            else:  # the pipe is readable once the first process, which holds its other end, has ended
                first_has_ended = bool(select.select([sys.stdin], [], [], LOOK)[0])
        _end_all(watch)
    finally:
        _clear(folder)


def _clear(folder: Path) -> None:
    """Remove the folder, unless a later start of the job has begun to use it."""
    for beat in read_beats(folder):
        if not _state(beat.pid)[0]:
            for path in folder.glob(f"rank-{beat.rank:05}.*"):
                path.unlink(missing_ok=True)
    if not read_beats(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _end_all(watch: Watch) -> None:
    """End the processes with code 5, and say why."""
    outcome, folder = watch.outcome, watch.run_folder()
    assert outcome is not None
    with suppress(OSError):
        os.write(2, f"ERROR the run hangs: {outcome.message}\n".encode(errors="backslashreplace"))
    stored = read_outcome(folder / STATE) if folder is not None else None
    if watch.is_cause_here or stored is None or stored.state != HUNG:  # else another node has named the rank at fault
        write_end(folder, outcome)
    for number in (signal.SIGCONT, signal.SIGTRAP, signal.SIGKILL):
        for beat in watch.beats():
            with suppress(OSError):
                os.kill(beat.pid, number)
        time.sleep(1.0 if number == signal.SIGTRAP else 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
