"""The batch scripts, with stand-ins for SLURM's commands; tests/chaos/slurm.py runs them in a real one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, job_environment

# srun: what is not the trainer runs at once; a trainer leaves the next state of STUB_STATES, [code, state, step]
STUBS = {
    "srun": f"""\
#!{sys.executable} -S
import json, os, sys
with open(os.environ["STUB_LOG"], "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
command = [word for word in sys.argv[1:]]
while command[0].startswith("-"):
    command.pop(0)
if "titan_mi100.train" not in command:
    if "SLURMD_NODENAME" in command[-1]:
        print("\\n".join("here " + node for node in os.environ["STUB_NODES"].split()))
        sys.exit()
    os.execvp(command[0], command)
with open(os.environ["STUB_LOG"] + ".end", "w") as file:
    file.write(os.environ.get("SLURM_JOB_END_TIME", ""))
number = int(os.environ["TITAN_START"].rpartition(".")[2])
code, state, step = json.loads(os.environ["STUB_STATES"])[number - 1]
if state:
    found = {{"state": state, "exit_code": code, "message": "stub", "step": step, "start": os.environ["TITAN_START"]}}
    with open(os.path.join(os.environ["TITAN_RUN_FOLDER"], "run_state.json"), "w") as file:
        json.dump(found, file)
sys.exit(143 if code else 0)
""",
    "sbcast": '#!/bin/sh\nshift 2\ncp "$1" "$2"\n',
    "squeue": '#!/bin/sh\necho "$STUB_END"\n',
    # a job that is requeued is ended, with scontrol, which may not have answered yet
    "scontrol": '#!/bin/sh\n[ "$1" = requeue ] && kill -TERM $$ || printf "n1\\nn2\\nn3\\n"\n',
}


class Job:
    def __init__(
        self, folder: Path, states: list[tuple[int, str, int | None]], *arguments: str, **settings: str
    ) -> None:
        """Run generic.sh as SLURM would, in an allocation of three nodes, two of which are used."""
        (folder / "bin").mkdir()
        for name, text in STUBS.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        environment = {
            **job_environment(),
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "STUB_LOG": str(folder / "log"), "STUB_STATES": json.dumps(states), "STUB_NODES": "n1 n3",
            "STUB_END": "1970-01-02T00:00:00", "TZ": "UTC",
            "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_CPUS_ON_NODE": "2",
            "SLURM_SUBMIT_DIR": str(REPO), "TITAN_NODES": "2", "TITAN_TASKS": "1", "TITAN_LOCAL": str(folder / "local"),
            **settings,
        }  # fmt: skip
        command = ["bash", str(REPO / "scripts/slurm/generic.sh"), str(folder / "run"), "--job.config_file"]
        command += [str(REPO / "train_configs/debug.toml"), *arguments]
        self.ended = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
        lines = (folder / "log").read_text().splitlines() if (folder / "log").exists() else []
        self.starts = [words for words in map(json.loads, lines) if "titan_mi100.train" in words]


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ({"SLURM_JOB_END_TIME": "1234"}, "86400"),  # the time of the job that has submitted this one
        pytest.param({"STUB_END": "N/A"}, "", marks=pytest.mark.full),
        pytest.param({"STUB_END": ""}, "", marks=pytest.mark.full),
        pytest.param({"STUB_END": "", "SLURM_JOB_END_TIME": "1234"}, "1234", marks=pytest.mark.full),
    ],
)
def test_the_trainer_learns_when_its_job_ends(settings: dict[str, str], end: str, tmp_path: Path) -> None:
    job = Job(tmp_path, [(0, "done", 60)], **settings)
    assert job.ended.returncode == 0, job.ended.stderr
    assert (tmp_path / "log.end").read_text() == end


STARTED_LATE = [(1, "", None), (1, "lost_a_process", None), (0, "done", 60)]


@pytest.mark.parametrize(
    ("states", "settings", "code", "requeued"),
    [
        (STARTED_LATE, {}, 0, False),
        ([(3, "preempted", 9)], {}, 3, True),
        pytest.param([(1, "crashed", 9)], {}, 1, False, marks=pytest.mark.full),
        pytest.param([(1, "running", 9)], {}, 1, True, marks=pytest.mark.full),
        pytest.param([(1, "", None)] * 4, {}, 1, False, marks=pytest.mark.full),
        pytest.param([(3, "preempted", 9)], {"SLURM_RESTART_COUNT": "20"}, 3, False, marks=pytest.mark.full),
        pytest.param([], {"STUB_NODES": "n2"}, 1, True, marks=pytest.mark.full),
    ],
)
def test_a_job_tries_starts_again_and_goes_back_to_the_queue_only_where_that_helps(
    states: list[tuple[int, str, int | None]], settings: dict[str, str], code: int, requeued: bool, tmp_path: Path
) -> None:
    job = Job(tmp_path, states, **settings)
    assert (job.ended.returncode, len(job.starts)) == (code, len(states)), job.ended.stderr
    assert ("titan: requeued" in job.ended.stderr) == requeued
    for start in job.starts:  # on the nodes that answer, and it ends when a task does
        assert {"-K", "--nodelist=n1,n3", "--nodes=2", "--ntasks-per-node=1"} <= set(start)


def test_each_task_sees_all_gpus_of_its_node_so_that_they_reach_each_other(tmp_path: Path) -> None:
    settings = {"SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_ON_NODE": "4", "TITAN_TASKS": "2"}
    ((*start,),) = Job(tmp_path, [(0, "done", 60)], **settings).starts
    assert {"--ntasks-per-node=2", "--cpus-per-task=2", "--gpus-per-node=2", "--gpu-bind=none"} <= set(start)
    assert not any(word.startswith("--gpus-per-task") for word in start)  # cgroups would keep them apart


def test_wrong_settings_start_nothing(tmp_path: Path) -> None:
    job = Job(tmp_path, [], "--training.stepss", "3")
    assert (job.ended.returncode, job.starts) == (2, []) and "did you mean --training.steps?" in job.ended.stderr


@pytest.mark.parametrize("script", ["generic", "frontier", "evaluate"])
def test_a_script_that_is_not_submitted_says_how(script: str) -> None:
    command = ["bash", str(REPO / f"scripts/slurm/{script}.sh"), "run"]
    environment = {name: value for name, value in job_environment().items() if not name.startswith("SLURM_")}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and ended.stderr.startswith("ERROR ") and "sbatch" in ended.stderr, ended.stderr


@pytest.mark.full
def test_shellcheck_finds_nothing() -> None:
    if (shellcheck := shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")) is None:
        pytest.skip("no shellcheck; it comes with the extras `dev`")
    scripts = [*(REPO / "scripts").rglob("*.sh"), REPO / "run_train.sh", REPO / ".ci/run"]
    assert len(scripts) > 10
    found = subprocess.run([shellcheck, "-x", *map(str, scripts)], cwd=REPO, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
