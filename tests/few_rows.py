"""How the loss goes with 50 to 50,000 rows: the table of docs/TRAIN.md. By hand; an hour on one core.

    python tests/few_rows.py MODEL OUTPUT [rows ...]

MODEL is an export of the default run, which adds; here it learns to subtract, with all weights and with LoRA.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

EPOCHS = {50: 40, 500: 20, 5000: 3, 50_000: 1}
FREQ = {50: 22, 500: 120, 5000: 235, 50_000: 1170}  # steps between validations
HELD_OUT = 200
METHODS = {"all weights": ("--optimizer.lr", "1e-3"), "LoRA": ("--optimizer.lr", "1e-2", "--lora.rank", "8")}


def row(rng: random.Random, a: int, b: int) -> str:
    borrow = a % 10 < b % 10
    ones, less = a % 10 - b % 10 + 10 * borrow, " - 1" * borrow
    steps = f"{a % 10 + 10 * borrow} - {b % 10} = {ones}, {a // 10} - {b // 10}{less} = {a // 10 - b // 10 - borrow}"
    question = rng.choice(("Take {b} from {a}.", "What is {a} - {b}?")).format(a=a, b=b)
    return json.dumps({"question": question, "answer": f"{steps}, so {a - b}."}) + "\n"


def main(model: str, output: Path, *counts: int) -> None:
    rng = random.Random(0)
    pairs = rng.sample([(a, b) for a in range(100, 1000) for b in range(10, 100)], HELD_OUT + max(EPOCHS))
    rows = [row(rng, a, b) for a, b in pairs]
    output.mkdir(parents=True)
    (output / "held_out.jsonl").write_text("".join(rows[:HELD_OUT]))
    for count in counts or EPOCHS:
        (output / f"{count}.jsonl").write_text("".join(rows[HELD_OUT : HELD_OUT + count]))
        for method, more in METHODS.items():
            folder = output / f"{count} {method}"
            command = [
                *("-m", "titan_mi100.train", "--checkpoint.initial_load_path", model, "--job.run_folder", str(folder)),
                *("--data.path", f"{output}/{count}.jsonl", "--data.validation_path", f"{output}/held_out.jsonl"),
                *("--training.seq_len", "256", "--training.gradient_accumulation_steps", "1"),
                *("--training.mixed_precision_param", "float32", "--training.epochs", str(EPOCHS[count])),
                *("--validation.freq", str(FREQ[count]), "--checkpoint.export_hf", "true"),
                *("--activation_checkpoint.mode", "none", *more),
            ]
            subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            epochs = {line["step"]: line["epoch"] for line in lines if "loss" in line}
            losses = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
            best = min(losses, key=lambda step: losses[step])
            lowest = f"lowest {losses[best]:.3f} at epoch {epochs[best]:.1f}, at the end {losses[max(losses)]:.3f}"
            print(f"{count} rows, {method}, {max(losses)} steps: {lowest}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
