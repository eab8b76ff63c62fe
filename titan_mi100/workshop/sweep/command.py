"""Measure training steps of a config over layouts, batch sizes, checkpointing and dtypes: one table.

Each row is a job of its own: one that runs out of memory is a row of the table, not the end of the sweep. Rows that do
not fit by plan are named and skipped. What is finished stays in the output folder (rows.jsonl) and is not run again.
The table goes to stdout and into the folder: sweep.md, sweep.csv. Weights and rows are random: a folder with
a config.json is enough, and no data are needed.
"""

import argparse
import datetime
import json
import math
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypedDict

from titan_mi100 import cli as tool
from titan_mi100.config.as_text import settings_parser, to_toml
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config
from titan_mi100.errors import UserError
from titan_mi100.files.durable import replace
from titan_mi100.files.plain import parse_object, read_plain
from titan_mi100.files.schema import validated
from titan_mi100.launch import launcher
from titan_mi100.log import setup_logging
from titan_mi100.planning.cards import Gpu
from titan_mi100.planning.device import find_card, positive, positive_float, size_gib
from titan_mi100.planning.hardware import count_gpus, find_gpu
from titan_mi100.planning.plan import EFFICIENCY, GIB, Plan, make_plan, remedy
from titan_mi100.planning.workload import Workload
from titan_mi100.wording import duration_in_words
from titan_mi100.workshop.columns import SETTINGS, markdown_table
from titan_mi100.workshop.measure import children
from titan_mi100.workshop.measure.parts import PASS, UNAVAILABLE
from titan_mi100.workshop.sweep import table
from titan_mi100.workshop.sweep.rows import AXES, EITHER, LAYOUTS, OWN_LAYOUT, PRESETS, Row, refusal, rows_of, verdict
from titan_mi100.workshop.sweep.table import Record

MEASURE = "titan_mi100.workshop.sweep.worker:measure"
_FINISHED = ("ok", "out of memory")  # not run again
_WARMUP = 2  # steps before the timed ones: the first allocates, and PowerSGD begins with the second
_PROFILED = 3  # steps after the timed ones
_LEAST_SECONDS = 1800  # of a row's time limit
_NO_MEMORY = ("out of memory", "killed: SIGKILL", "bad_alloc")  # SIGKILL: as the kernel ends a process for its memory


def launch(row: Row, config: Config, seconds: float) -> tuple[str, str, Record]:
    """Run a row to its end: status, why it is not "ok", and what was measured. Args: seconds: time limit."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "row.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        asked = {"config_file": str(file), "steps": row.steps, "warmup": row.warmup}
        part = children.run(children.Task(str(row), MEASURE, asked, row.processes, seconds))
    if part.verdict == PASS and part.found:
        return "ok", "", part.found
    if part.verdict == UNAVAILABLE:
        return "refused", part.said, {}
    return "out of memory" if any(word in part.said for word in _NO_MEMORY) else "failed", part.said, {}


class _Finished(TypedDict):
    row: dict[str, Any]
    machine: dict[str, Any]
    date: str
    status: str
    why: str


class _Measured(_Finished):
    """With what worker.measure returns."""

    step_ms_min: float
    step_ms_q1: float
    step_ms: float
    step_ms_q3: float
    step_ms_max: float
    tokens: int
    tokens_per_second: float
    peak_memory_gib: float
    mfu: float | None
    comm_ms: float
    comm_exposed_ms: float
    comm_ms_by_rank: list[float]
    comm_exposed_ms_by_rank: list[float]
    profiled_step_ms: float


_REMEDY = "choose another --output, or remove the file: its rows are measured again"


def read_records(path: Path) -> list[Record]:
    """Read the records that a sweep has written; those of older versions are kept, and match no row."""
    records = list[Record]()
    for number, line in enumerate(read_plain(path).splitlines() if path.exists() else (), 1):
        records.append(parse_object(line, f"{path}: line {number}", _REMEDY))
        if not {"row", "machine", "status"} <= records[-1].keys():
            raise UserError(f"{path}: line {number}: is not what a sweep writes; {_REMEDY}")
    return records


def check_record(record: Record) -> None:
    """Check the record of a finished row. Raises ValueError: a key or type is wrong, or its figures contradict."""
    is_measured = record["status"] == "ok"
    validated(record, _Measured if is_measured else _Finished)
    datetime.date.fromisoformat(record["date"])
    if not is_measured:
        return
    times = [record[key] for key in _Measured.__annotations__ if key.startswith("step_ms")]
    if times != sorted(times) or times[0] <= 0:
        raise ValueError(f"its times {times} must ascend from above 0")
    if not math.isclose(record["tokens_per_second"] * record["step_ms"], 1000 * record["tokens"], rel_tol=1e-6):
        raise ValueError(f"tokens_per_second = {record['tokens_per_second']} is not its tokens in its step_ms")
    if record["peak_memory_gib"] <= 0 or record["profiled_step_ms"] <= 0 or (record["mfu"] or 0) < 0:
        raise ValueError("peak_memory_gib and profiled_step_ms must be above 0, mfu not below")
    for key in ("comm_ms", "comm_exposed_ms"):
        ranks = record[f"{key}_by_rank"]
        if len(ranks) != record["row"]["processes"] or min(ranks) < 0 or max(ranks) != record[key]:
            raise ValueError(f"{key} must be the most of {key}_by_rank, which has a time from 0 for each process")


def sweep(
    rows: Mapping[Row, Config], skipped: Mapping[Row, tuple[str, str]], limits: Mapping[Row, float], machine: Record,
    path: Path,
) -> list[Record]:  # fmt: skip
    """Each row's record, in order; those that are finished on this machine are taken from the file.

    Args:
        skipped: rows that are not run -> status and why.
        limits: seconds for each row.
    """

    def of(row: Row, record: Record) -> bool:
        return record["row"] == asdict(row) and record["machine"] == machine

    def record_of(row: Row, status: str, why: str) -> Record:
        today = datetime.date.today().isoformat()
        return {"row": asdict(row), "machine": machine, "date": today, "status": status, "why": why}

    kept = read_records(path)
    records = {row: record_of(row, *reason) for row, reason in skipped.items()}
    for row in (row for row in rows if row not in skipped):
        finished = [record for record in kept if of(row, record) and record["status"] in _FINISHED]
        if finished:
            try:
                check_record(finished[-1])
            except ValueError as error:
                raise UserError(f"{path}: the record of {row} cannot be: {error}; {_REMEDY}") from None
            records[row] = finished[-1]
    pending, started = [row for row in rows if row not in records], time.monotonic()
    _say(f"{len(rows)} rows: {len(pending)} to run, {len(rows) - len(pending)} finished before, refused or too large")
    for row, (status, why) in skipped.items():
        _say(f"{row}: {status}: {why}")
    for number, row in enumerate(pending, 1):
        elapsed = time.monotonic() - started
        left = duration_in_words(elapsed / (number - 1) * (len(pending) - number + 1)) if number > 1 else "unknown"
        _say(f"[{number}/{len(pending)}] {row}; {duration_in_words(elapsed)} so far, left: {left}")
        status, why, measured = launch(row, rows[row], limits[row])
        records[row] = {**record_of(row, status, why), **measured}
        kept = [record for record in kept if not of(row, record)] + [records[row]]
        replace(path, "".join(json.dumps(record) + "\n" for record in kept))  # at once: a kill leaves it intact
        rate = f"{measured['tokens_per_second']:,.0f} toks/s" if status == "ok" else why
        _say(f"[{number}/{len(pending)}] {status}: {rate}")
    return [records[row] for row in rows]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    return tool.exit_code(lambda: _sweep(*_parser().parse_known_args(sys.argv[1:] if argv is None else argv)))


def _sweep(options: argparse.Namespace, settings: Sequence[str]) -> int:
    setup_logging(0)
    rows = asked_rows(options, settings)
    for row in (row for row in rows if row.layout.endswith("pp-gpipe") and row.ga < row.processes):
        _say(f"{row}: runs as GPipe, as 1F1B needs a microbatch (GA) for each stage")
    if not options.dry_run and (options.device or options.memory):
        raise UserError("--device and --memory are for --dry-run: a sweep measures the cards that are here")
    machine, gpu, card = _machine(options)
    refused = {row: why for row, config in rows.items() if (why := refusal(row, config))}
    planned = {row: config for row, config in rows.items() if card and row not in refused}
    cards = {row: min(card, round(config.memory.limit_gib * GIB) or card) for row, config in planned.items()}
    plans = {row: make_plan(Workload.of(config, row.processes), cards[row], gpu) for row, config in planned.items()}
    verdicts = {row: verdict(plan) for row, plan in plans.items()}
    if options.dry_run:
        print(_dry_run(options, rows, refused, plans, gpu, card))
        return 0
    skipped = {row: ("refused", why) for row, why in refused.items()}
    skipped |= {row: ("does not fit", f"{words}, by plan") for row, (starts, words) in verdicts.items() if not starts}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of `finally`: the job ends, too
    if options.output.exists() and not options.output.is_dir():
        raise UserError(f"--output {options.output}: is not a folder; name another one")
    options.output.mkdir(parents=True, exist_ok=True)
    launcher.set_defaults(next(iter(rows)).processes)  # a row gets the environment that `train` would give it
    limits = {row: options.timeout or max(_LEAST_SECONDS, 10 * _seconds(row, plans.get(row))) for row in rows}
    records = sweep(rows, skipped, limits, machine, options.output / "rows.jsonl")
    text = table.markdown(records, with_published=options.preset == "published")
    replace(options.output / "sweep.md", text)
    replace(options.output / "sweep.csv", table.to_csv(records))
    print(json.dumps(records, indent=1) if options.json else text)
    return 1 if any(record["status"] == "failed" for record in records) else 0


def asked_rows(options: argparse.Namespace, settings: Sequence[str]) -> dict[Row, Config]:
    """The rows that the command asks for, with their configs.

    Raises:
        UserError: the config's own mistakes; two options that set the same thing; an objective other than sft.
    """
    preset, processes = PRESETS.get(options.preset), options.gpus or count_gpus() or 2
    axes: dict[str, list[Any]] = {axis: choices for axis in AXES if (choices := getattr(options, axis))}
    cells = list(preset.cells) if preset else [{}]
    if EITHER.keys() <= {*axes, *cells[0]}:
        raise UserError("--tokens and GA (of --ga or the preset) both set a step's forwards; leave one of them out")
    if both := [axis for axis in axes if axis in cells[0]]:
        raise UserError(f"--{both[0]} is set by --preset {options.preset}; leave one of them out")
    if preset and preset.tokens and "ga" not in axes:
        axes.setdefault("tokens", [preset.tokens])
    layouts = options.layout or (preset.layouts(processes) if preset else [OWN_LAYOUT])
    set_here = {AXES[name]: axis for axis in (*cells[0], *axes) for name in (axis, EITHER.get(axis, axis))}
    for name in (word.partition("=")[0].removeprefix("--") for word in settings):
        axis = "layout" if name.startswith("parallelism.") and layouts != [OWN_LAYOUT] else set_here.get(name)
        if axis:
            who = f"--preset {options.preset}" if preset and not getattr(options, axis) else f"--{axis}"
            raise UserError(f"--{name} is set by {who}, too; leave one of them out")
    config = load_config([*_start(options.preset, settings), *settings], None, with_files=False)
    if config.objective.name != "sft":
        problem = f'[objective] name = "{config.objective.name}" needs rows of its own; a sweep has random ones'
        raise UserError(f"{problem}: set --objective.name sft, or name a config that learns texts")
    return rows_of(config, processes, layouts, cells, axes, steps=options.steps, warmup=_WARMUP)


def _start(preset: str, settings: Sequence[str]) -> list[str]:
    """The config and the model of a command that names none."""
    named = {word.partition("=")[0] for word in settings}
    config = [] if "--job.config_file" in named else ["--job.config_file", "finetune"]
    needs_model = config and not named & {"--model.flavor", "--checkpoint.initial_load_path"}
    return [*config, *(["--model.flavor", "debug" if preset == "debug" else "0.6B"] if needs_model else [])]


def _machine(options: argparse.Namespace) -> tuple[Record, Gpu | None, int]:
    """The machine as a record names it, its data sheet, and bytes of a card; 0: a CPU."""
    if options.dry_run and (options.device or options.memory or not count_gpus()):
        gpu, card = find_card(options.device, options.memory, "mi100")
        return {}, gpu, card
    described = children.run(children.MACHINE)
    if not described.found:
        raise UserError(f"this machine's device cannot be described: {described.said}; run titan-mi100 doctor")
    machine = described.found
    known = find_gpu(machine["arch"], machine["compute_units"], machine["memory"])
    kept = {name: machine[name] for name in ("device", "memory", "torch", "runtime")}
    return {**kept, "kind": known.name if known else ""}, known, machine["memory"]


def _seconds(row: Row, plan: Plan | None) -> float:
    """Of the whole row, by plan; 0: not known."""
    return (row.warmup + row.steps + _PROFILED) * ((plan and plan.step) or 0.0)


def _dry_run(
    options: argparse.Namespace, rows: Mapping[Row, Config], refused: Mapping[Row, str], plans: Mapping[Row, Plan],
    gpu: Gpu | None, card: int,
) -> str:  # fmt: skip
    """Each row with the plan's verdict, memory and time, as a table or as JSON."""
    words = {row: verdict(plan)[1] for row, plan in plans.items()}
    words |= {row: f"refused: {why}" for row, why in refused.items()}
    steps = {row: plan.step for row, plan in plans.items() if plan.step}
    if options.json:
        about = [{"row": asdict(row), "verdict": words[row], "planned_step_seconds": steps.get(row)} for row in rows]
        return json.dumps(about, indent=1)
    body = [
        [*table.settings_cells(asdict(row)), f"{1000 * steps[row]:,.0f}" if row in steps else "", words[row]]
        for row in rows
    ]
    first, starting = next(iter(rows)), [row for row, plan in plans.items() if verdict(plan)[0]]
    heading = f"{first.processes} x {gpu.name if gpu else 'card'}, {card / GIB:.1f} GiB each"
    summary = f"{len(starting)} of {len(rows)} rows would run"
    if steps and starting:
        summary += f", for {duration_in_words(sum(_seconds(row, plans[row]) for row in starting))}, if a card reaches "
        summary += f"{EFFICIENCY:.0%} of its data sheet's rate and half of its link's rate (assumed, not measured)"
    elif plans and not starting:
        summary += f"; what helps most: {remedy(min(plans.values(), key=lambda plan: plan.most))}"
    columns = [*SETTINGS, "planned step_ms", "by plan"]
    return f"{heading}; {table.about(asdict(first))}\n\n{markdown_table(columns, body)}\n\n{summary}"


def _parser() -> argparse.ArgumentParser:
    epilog = "Exit code: 0, 1 a row failed (not for memory), 2 a mistake. docs/TRAIN.md explains it."
    parser = settings_parser("titan-mi100 sweep", __doc__.splitlines()[0], epilog)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="", metavar="P", help=f"rows of docs/TRAIN.md: {', '.join(PRESETS)}")
    layouts = f"config (default: the config's own), {', '.join(LAYOUTS)}"
    add("--layout", nargs="+", choices=(OWN_LAYOUT, *LAYOUTS), metavar="L", help=layouts)
    add("--batch", nargs="+", type=positive, metavar="N", help="B_micro; this and the next: default the config's")
    add("--ga", nargs="+", type=positive, metavar="N", help="gradient accumulation")
    tokens = f"tokens per step (T_eff), instead of --ga; with --preset teff {PRESETS['teff'].tokens:,}"
    add("--tokens", nargs="+", type=positive_float, metavar="N", help=tokens)
    modes, dtypes = ("none", "selective", "full"), ("bfloat16", "float16", "float32", "float64")
    add("--ckpt", nargs="+", choices=modes, metavar="M", help=f"activation checkpointing: {', '.join(modes)}")
    add("--dtype", nargs="+", choices=dtypes, metavar="T", help=f"of the computation: {', '.join(dtypes)}")
    add("--gpus", type=positive, default=0, metavar="N", help="processes; default: the cards, or 2 on a CPU")
    add("--steps", type=positive, default=5, metavar="N", help="that are timed (default 5)")
    add(
        "--timeout",
        type=positive_float,
        default=0,
        metavar="S",
        help="seconds for a row; default: 10 times the plan's, at least 1800",
    )
    add("--output", type=Path, default=Path("outputs/sweep"), metavar="FOLDER", help="default: outputs/sweep")
    add("--dry-run", action="store_true", help="list the rows, with what the plan says of each")
    add("--device", default="", metavar="NAME", help="with --dry-run: a card that is not here, as for plan")
    add("--memory", type=size_gib, default=0, metavar="32GB", help="with --dry-run: memory of a card, in GiB")
    add("--json", action="store_true", help="print JSON instead of the table")
    return parser
