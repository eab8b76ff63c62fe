"""The whole story on one page: data, training, export, exact match by this package and by transformers.

    python scripts/bench/story.py [--output FOLDER] [--steps N]

A made-up set of additions and subtractions in GSM8K's format, digit by digit with carries; a small model trained on it
from random weights by ./run_train.sh on two processes; the checkpoint as an HF folder; problems that it never saw,
answered through that folder by both. Exit code 1 if the score is 90% or less, or if the two differ. About ten minutes
on two free cores.
"""

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from titan_mi100.cli import exit_code

REPO = Path(__file__).resolve().parents[2]
TOKENIZER, EXPORT = REPO / "tests" / "assets" / "tokenizer", REPO / "checkpoint_tools" / "dcp_to_hf.py"
NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emil", "Fatou", "Goran", "Hana")
THINGS = ("apples", "pencils", "marbles", "stamps", "shells", "beads", "books", "cards")
TRAINING_ROWS, HELD_OUT_ROWS = 30_000, 300
MAX_NEW_TOKENS = 128  # the longest answer has 107
BAR = 0.9

CONFIG = """\
[model]
flavor = "debug"
tokenizer_path = "{tokenizer}"

[data]
path = "train.jsonl"
validation_path = "held_out.jsonl"

[training]
seq_len = 512
local_batch_size = 4
steps = {steps}
mixed_precision_param = "float32"

[validation]
freq = {every}

[optimizer]
lr = 3e-3

[activation_checkpoint]
mode = "none"

[checkpoint]
interval = 0
"""


def problem(draw: random.Random) -> tuple[tuple[int, str, int], dict[str, str]]:
    """What is to be computed, and the row. There are 405,450 sums (2 + 1 is 1 + 2) and as many differences."""
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    a, b = draw.randint(100, 999), draw.randint(100, 999)
    if sums := draw.random() < 0.5:
        sign, verb, moved, result = "+", "finds", "carry", a + b
    else:
        a, b = max(a, b), min(a, b)
        sign, verb, moved, result = "-", "loses", "borrow", a - b
    steps, carry = [], 0
    for place, x, y in zip(("Ones", "Tens", "Hundreds"), _digits(a), _digits(b), strict=True):
        value = x + y + carry if sums else x - y - carry
        step = f"{place}: {x} {sign} {y} {sign} {carry} = {value}"
        carry = int(value > 9 if sums else value < 0)
        steps.append(f"{step}, write {value % 10}, {moved} {carry}.")
    question = f"{name} has {a} {things} and {verb} {b}. How many {things} does {name} have now?"
    return (max(a, b), sign, min(a, b)), {
        "question": question,
        "answer": f"{a} {sign} {b}. {' '.join(steps)}\n#### {result}",
    }


def _digits(number: int) -> list[int]:
    return [int(digit) for digit in reversed(str(number))]


def write_data(folder: Path, seed: int = 1) -> None:
    """train.jsonl and held_out.jsonl. No problem comes twice, under whatever name, so none is in both."""
    draw, rows = random.Random(seed), dict[tuple[int, str, int], dict[str, str]]()
    while len(rows) < TRAINING_ROWS + HELD_OUT_ROWS:
        what, row = problem(draw)
        rows.setdefault(what, row)
    lines = [json.dumps(row) + "\n" for row in rows.values()]
    (folder / "held_out.jsonl").write_text("".join(lines[:HELD_OUT_ROWS]))
    (folder / "train.jsonl").write_text("".join(lines[HELD_OUT_ROWS:]))


def run(*command: str | Path) -> str:
    """Run a command of the story, said aloud; what it printed. A command that fails ends the story."""
    words = [str(word) for word in command]
    print("$", shlex.join(["python", *words[1:]] if words[0] == sys.executable else words), flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(words, cwd=REPO, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}exit code {done.returncode}")
    return done.stdout


def train(folder: Path, steps: int) -> Path:
    """Train from random weights; the run's last checkpoint."""
    config, run_folder = folder / "story.toml", folder / "run"
    config.write_text(CONFIG.format(tokenizer=TOKENIZER, steps=steps, every=max(1, steps // 4)))
    started = time.perf_counter()
    run("./run_train.sh", "--nproc_per_node", "2", "--job.config_file", config, "--job.run_folder", run_folder)
    lines = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    loss = {line["step"]: line["loss"] for line in lines if "loss" in line}
    shown = sorted({1, *(steps * share // 8 for share in range(1, 9))} & loss.keys())
    print("step ", *(f"{step:>8}" for step in shown))
    print("loss ", *(f"{loss[step]:>8.4f}" for step in shown))
    on_held_out = [line["validation_loss"] for line in lines if "validation_loss" in line][-1]
    print(f"loss on held-out rows {on_held_out:.4f}; trained in {time.perf_counter() - started:.0f} s\n")
    return run_folder / "checkpoint" / f"step-{steps}"


def score(folder: Path, export: Path) -> dict[str, Any]:
    """The summary."""
    arguments = {"--model": export, "--data": folder / "held_out.jsonl"}
    arguments |= {"--output": folder / "answers.jsonl", "--max_new_tokens": MAX_NEW_TOKENS, "--batch_size": 50}
    words = [str(word) for argument in arguments.items() for word in argument]
    started = time.perf_counter()
    summary = json.loads(run(sys.executable, "-m", "titan_mi100.tools.exact_match", *words, "--no_thinking", "--json"))
    print(f"exact match {summary['score']:.1%} of {summary['n']} in {time.perf_counter() - started:.0f} s\n")
    return summary


def tell(folder: Path, steps: int) -> bool:
    """The story; whether it ends well."""
    started = time.perf_counter()
    write_data(folder)
    print(f"{TRAINING_ROWS:,} problems to train on, {HELD_OUT_ROWS} others held out; the first of these:")
    print(*json.loads((folder / "held_out.jsonl").open().readline()).values(), sep="\n", end="\n\n")
    checkpoint, export = train(folder, steps), folder / "hf"
    run(sys.executable, EXPORT, "--input_dir", checkpoint, "--output_dir", export)
    found = score(folder, export)
    good = found["score"] > BAR
    print(f"score {found['score']:.1%}: {'above' if good else 'NOT ABOVE'} {BAR:.0%}")
    print(f"{time.perf_counter() - started:.0f} s in all")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder to keep everything in; default: a temporary one")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps; default 1000")
    options = parser.parse_args()
    if options.output is None:
        with tempfile.TemporaryDirectory() as folder:
            return 0 if tell(Path(folder), options.steps) else 1
    options.output.mkdir(parents=True)  # an old story's files would be taken for this one's
    return 0 if tell(options.output.resolve(), options.steps) else 1


if __name__ == "__main__":
    sys.exit(exit_code(main))
