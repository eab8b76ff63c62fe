"""The results table: its rows, what the plan says of them, what they refuse, and that no row ends the sweep."""

import csv
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from faulty_parts import sweep_figures

from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config
from titan_mi100.errors import UserError
from titan_mi100.tools import plan
from titan_mi100.workshop.columns import FIGURES, SETTINGS
from titan_mi100.workshop.measure.children import Task
from titan_mi100.workshop.sweep import command, rows, table
from titan_mi100.workshop.sweep.rows import LAYOUTS, Row, refusal

CPU = {"device": "CPU, 2 cores", "kind": "", "memory": 0, "torch": "2.13.0", "runtime": ""}
MI100 = {**CPU, "device": "AMD Instinct MI100 (gfx908, 32 GiB)", "kind": "MI100", "memory": 32 << 30}
LEAN = ("--job.config_file", "qwen3_8b_fsdp2_8bit")
SMALL = ("--model.flavor", "debug", "--training.seq_len", "64", "--dtype", "float32", "--gpus", "2")


def rows_of(*arguments: str) -> dict[Row, Config]:
    return command.asked_rows(*command._parser().parse_known_args(arguments))


ROW = next(iter(rows_of(*SMALL, "--layout", "fsdp2", "--batch", "2", "--ga", "4")))


def record(row: Row = ROW, status: str = "ok", machine: dict[str, Any] = CPU, why: str = "") -> dict[str, Any]:
    about = {"row": asdict(row), "machine": machine, "date": "2026-11-21", "status": status, "why": why}
    return about | (sweep_figures(row.processes) if status == "ok" else {})


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_one_that_the_trainer_accepts_and_is_refused_with_fewer_processes(name: str) -> None:
    least = LAYOUTS[name][0]
    ask = (*SMALL[:-2], "--batch", "2", "--ga", "4", "--layout", name, "--gpus")
    assert [refusal(*pair) for pair in rows_of(*ask, str(max(least, 2))).items()] == [""]
    if least > 1:
        [(row, config)] = rows_of(*ask, str(least - 1)).items()
        assert row.tokens == 0 or least == 2
        assert refusal(row, config).startswith(f"{name} needs at least {least} processes")


def test_layouts_are_what_their_names_say() -> None:
    configs = rows_of(*SMALL[:-2], "--ga", "4", "--gpus", "4", "--layout", *LAYOUTS)
    layouts = {row.layout: config.layout(4) for row, config in configs.items()}
    assert {name: (at.pp, at.dp_replicate, at.dp_shard, at.tp, at.zero_stage) for name, at in layouts.items()} == {
        "fsdp2": (1, 1, 4, 1, 3),
        "fsdp2-zero2": (1, 1, 4, 1, 2),
        "fsdp2-zero1": (1, 1, 4, 1, 1),
        "fsdp2+pp": (2, 1, 2, 1, 1),
        "pp": (4, 1, 1, 1, 1),
        "pp-gpipe": (4, 1, 1, 1, 1),
        "pp-interleaved": (4, 1, 1, 1, 1),
        "ddp": (1, 4, 1, 1, 0),
        "ddp+powersgd": (1, 4, 1, 1, 0),
        "hsdp": (1, 2, 2, 1, 3),
        "tp": (1, 1, 1, 4, 3),
        "fsdp2+tp": (1, 1, 2, 2, 3),
        "cp": (1, 1, 1, 1, 3),
    }
    assert configs[next(row for row in configs if row.layout == "ddp+powersgd")].parallelism.powersgd_start_step == 2


def test_any_config_is_a_base_and_only_the_axes_change_it() -> None:
    for name, layout in {
        "qwen3_8b_pp2_8bit": "pipeline of 2", "qwen3.5_9b_fsdp2_offload": "FSDP2 over 2 (ZeRO-3)",
        "qwen3_8b_lora": "FSDP2 over 2 (ZeRO-1)",
    }.items():  # fmt: skip
        base = load_config(["--job.config_file", name], None, with_files=False)
        [(row, config)] = rows_of("--job.config_file", name, "--gpus", "2").items()
        assert (row.layout, row.ga) == (layout, base.batch(2).gradient_accumulation_steps)
        assert replace(config, training=base.training, notes=base.notes, job=base.job) == base
        [(row, config)] = rows_of("--job.config_file", name, "--gpus", "2", "--batch", "2", "--ga", "7").items()
        assert (row.batch, row.ga, row.tokens) == (2, 7, 2 * 7 * config.layout(2).dp_degree * base.training.seq_len)
        assert (config.optimizer, config.memory, config.lora) == (base.optimizer, base.memory, base.lora)
    [(row, _)] = rows_of(*LEAN, "--gpus", "2", "--optimizer.state", "bf16").items()
    assert row.settings.endswith('optimizer.state = "bf16", optimizer.master = "bf16_sr"') and row.model == "8B"
    one, other = (next(iter(rows_of(*LEAN, "--gpus", "2", "--optimizer.state", state))) for state in ("fp32", "8bit"))
    assert one.digest != other.digest  # a finished row of the one is none of the other


def test_presets_are_the_users_tables() -> None:
    found = rows_of(*LEAN, "--preset", "teff", "--gpus", "2")
    expected = [(layout, batch, mode) for layout in ("fsdp2", "pp") for batch, mode in rows._MICRO]
    assert [(row.layout, row.batch, row.checkpointing) for row in found] == expected
    first = next(iter(found))  # the users' example: S 1024, B_micro 1, GA 50, N 2
    assert (first.seq, first.batch, first.ga, first.processes, first.tokens) == (1024, 1, 50, 2, 102_400)
    assert all(abs(row.tokens - 102_400) <= row.seq * row.batch * 2 for row in found)
    assert {row.layout for row in rows_of(*LEAN, "--preset", "teff", "--gpus", "8")} == {"fsdp2", "fsdp2+pp"}
    theirs = rows_of("--preset", "published", "--gpus", "2")
    assert [(row.batch, row.ga, row.checkpointing, row.dtype) for row in theirs] == [*rows.PUBLISHED]
    gpipe = {row.ga: config.parallelism.pipeline_parallel_schedule for row, config in theirs.items()}
    assert gpipe == {1: "GPipe", 8: "1F1B", 4: "1F1B"} and not any(refusal(*pair) for pair in theirs.items())
    assert {row.layout for row in theirs} == {"pp", "pp-gpipe"}
    chosen = rows_of("--preset", "published", "--gpus", "2", "--layout", "ddp+powersgd", "fsdp2")
    assert len(chosen) == 18 and {row.layout for row in chosen} == {"ddp+powersgd", "fsdp2"}
    assert [row.tokens for row in rows_of("--gpus", "2", "--tokens", "4096", "8192")] == [4096, 8192]


def test_a_dry_run_says_of_each_row_what_the_plan_says(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ask = ["--preset", "teff", "--dry-run", "--gpus", "2", "--device", "mi100"]
    assert command.main([*LEAN, *ask]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("| fsdp2", "| pp"))]
    for place, settings in {
        0: ["--activation_checkpoint.mode", "none", "--training.gradient_accumulation_steps", "50"],
        6: [
            *("--training.local_batch_size", "8", "--training.gradient_accumulation_steps", "12"),
            *("--parallelism.pipeline_parallel_degree", "2"),
        ],
    }.items():
        plan.main([*LEAN, *settings, "--gpus", "2", "--device", "mi100"])
        [words] = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("fits", "does not"))]
        assert len(lines) == 8 and words in lines[place], (words, lines[place])
    assert command.main([*LEAN, *ask, "--json", "--optimizer.state", "fp32", "--optimizer.master", "fp32"]) == 0
    verdicts = [entry["verdict"] for entry in json.loads(capsys.readouterr().out)]
    assert len(verdicts) == 8 and all(words.startswith("does not fit: ") and "tried" not in words for words in verdicts)
    assert command.main([*LEAN, *ask, "--optimizer.state", "fp32", "--optimizer.master", "fp32"]) == 0
    assert "0 of 8 rows would run; what helps most: keep " in capsys.readouterr().out
    assert command.main([*LEAN, *ask[:-2], "--memory", "80GB"]) == 0  # a card whose speed is not known
    assert "8 of 8 rows would run\n" in capsys.readouterr().out and not [*tmp_path.iterdir()]


def run(asked: dict[Row, Config], path: Path, outcomes: dict[Row, str], **options: Any) -> tuple[list[str], list[Row]]:
    """The rows' statuses, and which of them were started. "kill": the sweep is told to end in this row."""
    started = []

    def launch(row: Row, config: Config, seconds: float) -> tuple[str, str, dict[str, Any]]:
        started.append(row)
        status = outcomes.get(row, "ok")
        if status == "kill":
            raise SystemExit(143)
        return status, "" if status == "ok" else "why", sweep_figures(row.processes) if status == "ok" else {}

    skipped = {row: ("refused", why) for row, config in asked.items() if (why := refusal(row, config))}
    options = {"skipped": skipped, "limits": dict.fromkeys(asked, 1.0), "machine": CPU, **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "launch", launch)
        try:
            records = command.sweep(asked, path=path, **options)
        except SystemExit:
            return ["killed"], started
    assert [entry["row"] for entry in records] == [asdict(row) for row in asked]
    return [entry["status"] for entry in records], started


def test_a_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    asked = rows_of(*SMALL, "--batch", "1", "2", "3", "--ga", "4") | rows_of(*SMALL[:-2], "--layout", "tp", "--gpus=1")
    a, b, c, _ = asked
    old = {"row": {"layout": "fsdp2", "flavor": "0.6B"}, "machine": CPU, "status": "ok"}  # of an older version
    path.write_text(json.dumps(old) + "\n")
    outcomes, statuses = {b: "out of memory", c: "failed"}, ["ok", "out of memory", "failed", "refused"]
    assert run(asked, path, {**outcomes, b: "kill"}) == (["killed"], [a, b])
    assert run(asked, path, outcomes) == (statuses, [b, c])
    assert run(asked, path, outcomes) == (statuses, [c])  # a failed one is tried again, want of memory is a result
    only = {a: asked[a]}
    assert run(asked, path, {}) == (["ok", "out of memory", "ok", "refused"], [c])
    other = {**CPU, "torch": "2.8.0"}
    assert run(only, path, {}, machine=other) == (["ok"], [a])
    assert run(only, path, {}) == (["ok"], [])
    longer = {replace(a, steps=31): asked[a]}
    assert run(longer, path, {})[1] == [*longer]
    assert json.loads(path.read_text().splitlines()[0]) == old


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step_ms": -5.0}, "its times [900.0, 950.0, -5.0, 1050.0, 1100.0] must ascend from above 0"),
        ({"step_ms_min": 960.0}, "must ascend"),
        ({"tokens_per_second": "many"}, "tokens_per_second = 'many' must be a finite number"),
        ({"tokens_per_second": 4000.0}, "tokens_per_second = 4000.0 is not its tokens in its step_ms"),
        ({"tokens": -1}, "tokens = -1 must be a whole number"),
        ({"peak_memory_gib": 0.0}, "peak_memory_gib and profiled_step_ms must be above 0"),
        ({"mfu": -0.1}, "mfu not below"),
        ({"comm_ms": 1.0}, "comm_ms must be the most of comm_ms_by_rank"),
        ({"comm_exposed_ms_by_rank": [3.0]}, "has a time from 0 for each process"),
        ({"date": "yesterday"}, "Invalid isoformat string: 'yesterday'"),
        ({"status": "out of memory"}, "it has the unknown key"),
        ({"watts": 3}, "it has the unknown key watts"),
    ],
)
def test_a_record_that_cannot_be_is_not_believed(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path, asked = tmp_path / "rows.jsonl", rows_of(*SMALL, "--layout", "fsdp2", "--batch", "2", "--ga", "4")
    sound = record()
    path.write_text(json.dumps(sound) + "\n")
    assert run(asked, path, {}) == (["ok"], [])
    path.write_text(before := json.dumps(sound | change) + "\n")
    with pytest.raises(UserError) as caught:
        run(asked, path, {})
    assert f"{path}: the record of {ROW} cannot be: " in str(caught.value) and said in str(caught.value)
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "must hold one JSON object"),
        ('{"a": 1}', "is not what a sweep writes"),
        ('{"row": NaN}', "NaN"),
        ("{", "JSON"),
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record()) + f"\n{line}\n")
    with pytest.raises(UserError, match=r"rows\.jsonl: line 2: ") as caught:
        command.read_records(path)
    assert said in str(caught.value) and "choose another --output, or remove the file" in str(caught.value)


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Runs the command in this process, with faulty_parts' rows in processes of their own; the records."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "MEASURE", "faulty_parts:sweep_row")
    monkeypatch.setattr(command.launcher, "set_defaults", lambda processes: monkeypatch.setenv("GIVEN", str(processes)))
    monkeypatch.setattr(command.children, "MACHINE", Task("machine", "faulty_parts:machine"))

    def sweep(*arguments: str) -> list[dict[str, Any]]:
        assert command.main([*SMALL, "--output", "out", *arguments]) == 0
        return [json.loads(line) for line in Path("out/rows.jsonl").read_text().splitlines()]

    return sweep


def test_a_row_that_runs_out_of_memory_is_a_row(
    faulty: Callable[..., list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    records = faulty("--batch", "1", "2", "--layout", "fsdp2", "pp", "--ga", "1")
    assert [entry["status"] for entry in records] == ["ok", "out of memory"] * 2
    assert "MemoryError: Unable to allocate 80 GiB" in records[1]["why"]
    assert records[0]["profiled_step_ms"] == 2  # of the launcher, as in training: fine-grained PCIe memory, threads
    out, err = capsys.readouterr()
    assert out.strip() == Path("out/sweep.md").read_text().strip() and out.count("| out of memory: ") == 2
    assert err.count("runs as GPipe, as 1F1B needs a microbatch") == 2 and out.count("| pp-gpipe | 2 ") == 2
    assert "pp-gpipe: the schedule is GPipe" in out
    lines = [line for line in out.splitlines() if line.startswith("| ")]
    header = [cell.strip() for cell in lines[0].strip("| ").split("|")]
    assert header == [*SETTINGS, *FIGURES]
    first = dict(zip(header, (cell.strip() for cell in lines[2].strip("| ").split("|")), strict=True))
    assert (first["B_micro"], first["T_eff"], first["ckpt"], first["step_ms"]) == ("1", "128", "full", "1,000")
    assert (first["peak GiB"], first["peak GB"], first["MFU"]) == ("2.00", "2.15", "n/a")
    table_rows = list(csv.DictReader(Path("out/sweep.csv").read_text().splitlines()))
    assert [entry["status"] for entry in table_rows] == ["ok", "out of memory"] * 2
    assert (table_rows[0]["GA"], table_rows[0]["toks/s"], table_rows[0]["peak GB"]) == ("1", "3000.0", "2.147483648")
    assert table_rows[1]["step_ms"] == ""


def test_a_killed_sweep_leaves_no_process_and_goes_on(faulty: Callable[..., list[dict[str, Any]]]) -> None:
    Path("hang").touch()
    code = (
        "import sys; from titan_mi100.workshop.measure.children import Task\n"
        "from titan_mi100.workshop.sweep import command\n"
        "command.MEASURE = 'faulty_parts:sweep_row'\n"
        "command.children.MACHINE = Task('machine', 'faulty_parts:machine')\n"
        "sys.exit(command.main(sys.argv[1:]))"
    )
    ask = ["--batch", "1", "4", "5"]
    environment = {**os.environ, "PYTHONPATH": f"{REPO}:{REPO / 'tests'}"}
    job = subprocess.Popen([sys.executable, "-c", code, *SMALL, "--output", "out", *ask], env=environment)
    until = time.monotonic() + 300
    while not Path("hangs").exists():
        assert job.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    job.kill()
    job.wait()
    Path("hang").unlink()
    assert len(Path("out/rows.jsonl").read_text().splitlines()) == 1
    before = Path("out/rows.jsonl").read_text()
    assert [entry["status"] for entry in faulty(*ask)] == ["ok"] * 3
    assert Path("out/rows.jsonl").read_text().startswith(before)
    while any(b"faulty_parts:sweep_row" in path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")):
        assert time.monotonic() < until  # the killed sweep's processes end with it
        time.sleep(0.05)


def test_a_row_that_does_not_fit_the_card_is_named_and_skipped(
    faulty: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = {"device": "MI100", "memory": 32 << 30, "torch": "2.8", "runtime": "", "kind": "MI100"}
    monkeypatch.setattr(command, "_machine", lambda options: (card, command.find_gpu("gfx908", 120), 32 << 30))
    ask = ["--model.flavor=8B", "--output", "out", "--gpus", "2", "--batch", "1", "64"]
    assert command.main([*LEAN, *ask]) == 0
    out, err = capsys.readouterr()
    [entry] = [json.loads(line) for line in Path("out/rows.jsonl").read_text().splitlines()]
    assert entry["row"]["batch"] == 1 and "B_micro 64, GA 1, ckpt full, bfloat16: does not fit: " in err
    [line] = [line for line in out.splitlines() if "| does not fit: " in line]
    assert "of 32.0 GiB, by plan" in line


def test_published_figures_stand_beside_ours_only_on_the_same_hardware() -> None:
    ours = rows_of("--preset", "published", "--gpus", "2")
    beside = table.markdown([record(row, machine=MI100) for row in ours], with_published=True)
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in beside.splitlines()]
    [line] = [line for line in cells if line[:7] == ["pp", "2", "4", "8", "32,768", "none", "float32"]]
    assert line[-4:] == ["5,404", "517", "6,085", "27.3"] and "do not compare" not in beside
    apart = [table.markdown([record(row) for row in ours], with_published=True)]
    wider = [replace(row, processes=4) for row in ours]
    apart += [table.markdown([record(row, machine=MI100) for row in wider], with_published=True)]
    smaller = rows_of("--preset", "published", "--gpus", "2", "--model.flavor", "debug")
    apart += [table.markdown([record(row, machine=MI100) for row in smaller], with_published=True)]
    for text in apart:
        assert "published: step_ms" not in text and "| 5,404 " not in text
        assert "The published figures are of 2 MI100, Qwen3-0.6B and rows of 1,024: they do not compare" in text
    assert "ublished" not in table.markdown([record()])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--preset teff --batch 2", "--batch is set by --preset teff; leave one of them out"),
        ("--ga 2 --tokens 4096", "--tokens and GA (of --ga or the preset) both set a step's forwards"),
        ("--preset published --tokens 4096", "--tokens and GA (of --ga or the preset) both set a step's forwards"),
        ("--ga 2 --training.target_tokens_per_step 4096", "--training.target_tokens_per_step is set by --ga, too"),
        ("--batch 2 --training.local_batch_size 4", "--training.local_batch_size is set by --batch, too"),
        ("--preset teff --activation_checkpoint.mode none", "is set by --preset teff, too; leave one of them out"),
        ("--layout pp --parallelism.zero_stage 1", "--parallelism.zero_stage is set by --layout, too"),
        ("--preset teff --parallelism.zero_stage 1", "--parallelism.zero_stage is set by --preset teff, too"),
        ("--device mi100", "--device and --memory are for --dry-run: a sweep measures the cards that are here"),
        ("--job.config_file qwen3_4b_dpo_lora_1gpu", "needs rows of its own; a sweep has random ones"),
        ("--optim.x y", "--optim.x"),
        ("--flavor 8B", "--model.flavor"),
        ("--dry-run --device mi1000", "did you mean mi100"),
    ],
)
def test_a_mistake_is_one_message(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main([*arguments.split(), "--gpus", "2"]) == 2
    err = capsys.readouterr().err
    assert said in err and len(err.splitlines()) == 1 and not [*tmp_path.iterdir()]


@pytest.mark.full
def test_a_real_sweep_has_a_row_that_runs_one_out_of_memory_and_one_refused(tmp_path: Path) -> None:
    def sweep(*ask: str) -> subprocess.CompletedProcess[str]:
        start = [sys.executable, str(REPO / "scripts/bench/sweep.py"), "--output", str(tmp_path / "out"), *SMALL, *ask]
        environment = {**os.environ, "PYTHONPATH": str(REPO)}
        done = subprocess.run(start, capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode == 0, done.stderr
        return done

    large = str(2**16)  # rows, whose random tokens alone are TB
    assert "| out of memory: " in sweep("--layout", "fsdp2", "--batch", large, "--ga", large).stdout
    ask = ("--layout", "fsdp2", "pp-interleaved", "--batch", "2", "--ga", "1", "--steps", "2")
    done = sweep(*ask)
    records = [json.loads(line) for line in (tmp_path / "out/rows.jsonl").read_text().splitlines()]
    assert [entry["status"] for entry in records] == ["out of memory", "ok"], records
    measured = records[1]
    assert measured["tokens"] == measured["row"]["tokens"] == 2 * 2 * 64
    assert measured["tokens_per_second"] == pytest.approx(measured["tokens"] / measured["step_ms"] * 1000)
    assert measured["step_ms_min"] <= measured["step_ms_q1"] <= measured["step_ms"] <= measured["step_ms_max"]
    assert 0 < measured["comm_exposed_ms"] <= measured["comm_ms"] == max(measured["comm_ms_by_rank"])
    assert measured["comm_exposed_ms"] < measured["profiled_step_ms"] and 0.1 < measured["peak_memory_gib"] < 20
    text = (tmp_path / "out/sweep.md").read_text()
    assert done.stdout.strip() == text.strip() and text.count("| refused: ") == 1
    assert len(list(csv.DictReader((tmp_path / "out/sweep.csv").read_text().splitlines()))) == 2
    again = sweep(*ask)
    assert "2 rows: 0 to run" in again.stderr and again.stdout == done.stdout
