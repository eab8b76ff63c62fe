"""Rounds on sums, by hand: do they help, and does a teacher?

    python tests/rounds_of_sums.py FOLDER SEED [--arms policy,shuffled,on_policy,offline] [--rounds 3]

A small model that has learned to forget most carries, so that it gets some of the sums right, learns from its own
answers by `titan-mi100 rounds`: `policy` from their scores; `shuffled` from scores that are drawn without looking,
which must not help; `on_policy` from what a better model thinks of them. `offline` learns as many tokens of the better
model's answers instead, to the same prompts, with that model's distributions.
Held-out exact match after each round, of answers that are drawn as in training, and of greedy ones: a line each, and
results.jsonl. Sums of training, prompts and test are disjoint. Started again with more rounds, it goes on.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "train_configs" / "debug"))
import make_additions  # noqa: E402

TESTED, ASKED, K, LONGEST = 300, 320, 8, 48
NOISE = "import random\nR = random.Random(1)\ndef score(prompt, answer, row):\n    return float(R.random() < 0.5)\n"
RUN = ["--training.seq_len", 256, "--training.epochs", 1, "--training.target_tokens_per_step", 4096,
       "--training.local_batch_size", 4, "--optimizer.weight_decay", 0, "--lr_scheduler.decay_type", "constant",
       "--lr_scheduler.warmup_steps", 0, "--training.mixed_precision_param", "float32",
       "--activation_checkpoint.mode", "none", "--checkpoint.interval", 0, "--checkpoint.export_hf", "true",
       "--metrics.enable_tensorboard", "false"]  # fmt: skip


def run(*words: object) -> str:
    done = subprocess.run([sys.executable, "-m", "titan_mi100", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sums(seed: int) -> tuple[list[dict], list[dict]]:
    """Test rows and prompts: sums that additions.jsonl does not have, with the number behind ####."""
    digits = [tuple(sorted(map(int, "".join(c if c.isdigit() else " " for c in row["question"]).split())))
              for row in make_additions.rows()]  # fmt: skip
    others = [(a, b) for a in range(10, 100) for b in range(a, 100) if (a, b) not in {*digits}]
    rng = random.Random(f"sums {seed}")
    rng.shuffle(others)
    rows = [{"question": rng.choice(make_additions.QUESTIONS).format(a=a, b=b), "answer": f"#### {a + b}"}
            for a, b in others]  # fmt: skip
    return rows[:TESTED], rows[TESTED:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("--arms", default="policy,shuffled,on_policy,offline")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lr", default="5e-5")
    parser.add_argument("--settings", default="", help="further settings, such as --objective.divisor=length")
    options = parser.parse_args()
    folder, seed = options.folder / f"seed-{options.seed}", options.seed
    folder.mkdir(parents=True, exist_ok=True)
    test, prompts = sums(seed)
    tested, asked = write(folder / "test.jsonl", test), write(folder / "prompts.jsonl", prompts)
    (folder / "noise.py").write_text(NOISE)

    def trained(name: str, data: Path, steps: int) -> Path:
        if not (out := folder / name).exists():
            run("train", "--job.config_file", REPO / "train_configs" / "debug.toml", "--job.run_folder", out,
                "--training.seed", seed, "--checkpoint.interval", 0, "--metrics.enable_tensorboard", "false",
                "--data.path", data, "--training.steps", steps, "--validation.prompts", 0,
                "--validation.freq", 0)  # fmt: skip
        return next(out.glob("hf-step-*"))

    def note(arm: str, number: int, model: Path, seconds: float = 0.0) -> None:
        said = run("evaluate", "exact-match", "--model", model, "--data", tested, "--max_new_tokens", LONGEST,
                   "--batch_size", 100, "--json")  # fmt: skip
        row = {
            "seed": seed,
            "arm": arm,
            "round": number,
            "greedy": float(json.loads(said)["score"]),
            "seconds": seconds,
        }
        drawn = folder / arm / f"round-{number}" / "held-out"
        if drawn.exists():
            said = run("score", drawn, "--by", "number", "--out", drawn / "by-number", "--json")
            row["drawn"] = json.loads(said)["scorers"]["score"]["mean"]
        print(row, flush=True)
        with (options.folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    base = trained("base", write(folder / "forgetful.jsonl", make_additions.forgetful(seed)), 700)
    arms, sampled = options.arms.split(","), f"--max_new_tokens {LONGEST} --batch_size 64 --device cpu"
    if {"on_policy", "offline"} & {*arms}:
        teacher = trained("teacher", REPO / "train_configs" / "debug" / "additions.jsonl", 1000)
        note("teacher", 0, teacher)
    for arm in arms:
        started, out = time.monotonic(), folder / arm
        common = ["--checkpoint.initial_load_path", base, *RUN, "--optimizer.lr", options.lr, "--training.seed", seed]
        if arm != "offline":
            scored = f"--function {folder / 'noise.py'}:score" if arm == "shuffled" else "--by number"
            named = ["--rounds.teacher", teacher] if arm == "on_policy" else []
            run("rounds", "--job.run_folder", out, "--objective.name", "policy", "--data.path", asked,
                "--data.validation_path", tested, f"--rounds.count={options.rounds}", "--rounds.patience", 0,
                "--rounds.most_drift", 0, f"--rounds.prompts={ASKED}", f"--rounds.k={K}", f"--rounds.sample={sampled}",
                f"--rounds.score={scored}", *common, *named, *options.settings.split())  # fmt: skip
            for number in range(options.rounds + 1):
                parts = json.loads((out / f"round-{number}" / "parts.json").read_text())
                model = next((out / f"round-{number}" / "run").glob("hf-step-*"), base)
                note(arm, number, model, sum(part["seconds"] for part in parts.values()))
            continue
        out.mkdir(exist_ok=True)
        write(out / "prompts.jsonl", prompts[: ASKED * options.rounds])
        run("sample", "--model", teacher, "--data", out / "prompts.jsonl", "--out", out / "samples", "--k", K,
            *sampled.split())  # fmt: skip
        run("score", out / "samples", "--by", "number", "--keep", "right", "--above", -1, "--to", out / "rows.jsonl")
        (out / "student.toml").write_text(
            f'[data]\npath = "{out.absolute()}/rows.jsonl"\nduplicates = "keep"\n[training]\nseq_len = 256\n'
            f'[checkpoint]\ninitial_load_path = "{base.absolute()}"\n'
        )
        config = ["--job.config_file", out / "student.toml"]
        run("teach", *config, "--model", teacher, "--out", out / "teacher")
        run("train", *config, "--job.run_folder", out / "run", "--objective.name", "distill", "--objective.teacher",
            out / "teacher", "--objective.teacher_weight", 1, *common[2:])  # fmt: skip
        note(arm, options.rounds, next((out / "run").glob("hf-step-*")), time.monotonic() - started)


if __name__ == "__main__":
    main()
