"""Rounds of sampling, scoring and learning on sums, by hand: does it work?

    python tests/rounds_of_sums.py FOLDER SEED [--arms policy,shuffled,rejection] [--rounds 3]

A small model that has learned to forget most carries, so that it gets some of the sums right, learns from its own
answers: `policy` from their scores, `rejection` by sft on the right ones of as many samples, `shuffled` from scores
that are shuffled among all answers, which must not help.
Held-out exact match after each round: a line each, and results.jsonl. Sums of training, prompts and test are disjoint.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "train_configs" / "debug"))
import make_additions  # noqa: E402

TESTED, ASKED, K, LONGEST = 300, 320, 8, 48


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


def shuffled(scored: Path, seed: int) -> None:
    """Scores in random order over all answers of the store."""
    rng, parts = random.Random(seed), sorted(scored.glob("part-*.jsonl"))
    groups = [[json.loads(line) for line in part.read_text().splitlines()] for part in parts]
    answers = [answer for part in groups for group in part for answer in group["answers"]]
    scores = [answer["score"] for answer in answers]
    rng.shuffle(scores)
    for answer, score in zip(answers, scores, strict=True):
        answer["score"] = score
    write(scored.parents[1] / "shuffled.jsonl", [group for part in groups for group in part])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("seed", type=int)
    parser.add_argument("--arms", default="policy,shuffled,rejection")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lr", default="5e-5")
    parser.add_argument(
        "--settings", default="", help="further settings of the policy, such as --objective.divisor=length"
    )
    options = parser.parse_args()
    folder, seed = options.folder / f"seed-{options.seed}", options.seed
    folder.mkdir(parents=True, exist_ok=True)
    test, prompts = sums(seed)
    tested = write(folder / "test.jsonl", test)
    common = ["--training.seed", seed, "--checkpoint.interval", 0, "--metrics.enable_tensorboard", "false"]
    base = folder / "base"
    if not base.exists():
        data = write(folder / "forgetful.jsonl", make_additions.forgetful(seed))
        run("train", "--job.config_file", REPO / "train_configs" / "debug.toml", "--job.run_folder", base, *common,
            "--data.path", data, "--training.steps", 700, "--validation.prompts", 0,
            "--validation.freq", 0)  # fmt: skip
    start = next(base.glob("hf-step-*"))

    def exact_match(model: Path) -> float:
        said = run("evaluate", "exact-match", "--model", model, "--data", tested, "--max_new_tokens", LONGEST,
                   "--batch_size", 100, "--json")  # fmt: skip
        return float(json.loads(said)["score"])

    def note(arm: str, number: int, score: float) -> None:
        print(f"seed {seed}, {arm}, round {number}: {score:.1%}", flush=True)
        with (options.folder / "results.jsonl").open("a") as file:
            file.write(json.dumps({"seed": seed, "arm": arm, "round": number, "score": score}) + "\n")

    note("base", 0, exact_match(start))
    for arm in options.arms.split(","):
        model = start
        for number in range(1, options.rounds + 1):
            here = folder / f"{arm}-{number}"
            here.mkdir(exist_ok=True)
            asked = write(here / "prompts.jsonl", prompts[(number - 1) * ASKED : number * ASKED])
            run("sample", "--model", model, "--data", asked, "--out", here / "samples", "--k", K, "--seed", seed,
                "--max_new_tokens", LONGEST, "--batch_size", 64, "--processes", 2, "--device", "cpu")  # fmt: skip
            keep = ["--keep", "right", "--to", here / "right.jsonl"] if arm == "rejection" else []
            run("score", here / "samples", "--by", "number", *keep)
            scored = here / "samples" / "scored"
            data = here / "right.jsonl" if keep else scored / "part-*.jsonl"
            if arm == "shuffled":
                shuffled(scored, seed)
                data = here / "shuffled.jsonl"
            settings = [] if keep else ["--objective.name", "policy", *options.settings.split()]
            run("train", "--job.run_folder", here / "run", "--checkpoint.initial_load_path", model, "--data.path", data,
                "--checkpoint.export_hf", "true", "--training.seq_len", 256, "--training.epochs", 1,
                "--training.target_tokens_per_step", 4096, "--training.local_batch_size", 4, "--optimizer.lr",
                options.lr, "--optimizer.weight_decay", 0, "--lr_scheduler.decay_type", "constant",
                "--lr_scheduler.warmup_steps", 0,
                "--training.mixed_precision_param", "float32", "--activation_checkpoint.mode", "none",
                *common, *settings)  # fmt: skip
            model = next((here / "run").glob("hf-step-*"))
            note(arm, number, exact_match(model))


if __name__ == "__main__":
    main()
