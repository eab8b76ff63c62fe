"""Standard streams that are closed, without a reader or on a full disk: a command works, or says what is lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ASSETS, job_environment

GOOD = f"--model.tokenizer_path {ASSETS}/tokenizer --data.path {ASSETS}/arithmetic.jsonl --model.flavor debug"
FULL = "standard output: No space left on device"


def bash(script: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**job_environment(), "PYTHON": sys.executable, "PYTHONUNBUFFERED": "", **environment}
    command = ["bash", "-o", "pipefail", "-c", script]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("command", "streams", "code", "said"),
    [
        ("config.load --help", ">/dev/full", 2, FULL),
        ("config.load --help", "| head -n 1", 0, ""),
        ("config.load --help", "<&- >&- 2>&-", 0, ""),
        ("config.load --help", "1</dev/null", 0, ""),  # a shell can have its script under that number
        (f"config.load {GOOD} --job.run_folder run", ">/dev/full", 2, FULL),
        ("config.load --nope", "2>/dev/full", 2, ""),
        ("config.load --nope", "2>&-", 2, ""),
        ("config.load --help", ">/dev/full 2>&1", 2, ""),
        ("__main__ nope", "2>/dev/full", 2, ""),
        ("__main__ convert inspect-dcp --help", ">/dev/full", 2, FULL),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                (f"__main__ inspect {GOOD} --json", ">/dev/full", 2, FULL),
                (f"__main__ inspect {GOOD}", ">&- 2>&-", 0, ""),
                ("__main__ generate --model nowhere", "<&-", 2, "--prompt --input is required"),
                ("launch.launcher --help", ">/dev/full", 2, FULL),
            )
        ),
    ],
)
def test_a_command_says_what_cannot_be_printed_and_nothing_else(
    command: str, streams: str, code: int, said: str, tmp_path: Path
) -> None:
    done = bash(f'"$PYTHON" -m titan_mi100.{command} {streams}', tmp_path)
    assert (done.returncode, done.stderr.count(said) == 1 if said else done.stderr) == (code, True if said else "")
    assert "Exception" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.full
def test_closed_streams_are_open_for_what_a_command_starts(tmp_path: Path) -> None:
    """The next files that a worker opens would have their numbers."""
    code = "import subprocess, sys; from titan_mi100.streams import open_streams; open_streams(); print('x'); "
    code += "sys.exit(subprocess.run([sys.executable, '-c', 'import sys; sys.exit(None in (sys.stdin, sys.stdout))'])"
    done = bash(f'"$PYTHON" -c "{code}.returncode)" <&- >&-', tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_name_of_a_run_folder_passes_through_any_encoding(tmp_path: Path) -> None:
    script = f'"$PYTHON" -m titan_mi100.config.load {GOOD} --job.run_folder café'
    assert bash(script, tmp_path, PYTHONIOENCODING="ascii").stdout == f"{tmp_path}/café\n"
    assert os.listdir(tmp_path) == ["café"]


def test_the_launcher_checks_the_config_for_its_number_of_processes(tmp_path: Path) -> None:
    stages = "--parallelism.pipeline_parallel_degree 2 --parallelism.data_parallel_shard_degree 3"
    done = bash(
        f'"$PYTHON" -m titan_mi100.launch.launcher --nproc_per_node 2 {GOOD} {stages}',
        tmp_path,
        RANK="x",
        LOCAL_RANK="3",
    )
    said = "data_parallel_shard_degree = 3 x pipeline_parallel_degree = 2 does not fill the 2 started processes"
    assert done.returncode == 2 and said in done.stderr


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    done = bash(f'mkdir gone; cd gone; rmdir ../gone; "$PYTHON" -m titan_mi100.config.load {GOOD}', tmp_path)
    said = "ERROR the current folder: No such file or directory\n"
    assert (done.returncode, done.stderr) == (2, said)
