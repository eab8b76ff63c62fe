"""A mixture of four sources, interrupted twice on other numbers of processes, against the same run without a stop.

    python scripts/bench/elastic.py --shakespeare tinyshakespeare.txt --gsm8k train.jsonl --png elastic.png

Sources: tinyshakespeare, GSM8K as chats, the Python standard library, made-up words; debug model, seed 42. The run is
stopped twice and goes on, 2 -> 4 -> 1 processes; the other one stays on 2; in fp64 and in fp32. Compared are the rows
of every step and the losses.
"""

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torchrun_job

from titan_mi100.cli import exit_code
from titan_mi100.config.load import load_config
from titan_mi100.data.loader import RowStream
from titan_mi100.data.mixture import Mixture

REPO = Path(__file__).parents[2]
TOKENIZER = REPO / "tests" / "assets" / "tokenizer"
CONFIG = """
[model]
flavor = "debug"
tokenizer_path = "{tokenizer}"
[training]
seq_len = 256
local_batch_size = 1
gradient_accumulation_steps = {accumulation}
steps = {steps}
mixed_precision_param = "{dtype}"
[optimizer]
lr = 3e-3
[data]
weights_in = "documents"
overlong = "split"
[[data.source]]
path = "{folder}/shakespeare"
weight = 0.002
[[data.source]]
path = "{gsm8k}"
name = "gsm8k"
weight = 0.5
[[data.source]]
path = "{folder}/python"
weight = 0.1
[[data.source]]
path = "{folder}/made_up"
weight = 0.398
"""
STEPS, STOPS = 36, ((12, 2), (24, 4), (36, 1))  # (step, processes) of the interrupted run
ROWS = 8  # of a step


def worker(arguments: list[str]) -> None:
    """Train up to a step, save, and write which rows were read and the losses."""
    config_file, folder, stop = arguments
    read: dict[int, list[Any]] = {}
    plain = RowStream.microbatch

    def microbatch(self: RowStream, first_row: int, number: int) -> Any:
        assert isinstance(self.source, Mixture)
        for row in self.row_numbers(first_row, [number]):
            source, index = self.source.find(row)
            read[row] = [source.name, index]
        return plain(self, first_row, number)

    RowStream.microbatch = microbatch  # type: ignore[method-assign]
    from titan_mi100.open_run.start import open_run
    from titan_mi100.parallel import distributed

    world = distributed.init_distributed()
    config = load_config(["--job.config_file", config_file], world.size)
    Path(folder, "checkpoint").mkdir(parents=True, exist_ok=True)
    run = open_run(config, world, Path(folder))
    losses = [run.step().loss for _ in range(run.progress.step, int(stop))]
    run.save()
    run.close()
    last = run.progress.rows_consumed
    record = {"rows": {n: found for n, found in read.items() if n < last}, "losses": losses}
    Path(folder, f"record-{stop}-{world.rank}.json").write_text(json.dumps(record))
    distributed.leave(0, True)


def train(folder: Path, sources: dict[str, Any], dtype: str, stops: tuple[tuple[int, int], ...]) -> tuple[dict, list]:
    """Rows by number, and losses."""
    rows: dict[str, Any] = {}
    losses: list[float] = []
    for stop, processes in stops:
        config = folder.with_name(f"{folder.name}-{processes}.toml")
        config.write_text(CONFIG.format(**sources, accumulation=ROWS // processes, steps=STEPS, dtype=dtype))
        arguments = ["--worker", str(config), str(folder), str(stop)]
        code, errors = torchrun_job.run(Path(__file__), arguments, processes)
        assert code == 0, errors[-3000:]
        found = [json.loads(Path(folder, f"record-{stop}-{rank}.json").read_text()) for rank in range(processes)]
        for record in found:
            assert not rows.keys() & record["rows"].keys(), "a row was read twice"
            rows |= record["rows"]
        losses += found[0]["losses"]
    return rows, losses


def prepare(folder: Path, name: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "titan_mi100.prepare_corpus", "--tokenizer", str(TOKENIZER)]
    subprocess.run([*command, "--output_dir", str(folder / name), *arguments], check=True)


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shakespeare", required=True)
    parser.add_argument("--gsm8k", required=True)
    parser.add_argument("--png", default="")
    options = parser.parse_args()
    if options.png:
        import matplotlib  # noqa: F401 (before the minutes of the runs)
    failed, curves = 0, {}
    with tempfile.TemporaryDirectory() as temporary:
        folder, draw = Path(temporary), random.Random(0)
        words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(500)]
        made = [json.dumps({"text": " ".join(draw.choices(words, k=draw.randint(5, 300)))}) for _ in range(3000)]
        (folder / "made_up.jsonl").write_text("\n".join(made))
        prepare(folder, "shakespeare", "--input", options.shakespeare, "--format", "text")
        library = sysconfig.get_path("stdlib")
        prepare(folder, "python", "--input", library, "--include", "[a-h]*.py", "--format", "text")
        prepare(folder, "made_up", "--input", str(folder / "made_up.jsonl"))
        sources = {"folder": folder, "tokenizer": TOKENIZER, "gsm8k": Path(options.gsm8k).resolve()}
        for dtype, limit in (("float64", 1e-10), ("float32", 1e-6)):
            whole_rows, whole = train(folder / f"whole-{dtype}", sources, dtype, ((STEPS, 2),))
            rows, losses = train(folder / f"stopped-{dtype}", sources, dtype, STOPS)
            same = rows == whole_rows and len(rows) == STEPS * ROWS
            after = range(STEPS) if dtype == "float64" else [s + i for s, _ in STOPS[:-1] for i in range(8)]
            off = max(abs(losses[i] / whole[i] - 1) for i in after)
            counts = {name: sum(found[0] == name for found in rows.values()) for name, _ in rows.values()}
            print(f"{dtype}: rows identical, none twice: {same}; losses differ by {off:.2e} (limit {limit}); {counts}")
            failed |= not same or off > limit
            curves[dtype] = whole, losses
        if options.png:
            draw_curves(curves, options.png)
    return int(failed)


def draw_curves(curves: dict[str, tuple[list[float], list[float]]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(11, 4), sharey=True)
    for axis, (dtype, (whole, losses)) in zip(axes, curves.items(), strict=True):
        axis.plot(range(1, STEPS + 1), whole, color="#888", linewidth=5, alpha=0.5, label="2 processes, no stop")
        start = 0
        for stop, processes in STOPS:
            words = f"{processes} process{'es' * (processes > 1)}"
            axis.plot(range(start + 1, stop + 1), losses[start:stop], marker=".", linewidth=1, label=words)
            start = stop
        axis.set(title=dtype, xlabel="step")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss")
    axes[0].legend()
    figure.suptitle("A mixture of four sources, resumed on other numbers of processes")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(exit_code(main))
