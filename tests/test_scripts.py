"""What the shell scripts promise, without network and training: stand-ins answer for Python, pip and torchrun."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from titan_mi100.config.toml_file import tomllib

REPO = Path(__file__).resolve().parent.parent

# A python3 that writes down what it is asked to do. STUB_* variables say how it answers.
STUB = f"""\
#!{sys.executable} -S
import json, os, runpy, signal, sys, time

def log(kind, args):
    with open(os.environ["STUB_LOG"], "a") as file:
        keep = ("WORLD_SIZE", "TITAN_RUN_FOLDER", "OMP_NUM_THREADS")
        print(json.dumps([kind, args, {{key: os.environ.get(key) for key in keep}}]), file=file)

def run_state(code, state="stub"):
    with open(os.environ["TITAN_OUTCOME"], "w") as file:
        json.dump({{"state": state, "exit_code": code}}, file)

def wait_in(kind, seconds=30):
    if os.environ.get("STUB_WAIT") == kind:
        log("waiting", [])
        time.sleep(seconds)

argv = sys.argv[1:]
if argv[0] == "-c" and "find_spec" in argv[1]:  # the search for an environment
    wait_in("probe", 3)  # nothing ends it
    print(sys.argv[0], "/prefix", os.environ.get("STUB_VERDICT", "ok"), sep="\\n")
elif argv[0] == "-c" and "print(sys.executable)" in argv[1]:  # the search for an interpreter to make one with
    print(sys.argv[0])
elif argv[0] in ("-c", "-"):
    os.execv(sys.executable, [sys.executable, *argv])
elif argv[1] == "titan_mi100.launch.launcher":  # the real one, but what it starts is the stub
    sys.path.insert(0, {str(REPO)!r})
    from titan_mi100.planning import hardware
    hardware.default_process_count = lambda is_rocm: 3
    sys.executable, sys.argv = sys.argv[0], argv[1:]
    runpy.run_module("titan_mi100.launch.launcher", run_name="__main__", alter_sys=True)
elif argv[1] == "titan_mi100.config.load":
    log("config", argv[2:])
    wait_in("config")
    code = int(os.environ.get("STUB_CONFIG_CODE", "0"))
    print("bad key" if code else "- " + os.environ["STUB_FOLDER"], file=sys.stderr if code else sys.stdout)
    sys.exit(code)
elif argv[1] == "titan_mi100.data.prepare":
    log("prepare", argv[2:])
    wait_in("prepare")
    code = int(os.environ.get("STUB_PREPARE_CODE", "0"))
    os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
elif argv[1] == "torch.distributed.run":
    log("torchrun", argv[2:])
    print("a page", flush=True)
    wait_in("importing")
    if os.environ.get("STUB_WAIT"):  # until a signal comes; a worker begins to listen only later, saves, leaves with 3
        run_state(1, "running")
        def leave(number, frame):
            run_state(3)
            log("signal", [number])
            os._exit(1)
        signal.signal(signal.SIGINT, leave)
        if os.fork() == 0:
            log("waiting", [])
            time.sleep(0.5)
            signal.signal(signal.SIGUSR1, leave)
            time.sleep(30)
        os.wait()
        sys.exit(1)
    code = os.environ.get("STUB_TORCHRUN_CODE", "0")
    left = os.environ.get("STUB_STATE_CODE", "none" if code != "0" else code)
    if left != "none":
        run_state(int(left))
    sys.exit(int(code))
elif argv[1] == "titan_mi100.train":  # one process: without torchrun
    log("trainer", argv[2:])
    def leave(number, frame):
        run_state(3)
        log("signal", [number])
        os._exit(0)
    if os.environ.get("STUB_WAIT"):
        run_state(1, "running")
        signal.signal(signal.SIGINT, leave)
        log("waiting", [])
        time.sleep(0.5)
        signal.signal(signal.SIGUSR1, leave)
        time.sleep(30)
    if os.environ.get("STUB_STATE_CODE") == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    run_state(int(os.environ.get("STUB_STATE_CODE", "0")))
elif argv[1] == "venv":
    log("venv", argv[2:])
    folder = os.path.join(argv[-1], "bin")
    os.makedirs(folder, exist_ok=True)
    os.symlink(sys.argv[0], os.path.join(folder, "python"))
elif argv[1] == "pip" and any(word in argv for word in ("install", "uninstall", "download")):
    log("pip", argv[2:])
    refused = os.environ.get("STUB_NO_INDEX", "none") in argv
    sys.exit(1 if refused else int(os.environ.get("STUB_PIP_CODE", "0")))
"""


def write_executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


class Checkout:
    """A copy of the scripts, an empty package, and a PATH whose python3 is the stub."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "checkout"
        self.elsewhere = folder / "elsewhere"
        self.run_folder = folder / "run"
        self.log_file = folder / "log"
        self.temporary = folder / "tmp [x y"
        for name in ("scripts/setup_env.sh", "run_train.sh", "pyproject.toml", "constraints.txt"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, self.folder / name)
        make_package(self.folder)
        for empty in (self.elsewhere, self.run_folder, self.temporary):
            empty.mkdir()
        for name in ("python3", "python"):
            write_executable(folder / "bin" / name, STUB)
        hidden = ("TITAN_", "STUB_", "NGPU", "OMP_", "PYTHON", "VIRTUAL_ENV", "SLURM_")
        self.environ = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
        self.environ |= {
            "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "STUB_LOG": str(self.log_file),
            "STUB_FOLDER": str(self.run_folder),
            "TMPDIR": str(self.temporary),
            "TITAN_TORCH_INDEX": "",  # whatever cards this machine has
        }

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environ | variables,
            cwd=cwd or self.elsewhere,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def train(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.folder / "run_train.sh"), *arguments, **variables)

    def set_up(self, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        script = (
            f'set -euo pipefail; source "{self.folder}/scripts/setup_env.sh"; echo "$PYTHON"; pwd; command -v python'
        )
        return self.run("bash", "-c", script, cwd=cwd, **variables)

    def replace_in_stub(self, old: str, new: str) -> None:
        assert STUB.count(old) == 1
        write_executable(self.folder.parent / "bin" / "python3", STUB.replace(old, new))

    def calls(self, kind: str) -> list[tuple[list[str], dict[str, str | None]]]:
        lines = self.log_file.read_text().splitlines() if self.log_file.exists() else []
        return [(args, environ) for name, args, environ in map(json.loads, lines) if name == kind]


def make_package(folder: Path, name: str = "titan_mi100") -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").touch()


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    checkout = Checkout(tmp_path)
    yield checkout
    assert list(checkout.temporary.iterdir()) == []


REQUIREMENTS = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
# by the names that they are imported by, which are the same
DEPENDENCIES = sorted({entry.split(">=")[0] for entry in REQUIREMENTS} - {"torch", "tomli"})


@pytest.fixture
def real_python(checkout: Checkout, tmp_path: Path) -> Path:
    """Puts a real, nearly empty environment in front, where no other can be made. Returns its folder of packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "active"], check=True)
    real = tmp_path / "active" / "bin" / "python3"
    wrapper = f"""\
#!/bin/sh
case "$*" in
  *"print(sys.executable)"*) echo "$0" ;;
  "-m venv"*) exit 1 ;;
  *) exec {real} "$@" ;;
esac
"""
    write_executable(tmp_path / "bin" / "python3", wrapper)
    (packages,) = (tmp_path / "active" / "lib").glob("python3*/site-packages")
    for name in ("torch", *DEPENDENCIES):
        make_package(packages, name)
    return packages


def torchrun_arguments(checkout: Checkout) -> tuple[list[str], list[str]]:
    """Arguments of torchrun, and of the trainer, in the one launch that happened."""
    ((arguments, _),) = checkout.calls("torchrun")
    split = arguments.index("-m")
    assert arguments[split + 1] == "titan_mi100.train"
    return arguments[:split], arguments[split + 2 :]


# setup_env.sh


def test_an_active_environment_with_torch_and_this_checkout_is_used(checkout: Checkout, real_python: Path) -> None:
    (real_python / "titan.pth").write_text(f"{checkout.folder}\n")
    result = checkout.set_up()
    assert result.returncode == 0, result.stderr
    python, cwd, first = result.stdout.splitlines()
    assert Path(python).parent == real_python.parents[2] / "bin" == Path(first).parent
    assert (cwd, result.stderr) == (str(checkout.elsewhere), "")
    without_tools = checkout.set_up(TITAN_EXTRAS="dev")  # it is left alone, and the remedy said
    assert without_tools.returncode == 1
    assert "pip install -c" in without_tools.stderr and "pytest" in without_tools.stderr
    assert not (checkout.folder / ".venv").exists()


def test_an_environment_with_no_or_another_checkout_is_not_used(
    checkout: Checkout, real_python: Path, tmp_path: Path
) -> None:
    result = checkout.set_up(cwd=checkout.folder)  # standing in the checkout does not count as having it installed
    assert result.returncode == 1
    assert "Setting up .venv" in result.stderr and "cannot make a virtual environment" in result.stderr
    make_package(tmp_path / "other")
    (real_python / "titan.pth").write_text(f"{tmp_path / 'other'}\n")
    result = checkout.set_up()
    assert result.returncode == 1
    assert f"another checkout, {tmp_path / 'other'}" in result.stderr


@pytest.mark.parametrize("missing", DEPENDENCIES)
def test_an_active_environment_that_lacks_a_dependency_is_left_alone_with_the_remedy(
    checkout: Checkout, real_python: Path, missing: str
) -> None:
    (real_python / "titan.pth").write_text(f"{checkout.folder}\n")
    shutil.rmtree(real_python / missing)
    result = checkout.set_up()
    assert result.returncode == 1
    assert f"but not: {missing}\n" in result.stderr and f"-e '{checkout.folder}'" in result.stderr


def test_the_environment_is_made_once_and_again_when_a_pin_or_the_extras_change(checkout: Checkout) -> None:
    def installs(**variables: str) -> list[list[str]]:
        before = len(checkout.calls("pip"))
        result = checkout.set_up(STUB_VERDICT="no torch", **variables)
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[0] == str(checkout.folder / ".venv" / "bin" / "python")
        return [arguments for arguments, _ in checkout.calls("pip")[before:]]

    torch, package = installs()
    assert torch[-1].startswith("torch==")
    assert package[-1] == str(checkout.folder)
    assert installs() == []
    assert installs(TITAN_EXTRAS="dev")[1][-1] == f"{checkout.folder}[dev]"
    assert installs(TITAN_EXTRAS="dev") == installs() == []
    with (checkout.folder / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert installs()[1][-1] == f"{checkout.folder}[dev]"  # what was there stays there
    assert len(checkout.calls("venv")) == 1


def test_a_half_made_environment_is_completed_and_not_taken_for_a_good_one(checkout: Checkout) -> None:
    broken = checkout.set_up(STUB_VERDICT="no torch", STUB_PIP_CODE="1")
    assert broken.returncode == 1
    assert "pip could not install" in broken.stderr
    assert checkout.set_up(STUB_VERDICT="no torch").returncode == 0
    assert len(checkout.calls("venv")) == 1
    assert len(checkout.calls("pip")) == 3  # torch failed; torch, package


CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def test_an_index_without_an_answer_is_given_up_soon_and_pips_own_takes_its_place(checkout: Checkout) -> None:
    silent = checkout.set_up(STUB_VERDICT="no torch", TITAN_TORCH_INDEX=CPU_INDEX, STUB_NO_INDEX=CPU_INDEX)
    assert silent.returncode == 0, silent.stderr
    assert (
        "(once; a few minutes): torch 2.13.0 for the CPU" in silent.stderr
        and f"from {CPU_INDEX} ...\n" in silent.stderr
    )
    assert f"setup: no torch from {CPU_INDEX}, so it comes from pip's index" in silent.stderr
    first, second, _ = (arguments for arguments, _ in checkout.calls("pip"))
    tried = ["--no-deps", "--retries", "1", "--timeout", "15", "torch==2.13.0", "--index-url", CPU_INDEX]
    assert first[-8:] == tried and second == [*first[:-8], "torch==2.13.0"]
    answers = checkout.set_up(STUB_VERDICT="no torch", TITAN_TORCH_INDEX=CPU_INDEX, TITAN_VENV="other")
    assert answers.returncode == 0 and "pip's index" not in answers.stderr
    # another index has no stand-in: PyPI's torch would not use the cards
    refused = checkout.set_up(
        STUB_VERDICT="no torch", TITAN_VENV="third", TITAN_TORCH_INDEX="https://a.b/c", STUB_NO_INDEX="https://a.b/c"
    )
    assert refused.returncode == 1 and "pip could not install this" in refused.stderr
    assert 'export TITAN_TORCH_INDEX=""' in (REPO / ".ci" / "run").read_text()  # the CI's machines reach no other index


def test_another_build_of_torch_takes_the_place_of_the_one_that_is_there(checkout: Checkout) -> None:
    """pip holds 2.13.0+cpu for 2.13.0 and would leave it, after a card was put in."""
    other = "https://a.b/c"
    for index, code, called in (
        (CPU_INDEX, 0, {"install"}), (CPU_INDEX, 0, set()),
        ("", 0, {"download", "uninstall", "install"}), ("", 0, set()),
        (CPU_INDEX, 0, set()),  # a login node: the torch that is there is that of the cards
        (other, 1, {"download"}), ("", 0, set()),  # what cannot be had takes the place of nothing
    ):  # fmt: skip
        before = len(checkout.calls("pip"))
        done = checkout.set_up(STUB_VERDICT="no torch", TITAN_TORCH_INDEX=index, STUB_NO_INDEX=other)
        assert done.returncode == code and ("is another one (torch==2.13.0) and stays" in done.stderr) == bool(code)
        assert {arguments[0] for arguments, _ in checkout.calls("pip")[before:]} == called


def test_what_the_script_did_not_make_is_left_alone_and_a_python_that_is_missing_is_named(checkout: Checkout) -> None:
    result = checkout.set_up(TITAN_PYTHON="/no/such/python3.12")
    assert result.returncode == 1
    assert "/no/such/python3.12" in result.stderr
    shutil.rmtree(checkout.folder / ".venv")
    (checkout.folder / ".venv").mkdir()
    (checkout.folder / ".venv" / "precious").touch()
    result = checkout.set_up(STUB_VERDICT="no torch")
    assert result.returncode == 1
    assert "so it is not changed" in result.stderr
    assert (checkout.folder / ".venv" / "precious").exists()


# run_train.sh


def test_the_arguments_go_unchanged_to_the_check_and_the_trainer_on_the_processes_found(checkout: Checkout) -> None:
    config = ["--training.steps", "4"]
    result = checkout.train(*config)
    assert result.returncode == 0, result.stderr
    torchrun, trainer = torchrun_arguments(checkout)
    assert torchrun[-2:] == ["--nproc_per_node", "3"]
    assert torchrun[torchrun.index("--log-dir") + 1] == os.devnull  # else a folder for each run stays in TMPDIR
    assert trainer == config
    ((_, environ),) = checkout.calls("torchrun")
    assert environ["TITAN_RUN_FOLDER"] == str(checkout.run_folder)
    ((arguments, environ),) = checkout.calls("config")
    assert arguments == config
    assert environ["WORLD_SIZE"] == "3"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nproc_per_node", "5", "--job.config_file", "x y.toml"],
        ["--nproc_per_node=5", "--job.config_file=x y.toml"],
        ["--job.config_file", "x y.toml", "--nproc_per_node", "5"],
    ],
)
def test_both_spellings_of_processes_and_config_file_are_understood(checkout: Checkout, arguments: list[str]) -> None:
    assert checkout.train(*arguments, NGPU="7").returncode == 0
    torchrun, trainer = torchrun_arguments(checkout)
    assert torchrun[-2:] == ["--nproc_per_node", "5"]
    assert trainer == [a for a in arguments if "nproc" not in a and a != "5"]


def test_ngpu_sets_the_processes_and_a_given_thread_count_stays(checkout: Checkout) -> None:
    assert checkout.train(NGPU="4", OMP_NUM_THREADS="9").returncode == 0
    ((arguments, environ),) = checkout.calls("torchrun")
    assert arguments[arguments.index("--nproc_per_node") + 1] == "4"
    assert environ["OMP_NUM_THREADS"] == "9"


@pytest.mark.parametrize(
    ("argument", "variables", "said"),
    [
        *((f"--nproc_per_node={count}", {"NGPU": ""}, "--nproc_per_node") for count in ("0", "two", "-1", "")),
        ("--training.steps=4", {"STUB_CONFIG_CODE": "2"}, "bad key"),
        ("--training.steps=4", {"STUB_PREPARE_CODE": "2"}, ""),
        # torchtitan's variable for the config is not just ignored
        ("--training.steps=4", {"CONFIG_FILE": "x.toml"}, "write --job.config_file x.toml"),
    ],
)
def test_what_is_refused_starts_nothing_and_keeps_its_code(
    checkout: Checkout, argument: str, variables: dict[str, str], said: str
) -> None:
    result = checkout.train(argument, **variables)
    assert result.returncode == 2 and said in result.stderr
    assert len(checkout.calls("prepare")) == ("STUB_PREPARE_CODE" in variables) and checkout.calls("torchrun") == []


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.full)])
def test_a_preparation_that_is_killed_is_one_message(checkout: Checkout, number: signal.Signals) -> None:
    result = checkout.train(STUB_PREPARE_CODE=str(-number))
    assert result.returncode == 1
    *stacks, said = result.stderr.splitlines()
    assert bool(stacks) == (number == signal.SIGSEGV)  # Python's own, of what crashed
    assert said.startswith(f"run_train: the preparation of the data was killed by {number.name}")
    assert ("memory" in said) == (number == signal.SIGKILL)
    assert checkout.calls("torchrun") == []


@pytest.mark.parametrize(
    "outputs", ["2>&-", *(pytest.param(more, marks=pytest.mark.full) for more in ("<&- >&- 2>&-", "2> >(:)"))]
)
def test_outputs_that_nobody_reads_change_no_exit_code(checkout: Checkout, outputs: str) -> None:
    script = f'"$0" {outputs}'
    variables = {"STUB_TORCHRUN_CODE": "1", "STUB_STATE_CODE": "4"}
    assert checkout.run("bash", "-c", script, str(checkout.folder / "run_train.sh"), **variables).returncode == 4


@pytest.mark.parametrize(("state", "code"), [("0", 0), ("2", 2), ("killed", 1)])
def test_one_process_starts_without_torchrun(checkout: Checkout, state: str, code: int) -> None:
    result = checkout.train("--nproc_per_node", "1", "--training.steps", "4", STUB_STATE_CODE=state)
    assert result.returncode == code, result.stderr
    assert checkout.calls("torchrun") == []
    ((arguments, environ),) = checkout.calls("trainer")
    assert arguments == ["--training.steps", "4"] and environ["WORLD_SIZE"] is None
    assert ("the trainer was killed by SIGKILL; most likely memory ran out" in result.stderr) == (state == "killed")


def test_help_goes_to_the_config_and_starts_nothing(checkout: Checkout) -> None:
    assert checkout.train("--nproc_per_node", "2", "-h").returncode == 0
    assert [arguments for arguments, _ in checkout.calls("config")] == [["-h"]]
    assert checkout.calls("torchrun") == []


@pytest.mark.parametrize(
    ("torchrun", "state", "code"),
    [("1", "none", 1), ("1", "4", 4), ("1", "0", 1), ("0", "2", 2), ("0", "none", 1), ("0", "0", 0)],
)
def test_the_exit_code_is_what_this_launch_left_in_its_run_state(
    checkout: Checkout, torchrun: str, state: str, code: int
) -> None:
    result = checkout.train(STUB_TORCHRUN_CODE=torchrun, STUB_STATE_CODE=state)
    assert result.returncode == code, result.stderr
    if code:
        last = result.stderr.splitlines()[-1]
        assert f"exit code {code}" in last
        assert str(checkout.run_folder) in last
    else:
        assert result.stderr == ""


def _as_from_a_terminal() -> None:
    """Background jobs of a shell ignore SIGINT, those of nohup SIGHUP, and what is ignored stays so in all children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def send_while(checkout: Checkout, kind: str, *numbers: int, group: bool = False, said: str = "") -> tuple[int, str]:
    """Start run_train.sh, send it signals when it waits in this call; its exit code and what it said.

    Args:
        group: to all processes of its process group, as a terminal does.
        said: what it says of a signal before the next is sent; "": that is sent soon after.
    """
    process = subprocess.Popen(
        [checkout.folder / "run_train.sh"],
        env=checkout.environ | {"STUB_WAIT": kind},
        cwd=checkout.elsewhere,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=_as_from_a_terminal,
    )
    deadline, errors = time.monotonic() + 120, ""
    while not checkout.calls("waiting"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for place, number in enumerate(numbers):
        if place and not said:
            time.sleep(0.3)
        while place and said not in errors:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line, errors
            errors += line
        (os.killpg if group else os.kill)(process.pid, number)
    errors += process.communicate(timeout=120)[1]
    return process.returncode, errors


TERM, INT, USR1, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP


@pytest.mark.parametrize(
    ("processes", "number"),
    [
        ("3", TERM),
        *(pytest.param("3", number, marks=pytest.mark.full) for number in (USR1, INT)),
        *(pytest.param("1", number, marks=pytest.mark.full) for number in (TERM, INT)),
    ],
)
def test_a_signal_reaches_the_run_and_the_saved_state_decides_the_code(
    checkout: Checkout, processes: str, number: int
) -> None:
    checkout.environ["NGPU"] = processes
    code, errors = send_while(checkout, "torchrun", number)
    assert code == 3, errors
    assert [arguments for arguments, _ in checkout.calls("signal")] == [[signal.SIGUSR1]]
    assert "stopping after the current step, which is saved; Ctrl-C ends it at once" in errors
    assert "stopped on request and saved. Run folder: " in errors.splitlines()[-1]


@pytest.mark.parametrize("first", [pytest.param(signal.SIGTERM, marks=pytest.mark.full), signal.SIGINT])
def test_signals_that_come_twice_do_not_end_a_save_but_ctrl_c_does(checkout: Checkout, first: int) -> None:
    save = "            run_state(3)\n"
    if first == signal.SIGTERM:
        checkout.replace_in_stub(save, "            time.sleep(1)\n" + save)
        twice = [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP]
        assert send_while(checkout, "torchrun", *twice)[0] == 3
        checkout.log_file.unlink()
    checkout.replace_in_stub(save, "            time.sleep(60)\n" + save)
    code, errors = send_while(checkout, "torchrun", first, signal.SIGINT, said="stopping after the current step")
    assert code == 1 and "Ctrl-C came again: ended at once, without saving" in errors
    assert "without a word" not in errors and checkout.calls("signal") == []
    assert json.loads((checkout.run_folder / "run_state.json").read_text())["state"] == "interrupted"


@pytest.mark.full
def test_a_request_for_stacks_goes_to_the_training_processes(checkout: Checkout) -> None:
    waiting = '            log("waiting", [])\n            time.sleep(0.5)\n'
    listens = '            signal.signal(signal.SIGUSR2, lambda *_: log("signal", ["stacks"]))\n'
    checkout.replace_in_stub(waiting, listens + waiting)
    said = "the training processes write their stacks"
    code, errors = send_while(checkout, "torchrun", signal.SIGUSR2, signal.SIGTERM, said=said)
    assert code == 3, errors
    assert [arguments for arguments, _ in checkout.calls("signal")] == [["stacks"], [signal.SIGUSR1]]
    assert "the training processes write their stacks: " in errors and "/watch/rank-*.stacks" in errors
    checkout.log_file.unlink()
    assert send_while(checkout, "config", signal.SIGUSR2, signal.SIGTERM)[0] == 3  # no process writes any


def test_a_run_whose_launchers_folder_was_removed_ends_as_its_state_says(checkout: Checkout) -> None:
    checkout.replace_in_stub(
        '    log("trainer", argv[2:])\n',
        """    import shutil
    shutil.rmtree(os.path.dirname(os.environ["TITAN_OUTCOME"]))
    with open(os.path.join(os.environ["STUB_FOLDER"], "run_state.json"), "w") as file:
        json.dump({"state": "stub", "exit_code": int(os.environ["STUB_STATE_CODE"])}, file)
    os._exit(int(os.environ["STUB_STATE_CODE"]))
""",
    )
    for code in ("0", "3"):
        result = checkout.train("--nproc_per_node", "1", STUB_STATE_CODE=code)
        assert result.returncode == int(code), result.stderr


@pytest.mark.parametrize(
    ("kind", "number", "group"),
    [
        ("probe", TERM, False),
        ("config", USR1, True),
        ("prepare", INT, True),
        ("importing", INT, True),
        *(
            pytest.param(kind, number, group, marks=pytest.mark.full)
            for kind in ("probe", "config", "prepare")
            for number, group in ((TERM, True), (INT, False), (USR1, False), (HUP, False))
        ),
    ],
)
def test_a_signal_before_the_run_begins_ends_with_code_3_and_trains_nothing(
    checkout: Checkout, kind: str, number: int, group: bool
) -> None:
    code, errors = send_while(checkout, kind, number, group=group)
    assert code == 3, errors
    assert "nothing was trained" in errors.splitlines()[-1] and "Traceback" not in errors
    assert checkout.calls("torchrun") == [] or kind == "importing"


def test_what_a_killed_torchrun_leaves_behind_is_ended(checkout: Checkout, tmp_path: Path) -> None:
    if not Path("/proc/self/environ").exists():
        pytest.skip("processes are found through /proc")
    pid_file = tmp_path / "pid"
    leave_a_worker = f"""
    import subprocess
    worker = subprocess.Popen(["sleep", "60"], start_new_session=True)
    open({str(pid_file)!r}, "w").write(str(worker.pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    launch = 'elif argv[1] == "torch.distributed.run":'
    checkout.replace_in_stub(launch, launch + leave_a_worker)
    assert checkout.train().returncode == 1
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and is_running(pid):
        time.sleep(0.02)
    assert not is_running(pid)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
