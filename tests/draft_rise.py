"""Draft heads that are trained here, by hand: what they are worth, on bundled data, with the real commands.

    python tests/draft_rise.py FOLDER [--seeds 3]

For each seed a small model learns sums, without a draft head. Then, each time on held-out prompts, greedily:
fresh: a head with random weights; trained: the same head after `draft_head.train = "after"`; shifted: trained likewise,
but to predict one token too far; kept: the trained head on word problems, after the model has learned them with
`draft_head.train = "no"`; along: with "along" instead; again: the kept head trained once more, on the word problems.
A line and a row of results.jsonl each. A quarter of an hour on two cores; started again, it goes on.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO / "tests"))
from breaks.copies import copy_tree  # noqa: E402

HELD_OUT, LONGEST = 60, 40
STEPS = {"model": 500, "head": 300, "tuned": 300, "again": 300}
LABELS = 'return {**microbatch, "next_ids": next_ids, "draft_labels": labels, DRAFTED: columns}'
SHIFTED = "labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE)\n    columns = torch.from_numpy(columns_where((labels != IGNORE).numpy()))\n    "
RUN = {
    "job.config_file": REPO / "train_configs" / "debug.toml", "model.flavor": "qwen3.5-debug", "validation.freq": 0,
    "validation.prompts": 0, "data.validation_fraction": 0, "metrics.enable_tensorboard": "false",
    "checkpoint.interval": 0,
}  # fmt: skip


def run(tree: Path, *words: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "titan_mi100", *map(str, words)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(tree)}, cwd=tree,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout + done.stderr


def shifted_tree(folder: Path) -> Path:
    """A copy of the tree that trains heads on the token after the one they should predict."""
    if not folder.exists():
        folder.mkdir(parents=True)
        copy_tree(folder)
        file = folder / "titan_mi100" / "data" / "microbatch.py"
        text = file.read_text()
        assert text.count(LABELS) == 1
        file.write_text(text.replace(LABELS, SHIFTED + LABELS))
    return folder


def split(folder: Path, name: str, source: Path) -> tuple[Path, Path]:
    """Rows to train on, and others to measure on."""
    lines = source.read_text().splitlines(keepends=True)
    train, test = folder / f"{name}.jsonl", folder / f"{name}-test.jsonl"
    train.write_text("".join(lines[:-HELD_OUT]))
    test.write_text("".join(lines[-HELD_OUT:]))
    return train, test


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    started, folder = time.monotonic(), options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    shifted = shifted_tree(folder / "shifted" / "tree")
    sums, of_sums = split(folder, "sums", REPO / "train_configs" / "debug" / "additions.jsonl")
    problems, of_problems = split(folder, "problems", REPO / "tests" / "assets" / "arithmetic.jsonl")
    found: dict[str, list[dict]] = {}
    for seed in range(1, options.seeds + 1):
        own = folder / f"seed-{seed}"

        def train(
            name: str, data: Path, steps: int, tree: Path = REPO, base: Path | None = None, **more: object
        ) -> Path:
            if not list((out := own / name).glob("hf-step-*")):  # noqa: B023
                settings = {
                    **RUN,
                    "job.run_folder": out,
                    "data.path": data,
                    "training.steps": steps,
                    "training.seed": seed,
                }  # noqa: B023
                settings |= {"checkpoint.initial_load_path": base} if base else {}
                settings |= {f"draft_head.{key}": value for key, value in more.items()}
                told = run(tree, "train", *(word for key, value in settings.items() for word in (f"--{key}", value)))
                (out / "told.txt").write_text(told)
            return next(out.glob("hf-step-*"))

        def measure(name: str, model: Path, data: Path) -> None:
            told = run(
                REPO, "evaluate", "acceptance", "--model", model, "--data", data, "--max_new_tokens", LONGEST, "--json"
            )
            summary = json.loads(told[told.index('{"data"') :].splitlines()[0])
            shown = [summary["length"], *summary["positions"]]
            found.setdefault(name, []).append(summary)
            rates = "  ".join("n/a" if rate["value"] is None else f"{rate['value']:.3f}" for rate in shown)
            print(
                f"seed {seed}  {name:<8} tokens a step, drafts 1 to 3: {rates}  ({shown[1]['n']:.0f} steps)", flush=True
            )  # noqa: B023
            with open(folder / "results.jsonl", "a") as file:
                file.write(json.dumps({"seed": seed, "name": name, **summary}) + "\n")  # noqa: B023

        model = train("model", sums, STEPS["model"])
        after = {"base": model, "train": "after", "fresh": "true"}
        measure("fresh", train("fresh", sums, 1, **after, lr=1e-9), of_sums)
        trained = train("trained", sums, STEPS["head"], **after)
        measure("trained", trained, of_sums)
        measure("shifted", train("shifted", sums, STEPS["head"], shifted, **after), of_sums)
        tuned = train("tuned", problems, STEPS["tuned"], base=trained)
        measure("kept", tuned, of_problems)
        beside = train("along", problems, STEPS["tuned"], base=trained, train="along")
        measure("along", beside, of_problems)
        measure("again", train("again", problems, STEPS["again"], base=tuned, train="after"), of_problems)
    print(f"mean of {options.seeds} seeds after {time.monotonic() - started:.0f} s: acceptance of the first draft:")
    for name, summaries in found.items():
        first = [summary["positions"][0]["value"] for summary in summaries]
        print(f"  {name:<8} {statistics.mean(first):.3f}  ({min(first):.3f} to {max(first):.3f})")


if __name__ == "__main__":
    main()
