"""A row of run.py: jobs of two launchers, as on two nodes, of which half meet trouble before their first step."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from chaos.case import Case, Outcome
from conftest import MINIMAL, REPO, job_environment

from titan_mi100.launch.links import reserved_port

TROUBLE = ("rank killed", "late", "agent killed", "refused", "rank killed", "port taken")  # of every second start
AGAIN = re.compile(r"^run_train: .*; attempt \d of \d \.\.\.$", re.MULTILINE)  # a line about a further attempt
PATIENCE = 300  # seconds for a job to end
CONFIG = f"""{MINIMAL}seq_len = 128
steps = 2
mixed_precision_param = "float32"
[metrics]
enable_tensorboard = false
"""


def starts(quick: bool) -> Iterator[Case]:
    for number in range(12 if quick else 100):
        trouble = TROUBLE[number // 2 % len(TROUBLE)] if number % 2 else "none"
        yield Case(f"{number:>3} {trouble}", partial(start, trouble, number))


def start(trouble: str, seed: int, folder: Path, _: tuple[str, ...] = ()) -> Outcome:
    """One job on two "nodes", whose launchers are both here.

    Args:
        trouble: one of TROUBLE; else none.
    """
    draw, mark = random.Random(seed), uuid.uuid4().hex
    (folder / "small.toml").write_text(CONFIG)
    began, waits = time.monotonic(), {0: 0.0, 1: 0.0}
    waits |= {"late": {1: draw.uniform(3, 15)}, "refused": {0: draw.uniform(3, 15)}}.get(trouble, {})
    launchers: dict[int, subprocess.Popen] = {}
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        if trouble == "port taken":  # by a service that answers nothing
            stack.enter_context(socket.create_server(("", port)))
        for node in sorted(waits, key=lambda node: waits[node]):
            time.sleep(max(0.0, began + waits[node] - time.monotonic()))
            output = stack.enter_context((folder / f"node-{node}.log").open("wb"))
            launchers[node] = _launch(node, port, folder, mark, output)
        killed = _kill_one(trouble.partition(" ")[0], mark, draw) if trouble.endswith("killed") else ""
        wrong = []
        try:
            codes = [launchers[node].wait(max(0.0, began + PATIENCE - time.monotonic())) for node in (0, 1)]
        except subprocess.TimeoutExpired:
            codes, wrong = [], [f"no end after {PATIENCE} s"]
        for process in _processes(mark):
            wrong.append(f"process {process} is left")
            os.kill(process, signal.SIGKILL)
    said = (folder / "node-0.log").read_text(errors="replace")
    state = json.loads((folder / "run/run_state.json").read_text()) if (folder / "run/run_state.json").exists() else {}
    if (codes, state.get("state"), state.get("step")) != ([0, 0], "done", 2):
        last = " | ".join(said.splitlines()[-5:])
        wrong.append(f"codes {codes}, state {state.get('state')}, step {state.get('step')}; {killed}: {last}"[:600])
    attempts = 1 + len(AGAIN.findall(said))
    if attempts == 1 and trouble.endswith("killed") and not wrong:
        wrong.append(f"{killed}, and no second attempt")  # then this has tried nothing
    return Outcome(1, wrong, {"attempts": attempts, "killed": killed})


def _launch(node: int, port: int, folder: Path, mark: str, output: object) -> subprocess.Popen:
    where = ["--nnodes", "2", "--node_rank", str(node), "--rdzv", f"localhost:{port}", "--nproc_per_node", "1"]
    config = ["--job.config_file", str(folder / "small.toml"), "--job.run_folder", str(folder / "run")]
    environment = {
        **job_environment(),
        "CHAOS_JOB": mark,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = [str(REPO / "run_train.sh"), *where, *config]
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _processes(mark: str, module: str = "") -> list[int]:
    """The job's processes, or those of them that run a module."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone, or another user's
            is_ours = f"CHAOS_JOB={mark}".encode() in (path / "environ").read_bytes().split(b"\0")
            words = (path / "cmdline").read_text(errors="replace").split("\0")
            if is_ours and (not module or ["-m", module] in (words[1:3], words[2:4])):
                found.append(int(path.name))
    return found


def _kill_one(kind: str, mark: str, draw: random.Random) -> str:
    """Kill a rank, or an agent, at some moment before the first step; which one, in words."""
    module = "torch.distributed.run" if kind == "agent" else "titan_mi100.train"
    until = time.monotonic() + 60
    while len(found := _processes(mark, module)) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    delay = draw.uniform(0, 2.5)  # torch alone takes longer to be imported and to meet the others
    time.sleep(delay)
    victim = draw.choice(sorted(found))
    with suppress(ProcessLookupError):
        os.kill(victim, signal.SIGKILL)
    return f"{kind} {sorted(found).index(victim)} of {len(found)} killed after {delay:.1f} s"
