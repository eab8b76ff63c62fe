"""Shows that preferences and distillation teach something, with the real commands, on two cores and bundled data.

    python scripts/show_objectives.py preferences|distillation OUT [--seeds 3]

Both learn sums of two numbers from rows in which most carries are forgotten, and are tested on others: exact match.
preferences: before and after a run on pairs of a right answer and one without the carry. distillation: a model of 3M
parameters that learns from the rows alone, and one that learns on the same rows, in as many steps, from a model of 10M
that has learned right sums.
"""

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

from titan_mi100.errors import UserError

REPO = Path(__file__).resolve().parents[1]
DEBUG = REPO / "train_configs" / "debug"
_COMMON = {
    "job.config_file": REPO / "train_configs/debug.toml", "metrics.enable_tensorboard": "false",
    "checkpoint.keep_latest_k": 1, "validation.freq": 0, "validation.prompts": 0,
}  # fmt: skip


def run(*words: object) -> str:
    """A command of the package. Raises UserError: it failed."""
    done = subprocess.run([sys.executable, "-m", "titan_mi100", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{' '.join(map(str, words[:4]))} ... failed:\n{done.stderr[-2000:]}")
    return done.stdout


def train(folder: Path, **settings: object) -> Path:
    """A run on one process; its export, or the folder if there is none. Done before: kept."""
    if not list(folder.glob("hf-step-*")):
        given = {**_COMMON, "job.run_folder": folder, **settings}
        run("train", "--nproc_per_node", 1, *(word for k, v in given.items() for word in (f"--{k}", v)))
    return max(folder.glob("hf-step-*"), default=folder)


def write(path: Path, rows: list[dict]) -> Path:
    """Rows as JSONL; a file that is there stays: the pages change, and a run goes on with its own."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def sums(out: Path, seed: int) -> tuple[list[dict], dict[str, str], Path, Path]:
    """Rows to learn, their answers without carries, held-out rows to test with, and the rows with most carries
    forgotten, as a file.
    """
    chosen = random.Random(seed)
    rows = [json.loads(line) for line in (DEBUG / "additions.jsonl").read_text().splitlines()]
    chosen.shuffle(rows)
    held_out, rows = rows[:200], rows[200:]
    test = [{**row, "answer": f"#### {row['answer'].rsplit(' ', 1)[1].removesuffix('.')}"} for row in held_out]
    wrong = {row["question"]: without_carry(row["question"]) for row in rows}
    forgotten = [{**row, "answer": wrong[row["question"]]} if chosen.random() < 0.7 else row for row in rows]
    return rows, wrong, write(out / "test.jsonl", test), write(out / "sums.jsonl", forgotten)


def preferences(out: Path, seed: int) -> tuple[float, float]:
    """Exact match on held-out sums before and after."""
    rows, wrong, tested, forgotten = sums(out, seed)
    pairs = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": wrong[row["question"]]}
        for row in rows
        if row["answer"] != wrong[row["question"]]
    ]
    common = {"training.seed": seed, "training.local_batch_size": 2}
    first = train(out / "sft", **common, **{"data.path": forgotten, "training.steps": 1000})
    more = {
        "objective.name": "preference",
        "checkpoint.initial_load_path": first,
        "optimizer.lr": 3e-5,
        "objective.sft_weight": 0.2,
    }
    more |= {"data.path": write(out / "pairs.jsonl", pairs), "training.steps": 60}
    second = train(out / "dpo", **common, **more)
    return exact_match(first, tested), exact_match(second, tested)


def without_carry(question: str) -> str:
    """The answer of someone who forgets the carry."""
    a, b = map(int, re.findall(r"\d+", question))
    ones, tens = a % 10 + b % 10, a // 10 + b // 10
    return f"{a % 10} + {b % 10} = {ones}, {a // 10} + {b // 10} = {tens}, so {10 * tens + ones % 10}."


def exact_match(model: Path, test: Path) -> float:
    told = run("evaluate", "exact-match", "--model", model, "--data", test, "--max_new_tokens", 64, "--json")
    return float(json.loads(told)["score"])


def distillation(out: Path, seed: int) -> tuple[float, float]:
    """Exact match of the student that learns from the rows alone, and of the one that learns from the teacher."""
    folder = out.parent  # one teacher, and one set of rows, for all seeds
    rows, _, tested, forgotten = sums(folder, 0)
    common = {"training.local_batch_size": 2, "model.flavor": "", "optimizer.lr": 2e-3}
    given = {"data.path": write(folder / "right.jsonl", rows), "training.steps": 800}
    big = {"checkpoint.initial_load_path": random_model(folder / "big", 384, 1152, 5, 0)}
    teacher, answers = train(folder / "teacher", **common, **given, **big), folder / "answers"
    small = random_model(out / "small", 256, 512, 3, seed)
    wanted = {**common, "data.path": forgotten, "training.seed": seed, "training.steps": 500}
    wanted |= {"checkpoint.initial_load_path": small}
    alone, student = train(out / "alone", **wanted), out / "student.toml"
    if not (answers / "run_state.json").exists():
        student.write_text(f'base = "{REPO}/train_configs/debug.toml"\n[data]\npath = "{forgotten}"\n')
        told = {"job.config_file": student, "model": teacher, "out": answers, "top_k": 32, "nproc_per_node": 1}
        run("teach", *(word for k, v in told.items() for word in (f"--{k}", v)))
    distilled = {"objective.name": "distill", "objective.teacher": answers, "objective.teacher_weight": 1.0}
    taught = train(out / "taught", **wanted, **distilled)
    print(f"teacher: {exact_match(teacher, tested):.4f}", flush=True)
    return exact_match(alone, tested), exact_match(taught, tested)


def random_model(folder: Path, hidden: int, inner: int, layers: int, seed: int) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if not folder.exists():
        torch.manual_seed(seed)
        shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": 64}
        heads = {"num_attention_heads": hidden // 64, "num_key_value_heads": 2, "vocab_size": 2048}
        Qwen3ForCausalLM(Qwen3Config(**shape, **heads, tie_word_embeddings=True)).save_pretrained(folder)
        for file in (DEBUG / "tokenizer").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("preferences", "distillation"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    show, found = preferences if options.what == "preferences" else distillation, []
    for seed in range(options.seeds):
        before, after = show(options.out.resolve() / options.what / f"seed-{seed}", seed)
        found.append((before, after))
        print(f"seed {seed}: {before:.4f} -> {after:.4f}", flush=True)
    means = [statistics.mean(values) for values in zip(*found, strict=True)]
    print(f"mean of {options.seeds} seeds: {means[0]:.4f} -> {means[1]:.4f}")


if __name__ == "__main__":
    main()
