"""The results table: its rows, what they refuse, and that no row ends the sweep."""

import csv
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sweep
import sweep_table
from conftest import REPO

from titan_mi100.config.layout import IGNORE
from titan_mi100.data.made_up import random_rows

CPU = {"device": "CPU, 2 cores, 1 of them per process", "kind": "", "torch": "2.13.0", "tflops": {}}
MI100 = {**CPU, "device": "AMD Instinct MI100 (gfx908, 32 GiB)", "kind": "MI100", "tflops": {"float32": 46.1}}
ROW = sweep.Row("fsdp2", 2, 2, 4, "none", "float32", "debug", 64, 32, 5, 0.5)


def rows_of(*arguments: str) -> list[sweep.Row]:
    return sweep.parse(arguments)[1]


def record(row: sweep.Row = ROW, status: str = "ok", machine: dict[str, Any] = CPU, why: str = "") -> dict[str, Any]:
    found = {"row": asdict(row), "machine": machine, "date": "2026-11-21", "status": status, "why": why}
    measured = {name: 1000.0 * number for number, name in enumerate(sweep_table.FIGURES, start=1)}
    return found | (measured | {"peak_memory_gib": 3.456, "mfu": None} if status == "ok" else {})


# rows


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


def test_what_the_trainer_would_not_start_is_refused_with_its_reason() -> None:
    assert "needs at least 2 microbatches" in sweep.refusal(replace(ROW, layout="pp", ga=1))
    assert "tensor_parallel_degree = 4 does not divide" in sweep.refusal(replace(ROW, layout="tp", processes=4))
    assert "max_position_embeddings" in sweep.refusal(replace(ROW, seq=8192))
    assert "an even number" in sweep.refusal(replace(ROW, layout="hsdp", processes=5))


def test_free_choice_is_the_product_of_what_is_given() -> None:
    given = ["--layout", "ddp", "pp", "--batch", "1", "4", "--ga", "8", "--dtype", "float32", "bfloat16"]
    rows = rows_of(*given, "--nproc", "2", "--seq", "128", "--steps", "7")
    assert [(row.layout, row.batch, row.dtype) for row in rows] == [
        (layout, batch, dtype) for layout in ("ddp", "pp") for batch in (1, 4) for dtype in ("float32", "bfloat16")
    ]
    assert {(row.ga, row.checkpointing, row.flavor, row.seq, row.steps) for row in rows} == {
        (8, "none", "0.6B", 128, 7)
    }


@pytest.mark.parametrize("processes", [2, 8])
def test_teff_compares_about_as_many_tokens_in_every_row(processes: int) -> None:
    rows = rows_of("--preset", "teff", "--nproc", str(processes))
    assert len(rows) == 12 and not any(map(sweep.refusal, rows))
    for row in rows:
        tokens = sweep.config_of(row).batch(processes).global_batch_size * row.seq
        assert row.seq == 1024 and abs(tokens - 100_000) < (5_000 if processes == 2 else 35_000), row
    assert {row.layout for row in rows if row.ga >= processes} == {"fsdp2", "pp"}
    assert {row.layout for row in rows if row.ga < processes} == {"fsdp2", "pp-gpipe"}


def test_published_rows_are_the_nine_that_stand_beside_them() -> None:
    rows = rows_of("--preset", "published", "--nproc", "2")
    settings = [(row.batch, row.ga, row.checkpointing, row.dtype) for row in rows]
    assert settings == list(sweep_table.PUBLISHED) and len(set(settings)) == 9
    assert not any(map(sweep.refusal, rows))
    assert {row.layout for row in rows if row.ga == 1} == {"pp-gpipe"}
    assert {row.layout for row in rows if row.ga > 1} == {"pp"}


def test_debug_has_every_layout_and_a_refused_row() -> None:
    rows = rows_of("--preset", "debug", "--nproc", "2")
    assert {row.layout for row in rows} == set(sweep.LAYOUTS) and {row.flavor for row in rows} == {"debug"}
    assert [row.ga for row in rows if sweep.refusal(row)] == [1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "teff", "--layout", "pp", "--ga", "2"], "leave out --layout, --ga"),
        (["--warmup", "1"], "at least 2"),
        (["--batch", "0"], "less than 1"),
        (["--supervised", "0"], "above 0"),
    ],
)
def test_arguments_that_contradict_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as stopped:
        sweep.parse(arguments)
    assert stopped.value.code == 2 and message in capsys.readouterr().err


# what a worker measures


def test_random_rows_are_full_and_supervised_as_asked() -> None:
    data = random_rows(24, 1024, 768, supervised_share=0.3)
    rows = [data.row(number) for number in range(len(data))]
    assert len(rows) == 24 and all((row.document_ids >= 0).all() for row in rows)
    lengths = np.concatenate([np.bincount(row.document_ids) for row in rows])
    assert 150 < lengths.mean() < 450 and lengths.max() < 500
    share = np.mean([row.labels != IGNORE for row in rows])
    assert share == pytest.approx(0.3, abs=0.02)
    assert len({row.input_ids.tobytes() for row in rows}) == 24 and max(row.input_ids.max() for row in rows) == 767


# what became of a row


@pytest.mark.parametrize(
    ("code", "stderr"),
    [
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\nsome.Error: later"),
        (1, "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB."),
        (1, "RuntimeError: [enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
        (1, "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 954. MiB for an array"),
        (1, "MemoryError"),
        (1, "OSError: [Errno 12] Cannot allocate memory"),
        (1, "terminate called after throwing an instance of 'std::bad_alloc'"),
        (1, "  exitcode  : -9 (pid: 4711)\n  traceback : Signal 9 (SIGKILL) received by PID 4711"),
        (-9, ""),
        (137, ""),
    ],
)
def test_want_of_memory_is_recognised(code: int, stderr: str) -> None:
    assert sweep.no_memory(code, stderr)


@pytest.mark.parametrize("stderr", ["", "ValueError: 5 of 9", "exitcode  : -6 (pid: -9)", "exitcode  : -99 (pid: 1)"])
def test_other_failures_are_not_want_of_memory(stderr: str) -> None:
    assert not sweep.no_memory(1, stderr)


def test_the_last_error_is_the_cause_and_not_another_ranks_end() -> None:
    peer = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:6789"
    elastic = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n======\nexitcode  : 1 (pid: 5)"
    assert sweep.last_error(1, f"Traceback\n  KeyError: 'a'\n{peer}\n{elastic}") == "KeyError: 'a'"
    assert sweep.last_error(1, f"{peer}\n{elastic}") == peer
    killed = f"{peer}\n  traceback : Signal 11 (SIGSEGV) received by PID 7"
    assert sweep.last_error(1, killed) == "traceback : Signal 11 (SIGSEGV) received by PID 7"
    assert sweep.last_error(3, "no idea") == "exit code 3"


def test_a_job_over_its_time_limit_fails() -> None:
    assert sweep.launch(replace(ROW, steps=10**9), timeout=1) == ("failed", "no end after 1 s", {})


def job(mark: str) -> tuple[set[int], set[int]]:
    """A sweep's torchrun, and its workers that have met (they have threads), by what their environment holds."""
    launchers, workers = set(), set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if b"sweep_worker.py" in command and mark.encode() in (process / "environ").read_bytes():
                if b"torch.distributed.run" in command:
                    launchers.add(int(process.name))
                elif "\nThreads:\t1\n" not in (process / "status").read_text():
                    workers.add(int(process.name))
    return launchers, workers


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_job_that_is_ended(how: signal.Signals, tmp_path: Path) -> None:
    """By a word to the sweep, and where its torchrun is killed."""
    mark = str(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(REPO), "SWEEP_MARK": mark}
    command = sweep_command(tmp_path, "--steps", "1000000")
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + 120
        while len(job(mark)[1]) < 2:
            assert process.poll() is None and time.monotonic() < until, "no job was started"
            time.sleep(0.1)
        if how == signal.SIGTERM:
            process.terminate()
            assert process.wait(timeout=100) == 128 + signal.SIGTERM
        else:
            os.kill(job(mark)[0].pop(), signal.SIGKILL)
            assert process.wait(timeout=100) == 0
            (entry,) = map(json.loads, (tmp_path / "out/rows.jsonl").read_text().splitlines())
            assert entry["status"] == "out of memory" and "SIGKILL" in entry["why"]
    assert job(mark) == (set(), set())


def sweep_command(folder: Path, *arguments: str) -> list[str]:
    """A sweep of the debug model on two processes."""
    command = [sys.executable, str(REPO / "scripts/bench/sweep.py"), "--output", str(folder / "out")]
    return [*command, "--flavor", "debug", "--seq", "64", "--nproc", "2", "--dtype", "float32", *arguments]


# the sweep


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


def test_a_sweep_that_ends_in_the_midst_keeps_the_rows_before(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [ROW, replace(ROW, batch=1)]

    def launch(row: sweep.Row, timeout: float) -> Any:
        if row == rows[1]:
            raise KeyboardInterrupt
        return "ok", "", {"tokens_per_second": 1.0}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "launch", launch)
        with pytest.raises(KeyboardInterrupt):
            sweep.sweep(rows, CPU, path, fresh=False, timeout=1)
    assert run(rows, path, {})[1] == rows[1:]


def test_progress_says_which_row_of_how_many_and_when_it_may_end(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.0, 60.0, 180.0])
    monkeypatch.setattr(sweep.time, "monotonic", lambda: next(clock))
    rows = [replace(ROW, batch=number) for number in (1, 2, 3)]
    run(rows, tmp_path / "rows.jsonl", {})
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "3 rows: 3 to run, 0 finished before or refused"
    assert lines[1].endswith("1/4 none float32; elapsed 0:00:00, ETA unknown") and lines[1].startswith("[1/3] fsdp2 x2")
    assert lines[3].startswith("[2/3]") and lines[3].endswith("elapsed 0:01:00, ETA 0:02:00")
    assert lines[5].startswith("[3/3]") and lines[5].endswith("elapsed 0:03:00, ETA 0:01:30")


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("out of memory", 0), ("refused", 0), ("failed", 1)])
def test_only_a_failed_row_fails_the_sweep(
    status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    found = [record(), record(status=status, why="because")]
    monkeypatch.setattr(sweep, "describe_machine", lambda: CPU)
    monkeypatch.setattr(sweep, "sweep", lambda *_: found)
    monkeypatch.setattr(sweep.signal, "signal", lambda *_: None)
    assert sweep.main(["--output", str(tmp_path), "--json"]) == code
    assert json.loads(capsys.readouterr().out) == found


# the table


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split(" | ")] for line in text.splitlines() if line.startswith("| ")]


def test_markdown_says_what_was_measured_where_and_how() -> None:
    known = {**record(machine=MI100), "mfu": 0.1234, "step_ms": 99.94}
    text = sweep_table.markdown([known, record(), record(status="out of memory", why="CUDA out of memory")])
    text += sweep_table.markdown([record(status="failed", why="KeyError: a | b\nc")])
    rows = cells(text)
    assert len(set(map(len, rows))) == 1
    assert "99.9 | 7,000 | 8,000 | 10,000 | 3.46 | 12.3% |" in text
    assert "| out of memory |" in text and "| failed: KeyError: a \\| b c |" in text and "| n/a |" in text
    assert "torch 2.13.0" in text and "2026-11-21" in text and "Medians of 32 steps after 5" in text
    assert "NCCL" in sweep_table.footer([known]) and "gloo" in sweep_table.footer([record()])
    assert "2 processes, each on AMD Instinct MI100 (gfx908, 32 GiB)" in sweep_table.markdown([known])


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


def test_csv_holds_every_figure_and_what_a_row_depends_on() -> None:
    found = list(csv.DictReader(io.StringIO(sweep_table.to_csv([record(), record(status="failed", why='a, "b"')]))))
    assert found[0]["layout"] == "fsdp2" and found[0]["supervised"] == "0.5" and found[0]["torch"] == "2.13.0"
    assert found[0]["step_ms_q1"] == "4000.0" and found[0]["mfu"] == "" and found[0]["peak_memory_gib"] == "3.456"
    assert found[1]["why"] == 'a, "b"' and found[1]["step_ms"] == ""


def test_without_matplotlib_the_plot_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sweep_table.plot([record()], tmp_path / "x.png")
    assert "[bench]" in capsys.readouterr().err and not (tmp_path / "x.png").exists()


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
