"""The results table: its rows, what they refuse, and that no row ends the sweep."""

import csv
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import sweep
import sweep_table
from conftest import REPO

CPU = {"device": "CPU, 2 cores, 1 of them per process", "kind": "", "torch": "2.13.0", "tflops": {}}
MI100 = {**CPU, "device": "AMD Instinct MI100 (gfx908, 32 GiB)", "kind": "MI100", "tflops": {"float32": 46.1}}
ROW = sweep.Row("fsdp2", 2, 2, 4, "none", "float32", "debug", 64, 32, 5, 0.5)


def rows_of(*arguments: str) -> list[sweep.Row]:
    return sweep.parse(arguments)[1]


def record(row: sweep.Row = ROW, status: str = "ok", machine: dict[str, Any] = CPU, why: str = "") -> dict[str, Any]:
    found = {"row": asdict(row), "machine": machine, "date": "2026-11-21", "status": status, "why": why}
    measured = {name: 1000.0 * number for number, name in enumerate(sweep_table.FIGURES, start=1)}
    return found | (measured | {"peak_memory_gib": 3.456, "mfu": None} if status == "ok" else {})


@pytest.mark.parametrize("name", sweep.LAYOUTS)
def test_every_layout_is_one_that_the_trainer_accepts_and_is_refused_with_fewer_processes(name: str) -> None:
    least = sweep.LAYOUTS[name][0]
    assert sweep.refusal(replace(ROW, layout=name, processes=max(least, 2))) == ""
    if least > 1:
        refused = sweep.refusal(replace(ROW, layout=name, processes=least - 1))
        assert refused.startswith(f"{name} needs at least {least} processes")


def test_layouts_are_what_their_names_say() -> None:
    def degrees(name: str, processes: int) -> tuple[int, ...]:
        layout = sweep.config_of(replace(ROW, layout=name, processes=processes)).layout(processes)
        return layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp, layout.zero_stage

    assert {name: degrees(name, 4) for name in sweep.LAYOUTS} == {
        "fsdp2": (1, 1, 4, 1, 3),
        "fsdp2-zero2": (1, 1, 4, 1, 2),
        "fsdp2-zero1": (1, 1, 4, 1, 1),
        "ddp": (1, 4, 1, 1, 0),
        "ddp-powersgd": (1, 4, 1, 1, 0),
        "hsdp": (1, 2, 2, 1, 3),
        "pp": (4, 1, 1, 1, 1),
        "pp-gpipe": (4, 1, 1, 1, 1),
        "pp-interleaved": (4, 1, 1, 1, 1),
        "pp-fsdp2": (2, 1, 2, 1, 1),
        "tp": (1, 1, 1, 4, 3),
        "tp-fsdp2": (1, 1, 2, 2, 3),
    }


def sweep_command(folder: Path, *arguments: str) -> list[str]:
    """A sweep of the debug model on two processes."""
    command = [sys.executable, str(REPO / "scripts/bench/sweep.py"), "--output", str(folder / "out")]
    return [*command, "--flavor", "debug", "--seq", "64", "--nproc", "2", "--dtype", "float32", *arguments]


def run(
    rows: list[sweep.Row], path: Path, outcomes: dict[sweep.Row, str], **options: Any
) -> tuple[list[str], list[Any]]:
    """The rows' statuses, and which of them were started."""
    started = []

    def launch(row: sweep.Row, timeout: float) -> tuple[str, str, dict[str, Any]]:
        started.append(row)
        status = outcomes.get(row, "ok")
        return status, "" if status == "ok" else "why", {"tokens_per_second": 1.0} if status == "ok" else {}

    options = {"machine": CPU, "fresh": False, "timeout": 1, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "launch", launch)
        found = sweep.sweep(rows, path=path, **options)
    assert [entry["row"] for entry in found] == [asdict(row) for row in rows]
    return [entry["status"] for entry in found], started


def test_a_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    a, b, c, refused = (replace(ROW, batch=number) for number in (1, 2, 3, 4))
    refused = replace(refused, layout="pp", ga=1)
    rows, outcomes = [a, b, c, refused], {b: "out of memory", c: "failed"}
    statuses = ["ok", "out of memory", "failed", "refused"]
    assert run(rows, path, outcomes) == (statuses, [a, b, c])
    assert run(rows, path, outcomes) == (statuses, [c])  # a failed one is tried again, want of memory is a result
    assert run(rows[:1], path, {a: "failed"}, fresh=True) == (["failed"], [a])
    assert run(rows, path, {}) == (["ok", "out of memory", "ok", "refused"], [a, c])  # fresh kept what it did not run
    other = {**CPU, "torch": "2.8.0"}
    assert run([a, b], path, {}, machine=other) == (["ok", "ok"], [a, b])
    assert run([a, b], path, {}) == (["ok", "out of memory"], [])
    assert run([replace(a, steps=31)], path, {})[1] == [replace(a, steps=31)]


def test_published_figures_stand_beside_ours_only_on_the_same_hardware() -> None:
    rows = rows_of("--preset", "published", "--nproc", "2")
    beside = sweep_table.markdown([record(row, machine=MI100) for row in rows], with_published=True)
    line = next(line for line in beside.splitlines() if line.startswith("| pp | 2 | 4 | 8 | none | float32 |"))
    assert line.endswith("| 5,404 | 517 | 6,085 | 27.3 |") and "do not compare" not in beside
    apart = [sweep_table.markdown([record(row) for row in rows], with_published=True)]
    wider = [replace(row, processes=4) for row in rows]
    apart += [sweep_table.markdown([record(row, machine=MI100) for row in wider], with_published=True)]
    smaller = rows_of("--preset", "published", "--nproc", "2", "--flavor", "debug")
    apart += [sweep_table.markdown([record(row, machine=MI100) for row in smaller], with_published=True)]
    for text in apart:
        ours, theirs = text.split("Published figures, made on 2x MI100")
        assert "published" not in ours and "do not compare" in theirs.replace("\n", " ")
        assert "| 4 | 8 | none | float32 | 5,404 | 517 | 6,085 | 27.3 |" in theirs
    assert "ublished" not in sweep_table.markdown([record()])


@pytest.mark.full
def test_a_real_sweep_has_a_row_that_runs_one_out_of_memory_and_one_refused(tmp_path: Path) -> None:
    large = str(10**11)  # rows, whose made-up tokens alone are tens of TB
    rows = ["--layout", "fsdp2", "pp", "--batch", "2", large, "--steps", "2", "--warmup", "2"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(sweep_command(tmp_path, *rows), capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
    assert [entry["status"] for entry in found] == ["ok", "out of memory"], found
    measured = found[0]
    assert measured["tokens_per_step"] == 2 * 2 * 64
    assert measured["tokens_per_second"] == pytest.approx(2 * 2 * 64 / measured["step_ms"] * 1000)
    assert measured["step_ms_min"] <= measured["step_ms_q1"] <= measured["step_ms"] <= measured["step_ms_max"]
    assert 0 < measured["comm_exposed_ms"] <= measured["comm_ms"] == max(measured["comm_ms_by_rank"])
    assert measured["comm_exposed_ms"] < measured["profiled_step_ms"] and 0.1 < measured["peak_memory_gib"] < 20
    table = (tmp_path / "out/sweep.md").read_text()
    assert done.stdout.strip() == table.strip() and table.count("| refused: ") == 2
    assert table.count("| out of memory |") == 1
    assert len(list(csv.DictReader((tmp_path / "out/sweep.csv").open()))) == 4
    if importlib.util.find_spec("matplotlib"):
        assert (tmp_path / "out/sweep.png").read_bytes().startswith(b"\x89PNG")
    again = [sweep.Row(**entry["row"]) for entry in found]
    assert run(again, tmp_path / "out/rows.jsonl", {}, machine=found[0]["machine"]) == (["ok", "out of memory"], [])
