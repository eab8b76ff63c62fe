"""The results table: layout x local batch x gradient accumulation x activation checkpointing x dtype.

    python scripts/bench/sweep.py --preset teff|published|debug [--output FOLDER]
    python scripts/bench/sweep.py --layout fsdp2 pp --batch 1 4 --ga 8 --checkpointing none full --dtype bfloat16

Each row is a torchrun job of its own, so that one which runs out of memory is a row of the table and not the end of the
sweep. What is finished stays in the output folder (rows.jsonl) and is not run again, unless --fresh. The table goes to
stdout and, as Markdown, CSV and a plot, into the folder. Exit code 1: a row failed otherwise than for want of memory.
"""

import argparse
import datetime
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import sweep_table
import torchrun_job

from titan_mi100.cli import exit_code
from titan_mi100.config.check import check
from titan_mi100.config.settings import (
    ActivationCheckpointConfig,
    Config,
    ModelConfig,
    ParallelismConfig,
    TrainingConfig,
)
from titan_mi100.planning.hardware import default_process_count
from titan_mi100.shapes import families

WORKER = Path(__file__).with_name("sweep_worker.py")
T_EFF = 100_000  # tokens per step of --preset teff
FINISHED = ("ok", "out of memory")  # not run again

Record = dict[str, Any]  # a row, what became of it, and what was measured


@dataclass(frozen=True)
class Row:
    """All that a row's result depends on, but for the machine."""

    layout: str
    processes: int
    batch: int  # rows per data-parallel rank and forward
    ga: int
    checkpointing: str
    dtype: str
    flavor: str
    seq: int
    steps: int
    warmup: int
    supervised: float  # share of the tokens

    def __str__(self) -> str:
        return f"{self.layout} x{self.processes} {self.batch}/{self.ga} {self.checkpointing} {self.dtype}"


def _pp(degree: int, schedule: str) -> dict[str, Any]:
    return {"pipeline_parallel_degree": degree, "pipeline_parallel_schedule": schedule}


# the processes it needs, a multiple of: a mixed layout is one of 2 with what the others leave -> [parallelism]
LAYOUTS: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "fsdp2": (1, lambda n: {"zero_stage": 3}),
    "fsdp2-zero2": (1, lambda n: {"zero_stage": 2}),
    "fsdp2-zero1": (1, lambda n: {"zero_stage": 1}),
    "ddp": (1, lambda n: {"zero_stage": 0}),
    # compressed from the second step on, so that all timed steps are
    "ddp-powersgd": (1, lambda n: {"zero_stage": 0, "powersgd_rank": 1, "powersgd_start_step": 2}),
    "hsdp": (4, lambda n: {"data_parallel_replicate_degree": 2}),
    "pp": (2, lambda n: _pp(n, "1F1B")),
    "pp-gpipe": (2, lambda n: _pp(n, "GPipe")),
    "pp-interleaved": (2, lambda n: _pp(n, "Interleaved1F1B")),
    "pp-fsdp2": (4, lambda n: _pp(2, "1F1B")),
    "tp": (2, lambda n: {"tensor_parallel_degree": n}),
    "tp-fsdp2": (4, lambda n: {"tensor_parallel_degree": 2}),
}


def config_of(row: Row) -> Config:
    return Config(
        model=ModelConfig(flavor=row.flavor),
        training=TrainingConfig(
            seq_len=row.seq,
            local_batch_size=row.batch,
            gradient_accumulation_steps=row.ga,
            mixed_precision_param=row.dtype,
        ),
        parallelism=ParallelismConfig(**LAYOUTS[row.layout][1](row.processes)),
        activation_checkpoint=ActivationCheckpointConfig(mode=row.checkpointing),
    )


def refusal(row: Row) -> str:
    """Why the trainer would not start the row; empty: it would."""
    least = LAYOUTS[row.layout][0]
    if row.processes < least or (least == 4 and row.processes % 2):
        even = ", an even number" if least == 4 else ""
        return f"{row.layout} needs at least {least} processes{even}, not {row.processes}"
    return "; ".join(map(str, check(config_of(row), row.processes, with_files=False)))


def choice(common: Row, chosen: dict[str, list[Any]]) -> list[Row]:
    """The product of what was asked for, the last key's values changing first."""
    return [replace(common, **dict(zip(chosen, values, strict=True))) for values in product(*chosen.values())]


def teff(common: Row) -> list[Row]:
    """FSDP2 against a pipeline at the same tokens per step, in so many microbatches."""
    found = []
    for checkpointing, layout, microbatches in product(("none", "full"), ("fsdp2", "pp"), (1, 8, 16)):
        dp = common.processes if layout == "fsdp2" else 1
        name = "pp-gpipe" if layout == "pp" and microbatches < common.processes else layout  # 1F1B needs one per stage
        batch = max(1, round(T_EFF / (common.seq * microbatches * dp)))
        found.append(replace(common, layout=name, batch=batch, ga=microbatches, checkpointing=checkpointing))
    return found


def published(common: Row) -> list[Row]:
    """The published rows' settings, as a pipeline like theirs."""
    rows = []
    for batch, ga, checkpointing, dtype in sweep_table.PUBLISHED:
        layout = "pp" if ga >= common.processes else "pp-gpipe"
        rows.append(replace(common, layout=layout, batch=batch, ga=ga, checkpointing=checkpointing, dtype=dtype))
    return rows


def debug(common: Row) -> list[Row]:
    """Every layout once, on as many processes as it needs; a refused row; checkpointing and bf16."""
    common = replace(common, batch=2, dtype="float32")
    rows = [
        replace(common, layout=name, processes=max(common.processes, least)) for name, (least, _) in LAYOUTS.items()
    ]
    return [
        *rows,
        replace(common, layout="pp", ga=1),
        replace(common, layout="fsdp2", checkpointing="full"),
        replace(common, layout="fsdp2", dtype="bfloat16"),
    ]


PRESETS: dict[str, Callable[[Row], list[Row]]] = {"teff": teff, "published": published, "debug": debug}


def launch(row: Row, timeout: float) -> tuple[str, str, Record]:
    """Run a row to its end: status, why it is not "ok", and what was measured."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "row.json"
        job.write_text(json.dumps(asdict(row)), encoding="utf-8")
        try:
            code, stderr = torchrun_job.run(WORKER, [str(job)], row.processes, timeout)
        except TimeoutError as error:
            return "failed", str(error), {}
        if code == 0:
            return "ok", "", json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    if why := no_memory(code, stderr):
        return "out of memory", why, {}
    return "failed", last_error(code, stderr), {}


# as the allocators of CUDA and HIP say it, Python and numpy, torch on CPU, C++
_NO_MEMORY = re.compile(r"out ?of ?memory|MemoryError|(can't|cannot) allocate memory|bad_alloc", re.IGNORECASE)
_KILLED = re.compile(r"exitcode *: -9\b")  # torchrun's words for a worker that SIGKILL ended


def no_memory(code: int, stderr: str) -> str:
    """What says that a job which failed did so for want of memory; empty: nothing does."""
    if lines := [line.strip() for line in stderr.splitlines() if _NO_MEMORY.search(line)]:
        return lines[-1][:300]
    killed = code in (-signal.SIGKILL, 128 + signal.SIGKILL) or _KILLED.search(stderr)
    return "killed (SIGKILL), as the kernel does" if killed else ""


def last_error(code: int, stderr: str) -> str:
    """One line: the last error that is not merely another rank's end."""
    lines = [line.strip() for line in stderr.splitlines()]
    errors = [line for line in lines if re.search(r"\w(Error|Exception): \S", line)]
    causes = [line for line in errors if not re.search("Connection (closed|reset) by peer", line)]
    signals = [line for line in lines if re.search(r"Signal \d+ \(\w+\) received", line)]
    return [f"exit code {code}", *errors[-1:], *signals[-1:], *causes[-1:]][-1][:300]


def read_records(path: Path) -> list[Record]:
    if not path.exists():
        return []
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except ValueError as error:
        sys.exit(f"{path}: is not what a sweep writes ({error}); choose another --output or remove it")


def write_records(path: Path, records: Iterable[Record]) -> None:
    """All at once, by a rename: a killed sweep leaves the file whole."""
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    aside.replace(path)


def sweep(rows: list[Row], machine: Record, path: Path, fresh: bool, timeout: float) -> list[Record]:
    """Each row's record, in order; those that are finished on this machine are taken from the file."""

    def of(row: Row, record: Record) -> bool:
        return record["row"] == asdict(row) and record["machine"] == machine

    kept = [r for r in read_records(path) if not (fresh and any(of(row, r) for row in rows))]
    found: dict[Row, Record] = {}
    for row in rows:
        finished = [record for record in kept if of(row, record) and record["status"] in FINISHED]
        if finished:
            found[row] = finished[-1]
        elif why := refusal(row):
            found[row] = {"row": asdict(row), "machine": machine, "date": _today(), "status": "refused", "why": why}
    pending = [row for row in rows if row not in found]
    say(f"{len(rows)} rows: {len(pending)} to run, {len(rows) - len(pending)} finished before or refused")
    started = time.monotonic()
    for number, row in enumerate(pending):
        elapsed = time.monotonic() - started
        eta = _duration(elapsed / number * (len(pending) - number)) if number else "unknown"
        say(f"[{rows.index(row) + 1}/{len(rows)}] {row}; elapsed {_duration(elapsed)}, ETA {eta}")
        status, why, measured = launch(row, timeout)
        record = {"row": asdict(row), "machine": machine, "date": _today(), "status": status, "why": why, **measured}
        found[row] = record
        kept = [other for other in kept if not of(row, other)] + [record]
        write_records(path, kept)
        rate = f"{record['tokens_per_second']:,.0f} tok/s" if status == "ok" else ""
        say(f"[{rows.index(row) + 1}/{len(rows)}] {status} {rate or why}")
    return [found[row] for row in rows]


def _today() -> str:
    return datetime.date.today().isoformat()


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def describe_machine() -> Record:
    """In a process of its own, because a process that has looked may hold memory of the GPU."""
    command = [sys.executable, str(WORKER), "--describe"]
    done = subprocess.run(command, stdout=subprocess.PIPE, env=torchrun_job.environment())
    if done.returncode:
        sys.exit("the worker could not describe the machine; its error is above")
    return json.loads(done.stdout)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Row]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS), help="instead of the five that follow")
    free: dict[str, tuple[Any, dict[str, Any]]] = {  # the default, and how it is parsed
        "layout": ("fsdp2", {"choices": list(LAYOUTS)}),
        "batch": (1, {"type": _count, "metavar": "ROWS"}),
        "ga": (1, {"type": _count, "metavar": "FORWARDS"}),
        "checkpointing": ("none", {"choices": ["none", "selective", "full"]}),
        "dtype": ("bfloat16", {"choices": ["bfloat16", "float32", "float64"]}),
    }
    for name, (default, options) in free.items():
        parser.add_argument(f"--{name}", nargs="+", help=f"default: {default}", **options)
    parser.add_argument("--flavor", choices=list(families.PRESETS), help="default: 0.6B, of the preset debug: debug")
    parser.add_argument("--seq", type=_count, help="tokens per row; default: 1024, of the preset debug: 64")
    parser.add_argument("--nproc", type=_count, help="processes; default: the GPUs, or 2 on CPU")
    parser.add_argument("--steps", type=_count, default=32, help="that are timed")
    parser.add_argument("--warmup", type=_count, default=5, help="steps before these, at least 2")
    parser.add_argument("--supervised", type=float, default=0.5, help="share of the tokens")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for a row")
    parser.add_argument("--output", type=Path, default=Path("outputs/sweep"))
    parser.add_argument("--fresh", action="store_true", help="run finished rows again")
    parser.add_argument("--dry-run", action="store_true", help="list the rows")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    arguments = parser.parse_args(argv)
    given = {name: getattr(arguments, name) for name in free}
    if arguments.preset and any(given.values()):
        parser.error(
            f"--preset {arguments.preset} sets the rows; leave out --" + ", --".join(k for k in given if given[k])
        )
    if arguments.warmup < 2:
        parser.error("--warmup must be at least 2: the first step allocates, and PowerSGD begins with the second")
    if not 0 < arguments.supervised <= 1:
        parser.error("--supervised must be above 0 and at most 1")
    tiny = arguments.preset == "debug"
    common = Row(
        "fsdp2", arguments.nproc or default_process_count(), 1, 4, "none", "bfloat16",
        arguments.flavor or ("debug" if tiny else "0.6B"), arguments.seq or (64 if tiny else 1024),
        arguments.steps, arguments.warmup, arguments.supervised,
    )  # fmt: skip
    if arguments.preset:
        return arguments, PRESETS[arguments.preset](common)
    return arguments, choice(common, {name: given[name] or [default] for name, (default, _) in free.items()})


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    arguments, rows = parse(argv)
    if arguments.dry_run:
        for number, row in enumerate(rows, start=1):
            print(f"{number}. {row}" + (f"  refused: {why}" if (why := refusal(row)) else ""))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # by way of `finally`: the job ends, too
    arguments.output.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    path = arguments.output / "rows.jsonl"
    records = sweep(rows, machine, path, arguments.fresh, arguments.timeout)
    text = sweep_table.markdown(records, with_published=arguments.preset == "published")
    (arguments.output / "sweep.md").write_text(text, encoding="utf-8")
    (arguments.output / "sweep.csv").write_text(sweep_table.to_csv(records), encoding="utf-8")
    sweep_table.plot(records, arguments.output / "sweep.png")
    print(json.dumps(records, indent=1) if arguments.json else text)
    return 1 if any(record["status"] == "failed" for record in records) else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
