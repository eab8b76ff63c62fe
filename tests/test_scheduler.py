"""Processes that torchrun has not started: srun's get their ranks, mpirun's are refused, one alone is left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO, free_port, job_environment

from titan_mi100.config.srun import check_place, device_index, srun_ranks, srun_tasks
from titan_mi100.errors import UserError

STEP = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[003-006,009],login1",
    "SLURM_JOB_NODELIST": "gpu[001-009],login1",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
}
RANKS = {
    "RANK": "5",
    "WORLD_SIZE": "7",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu003",
    "MASTER_PORT": "15450",
}


def without(*names: str, **changed: str) -> dict[str, str]:
    return {name: value for name, value in {**STEP, **changed}.items() if name not in names}


def test_a_task_of_srun_gets_what_torchrun_would_set() -> None:
    assert srun_ranks(STEP) == RANKS
    assert srun_ranks(without(SLURM_PROCID="6", SLURM_NODEID="3", SLURM_LOCALID="0"))["LOCAL_WORLD_SIZE"] == "1"
    assert srun_ranks(without(SLURM_STEP_ID="3"))["MASTER_PORT"] != RANKS["MASTER_PORT"]
    mine = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    assert srun_ranks(without(**mine)) == {**RANKS, **mine}
    assert srun_ranks(without("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID")).keys() == RANKS.keys()
    assert srun_ranks(without(PMI_SIZE="7", WORLD_SIZE="7")) == RANKS


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("frontier[00012-00015]", "frontier00012"),
        ("a-b[7]-ib,c", "a-b7-ib"),
        ("r[1-2]n[03,05]", "r1n03"),
        ("n1.example.org,n2", "n1.example.org"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert srun_ranks(without(SLURM_STEP_NODELIST=nodes))["MASTER_ADDR"] == host
    assert srun_ranks(without("SLURM_STEP_NODELIST", SLURM_JOB_NODELIST=nodes))["MASTER_ADDR"] == host


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8"},  # salloc's shell
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # a batch script
        without(SLURM_STEP_ID="4294967290", SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0"),  # an interactive step
        without(RANK="3"),  # torchrun under srun, a task for each node
        {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1", "WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_SIZE": "4", "WORLD_SIZE": "4", "RANK": "0"},
    ],
)
def test_one_process_and_one_with_a_rank_are_left_as_they_are(environ: dict[str, str]) -> None:
    assert srun_tasks(environ) == 1
    assert srun_ranks(environ) == {}


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        *((without(name), name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")),
        (without("SLURM_STEP_TASKS_PER_NODE"), "SLURM_STEP_TASKS_PER_NODE"),
        (without("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "SLURM_STEP_NODELIST"),
        (without(SLURM_STEP_NODELIST="gpu[003"), "SLURM_STEP_NODELIST"),
        (without(SLURM_NODEID="4"), "SLURM_STEP_TASKS_PER_NODE"),
        (without(SLURM_LOCALID="one"), "SLURM_LOCALID = 'one' is no number"),
        ({"SLURM_PROCID": "1"}, "SLURM_NTASKS = '' is no number"),  # a container that passes few variables on
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE = 2"),
        ({"PMI_SIZE": "2"}, "PMI_SIZE = 2"),
        (without(PMI_SIZE="8"), "PMI_SIZE = 8"),  # mpirun, which has started its daemons with srun
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2"),
    ],
)
def test_what_does_not_tell_the_rank_is_refused_by_name(environ: dict[str, str], named: str) -> None:
    with pytest.raises(UserError, match="set RANK, WORLD_SIZE, LOCAL_RANK") as refused:
        srun_ranks(environ)
    assert named in str(refused.value)


@pytest.mark.parametrize(("rank", "said"), [("0", 1), ("1", 0)])
def test_the_trainer_asks_before_it_does_anything_and_one_process_answers(rank: str, said: int) -> None:
    mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": rank}
    command = [sys.executable, "-m", "titan_mi100.train", "--help"]
    refused = subprocess.run(command, cwd=REPO, env={**job_environment(), **mpi}, capture_output=True, text=True)
    assert (refused.returncode, refused.stderr.count("OMPI_COMM_WORLD_SIZE = 2"), refused.stdout) == (2, said, "")


@pytest.mark.full
def test_four_tasks_of_srun_on_two_nodes_train_one_model(tmp_path: Path) -> None:
    """Without torchrun. What srun would set is set here, for nodes that are both this one."""
    step = without(
        "SLURM_JOB_NODELIST", SLURM_STEP_NUM_TASKS="4", SLURM_STEP_TASKS_PER_NODE="2(x2)", MASTER_PORT=str(free_port()),
        SLURM_STEP_NODELIST="localhost,localhost2", TITAN_START="123456.0.1",
    )  # fmt: skip
    command = [sys.executable, "-m", "titan_mi100.train", "--job.config_file", str(REPO / "train_configs/debug.toml")]
    command += ["--job.run_folder", str(tmp_path / "run"), "--training.steps", "2", "--training.seq_len", "128"]
    ranks = []
    for rank in range(4):
        place = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 2), "SLURM_LOCALID": str(rank % 2)}
        environment = {**job_environment(), **step, **place}
        output, ends = subprocess.PIPE, subprocess.STDOUT
        ranks.append(subprocess.Popen(command, cwd=REPO, env=environment, stdout=output, stderr=ends, text=True))
    said = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["processes"] == 4
    assert os.listdir(tmp_path / "run" / "checkpoint") == ["step-2"]
    state = json.loads((tmp_path / "run" / "run_state.json").read_text())
    assert (state["exit_code"], state["step"], state["start"]) == (0, 2, "123456.0.1")
    printed = [[line for line in text.splitlines() if not line.startswith("[Gloo]")] for text in said]
    assert "step 2/2" in said[0] and not any(printed[1:])  # rank 0 alone is on the screen


MEETING = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "gpu003", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "environ", [{}, MEETING, {**MEETING, **RANKS}, {"WORLD_SIZE": "4"}, {**MEETING, "LOCAL_RANK": "1"}]
)
def test_a_place_among_processes_is_taken_as_it_is(environ: dict[str, str]) -> None:
    check_place(environ)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"RANK": ""}, "RANK = '' is no number"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK = 'one' is no number"),
        ({"WORLD_SIZE": "1e3"}, "WORLD_SIZE = '1e3' is no number"),
        ({**MEETING, "MASTER_PORT": "http"}, "MASTER_PORT = 'http' is no number"),
        ({"WORLD_SIZE": "0"}, "RANK = 0 needs a WORLD_SIZE above it"),
        ({**MEETING, "RANK": "2"}, "RANK = 2 needs a WORLD_SIZE above it"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK = 1 needs a LOCAL_WORLD_SIZE above it"),
        ({**MEETING, "LOCAL_WORLD_SIZE": "0"}, "LOCAL_RANK = 0 needs a LOCAL_WORLD_SIZE above it"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK is set, but not MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_a_place_that_is_none_is_refused(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match="set RANK, WORLD_SIZE, LOCAL_RANK") as refused:
        check_place(environ)
    assert str(refused.value).startswith(said)


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
