"""The GPU check: its tables name what exists, and no task that fails hides another one.

With --full both of its commands run with tiny sizes on the CPU.
"""

import importlib
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import faulty_parts
import pytest
import torch
from conftest import REPO
from gpu_check import run
from gpu_check.sections import CALLS, Section, sections_of

from titan_mi100.attention import choice
from titan_mi100.errors import UserError
from titan_mi100.run.machine import Machine
from titan_mi100.workshop.measure import children
from titan_mi100.workshop.measure.children import Task
from titan_mi100.workshop.measure.parts import Part, read

LIMITS = {"first": 590, "second": 220}  # seconds: a little less than ten and four minutes
TEXTS = ("driver", "torch", "runtime", "triton", "python", "version", "commit")


@pytest.fixture
def paths(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes that measure import: the package, the check, and the faulty tasks of tests/."""
    folders = (REPO, REPO / "scripts", REPO / "tests")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))


def faulty(function: str, seconds: float = 60, **arguments: Any) -> Task:
    return Task(f"faulty/{function}", f"faulty_parts:{function}", arguments, seconds=seconds)


def measured(section: Section, log: Path) -> dict[str, tuple[str, str]]:
    """Verdict and words by task, in the order in which they were kept."""
    parts: list[Part] = []
    run.measure(section, parts.append, log, [])
    return {part.name: (part.verdict, part.said) for part in parts}


@pytest.mark.parametrize("call", CALLS)
def test_the_limits_of_a_call_fit_into_its_minutes(call: str) -> None:
    assert sum(section.seconds for section in sections_of(call, tiny=False)) < LIMITS[call]


@pytest.mark.parametrize("tiny", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_every_task_is_a_function_that_takes_its_arguments(call: str, tiny: bool) -> None:
    for section in sections_of(call, tiny):
        names = [task.name for task in section.tasks]
        assert names and (tiny or len(set(names)) == len(names))
        for task in section.tasks:
            module, function = task.target.split(":")
            found = getattr(importlib.import_module(module), function)
            inspect.signature(found).bind(**task.arguments)
            json.dumps(dict(task.arguments))


def test_sections_are_chosen_by_the_beginning_of_their_names() -> None:
    chosen = sections_of("first", False, ("steps", "plain"))
    names = ["steps of 0.6B", "steps of 8B and Qwen3.5", "plain loop"]
    assert [section.name for section in chosen] == names


@pytest.mark.usefixtures("paths")
def test_no_task_that_fails_hides_the_next_one(tmp_path: Path) -> None:
    good = Task("good", "faulty_parts:machine")
    listed = Task("lists", "faulty_parts:asks_for_another")
    tasks = [
        faulty("fail"),
        faulty("crash"),
        faulty("hang", 0.5),
        faulty("not_a_number"),
        faulty("refuse"),
        listed,
        good,
    ]
    assert measured(Section("faulty", 60, tasks), tmp_path / "log.txt") == {
        "faulty/fail": ("fail", "failed: RuntimeError: no kernel image"),
        "faulty/crash": ("fail", "crashed: SIGABRT; see log.txt"),
        "faulty/hang": ("fail", "hung: did not end within 0 s"),
        "faulty/not_a_number": ("fail", "crashed: exit code 1; see log.txt"),
        "faulty/refuse": ("unavailable", "its package is not installed"),
        "lists": ("pass", "one more"),
        "wrong": ("fail", "5 elements are wrong; copy 1 GB/s"),
        "good": ("pass", ""),
    }
    log = (tmp_path / "log.txt").read_text()
    assert "== faulty/fail\nTraceback" in log and "ValueError: Out of range float values" in log


@pytest.mark.usefixtures("paths")
def test_a_section_at_its_limit_names_what_was_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "LEAST", 0.1)
    section = Section("slow", 6, [Task("good", "faulty_parts:machine"), faulty("hang"), faulty("fail")])
    found = measured(section, tmp_path / "log.txt")
    assert found["good"][0] == "pass" and found["faulty/hang"][0] == "fail"
    assert found["faulty/fail"] == ("not run", "the section's 6 s were over")


def a_report(folder: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> run.Report:
    described = Part("machine", "pass", "", 0.0, {**faulty_parts.machine(), "torch": "2.13.0"})
    monkeypatch.setattr(children, "run", lambda *_: described)
    folder.mkdir(exist_ok=True)
    return run.Report(folder, call, 9.5)


def test_the_second_call_continues_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    row = {"model": "0.6B", "method": "full", "bf16": "yes", "N": "1", "toks/s": "30,000", "mfu": "31.0%"}
    first = a_report(folder, "first", monkeypatch)
    first.keep(Part("steps/a", "pass", "fast", 1.0, {"row": row, "tokens_per_second": 3e4, "lines": ["a kernel"]}))
    first.keep(Part("values/b", "fail", "wrong", 1.0))
    first.end(interrupted=False)
    second = a_report(folder, "second", monkeypatch)
    slower = {**row, "toks/s": "20,000"}
    second.keep(Part("steps/c", "pass", "slow", 1.0, {"row": slower, "tokens_per_second": 2e4}))
    second.end(interrupted=True)
    header, parts = read(folder / "certificate.jsonl")
    assert header.machine == Machine(**{**faulty_parts.machine(), "torch": "2.13.0"})
    assert [part.name for part in parts] == ["steps/a", "values/b", "conclusion/end", "steps/c", "conclusion/end"]
    assert parts[-1].said == "unfinished: it was interrupted; 1 failed: values/b"
    printed = capsys.readouterr().out
    assert printed == (folder / "results.txt").read_text()
    assert "pass steps/a: fast\n         a kernel\n" in printed and "FAIL values/b: wrong" in printed
    assert "| CPU | 0.6B | full | yes | 1 | 30,000 | 31.0% | 2.13.0 | [" in printed.rpartition("rows for")[2]
    assert "| 0.6B | full | 1 |" not in printed and "## steps" in (folder / "certificate.md").read_text()
    with pytest.raises(UserError, match=r"certificate.jsonl exists, .*: OUT=FOLDER"):
        run.Report(folder, "first", 9.5)


def test_the_choice_of_attention_takes_what_a_run_passes() -> None:
    from gpu_check import steps

    own, theirs = (inspect.signature(function) for function in (steps.choose, choice.choose))
    assert [*own.parameters][:-1] == [*theirs.parameters][: len(own.parameters) - 1]


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_check import kernels

    right = kernels.KERNELS["NF4"]._replace(sizes=(16, 64))
    noise = iter(range(1, 99))
    planted = {
        "right": right,
        "wrong": right._replace(ours=lambda *inputs: right.ours(*inputs) * 1.1),
        "other bits": right._replace(ours=lambda *inputs: right.ours(*inputs) * (1 + 1e-3 * next(noise))),
        "not a number": right._replace(ours=lambda *inputs: right.ours(*inputs) * torch.nan),
    }
    monkeypatch.setattr(kernels, "KERNELS", planted)
    problems = {name: kernels.measure(name, "float16", tiny=True)["problem"] for name in planted}
    assert problems["right"] == "" and "equal calls give other bits" in problems["other bits"]
    assert "an error is 1" in problems["wrong"] and "an error is nan" in problems["not a number"]


@pytest.mark.full
def test_both_commands_run_with_tiny_sizes(tmp_path: Path) -> None:
    environment = {**os.environ, "OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    for call in CALLS:
        command = ["bash", str(REPO / "scripts" / "gpu_check" / f"{call}.sh"), "--tiny"]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    _, parts = read(tmp_path / "out" / "certificate.jsonl")
    assert {part.verdict for part in parts} <= {"pass", "unavailable"}
    kinds = {part.kind for part in parts if part.verdict == "pass"}
    assert kinds >= {"environment", "gemm", "kernels", "attention", "steps", "commands", "plain loop", "conclusion"}
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "results.txt", "log.txt", "certificate.jsonl", "certificate.md",
    }  # fmt: skip
