"""Several nodes without SLURM: an agent of torchrun on each. Here both "nodes" are this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import MINIMAL, REPO, free_port, job_environment, torchrun

CONFIG = f"""{MINIMAL}seq_len = 128
mixed_precision_param = "float32"
[metrics]
enable_tensorboard = false
"""
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def start(folder: Path, *arguments: str, restarts: int = 0) -> list[subprocess.Popen]:
    """Two agents of one process each, with the environment that restarts need."""
    (folder / "small.toml").write_text(CONFIG)
    command = ["torchrun", "--nnodes", "2", "--nproc_per_node", "1", "--max-restarts", str(restarts)]
    command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{free_port()}", "-m", "titan_mi100.train"]
    command += ["--job.config_file", str(folder / "small.toml"), "--job.run_folder", str(folder / "run")]
    environment = {**job_environment(), "PATH": PATH, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return [
        subprocess.Popen(
            [*command, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]


def end(agents: list[subprocess.Popen]) -> tuple[list[int], list[str]]:
    """Their exit codes, and what they have printed."""
    printed = [agent.communicate(timeout=240)[0] for agent in agents]
    return [agent.returncode for agent in agents], printed


def state_of(run: Path) -> tuple[str, int, int | None]:
    state = json.loads((run / "run_state.json").read_text())
    return state["state"], state["exit_code"], state["step"]


def wait_for_steps(run: Path) -> None:
    until = time.monotonic() + 120
    while not ((run / "metrics.jsonl").exists() and (run / "metrics.jsonl").stat().st_size):
        assert time.monotonic() < until
        time.sleep(0.1)


def losses(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.full
def test_the_two_nodes_that_the_page_shows_train_as_two_processes_of_one(tmp_path: Path) -> None:
    page = (REPO / "docs" / "CLUSTER.md").read_text(encoding="utf-8")
    block = page.split("## Try it on one machine")[1].split("```sh\n")[1].split("```")[0]
    (tmp_path / "small.toml").write_text(CONFIG)
    asked = ("--job.config_file", str(tmp_path / "small.toml"), "--data.cache_folder", str(tmp_path / "cache"))
    commands = block.replace("localhost:29400", f"localhost:{free_port()}").replace(
        "-m titan_mi100.train", f"-m titan_mi100.train {' '.join(asked)}"
    )
    script = subprocess.run(
        ["bash", "-c", commands], cwd=tmp_path, env={**job_environment(), "PATH": PATH}, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    run = tmp_path / "outputs/two"
    assert state_of(run) == ("done", 0, 10), script.stdout + script.stderr
    assert json.loads((run / "environment.json").read_text())["processes"] == 2
    assert len([*(tmp_path / "cache").glob("*/ledger.csv")]) == 1 and (run / "ledger.csv").exists()
    one = tmp_path / "one"
    torchrun("-m", "titan_mi100.train", *asked, "--training.steps", "10", "--job.run_folder", str(one))
    assert losses(run) == losses(one) and len(losses(run)) == 10


@pytest.mark.full
def test_a_mistake_is_named_by_one_process_and_torchruns_code_is_1(tmp_path: Path) -> None:
    codes, printed = end(start(tmp_path, "--data.overlong", "error"))
    assert codes == [1, 1] and state_of(tmp_path / "run") == ("bad_input", 2, None)
    assert sum("data.overlong" in text for text in printed) == 1, printed


@pytest.mark.full
def test_a_stop_signal_to_one_agent_saves_and_ends_all(tmp_path: Path) -> None:
    agents = start(tmp_path, "--training.steps", "5000")
    wait_for_steps(tmp_path / "run")
    agents[1].send_signal(signal.SIGTERM)
    codes, printed = end(agents)
    state, code, step = state_of(tmp_path / "run")
    assert codes == [1, 1] and (state, code) == ("preempted", 3), printed
    assert [path.name for path in (tmp_path / "run/checkpoint").iterdir()] == [f"step-{step}"]


@pytest.mark.full
def test_a_killed_rank_is_started_again_from_the_checkpoint(tmp_path: Path) -> None:
    agents = start(tmp_path, "--training.steps", "150", "--checkpoint.interval", "20", restarts=1)
    wait_for_steps(tmp_path / "run")
    children = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    codes, printed = end(agents)
    assert codes == [0, 0] and state_of(tmp_path / "run") == ("done", 0, 150), printed
