"""Kills runs of a draft head at random moments and starts them again: the last checkpoint and the export must be as if
nobody had disturbed.

    python tests/kill_draft.py [--kills 12] [--seed 0] [--folder WORK]

Trained along on two FSDP2 processes, along beside adapters, and after, alone. A kill takes the launcher, one of its
processes, or all.
"""

import random
import shutil
import sys
import time
from pathlib import Path

from kill_samples import kill_once
from kill_teach import CONFIG, read_options, run

STEPS = 24
USUAL = [
    "--training.steps", str(STEPS), "--checkpoint.interval", "4", "--validation.freq", "0",
    "--validation.prompts", "0", "--training.seq_len", "64", "--training.local_batch_size", "4",
    "--model.attention_backend", "sdpa", "--metrics.enable_tensorboard", "false",
]  # fmt: skip
FOLDER = ["--model.flavor", "", "--checkpoint.initial_load_path", f"model/hf-step-{STEPS}"]
KINDS = {
    "along": ["--model.flavor", "qwen3.5-debug", "--draft_head.train", "along", "--nproc_per_node", "2"],
    "adapters": [*FOLDER, "--draft_head.train", "along", "--lora.rank", "4", "--nproc_per_node", "1"],
    "after": [*FOLDER, "--draft_head.train", "after", "--nproc_per_node", "1"],
}


def words(kind: str, out: Path) -> list[str]:
    return ["train", *CONFIG, *USUAL, *KINDS[kind], "--job.run_folder", str(out)]


def content(out: Path) -> dict[str, bytes]:
    """Weights and state of the last step, and the export."""
    last, export = out / "checkpoint" / f"step-{STEPS}", out / f"hf-step-{STEPS}"
    files = [*last.glob("*.distcp"), last / "trainer.json", *export.glob("*.safetensors")]
    return {str(path.relative_to(out)): path.read_bytes() for path in files if path.exists()}


def main() -> int:
    options, work = read_options(__doc__.splitlines()[0], 12)
    draw, failures, seconds, undisturbed = (
        random.Random(options.seed),
        0,
        dict[str, float](),
        dict[str, dict[str, bytes]](),
    )
    for kind in KINDS:
        out = work / ("model" if kind == "along" else f"undisturbed-{kind}")
        shutil.rmtree(out, ignore_errors=True)
        started, done = time.monotonic(), run(work, *words(kind, out))
        assert done.returncode == 0, done.stderr
        seconds[kind], undisturbed[kind] = time.monotonic() - started, content(out)
        print(f"undisturbed: {kind} {seconds[kind]:.0f} s, {len(undisturbed[kind])} files", flush=True)
        assert len(undisturbed[kind]) > 2
    for number in range(options.kills):
        kind, out, told = [*KINDS][number % len(KINDS)], work / f"killed-{number}", []
        shutil.rmtree(out, ignore_errors=True)
        for _ in range(draw.choice((1, 1, 2))):
            after, who = draw.uniform(0.3, 1.0) * seconds[kind], draw.choice(("command", "child", "all"))
            told.append(f"{who} after {after:.1f} s: {kill_once(work, words(kind, out), after, who, draw)}")
        done = run(work, *words(kind, out))
        is_equal = content(out) == undisturbed[kind] and not done.returncode and "Traceback" not in done.stderr
        failures += not is_equal
        print(f"{number}: {kind}; {'; '.join(told)}; {'equal' if is_equal else 'DIFFERS'}", flush=True)
        print("" if is_equal else done.stderr[-2000:], end="", flush=True)
    print(f"{options.kills} kills, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
