"""Our kernels, compiled for all cards without one, by compile_report.py."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec

import pytest
from conftest import REPO
from test_launches import SPILLED

from titan_mi100.attention.launches import TABLES

REQUIRED = os.environ.get("TITAN_TESTS_REQUIRE", "")
# CDNA, RDNA, NVIDIA; the others, and MI300's and Hopper's, with --full, by hand
CHOSEN = ("gfx908", "gfx1100", "sm80")
LINKERS = ("ld.lld", *(f"ld.lld-{version}" for version in range(22, 15, -1)))
if "triton" not in REQUIRED:
    pytest.importorskip("triton")


@pytest.mark.skipif(
    "lld" not in REQUIRED and not any(map(shutil.which, LINKERS)), reason="no ld.lld: apt-get install lld-16"
)
def test_the_first_launches_of_every_card_compile_with_matrix_instructions_and_without_spills(full: bool) -> None:
    """The others: tests/assets/compiled-*.csv, see test_launches.py, which says what spills with which Triton."""
    import triton
    from compile_report import ARCHITECTURES, Tile

    cards = ARCHITECTURES if full else CHOSEN
    command = [sys.executable, REPO / "tests" / "compile_report.py", "--json", "--first", "--head_dim", "128", "256"]
    done = subprocess.run([*command, "--arch", *cards], capture_output=True, text=True)
    assert all("registers per thread are kept" in line for line in done.stderr.splitlines()), done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    for report in (report for report in reports if report["spilled"]):
        what = str(Tile(*report["tile"])) if "tile" in report else report["kernel"]
        assert report["spilled"] <= SPILLED.get((triton.__version__, report["arch"], what), 0), report
    updates = [report for report in reports if "fused" in report]
    heads = [report for report in reports if "ids" in report]
    assert Counter(report["arch"] for report in heads) == dict.fromkeys((report["arch"] for report in updates), 5)
    between = Counter(report["arch"] for report in reports if "constants" in report)
    kinds = [(report["arch"], report["dtype"], report["head_dim"]) for report in reports if "head_dim" in report]
    sizes = {"fp16": 2, "bf16": 2, "fp32": 4}
    assert {(arch, dim, sizes[dtype]) for arch, dtype, dim in kinds} == {row for row in TABLES if row[0] in cards}
    assert set(Counter(kinds).values()) == {3} and len(updates) == 4 * len(cards)
    # both ways, and sums of gradients; experts; the delta rule
    assert between.keys() == set(cards) and set(between.values()) == {2 * 10 + 9 + 6 + 9 + 2 + 1}
    assert all(int(report["registers"].split()[0]) > 0 for report in reports)
    assert not any(report["fused"] for report in updates)


@pytest.mark.skipif(find_spec("triton.backends.amd") is None, reason="this triton has no AMD compiler")
def test_what_must_not_be_is_named() -> None:
    from compile_report import Report, Tile

    sound = Report("gfx908", "forward", "fp16", 128, Tile(128, 64, 4, 1), "200", 0, 65_536, 1)
    assert list(sound.problems()) == []
    bad = replace(sound, spilled=4, shared=65_540, matrix_instructions=0)
    assert [problem.removeprefix("gfx908 forward fp16 D 128 128.64.4.1: ") for problem in bad.problems()] == [
        "4 bytes of registers per thread are kept in memory",
        "65,540 bytes of shared memory of 65,536",
        "no matrix instructions",
    ]
