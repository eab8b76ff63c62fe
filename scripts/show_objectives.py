"""Shows that preferences and distillation teach something, with the real commands, on two cores and bundled data.

    python scripts/show_objectives.py preferences|distillation OUT [--seeds 3]

preferences: a model learns sums from data in which most carries are forgotten, then from pairs of a right answer and
one without the carry; exact match on sums that it has not seen, before and after. distillation: a model of 10M
parameters learns the pages of docs/; one of 3M learns a quarter of them from its distributions or from the text alone,
in as many steps; loss of both on pages that no one has learned.
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
    if not list(folder.glob("checkpoint/step-*")):
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


def preferences(out: Path, seed: int) -> tuple[float, float]:
    """Exact match on held-out sums before and after."""
    chosen = random.Random(seed)
    rows = [json.loads(line) for line in (DEBUG / "additions.jsonl").read_text().splitlines()]
    chosen.shuffle(rows)
    held_out, rows = rows[:200], rows[200:]
    test = [{**row, "answer": f"#### {row['answer'].rsplit(' ', 1)[1].removesuffix('.')}"} for row in held_out]
    wrong = {row["question"]: without_carry(row["question"]) for row in rows}
    sums = [{**row, "answer": wrong[row["question"]]} if chosen.random() < 0.7 else row for row in rows]
    pairs = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": wrong[row["question"]]}
        for row in rows
        if row["answer"] != wrong[row["question"]]
    ]
    tested, common = write(out / "test.jsonl", test), {"training.seed": seed, "training.local_batch_size": 2}
    first = train(out / "sft", **common, **{"data.path": write(out / "sums.jsonl", sums), "training.steps": 1000})
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
    """Validation loss of the student that learns from the text alone, and of the one that learns from the teacher."""
    texts = [part for page in sorted((REPO / "docs").glob("*.md")) for part in page.read_text().split("\n\n")]
    rows = [{"text": "\n\n".join(texts[start : start + 8])} for start in range(0, len(texts), 8)]
    held_out, rows = rows[::8], [row for place, row in enumerate(rows) if place % 8]
    folder = out.parent  # one teacher for all seeds
    every, few = write(folder / "pages.jsonl", rows), write(folder / "few.jsonl", rows[::4])
    common = {
        "data.validation_path": write(folder / "held_out.jsonl", held_out), "data.validation_fraction": 0,
        "data.overlong": "split", "training.local_batch_size": 4, "optimizer.lr": 2e-3, "model.flavor": "",
    }  # fmt: skip
    big = random_model(folder / "big", 384, 1152, 5, 0)
    teacher = train(
        folder / "teacher", **common,
        **{"data.path": every, "training.steps": 250, "checkpoint.initial_load_path": big})  # fmt: skip
    small = random_model(out / "small", 256, 512, 3, seed)
    wanted = {**common, "data.path": few, "training.seed": seed, "training.steps": 150}
    wanted |= {"checkpoint.initial_load_path": small}
    alone = train(out / "alone", **wanted)
    student, answers = out / "student.toml", folder / "answers"
    student.write_text(
        f'base = "{REPO}/train_configs/debug.toml"\n[data]\npath = "{few}"\nvalidation_fraction = 0.0\n'
        f'validation_path = "{folder}/held_out.jsonl"\noverlong = "split"\n[training]\nlocal_batch_size = 4\n'
    )
    if not (answers / "run_state.json").exists():
        given = {"job.config_file": student, "model": teacher, "out": answers, "top_k": 512, "nproc_per_node": 1}
        run("teach", *(word for k, v in given.items() for word in (f"--{k}", v)))
    distilled = {"objective.name": "distill", "objective.teacher": answers, "objective.teacher_weight": 0.8}
    taught = train(out / "taught", **wanted, **distilled)
    return validation_loss(alone.parent, "validation_loss"), validation_loss(taught.parent, "validation_cross_entropy")


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


def validation_loss(folder: Path, key: str) -> float:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return float(next(line[key] for line in reversed(lines) if key in line))


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
