"""The doctor on whole machines: each verdict, what the user sees, what a start of a run does with it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO
from machines import NAMES, build, facts_of, load

from titan_mi100.errors import UserError
from titan_mi100.launch import launcher as launch
from titan_mi100.launch import machine_checks as start
from titan_mi100.launch import machine_facts as reading
from titan_mi100.launch.machine_checks import FAIL, PASS, Result, judge
from titan_mi100.launch.torch_build import Torch
from titan_mi100.tools import doctor


@pytest.mark.parametrize("name", NAMES)
def test_each_machine_gets_the_verdicts_that_its_report_gives_it(name: str, tmp_path: Path) -> None:
    machine = load(name)
    verdicts = judge(facts_of(machine, tmp_path))
    expected = {name: state for name, state in machine["expected"].items() if state}  # null: does not apply
    assert {verdict.name: verdict.state for verdict in verdicts} == expected
    assert [verdict.name for verdict in verdicts if verdict.stops] == machine["stops"]
    for verdict in verdicts:
        assert bool(verdict.remedy) == (verdict.state != PASS), verdict


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_is_marked_synthetic_and_quotes_its_report(name: str) -> None:
    machine = load(name)
    assert machine["synthetic"] is True
    assert name == "laptop" or all(
        report["source"].startswith("https://") and report["quote"] for report in machine["reports"]
    )


def test_the_remedy_for_a_cuda_wheel_names_amds_own_wheels_for_the_card(tmp_path: Path) -> None:
    (verdict,) = [verdict for verdict in judge(facts_of(load("mi100_cuda_wheel"), tmp_path)) if verdict.state == FAIL]
    own = "pip install 'torch[device-gfx908]' --index-url https://repo.amd.com/rocm/whl-multi-arch/"
    assert own in verdict.remedy.splitlines()
    assert "CUDA 13.0; it cannot use 2 x MI100 (gfx908)" in verdict.fact


def said_at_start(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch, processes: int = 2, **changes: object
) -> list[str]:
    """What a start says on a machine."""
    machine = {**load(name), **changes}
    said: list[str] = []
    known = Torch(**{key: value for key, value in machine["torch"].items() if key in ("version", "hip", "cuda")})
    monkeypatch.setattr(reading, "installed", lambda wants_blas, environ: known)
    start.before_start(processes, said.append, system=build(machine, root))
    return said


def test_a_start_on_a_healthy_machine_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mi100", "h100", "laptop"):
        (tmp_path / name).mkdir()
        assert said_at_start(name, tmp_path / name, monkeypatch) == []


def test_a_start_says_what_is_wrong_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_at_start("mi100_iommu", tmp_path, monkeypatch) == [
        "doctor: warn: IOMMU: it translates addresses of 2 x MI100 (gfx908), type DMA-FQ; NCCL and RCCL can hang; "
        "add iommu=pt to GRUB_CMDLINE_LINUX_DEFAULT in /etc/default/grub, then sudo update-grub and reboot"
    ]


def test_one_process_needs_nothing_that_is_between_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert said_at_start("mi100_iommu", tmp_path, monkeypatch, processes=1) == []


def test_a_start_ends_where_no_run_can_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"torch: 2\.12\.0\+cu130, built for CUDA 13\.0; it cannot use 2 x MI100"):
        said_at_start("mi100_cuda_wheel", tmp_path / "a", monkeypatch)
    with pytest.raises(UserError, match=r"device files: /dev/kfd, .*: no permission; group render"):
        said_at_start("mi100_wrong_group", tmp_path / "b", monkeypatch)
    # hidden cards are not used, so the run computes on the CPU, as was asked for
    assert said_at_start("mi100_cuda_wheel", tmp_path / "c", monkeypatch, environ={"CUDA_VISIBLE_DEVICES": ""}) == []


def test_a_mistake_of_the_doctors_does_not_cost_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    said: list[str] = []
    monkeypatch.setattr(start, "read", broken)
    start.before_start(1, said.append)
    assert said == ["doctor: the checks of this machine failed (KeyError('a bug')); starting without them"]


def test_the_launcher_asks_about_the_processes_and_the_environment_that_workers_get(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def refuse(processes: int, say: object) -> None:
        asked.append((processes, os.environ.get("OMP_NUM_THREADS")))
        raise UserError("torch: cannot use the card; install another")

    monkeypatch.setattr(launch.Launcher, "__init__", lambda _: None)  # it blocks signals
    monkeypatch.setattr(launch, "before_start", refuse)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6), raising=False)
    assert launch.main(["--nproc_per_node", "2"], {}) == 2
    assert asked == [(2, "3")]
    assert capfd.readouterr().err == "run_train: torch: cannot use the card; install another\n"


def test_what_a_start_checks_takes_milliseconds_and_imports_no_torch(tmp_path: Path) -> None:
    machine = build(load("mi100"), tmp_path)
    began = time.perf_counter()
    judge(reading.read(machine, 2))
    assert time.perf_counter() - began < 0.1
    code = "import sys; from titan_mi100.launch.machine_checks import before_start; before_start(2, print); "
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(("state", "code"), [("pass", 0), ("warn", 0), ("fail", 2)])
def test_the_exit_code_is_2_where_something_fails(
    state: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "judge", lambda facts: [Result("IOMMU", state, "what was found", "")])
    assert doctor.main(["--fast"]) == code
    shown = "" if state == "pass" else f"{state}  IOMMU  what was found\n\n"
    assert capsys.readouterr().out.startswith(shown)


def test_json_holds_the_facts_and_the_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--json", "--fast"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["facts"]["torch"]["version"]
    assert {"name": "torch", "state": "pass"}.items() <= found["verdicts"][-1].items()


def test_the_report_asks_torch_itself(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.torch_build, "ask", lambda known, environ: Torch("9.9", problem="made up"))
    assert doctor.main([]) == 2  # also on a machine without a card: nothing can be trained
    said = capsys.readouterr().out
    assert "torch 9.9; Linux" in said.splitlines()[0] and "it cannot be imported: made up" in said


def test_text_is_aligned_and_remedies_stand_below() -> None:
    verdicts = [Result("torch", PASS, "fine"), Result("open files", FAIL, "one two three four", "do this and that")]
    assert list(doctor.lines(verdicts)) == [
        "pass  torch       fine",
        "fail  open files  one two three four",
        "                  -> do this and that",
    ]
    *_, one, two = doctor.lines([Result("a", FAIL, "b", "command " * 30 + "\nanother")])
    assert one.endswith("-> " + "command " * 30) and two.endswith("-> another")


def test_what_a_variable_holds_cannot_command_the_terminal() -> None:
    (line,) = doctor.lines([Result("a", PASS, "NCCL_ALGO=\033[2J")])
    assert line == "pass  a  NCCL_ALGO=\\x1b[2J"


def test_help_says_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--help"]) == 0
    assert "Exit codes: 0 no check fails (there may be warnings), 2" in " ".join(capsys.readouterr().out.split())
