"""Which default tests execute which line of the package: what tests/mutants.py asks, to run the right tests.

    python tests/executed.py [--output executed.json]

Runs the default tests under `coverage` (pip install coverage), in the ranks and child processes that they start, too.
What a test executes while its fixtures are set up belongs to all tests of its file: a fixture may serve them all.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from breaks.copies import test_of

REPO = Path(__file__).resolve().parents[1]
MAP = REPO / "executed.json"
# `patch` saves what processes have executed that end by os._exit, and starts with those that are forked or started.
_CONFIG = """
[run]
data_file = {folder}/data
source_pkgs = titan_mi100
parallel = true
patch = _exit, fork, subprocess
context = ${{PYTEST_CURRENT_TEST-}}
"""


def context(test: str, phase: str) -> None:
    """From now on, what this process executes belongs to a test. Does nothing without coverage."""
    if "coverage" in sys.modules:
        from coverage import Coverage

        if (measuring := Coverage.current()) is not None:
            measuring.switch_context(f"{test} ({phase})")


class Contexts:
    """A plugin of pytest: contexts are a test's id and its phase, as PYTEST_CURRENT_TEST has them."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        context(item.nodeid, "setup")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        context(item.nodeid, "call")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        context(item.nodeid, "call")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Contexts())


def measure(folder: Path, arguments: list[str]) -> None:
    """Run the tests; coverage's files, and report.xml with the tests' times, are in the folder afterwards."""
    (folder / "coveragerc").write_text(_CONFIG.format(folder=folder))
    pytest_options = ["-q", "-p", "executed", "-p", "no:cacheprovider", f"--junitxml={folder / 'report.xml'}"]
    spread = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={folder / 'coveragerc'}", "-m", "pytest"]
    path = os.pathsep.join(filter(None, [str(REPO), str(REPO / "tests"), os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run([*command, *pytest_options, *spread, *arguments], cwd=REPO, env=environment)
    combine = [sys.executable, "-m", "coverage", "combine", f"--rcfile={folder / 'coveragerc'}", "-q"]
    subprocess.run(combine, cwd=REPO, check=True)


def seconds_of(report: Path) -> Iterator[tuple[str, float]]:
    """Each test's id and how long it took."""
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        if test := test_of(case):  # not a module that is skipped whole
            yield test, float(case.get("time", 0))


def table(folder: Path) -> dict[str, Any]:
    """`seconds`: test -> seconds. `lines`: file -> line -> tests, by their numbers among `tests`."""
    from coverage import CoverageData

    data = CoverageData(str(folder / "data"))
    data.read()
    seconds = dict(seconds_of(folder / "report.xml"))
    of_file = defaultdict[str, list[str]](list)
    for test in seconds:
        of_file[test.split("::")[0]].append(test)
    tests = sorted(seconds, key=lambda test: seconds[test])
    numbers = {test: number for number, test in enumerate(tests)}
    lines: dict[str, dict[int, list[int]]] = {}
    for file in data.measured_files():
        name = f"titan_mi100/{file.rpartition('/titan_mi100/')[2]}"  # some tests run a copy of the package, or a wheel
        found = lines.setdefault(name, {})
        for line, contexts in data.contexts_by_lineno(file).items():
            by = set(found.get(line, ()))
            for test, _, phase in (each.rpartition(" (") for each in contexts):
                mine = [test] if phase.startswith("call") else of_file[test.split("::")[0]]
                by |= {numbers[each] for each in mine if each in numbers}
            if by:
                found[line] = sorted(by)
    return {"tests": tests, "seconds": [round(seconds[test], 2) for test in tests], "lines": lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=MAP)
    options, arguments = parser.parse_known_args()
    if find_spec("coverage") is None:
        parser.error("the package `coverage` is missing: pip install coverage")
    with tempfile.TemporaryDirectory(prefix="executed-") as folder:
        measure(Path(folder), arguments)
        found = table(Path(folder))
    options.output.write_text(json.dumps(found))
    executed = sum(map(len, found["lines"].values()))
    print(f"{options.output}: {executed:,} lines are executed by {len(found['tests']):,} tests")
    return 0


if __name__ == "__main__":
    sys.exit(main())
