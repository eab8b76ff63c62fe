"""A row of run.py: the batch scripts in a real SLURM, whose three "nodes" are all on this machine.

It needs root, Debian's slurm-wlm and munge, and names that lead here: `echo 127.0.0.1 n1 n2 n3 >> /etc/hosts`.
"""

import atexit
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from chaos.case import Case, Outcome
from conftest import MINIMAL, REPO, free_port, job_environment

from titan_mi100.watch.outcome import read_outcome

CONFIG = f"""{MINIMAL}seq_len = 128
steps = 2
mixed_precision_param = "float32"
[metrics]
enable_tensorboard = false
"""
NODES = ("n1", "n2", "n3")
SETTINGS = """
ClusterName=chaos
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdParameters=config_overrides
AuthInfo=cred_expire=30
PartitionName=main Nodes=ALL Default=YES State=UP
"""
PATIENCE = 400  # seconds for a job, with its waits in the queue


@functools.cache
def cluster() -> Path:
    """Start it; the folder with its slurm.conf."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-slurm-"))
    text = SETTINGS.format(host=socket.gethostname(), port=free_port(), folder=folder)
    for name in NODES:
        where = f"NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={free_port()}"
        text += f"NodeName={name} {where} CPUs=2 RealMemory=4000\n"
        (folder / f"spool-{name}").mkdir()
    (folder / "slurm.conf").write_text(text)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    if subprocess.run("munge -n | unmunge", shell=True, capture_output=True).returncode:
        subprocess.run("install -d -o munge /run/munge && runuser -u munge munged", shell=True, check=True)
    subprocess.run(["slurmctld"], check=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in NODES:
        start_node(name)
    atexit.register(lambda: [os.kill(int(pid.read_text()), signal.SIGTERM) for pid in folder.glob("slurm*.pid")])
    wait_until(lambda: ask("sinfo", "-h", "-o", "%T").split() == ["idle"], 30)
    return folder


def start_node(name: str) -> None:
    subprocess.run(["slurmd", "-N", name], check=True)


def ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wait_until(holds: Callable[[], Any], seconds: float) -> float:
    """Seconds that it took. Raises TimeoutError."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() > began + seconds:
            raise TimeoutError(f"no end after {seconds} s")
        time.sleep(0.1)
    return time.monotonic() - began


class Job:
    def __init__(
        self, folder: Path, *options: str, script: str = "generic.sh", steps: int = 4, **settings: str
    ) -> None:
        """Submit it; it trains on two nodes, unless options say otherwise."""
        cluster()
        self.folder, self.log = folder / "run", folder / "job.log"
        (folder / "small.toml").write_text(CONFIG.replace("steps = 2", f"steps = {steps}"))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"TITAN_REPO": str(REPO), "TITAN_TASKS": "1", "TITAN_LOCAL": str(folder / "local"), "PATH": path}
        command = ["sbatch", "--parsable", "--nodes=2", "-o", str(self.log), *options]
        if script == "chain.sh":
            command = [str(REPO / "scripts/slurm/chain.sh"), "2", *command[2:]]
        command += [str(REPO / "scripts/slurm/generic.sh"), str(self.folder), "--job.config_file"]
        command += [str(folder / "small.toml"), "--checkpoint.interval", "10"]
        said = subprocess.run(
            command,
            env={**job_environment(), **own, **settings},
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        self.id = re.findall(r"\d+", said.stdout)[-1]

    def said(self, words: str = "titan: |srun: ") -> list[str]:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return [line for line in lines if re.search(words, line)]

    def tasks(self) -> dict[int, int]:
        """Processes of the trainer, by rank."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, KeyError):
                pairs = (path / "environ").read_text(errors="replace").split("\0")
                environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
                words = (path / "cmdline").read_text(errors="replace").split("\0")
                if environ["SLURM_JOB_ID"] == self.id and words[1:3] == ["-m", "titan_mi100.train"]:
                    found[int(environ["SLURM_PROCID"])] = int(path.name)
        return found

    def end(self, *wanted: str) -> Outcome:
        """Wait until nothing is in the queue; whether the run is done, and these words are in the log, in order."""
        seconds = round(wait_until(lambda: not ask("squeue", "-h"), PATIENCE))
        outcome, log = read_outcome(self.folder / "run_state.json"), "\n".join(self.said())
        wrong = [] if outcome and outcome.code == 0 else [f"ended with {outcome}"]
        if not re.search(".*".join(wanted), log, re.DOTALL):
            wrong.append(f"no {wanted}")
        return Outcome(1, [f"{problem}: {log[-1500:]}" for problem in wrong], {"seconds": seconds})


def jobs(quick: bool) -> Iterator[Case]:
    for name, run in CASES.items():
        yield Case(name, partial(_guarded, run))
    for number in range(0 if quick else 9):
        yield Case(f"rank killed in start-up, again {number}", partial(_guarded, partial(killed_at_start, number)))


def _guarded(run: Callable[[Path], Outcome], folder: Path, _: tuple[str, ...]) -> Outcome:
    try:
        return run(folder)
    except TimeoutError as error:
        log = (folder / "job.log").read_text(errors="replace") if (folder / "job.log").exists() else ""
        subprocess.run(["scancel", "--full", "--me"])
        return Outcome(1, [f"{error}: {log[-1500:]}"])


def plain(folder: Path) -> Outcome:
    return Job(folder).end("attempt 1: exit code 0")


def two_tasks_a_node(folder: Path) -> Outcome:
    return Job(folder, TITAN_TASKS="2").end("attempt 1: exit code 0")


def killed_in_training(folder: Path) -> Outcome:
    """The step ends within a minute, the job is requeued and resumes."""
    job = Job(folder, steps=120)
    wait_until(lambda: job.said(r"step +25/"), PATIENCE)
    os.kill(job.tasks()[1], signal.SIGKILL)
    seconds = wait_until(lambda: job.said("attempt 1: exit code 1"), PATIENCE)
    outcome = job.end("attempt 1: exit code 1 .* requeue", "titan: requeued", "attempt 1: exit code 0")
    resumed = job.said("resum")
    wrong = [*outcome.wrong, *([] if seconds <= 60 else [f"the step took {seconds:.0f} s to end"])]
    wrong += [] if job.said("step +21/") and len(job.said(r"step +1/")) == 1 else [f"not resumed: {resumed}"]
    return Outcome(1, wrong, {**outcome.figures, "seconds to end the step": round(seconds, 1)})


def killed_at_start(number: int, folder: Path) -> Outcome:
    job = Job(folder)
    wait_until(lambda: len(job.tasks()) == 2, PATIENCE)
    time.sleep(number * 0.25)  # torch alone takes longer to be imported
    os.kill(job.tasks()[number % 2], signal.SIGKILL)
    return job.end("attempt 1: exit code 1 .* retry", "attempt 2: exit code 0")


def near_the_wall(folder: Path) -> Outcome:
    """A run that trains is told a minute before its time is over, saves, and goes on in the next turn, twice."""
    job = Job(folder, "--time=60", "--signal=B:USR1@60", steps=100_000, TITAN_MAX_REQUEUES="1")
    for turn in (1, 2):
        trained = len(job.said(r"step +\d"))
        wait_until(lambda trained=trained: len(job.said(r"step +\d")) > trained, PATIENCE)  # type: ignore[misc]
        ask("scontrol", "update", f"JobId={job.id}", "EndTime=now+80")  # only now: a busy machine starts slowly
        wait_until(lambda turn=turn: len(job.said("attempt 1: exit code 3")) == turn, PATIENCE)  # type: ignore[misc]
        if turn == 1:
            wait_until(lambda: job.said("titan: requeued"), PATIENCE)
            ask("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    wait_until(lambda: not ask("squeue", "-h"), PATIENCE)
    outcome = read_outcome(job.folder / "run_state.json")
    resumed = len(job.said(r"step +1/")) == 1
    wrong = [] if outcome and outcome.code == 3 and resumed else [f"{outcome}: {job.said()[-20:]}"]
    return Outcome(1, wrong, {"last step": outcome and outcome.step})


def silent_node(folder: Path) -> Outcome:
    """Of three nodes one does not answer: the job trains on the others."""
    pid = int((cluster() / "slurmd-n2.pid").read_text())
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 30)
    try:
        job = Job(folder, "--nodes=3", "--no-kill", TITAN_NODES="2")
        wait_until(lambda: job.said("attempt 1"), PATIENCE)
    finally:
        start_node("n2")
    return job.end("2 of 3 nodes answer", "attempt 1: exit code 0")


def chain(folder: Path) -> Outcome:
    """The second job finds the run done."""
    return Job(folder, script="chain.sh").end("attempt 1: exit code 0", "has ended before, with exit code 0")


def wrong_config(folder: Path) -> Outcome:
    job = Job(folder, "--export=ALL", steps=-1)
    wait_until(lambda: not ask("squeue", "-h"), PATIENCE)
    wrong = [] if job.said("steps = -1") and not job.said("attempt") else [job.log.read_text()]
    return Outcome(1, wrong)


CASES = {
    "plain": plain, "two tasks a node": two_tasks_a_node, "wrong config": wrong_config, "chain of two": chain,
    "task killed in training": killed_in_training, "rank killed in start-up": partial(killed_at_start, 3),
    "near the wall": near_the_wall, "silent node": silent_node,
}  # fmt: skip
