"""The launchers of several nodes: node 0 leads, the others follow. launch.py does each node's own part.

A start goes: all nodes there, data prepared on each, then one torchrun agent per node, on a port that node 0 has just
found free. How it ended is what all nodes report. A start that fails before its first step is tried again, three times:
torch's store and port are new each time, and so are all processes.
"""

import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from titan_mi100.errors import UserError
from titan_mi100.nodes import Host, Link, Message, Place, free_port, join
from titan_mi100.outcome import LOST, Outcome, Restarts, combined

_LOOK = 0.3  # seconds between two looks at the other nodes
_LAST_CALL = 60.0  # seconds to wait for more nodes where there are enough
_GRACE = 8.0  # seconds for a node's processes to find out that another one's have failed, before they are killed
_PARTING = 120.0  # seconds for the other launchers to report after this one's processes have ended

Reports = dict[int, Outcome]  # by node, the first to come first


class Launcher(Protocol):
    """A node's own part; each method exits where it fails, or the launcher was told to stop."""

    def check(self, world: int, rank: int = 0, folder: str = "") -> str:
        """Check the config as this rank of the world; the run's folder, which is made if none is given."""

    def prepare(self, folder: str) -> None:
        """Prepare the data; the ledger goes into the folder."""

    def attempt(self, torchrun: tuple[str, ...], is_over: Callable[[], bool]) -> Outcome:
        """Run this node's processes until they end, or `is_over` says to end them."""

    def rest(self, seconds: float) -> None:
        """Wait."""

    def leave_if_told(self) -> None: ...

    def is_told(self) -> bool: ...

    def restart(self, folder: str, outcome: Outcome, words: str) -> None:
        """Say and note it; the next attempt reads the config in the run's folder."""

    def use_config_of(self, folder: str) -> None: ...

    def say(self, words: object) -> None: ...


class Leader:
    """Node 0's launcher."""

    def __init__(self, launcher: Launcher, host: Host, place: Place, processes: int) -> None:
        self._launcher, self._host, self._place, self._processes = launcher, host, place, processes
        self._ready, self._checked = (
            set[int](),
            place.most,
        )  # nodes with data; number of nodes the config is checked for

    def run(self, folder: str, restarts: Restarts) -> Outcome:
        """Start until the run has ended, or no more starts are left; how the last one ended."""
        is_first, trained = True, False
        while True:
            self._gather()
            outcome = combined((self._prepare(folder, is_first) or self._train(folder if trained else "")).values())
            is_first, trained = False, trained or outcome.step is not None
            if outcome.step is None and outcome.code == 1:
                self._launcher.leave_if_told()
            if self._launcher.is_told() or not (words := restarts.next(outcome)):
                return outcome
            message = outcome.message or "no process said why"
            self._launcher.restart(folder, outcome._replace(message=message), words)

    def _gather(self) -> None:
        """Wait for the nodes; go on with fewer only where --nnodes allows it, after a last call."""
        place, began = self._place, time.monotonic()
        until = began + place.patience
        while (count := 1 + len(self._host.links)) < place.most and time.monotonic() < until:
            if count >= place.least:
                until = min(until, began + _LAST_CALL)
            if refusal := self._host.admit(_LOOK):
                self._launcher.say(refusal)
            self._host.hear()  # drops who is gone
            self._launcher.rest(0)
        missing = [str(node) for node in range(1, place.most) if node not in self._host.links]
        if count < place.least:
            raise UserError(
                f"node {', '.join(missing)} did not come in {place.patience} s; look at what run_train.sh says there, "
                "or allow fewer nodes: --nnodes LEAST:MOST"
            )
        if missing:
            self._launcher.say(f"going on with {count} nodes; missing: {', '.join(missing)}")

    def _prepare(self, folder: str, is_first: bool) -> Reports:
        """Check the config for the nodes that are there, and have the data prepared on each; reports of failures."""
        if (count := 1 + len(self._host.links)) != self._checked:
            self._launcher.check(self._processes * count, folder=folder)
            self._checked = count
        self._ready &= self._host.links.keys()
        for node in self._host.links.keys() - self._ready:
            with suppress(OSError):  # the next look drops it
                self._host.links[node].send(do="prepare", folder=folder, world=self._processes * count)
        if is_first:
            self._launcher.prepare(folder)
        while self._host.links.keys() - self._ready:
            self._launcher.rest(_LOOK)
            reports = self._hear()
            self._ready |= {node for node, report in reports.items() if not report.code}
            if failed := {node: report for node, report in reports.items() if report.code}:
                return failed
        return {}

    def _train(self, trained: str) -> Reports:
        """One agent on each node, to the end of all.

        Args:
            trained: the run's folder, whose config is read; "": the run has not trained yet.
        """
        numbers, port, reports = [0, *sorted(self._host.links)], free_port(), Reports()
        everyone = len(numbers) - 1
        self._host.tell(do="start", port=port, nodes=numbers, trained=trained)
        failed_at = float("inf")

        def is_over() -> bool:
            nonlocal failed_at
            reports.update(self._hear())
            if any(report.code for report in reports.values()):
                failed_at = min(failed_at, time.monotonic())
            return time.monotonic() > failed_at + _GRACE

        reports[0] = self._launcher.attempt(agent(self._place, numbers, port, self._processes), is_over)
        now = time.monotonic()
        stop_at = now + (_GRACE if any(report.code == 1 for report in reports.values()) else _PARTING)
        while len(reports) <= everyone and self._host.links and time.monotonic() < stop_at + _PARTING:
            if time.monotonic() > stop_at:
                self._host.tell(do="stop")
                stop_at = float("inf")
            time.sleep(_LOOK)
            reports.update(self._hear())
        return reports

    def _hear(self) -> Reports:
        reports = Reports()
        for node, message in self._host.hear():
            gone = Outcome(1, f"node {node} is gone: its launcher has ended", None, LOST)
            reports[node] = gone if message is None else _outcome_of(message) or gone
        return reports


def follow(launcher: Launcher, place: Place, processes: int) -> int:
    """Do what node 0's launcher says, until it says that the run has ended; the exit code."""
    until = time.monotonic() + place.patience
    while (link := join(place, processes)) is None:
        if time.monotonic() > until:
            raise UserError(
                f"node 0 did not answer at {place.host}:{place.port} in {place.patience} s; look at what run_train.sh "
                "says there, and whether this node can reach it"
            )
        launcher.rest(1)
    launcher.say(f"node {place.rank} of {place.most}: node 0 at {place.host} leads")
    try:
        return _follow(launcher, link, place, processes)
    except SystemExit as ended:  # the check or the data, or told to stop
        with suppress(OSError):
            link.send(
                code=ended.code,
                message=f"node {place.rank} has stopped with exit code {ended.code}",
                step=None,
                state="ended",
            )
        raise
    except OSError:
        launcher.say("node 0 is gone: its launcher has ended")
        return 1
    finally:
        link.close()


def _follow(launcher: Launcher, link: Link, place: Place, processes: int) -> int:
    while True:
        message = link.receive(0)
        if message is None:
            launcher.rest(_LOOK)
        elif message["do"] == "prepare":
            rank = place.rank * processes
            launcher.check(int(message["world"]), min(rank, int(message["world"]) - 1), str(message["folder"]))
            with tempfile.TemporaryDirectory(prefix="titan-ledger-") as aside:  # the run's own is node 0's
                launcher.prepare(aside)
            link.send(**Outcome(0)._asdict())
        elif message["do"] == "start":
            torchrun = agent(place, message["nodes"], int(message["port"]), processes)
            if trained := str(message["trained"]):
                launcher.use_config_of(trained)
            outcome = launcher.attempt(torchrun, lambda: _is_called_off(link))
            if outcome.code == 1 and outcome.step is None:
                launcher.leave_if_told()  # else node 0 would try again
            link.send(**outcome._asdict())
        elif message["do"] == "end":
            return int(message["code"])


def _is_called_off(link: Link) -> bool:
    try:
        return link.receive(0) is not None  # nothing else can come now
    except OSError:
        return True


def agent(place: Place, numbers: list[int], port: int, processes: int) -> tuple[str, ...]:
    """torchrun's arguments: this node's agent, of those of the nodes with these numbers."""
    where = ("--node-rank", str(numbers.index(place.rank)), "--master-addr", place.host, "--master-port", str(port))
    return ("--nnodes", str(len(numbers)), *where, "--nproc_per_node", str(processes))


def _outcome_of(message: Message) -> Outcome | None:
    try:
        step = message["step"]
        found = int(message["code"]), str(message["message"]), step if step is None else int(step)
        return Outcome(*found, str(message["state"]))
    except (KeyError, TypeError, ValueError):
        return None
