"""Copies of the tree in which a line is changed, and the tests that should notice."""

import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parents[2]


class Verdict(NamedTuple):
    """What became of some tests: "red" (one failed), "green", "error" (none failed, but one could not run), "slow"."""

    kind: str
    seconds: float
    words: str  # the first failure's, or the end of pytest's output


def copy_tree(folder: Path) -> None:
    """Put the working tree's files, those that git ignores left out, into an empty folder."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=REPO, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (REPO / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, folder / name)


def run_tests(copy: Path, arguments: list[str], timeout: float) -> Verdict:
    """Run pytest in a copy, up to the first failure."""
    report, scratch = copy / "report.xml", copy / "scratch"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--basetemp={scratch}"]
    found = [str(copy), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(found), "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    started = time.monotonic()
    with subprocess.Popen(
        [*command, f"--junitxml={report}", *arguments], cwd=copy, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException as error:
            _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return Verdict("slow", time.monotonic() - started, f"no end after {timeout:g} s")
    seconds = time.monotonic() - started
    shutil.rmtree(scratch, ignore_errors=True)
    if process.returncode == 0:
        return Verdict("green", seconds, "")
    failures = ElementTree.parse(report).getroot().findall(".//failure") if report.exists() else []
    if failures:
        return Verdict("red", seconds, failures[0].get("message", "").splitlines()[0][:150])
    return Verdict("error", seconds, output[-1500:])


def _end(process: subprocess.Popen[str]) -> None:
    """End pytest and what it has started: torchrun ends its workers when it is told to, not when it is killed."""
    for number, patience in ((signal.SIGINT, 30), (signal.SIGTERM, 30), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=patience)
            return
