"""Several nodes: who is there, what follows from how a start ended, and real jobs of two launchers."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import REPO, free_port, job_environment
from torch.distributed import TCPStore

from titan_mi100.config.srun import device_index
from titan_mi100.errors import UserError
from titan_mi100.launch import several_nodes as launch_nodes
from titan_mi100.launch.links import Endpoint, Host, Link, join, parse_place, reserved_port
from titan_mi100.watch.outcome import (
    ATTEMPTS,
    KILLED,
    LOST,
    RUNNING,
    Outcome,
    Restarts,
    combined,
    next_move,
    read_outcome,
)


def here(rank: int = 1, most: int = 2, least: int | None = None, port: int = 0, patience: int = 20) -> Endpoint:
    return Endpoint(least or most, most, rank, "127.0.0.1", port or free_port(), patience)


GIVEN = {"nnodes": "4", "node_rank": "3", "rdzv": "first:29400"}


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({}, None),
        ({"nnodes": "1"}, None),
        (GIVEN, Endpoint(4, 4, 3, "first", 29400)),
        ({**GIVEN, "nnodes": "3:4", "rdzv_timeout": "60"}, Endpoint(3, 4, 3, "first", 29400, 60)),
        ({**GIVEN, "rdzv": "[fe80::1]:80"}, Endpoint(4, 4, 3, "fe80::1", 80)),
    ],
)
def test_the_place_of_a_node_is_what_the_command_line_says(given: dict[str, str], place: Endpoint | None) -> None:
    assert parse_place(given) == place


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        *(({"nnodes": value}, "--nnodes must be a number, or LEAST:MOST") for value in ("0", "", "x", "4:3", "1:2:3")),
        *(({"node_rank": value}, "--node_rank must be 0 to 3") for value in ("4", "-1", "", "one", "٣")),
        *(({"rdzv": value}, "--rdzv must be HOST:PORT") for value in ("", "first", "first:", "first:0", "a b:1", ":1")),
        ({"rdzv": "first:65535"}, "--rdzv must be HOST:PORT"),  # no room for the other ports
        ({"nnodes": "1"}, "--node_rank is for several nodes"),
        ({"rdzv_timeout": "0"}, "--rdzv_timeout must be seconds"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(changed: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_place({**GIVEN, **changed})


CRASH, SILENT = Outcome(1, "rank 3: a bug", None, "crashed"), Outcome(1)
GONE = Outcome(1, "closed by peer", None, LOST)


@pytest.mark.parametrize(
    ("outcome", "move"),
    [
        (Outcome(0, "", 9, "done"), "end"),
        (SILENT, "retry"),
        (CRASH, "retry"),
        (GONE, "retry"),
        (Outcome(1, "", None, RUNNING), "retry"),
        (Outcome(5, "", None, "hung"), "retry"),
        (Outcome(2, "wrong", None, "bad_input"), "end"),
        (Outcome(6, "", None, "out_of_memory"), "end"),
        (Outcome(1, "interrupted", None, "interrupted"), "end"),
        (Outcome(1, "disk", None, "save_failed"), "end"),
        (Outcome(3, "", None, "preempted"), "requeue"),
        (Outcome(3, "", 7, "preempted"), "requeue"),
        (Outcome(5, "", 7, "hung"), "requeue"),
        (Outcome(1, "", 7, RUNNING), "requeue"),
        (GONE._replace(step=7), "requeue"),
        (CRASH._replace(step=7), "end"),
        (Outcome(4, "nan", 7, "numerical_abort"), "end"),
    ],
)
def test_what_follows_from_an_outcome(outcome: Outcome, move: str) -> None:
    assert next_move(outcome) == move


@pytest.mark.parametrize(
    ("outcomes", "all_in_all"),
    [
        ([Outcome(0), Outcome(0, "", 5, "done")], (0, 5)),
        ([Outcome(0), Outcome(3, "", 5, "preempted")], (3, 5)),
        ([SILENT, GONE, CRASH], (1, None)),
        ([GONE, Outcome(6, "memory", None, "out_of_memory"), SILENT], (6, None)),
        ([Outcome(0, "", 5, "done"), SILENT], (1, 5)),
        ([SILENT, Outcome(1, "", 2, RUNNING)], (1, 2)),
    ],
)
def test_what_the_nodes_found_makes_one_outcome(outcomes: list[Outcome], all_in_all: tuple[int, int | None]) -> None:
    found = combined(outcomes)
    assert (found.code, found.step) == all_in_all
    assert not {CRASH} & set(outcomes) or found.message == CRASH.message  # the cause, not what followed from it


def test_the_killed_rank_is_named_before_the_ranks_that_lost_it() -> None:
    """A node whose processes only waited may report first; a later cause still counts more."""
    killed = Outcome(1, f"rank 1 on b {KILLED}, in step 3", 2, LOST)
    found = combined([Outcome(1, "killed", 2, RUNNING), GONE._replace(step=2), killed])
    assert (found.state, found.step) == (LOST, 2)
    assert found.message.splitlines() == [killed.message, GONE.message]
    assert combined([GONE, killed, CRASH]).message == CRASH.message


def test_a_batch_script_reads_code_and_move_of_its_own_start_only(tmp_path: Path) -> None:
    def ask(*options: str) -> str:
        command = [sys.executable, "-S", "-m", "titan_mi100.watch.outcome", str(tmp_path), *options]
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout

    nothing = f"the run has left no run_state.json in {tmp_path}\n"
    assert ask("--start", "7.0.1") == f"1 retry {nothing}"
    state = {"state": "preempted", "exit_code": 3, "message": "stopped\nafter 5", "step": 5, "start": "7.0.1"}
    (tmp_path / "run_state.json").write_text(json.dumps(state))
    assert ask("--start", "7.0.1") == ask() == "3 requeue stopped after 5\n"
    assert ask("--start", "7.0.2", "--srun", "2") == f"2 end {nothing}"  # the settings are wrong


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"exit_code": null, "state": ""}', '{"exit_code": 3}'])
def test_an_outcome_that_cannot_be_read_is_none(text: str, tmp_path: Path) -> None:
    assert read_outcome(tmp_path / "outcome") is None
    (tmp_path / "outcome").write_text(text)
    assert read_outcome(tmp_path / "outcome") is None


@pytest.mark.parametrize(
    ("rank", "processes", "usable", "in_step", "index"),
    [(3, 8, 8, True, 3), (3, 8, 1, True, 0), (1, 2, 4, False, 1), (0, 1, 1, False, 0)],
)
def test_a_task_that_sees_one_gpu_takes_it_and_others_their_own(
    rank: int, processes: int, usable: int, in_step: bool, index: int
) -> None:
    environ = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)} | (
        {"SLURM_STEP_ID": "0"} if in_step else {}
    )
    assert device_index(environ, usable) == index
    for wrong in ({"usable": 1, "step": {}}, {"usable": processes - 1, "step": {"SLURM_STEP_ID": "0"}}):
        if processes > 2:  # one device that is not bound by srun, or too few for all
            place = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes), **wrong["step"]}
            with pytest.raises(UserError, match=r"8 processes, usable GPUs: \d;"):
                device_index(place, wrong["usable"])


def answers(host: Host, join_one: Callable[[], Any]) -> tuple[Any, str]:
    """What a node that joins gets, and what node 0 says of it."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(join_one())
        except UserError as error:
            found.append(str(error))

    node, said = threading.Thread(target=run), []
    node.start()
    while node.is_alive():
        said.append(host.admit(0.05))
    return found[0], "".join(said)


def test_nodes_meet_talk_and_notice_when_one_is_gone() -> None:
    place = here()
    with Host(here(0, port=place.port), 2) as host:
        link, said = answers(host, lambda: join(place, 2))
        assert isinstance(link, Link) and said == "" and list(host.links) == [1] and host.hear() == []
        host.tell(do="start", port=5)
        link.send(code=1)
        link.send(code=2)
        assert link.receive(5) == {"do": "start", "port": 5} and link.receive(0) is None
        time.sleep(0.1)
        assert host.hear() == [(1, {"code": 1}), (1, {"code": 2})]
        twice, said = answers(host, lambda: join(place, 2))
        assert "two launchers connected as node 1" in twice and "two launchers connected as node 1" in said
        for wrong, words in (
            (here(1, 3, 3, place.port), "--nnodes must be equal"),
            (place, "node 0 has 2 processes"),
        ):
            refused, said = answers(host, lambda wrong=wrong: join(wrong, 5))
            assert words in refused and words in said
        link.close()
        time.sleep(0.1)
        assert host.hear() == [(1, None)] and not host.links
    assert join(place, 2) is None  # nobody listens any more


def test_a_port_that_is_taken_and_a_stranger_on_it_do_not_keep_nodes_apart() -> None:
    place = here()
    with closing(socket.create_server(("", place.port))) as stranger, Host(here(0, port=place.port), 1) as host:
        threading.Thread(target=lambda: stranger.accept()[0].close()).start()  # it hangs up on whoever comes
        for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"node": 1, "nodes": [2, 2], "processes": 1}\n', b"[]\n"):
            with closing(socket.create_connection(("127.0.0.1", host.port))) as scan:
                scan.sendall(words)
                assert host.admit(1) == "" and not host.links
        link, said = answers(host, lambda: join(place, 1))
        assert isinstance(link, Link) and said == "" and host.port > place.port and list(host.links) == [1]
        link.close()


def test_a_host_that_loses_power_is_noticed_within_a_minute() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        connection = socket.create_connection(server.getsockname())
        link = Link(connection)
    options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")
    found = [connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in options]
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and found == [20, 10, 3]
    assert connection.gettimeout() == 10
    link.close()


class FakeLauncher:
    """Node 0's own part, whose starts end as given."""

    def __init__(self, outcomes: list[Outcome]) -> None:
        self.outcomes, self.said, self.checked, self.agents = (
            outcomes,
            list[str](),
            list[int](),
            list[tuple[str, ...]](),
        )

    def check(self, world: int, rank: int = 0, folder: str = "") -> str:
        self.checked.append(world)
        return folder

    def prepare(self, folder: str) -> None: ...

    def attempt(self, torchrun: tuple[str, ...], is_over: Callable[[], bool]) -> Outcome:
        self.agents.append(torchrun)
        return self.outcomes.pop(0)

    def rest(self, seconds: float) -> None:
        time.sleep(min(seconds, 0.01))

    def exit_if_stopped(self) -> None: ...

    def is_stopped(self) -> bool:
        return False

    def restart(self, folder: str, outcome: Outcome, words: str) -> None:
        self.said.append(words)

    def use_config_of(self, folder: str) -> None: ...

    def say(self, words: object) -> None:
        self.said.append(str(words))


@pytest.mark.parametrize(("silent", "said"), [(3, "node 1 of 2: node 0 at first-node leads"), (99, "within 5 s")])
def test_a_node_asks_node_0_until_it_answers_or_its_patience_ends(
    silent: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked, sent, place = (
        [100.0],
        list[Endpoint](),
        list[dict[str, Any]](),
        Endpoint(2, 2, 1, "first-node", 29400, 5),
    )
    link, launcher = SimpleNamespace(send=lambda **message: sent.append(message), close=lambda: None), FakeLauncher([])

    def answer(_: Endpoint, processes: int) -> Any:
        asked.append(place)
        return link if len(asked) > silent else None

    def follow(*_: Any) -> int:
        sys.exit(2)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    launcher.rest = lambda seconds: now.__setitem__(0, now[0] + seconds)  # type: ignore[method-assign]
    monkeypatch.setattr(launch_nodes, "join", answer)
    monkeypatch.setattr(launch_nodes, "_follow", follow)
    with pytest.raises(SystemExit if silent == 3 else UserError) as ended:
        launch_nodes.follow(launcher, place, 2)  # type: ignore[arg-type]
    assert said in (launcher.said[0] if silent == 3 else str(ended.value))
    assert len(asked) == (4 if silent == 3 else 7)  # at once, and after each second
    stopped = {"code": 2, "message": "node 1 has stopped with exit code 2", "step": None, "state": "ended"}
    assert sent == [stopped] * (silent == 3)


def lead(
    outcomes: list[Outcome], place: Endpoint, nodes: int, monkeypatch: pytest.MonkeyPatch, restarts: int = 0
) -> tuple[Outcome, FakeLauncher]:
    """Node 0 with that many others, which do what they are told and have nothing to say."""
    monkeypatch.setattr(launch_nodes, "_LOOK", 0.01)
    monkeypatch.setattr(launch_nodes, "_LAST_CALL", 0.2)
    launcher = FakeLauncher(outcomes)

    def follow(rank: int) -> None:
        link = None
        while link is None:
            link = join(place._replace(rank=rank), 2)
        while (message := link.receive(20)) is not None and message["do"] != "end":
            link.send(**Outcome(0)._asdict())
        link.close()

    others = [threading.Thread(target=follow, args=[rank], daemon=True) for rank in range(1, nodes)]
    with Host(place, 2) as host:
        for other in others:
            other.start()
        try:
            return launch_nodes.Leader(launcher, host, place, 2).run("folder", Restarts(ATTEMPTS, restarts)), launcher
        finally:
            host.tell(do="end", code=0)
            for other in others:
                other.join(20)


DONE = Outcome(0, "", 4, "done")


@pytest.mark.parametrize(
    ("outcomes", "code", "starts"),
    [
        ([DONE], 0, 1),
        ([CRASH, GONE, SILENT, DONE], 0, ATTEMPTS),
        ([CRASH] * ATTEMPTS, 1, ATTEMPTS),
        ([Outcome(2, "wrong", None, "bad_input")], 2, 1),
        ([GONE._replace(step=1)], 1, 1),
    ],
)
def test_a_start_that_fails_before_its_first_step_is_tried_again_on_a_fresh_port(
    outcomes: list[Outcome], code: int, starts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, launcher = lead(list(outcomes), here(0, 3), 3, monkeypatch)
    ports = [torchrun[torchrun.index("--master-port") + 1] for torchrun in launcher.agents]
    assert (found.code, len(ports), len(set(ports))) == (code, starts, starts)
    assert sum("attempt" in words for words in launcher.said) == starts - 1
    assert launcher.checked == [] and all("3" in torchrun for torchrun in launcher.agents)


def test_a_run_that_has_trained_is_restarted_as_often_as_allowed_and_not_twice_at_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = [GONE._replace(step=step) for step in (3, 5, 5)]
    found, launcher = lead([*lost[:2], DONE], here(0, 2), 2, monkeypatch, restarts=2)
    assert (found, len(launcher.agents)) == (DONE, 3)
    found, launcher = lead(lost, here(0, 2), 2, monkeypatch, restarts=9)
    assert (found.code, found.step, len(launcher.agents)) == (1, 5, 3)


def test_a_node_that_is_lost_and_joins_again_prepares_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_nodes, "_LOOK", 0.01)
    monkeypatch.setattr(launch_nodes, "_SOON", 0.0)
    place, told = here(0, 2), list[str]()
    launcher = FakeLauncher([GONE._replace(step=3), DONE])

    def follow(until: str) -> None:
        link = None
        while link is None:
            link = join(place._replace(rank=1), 2)
        while (message := link.receive(20)) is not None:
            told.append(message["do"])
            if message["do"] == until:
                break
            link.send(**Outcome(0)._asdict())
        link.close()

    def lost_and_back() -> None:
        follow("start")
        follow("end")

    other = threading.Thread(target=lost_and_back, daemon=True)
    with Host(place, 2) as host:
        other.start()
        found = launch_nodes.Leader(launcher, host, place, 2).run("folder", Restarts(ATTEMPTS, 2))
        host.tell(do="end", code=0)
        other.join(20)
    assert found == DONE and told == ["prepare", "start", "prepare", "start", "end"]
    assert f"waiting up to {place.patience} s (--rdzv_timeout) for node 1" in launcher.said


def test_fewer_nodes_train_only_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, launcher = lead([DONE], here(0, 3, least=2), 2, monkeypatch)
    assert found.code == 0 and launcher.checked == [4]  # processes for which the config is checked anew
    assert launcher.agents[0][:2] == ("--nnodes", "2") and "missing: 2" in launcher.said[0]
    with pytest.raises(UserError, match="node 2 did not connect within 1 s"):
        lead([DONE], here(0, 3, patience=1), 2, monkeypatch)


def kill_rank(rank: int, folder: Path) -> None:
    """Kill a training process of the run in `folder` once the run has trained."""
    until = time.monotonic() + 120
    while not any(path.stat().st_size for path in folder.glob("*/metrics.jsonl")) and time.monotonic() < until:
        time.sleep(0.1)
    marks = {f"RANK={rank}".encode(), *(f"TITAN_RUN_FOLDER={run}".encode() for run in folder.iterdir())}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if marks <= {*path.read_bytes().split(b"\0")}:
                os.kill(int(path.parent.name), signal.SIGKILL)


@pytest.mark.full
@pytest.mark.parametrize("case", ["trained", "refused", "killed"])
def test_two_launchers_of_two_processes_train_one_model(case: str, tmp_path: Path) -> None:
    """Node 1 comes first; or the data are refused on all nodes, with their exit code; or a rank of node 1 is killed."""
    refused, steps = case == "refused", "2000" if case == "killed" else "2"
    arguments = ["--nproc_per_node", "2", "--nnodes", "2", "--rdzv", f"localhost:{free_port()}"]
    arguments += ["--job.config_file", str(REPO / "train_configs/debug.toml"), "--training.steps", steps]
    arguments += ["--job.run_folder", str(tmp_path / "run"), "--data.overlong", "error"] if refused else []
    arguments += [] if refused else ["--job.dump_folder", str(tmp_path), "--training.seq_len", "128"]
    environment = {**job_environment(), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    nodes = []
    for rank in (1, 0):
        command = [str(REPO / "run_train.sh"), *arguments, f"--node-rank={rank}"] + (
            ["--training.seq_len", "16"] if refused else []
        )
        pipe = subprocess.PIPE
        nodes.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True))
        time.sleep(0.5)
    if case == "killed":
        kill_rank(3, tmp_path)
    said = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [{"trained": 0, "refused": 2, "killed": 1}[case]] * 2, said
    if case == "killed":
        (folder,) = tmp_path.iterdir()
        named = f"rank 3 on {socket.gethostname()} {KILLED}, in step "
        assert json.loads((folder / "run_state.json").read_text())["message"].startswith(named), said
        assert named in (folder / "train.log").read_text()
    if case == "trained":
        (folder,) = tmp_path.iterdir()  # node 0 has made it, the other one has learned its name
        assert json.loads((folder / "environment.json").read_text())["processes"] == 4
        state = json.loads((folder / "run_state.json").read_text())
        assert (state["state"], state["step"]) == ("done", 2) and not (folder / "logs").exists()


@pytest.mark.full
def test_the_two_nodes_that_the_page_shows_on_one_machine_train(tmp_path: Path) -> None:
    page = (REPO / "docs" / "CLUSTER.md").read_text(encoding="utf-8")
    block = page.split("## Try it on one machine")[1].split("```sh\n")[1].split("```")[0]
    commands = block.replace("./run_train.sh", str(REPO / "run_train.sh")).replace(":29400", f":{free_port()}")
    environment = {**job_environment(), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    script = subprocess.run(
        ["bash", "-c", commands], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    state = json.loads((tmp_path / "outputs/two/run_state.json").read_text())
    ran = json.loads((tmp_path / "outputs/two/environment.json").read_text())
    assert (state["state"], state["step"], ran["processes"]) == ("done", 10, 2), script.stdout + script.stderr
    assert "node 1 of 2: node 0 at localhost leads" in script.stdout  # cat node1.log


def test_a_reserved_port_is_for_the_server_that_names_it_alone() -> None:
    """Once a port was only asked for; before rank 0 listened on it, the kernel had given it to another job."""
    with reserved_port() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, multi_tenant=True)
        TCPStore("127.0.0.1", port, is_master=False).set("name", "value")
        assert store.get("name") == b"value"
