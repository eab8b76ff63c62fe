"""Copies of the tree in which a line is changed, and the tests that should notice."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parents[2]
# Every pytest is forked from one process that has imported these, which takes longer than many of the tests.
_PRELOADED = ["pytest", "numpy", "torch.distributed.checkpoint", "torch.distributed.pipelining", "transformers", "peft"]
_ENVIRONMENT = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
                "HF_HUB_OFFLINE": "1", "TRITON_INTERPRET": "1"}  # fmt: skip


class Verdict(NamedTuple):
    """What became of some tests: "red" (one failed), "green", "error" (none failed, but one could not run), "slow"."""

    kind: str
    seconds: float
    words: str  # the first failure's, or the end of pytest's output
    test: str = ""  # the one that failed


def copy_tree(folder: Path) -> None:
    """Put the working tree's files, without those that git ignores, into an empty folder; beside it shared/, if any."""
    with suppress(FileExistsError):
        if (shared := REPO.parent / "shared").exists():
            (folder.parent / "shared").symlink_to(shared)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPO, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (REPO / name).is_file() or (REPO / name).is_symlink():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name, follow_symlinks=False)


def run_tests(copy: Path, arguments: list[str], timeout: float) -> Verdict:
    """Run pytest in a copy, up to the first failure."""
    report, scratch, output = copy / "report.xml", copy / "scratch", copy / "output.txt"
    report.unlink(missing_ok=True)
    command = ["-q", "-x", "-p", "no:cacheprovider", f"--basetemp={scratch}", f"--junitxml={report}", *arguments]
    os.environ.update(_ENVIRONMENT)  # before the first call starts the process that is forked
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    started = time.monotonic()
    process = context.Process(target=_run_pytest, args=(copy, command, output))
    process.start()
    try:
        process.join(timeout)
    finally:
        slow = process.is_alive()
        if slow:
            _end(process)
    seconds = time.monotonic() - started
    shutil.rmtree(scratch, ignore_errors=True)
    if slow:
        return Verdict("slow", seconds, f"no end after {timeout:g} s")
    if process.exitcode == 0:
        return Verdict("green", seconds, "")
    cases = [*ElementTree.parse(report).getroot().iter("testcase")] if report.exists() else []
    for case in cases:
        for kind, found in (("red", case.find("failure")), ("error", case.find("error"))):
            if found is not None:
                words = (found.get("message", "").splitlines() or [""])[0][:150]
                return Verdict(kind, seconds, words, test_of(case))
    return Verdict("error", seconds, output.read_text(errors="replace")[-1500:])


def test_of(case: ElementTree.Element) -> str:
    """The test of pytest's report as it is named on the command line; "" for a module that cannot be imported."""
    module = case.get("classname", "")
    return f"{module.replace('.', '/')}.py::{case.get('name')}" if module else ""


def _run_pytest(copy: Path, arguments: list[str], output: Path) -> None:
    os.setsid()
    for descriptor, path, mode in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        os.dup2(os.open(path, mode), descriptor)
    os.dup2(1, 2)
    os.chdir(copy)
    # the copy comes first, here and in what the tests start; this tree's tests are not on the path
    others = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(copy), *others])
    sys.path[:] = [str(copy), *(entry for entry in sys.path if Path(entry).resolve() not in (REPO, REPO / "tests"))]
    assert not any(name.split(".")[0] == "titan_mi100" for name in sys.modules), "the product must come from the copy"
    sys.dont_write_bytecode = True
    sys.exit(pytest.main(arguments))


def _end(process: BaseProcess) -> None:
    """End pytest and what it has started: torchrun ends its workers when it is told to, not when it is killed."""
    assert process.pid is not None
    for number, patience in ((signal.SIGINT, 30), (signal.SIGTERM, 30), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        process.join(patience)
        if not process.is_alive():
            return
