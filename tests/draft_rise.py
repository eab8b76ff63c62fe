"""Draft heads that are trained here, by hand: what they are worth, on bundled data, with the real commands.

    python tests/draft_rise.py FOLDER [--seeds 3]

For each seed a small model learns sums, without a draft head. Then, each time on held-out prompts, greedily:
fresh: a head with random weights; trained: the same head after `draft_head.train = "after"`; shifted: trained likewise,
but to predict one token too far; kept: the trained head on word problems, after the model has learned them with
`draft_head.train = "no"`; along: with "along" instead; again: the kept head trained once more, on the word problems.
A line each. A quarter of an hour on two cores; started again, it goes on.
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
LABELS = "    columns = torch.from_numpy(columns_where((labels != IGNORE).numpy()))\n"
SHIFTED = "    labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE)\n"
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
    return done.stdout


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


class Seed:
    """The runs of a seed, and what was measured. Args: of_all: receives (name, acceptance of the first draft)."""

    def __init__(self, folder: Path, seed: int, of_all: list[tuple[str, float]]) -> None:
        self.folder, self.seed, self.of_all = folder, seed, of_all

    def train(
        self, name: str, data: Path, steps: int, base: Path | None = None, tree: Path = REPO, **draft: object
    ) -> Path:
        """The export of a run; done before: kept. Args: draft: keys of [draft_head]."""
        out = self.folder / f"seed-{self.seed}" / name
        if not list(out.glob("hf-step-*")):
            settings = {
                **RUN,
                "job.run_folder": out,
                "data.path": data,
                "training.steps": steps,
                "training.seed": self.seed,
            }
            settings |= {"checkpoint.initial_load_path": base} if base else {}
            settings |= {f"draft_head.{key}": value for key, value in draft.items()}
            run(tree, "train", *(word for key, value in settings.items() for word in (f"--{key}", value)))
        return next(out.glob("hf-step-*"))

    def measure(self, name: str, model: Path, data: Path) -> None:
        options = ["--model", model, "--data", data, "--max_new_tokens", LONGEST, "--json"]
        summary = json.loads(run(REPO, "evaluate", "acceptance", *options))
        length, *positions = rates = [summary["length"], *summary["positions"]]
        shown = "  ".join("n/a" if rate["value"] is None else f"{rate['value']:.3f}" for rate in rates)
        text = f"seed {self.seed}  {name:<8} tokens a step, drafts 1 to 3: {shown}  ({length['n']:.0f} steps)"
        print(text, flush=True)
        self.of_all.append((name, positions[0]["value"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    started, folder, of_all = time.monotonic(), options.folder.resolve(), list[tuple[str, float]]()
    folder.mkdir(parents=True, exist_ok=True)
    shifted = shifted_tree(folder / "shifted" / "tree")
    sums, of_sums = split(folder, "sums", REPO / "train_configs" / "debug" / "additions.jsonl")
    problems, of_problems = split(folder, "problems", REPO / "tests" / "assets" / "arithmetic.jsonl")
    for number in range(1, options.seeds + 1):
        seed = Seed(folder, number, of_all)
        model = seed.train("model", sums, 500)
        after = {"train": "after", "fresh": "true"}
        seed.measure("fresh", seed.train("fresh", sums, 1, model, **after, lr=1e-9), of_sums)
        trained = seed.train("trained", sums, 300, model, **after)
        seed.measure("trained", trained, of_sums)
        seed.measure("shifted", seed.train("shifted", sums, 300, model, shifted, **after), of_sums)
        tuned = seed.train("tuned", problems, 300, trained)
        seed.measure("kept", tuned, of_problems)
        seed.measure("along", seed.train("along", problems, 300, trained, train="along"), of_problems)
        seed.measure("again", seed.train("again", problems, 300, tuned, train="after"), of_problems)
    print(f"{options.seeds} seeds, {time.monotonic() - started:.0f} s; the first draft is accepted:")
    for name in dict.fromkeys(name for name, _ in of_all):
        first = [rate for other, rate in of_all if other == name]
        print(f"  {name:<8} {statistics.mean(first):.3f}  ({min(first):.3f} to {max(first):.3f})")


if __name__ == "__main__":
    main()
