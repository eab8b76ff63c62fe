"""Launching on several nodes: node 0 leads, the others follow. launcher.py does the work of a single node.

A start has these steps: all nodes connect; each prepares the data; each runs one torchrun agent, with a port that node
0 has just found free; each reports how its agent ended. If a start fails before its first step, it is tried again, up
to three times, with a new port, a new store and new processes. `parse` reads the options of both kinds of launch.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from titan_mi100.config.hub import COMMITS
from titan_mi100.errors import UserError
from titan_mi100.launch.links import OPTIONS, Endpoint, Host, Link, Message, join, parse_place, reserved_port
from titan_mi100.launch.torch_build import installed
from titan_mi100.planning.hardware import default_process_count
from titan_mi100.watch.outcome import INTERRUPTED, LOST, Outcome, Restarts, combined

_LOOK = 0.3  # seconds between two looks at the other nodes
_LAST_CALL = 60.0  # seconds to wait for more nodes after the minimum of --nnodes has connected
_SOON = 5.0  # seconds until the log says that nodes are missing
_GRACE = 8.0  # seconds that a node's processes get to end by themselves after another node's have failed
_PARTING = 120.0  # seconds to wait for the other nodes' reports after this node's processes have ended

Reports = dict[int, Outcome]  # by node, in the order of arrival


def parse(arguments: Sequence[str], ngpu: str = "") -> tuple[int, list[str], Endpoint | None, int]:
    """The number of processes of this node, the trainer's arguments, this node's place (None: there is no other), and
    how often the run is restarted.

    Args:
        ngpu: the number of processes where the command line has none.

    Raises:
        UserError: there is no such number, or no such place.
    """
    rest, trainer, options = list(arguments), list[str](), dict[str, str]()
    while rest:
        name, has_value, value = rest[0].partition("=")
        argument, option = rest.pop(0), name.removeprefix("--").replace("-", "_")
        if not name.startswith("--") or option not in ("nproc_per_node", "max_restarts", *OPTIONS):
            trainer.append(argument)
            continue
        if not has_value and not rest:
            raise UserError(f"{name} needs a value, e.g. {name} 2")
        value = value if has_value else rest.pop(0)
        if option in options:
            raise UserError(f"--{option} is given twice, as {options[option]!r} and {value!r}; keep one of them")
        options[option] = value
    count, restarts = options.pop("nproc_per_node", ngpu or None), options.pop("max_restarts", "0")
    if not re.fullmatch("[0-9]{1,4}", restarts, re.ASCII):
        raise UserError(f"--max_restarts must be a whole number from 0 to 9999, not {restarts!r}")
    if count is not None and not re.fullmatch("[1-9][0-9]?", count, re.ASCII):
        raise UserError(f"the number of processes must be 1 to 99, not {count!r} (--nproc_per_node, NGPU)")
    is_rocm = bool(installed(wants_blas=False, environ=os.environ).hip) if count is None else None
    return int(count or default_process_count(is_rocm)), trainer, parse_place(options), int(restarts)


class NodeLauncher(Protocol):
    """The work of a single node, see launcher.Launcher. Methods exit the process on failure or after a stop signal."""

    def check(self, world: int, rank: int = 0, folder: str = "") -> str:
        """Check the config as this rank of the world. Returns the run folder, which is created if none is given."""

    def prepare(self, folder: str) -> None:
        """Prepare the data, with the ledger in this folder."""

    def attempt(self, torchrun: tuple[str, ...], is_over: Callable[[], bool]) -> Outcome:
        """Run this node's processes until they end; kill them when `is_over` returns True."""

    def rest(self, seconds: float) -> None:
        """Wait."""

    def exit_if_stopped(self) -> None: ...

    def is_stopped(self) -> bool: ...

    def restart(self, folder: str, outcome: Outcome, words: str) -> None:
        """Log and record a restart. If the run has trained, the next attempt reads the config in its folder."""

    def use_config_of(self, folder: str) -> None: ...

    def say(self, words: object) -> None: ...


class Leader:
    """Node 0's launcher."""

    def __init__(self, launcher: NodeLauncher, host: Host, place: Endpoint, processes: int) -> None:
        self._launcher, self._host, self._place, self._processes = launcher, host, place, processes
        self._ready = set[Link]()  # connections of nodes that have prepared the data; a node that joins again has not
        self._checked = place.most  # the config was checked for this number of nodes

    def run(self, folder: str, restarts: Restarts) -> Outcome:
        """Start the run, and restart it as `restarts` decides. Returns the outcome of the last start."""
        is_first, trained = True, False
        while True:
            self._gather()
            with reserved_port() as port:
                reports = self._prepare(folder, is_first) or self._train(folder if trained else "", port)
            outcome = combined(reports.values())
            is_first, trained = False, trained or outcome.step is not None
            if outcome.step is None and outcome.code == 1:
                self._launcher.exit_if_stopped()
            if self._launcher.is_stopped() or not (words := restarts.next(outcome)):
                return outcome
            message = outcome.message or "no process reported the reason"
            self._launcher.restart(folder, outcome._replace(message=message), words)

    def _gather(self) -> None:
        """Wait until all nodes are connected; start with fewer only if --nnodes allows it, after _LAST_CALL seconds.

        Raises:
            UserError: fewer than the minimum number of nodes connected in time.
        """
        limits, began, is_said = self._place, time.monotonic(), False
        until = began + limits.patience
        while (count := 1 + len(self._host.links)) < limits.most and time.monotonic() < until:
            if count >= limits.least:
                until = min(until, began + _LAST_CALL)
            if not is_said and time.monotonic() > began + _SOON:
                is_said = True
                awaited = ", ".join(str(node) for node in range(1, limits.most) if node not in self._host.links)
                self._launcher.say(f"waiting up to {limits.patience} s (--rdzv_timeout) for node {awaited}")
            if refusal := self._host.admit(_LOOK):
                self._launcher.say(refusal)
            self._host.hear()  # drops nodes whose connection is lost
            self._launcher.rest(0)
        missing = [str(node) for node in range(1, limits.most) if node not in self._host.links]
        if count < limits.least:
            raise UserError(
                f"node {', '.join(missing)} did not connect within {limits.patience} s; read the messages of "
                "run_train.sh on that node, or allow fewer nodes: --nnodes LEAST:MOST"
            )
        if missing:
            self._launcher.say(f"starting with {count} nodes; missing: {', '.join(missing)}")

    def _prepare(self, folder: str, is_first: bool) -> Reports:
        """Check the config for the connected nodes and let each prepare the data.

        Args:
            is_first: this node prepares its data too; later starts find it prepared.

        Returns:
            The reports of nodes that failed; empty: all are ready.
        """
        if (count := 1 + len(self._host.links)) != self._checked:
            self._launcher.check(self._processes * count, folder=folder)
            self._checked = count
        self._ready &= set(self._host.links.values())
        for link in set(self._host.links.values()) - self._ready:
            with suppress(OSError):  # the next `hear` drops the node
                commits = os.environ.get(COMMITS, "")  # a branch of the hub may move while the nodes start
                link.send(do="prepare", folder=folder, world=self._processes * count, commits=commits)
        if is_first:
            self._launcher.prepare(folder)
        while set(self._host.links.values()) - self._ready:
            self._launcher.rest(_LOOK)
            reports = self._hear()
            links = self._host.links
            self._ready |= {links[node] for node, report in reports.items() if not report.code and node in links}
            if failed := {node: report for node, report in reports.items() if report.code}:
                return failed
        return {}

    def _train(self, trained: str, port: int) -> Reports:
        """Run one torchrun agent on each node until all have ended, and collect the nodes' reports.

        Args:
            trained: the run folder, if the run has trained: then all nodes read the config in it; else "".
            port: where the agents meet on this node.
        """
        numbers, reports = [0, *sorted(self._host.links)], Reports()
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
            gone = Outcome(1, f"node {node} is lost: its launcher has ended", None, LOST)
            reports[node] = gone if message is None else _outcome_of(message) or gone
        return reports


def follow(launcher: NodeLauncher, place: Endpoint, processes: int) -> int:
    """Follow the messages of node 0's launcher until the run has ended. Returns the exit code.

    Raises:
        UserError: node 0 does not answer in time, or refuses this node.
    """
    until = time.monotonic() + place.patience
    while (link := join(place, processes)) is None:
        if time.monotonic() > until:
            raise UserError(
                f"node 0 did not answer at {place.host}:{place.port} within {place.patience} s; read the messages of "
                "run_train.sh on node 0, and check that this node can reach it"
            )
        launcher.rest(1)
    launcher.say(f"node {place.rank} of {place.most}: node 0 at {place.host} leads")
    try:
        return _follow(launcher, link, place, processes)
    except SystemExit as ended:  # the config check or the data preparation failed, or a stop signal came
        with suppress(OSError):
            link.send(
                code=ended.code,
                message=f"node {place.rank} has stopped with exit code {ended.code}",
                step=None,
                state="ended",
            )
        raise
    except OSError:
        launcher.say("node 0 is lost: its launcher has ended")
        return 1
    finally:
        link.close()


def _follow(launcher: NodeLauncher, link: Link, place: Endpoint, processes: int) -> int:
    while True:
        # After a stop signal the run has ended here: wait for node 0's word. `rest` would say that nothing was trained.
        message = link.receive(_LOOK if launcher.is_stopped() else 0)
        if message is None and not launcher.is_stopped():
            launcher.rest(_LOOK)
        if message is None:
            continue
        if message["do"] == "prepare":
            rank, os.environ[COMMITS] = place.rank * processes, str(message.get("commits", ""))
            launcher.check(int(message["world"]), min(rank, int(message["world"]) - 1), str(message["folder"]))
            with tempfile.TemporaryDirectory(prefix="titan-ledger-") as aside:  # the run folder gets node 0's ledger
                launcher.prepare(aside)
            link.send(**Outcome(0)._asdict())
        elif message["do"] == "start":
            torchrun = agent(place, message["nodes"], int(message["port"]), processes)
            if trained := str(message["trained"]):
                launcher.use_config_of(trained)
            outcome = launcher.attempt(torchrun, lambda: _is_called_off(link))
            if outcome.code == 1 and outcome.step is None:
                launcher.exit_if_stopped()  # exit here; a report of code 1 would make node 0 try again
            if outcome.code == 1 and launcher.is_stopped():  # a lost process would be restarted
                outcome = outcome._replace(message=f"node {place.rank} was interrupted", state=INTERRUPTED)
            link.send(**outcome._asdict())
        elif message["do"] == "end":
            return int(message["code"])


def _is_called_off(link: Link) -> bool:
    try:
        return link.receive(0) is not None  # during training node 0 sends only "stop" or "end"
    except OSError:
        return True


def agent(place: Endpoint, numbers: list[int], port: int, processes: int) -> tuple[str, ...]:
    """torchrun's arguments for this node's agent.

    Args:
        numbers: the node numbers that take part; torchrun's node rank is the position in this list.
        port: the port of the processes' store on node 0.
    """
    where = ("--node-rank", str(numbers.index(place.rank)), "--master-addr", place.host, "--master-port", str(port))
    return ("--nnodes", str(len(numbers)), *where, "--nproc_per_node", str(processes))


def _outcome_of(message: Message) -> Outcome | None:
    try:
        step = message["step"]
        step = step if step is None else int(step)
        return Outcome(int(message["code"]), str(message["message"]), step, str(message["state"]))
    except (KeyError, TypeError, ValueError):
        return None
