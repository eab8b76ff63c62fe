"""Kills rounds at random moments and starts them again: the end must have the same bits as without kills.

    python tests/kill_rounds.py [--kills 30] [--seed 0] [--folder WORK]

Two rounds with all weights, sampled in two processes, scored by a function. A kill takes the command alone, one of its
processes, or all; at a random moment, or as soon as a part is noted, a run has its export (which hands the weights
over), or the next part has begun. Several kills are made before the rounds may end.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from kill_samples import FUNCTION
from kill_teach import CONFIG, PROGRAM, children, ended, environment, read_options, run

DEBUG = Path(CONFIG[1]).parent / "debug"
KILLS = 5  # before the rounds may end
EVENTS = {"noted": "round-*/parts.json", "handed over": "round-*/run/hf-step-*", "begun": "round-*/*/store.json"}


def command(out: str) -> list[str]:
    return ["rounds", "--job.run_folder", out, "--checkpoint.initial_load_path", "model/hf-step-60",
            "--data.path", "prompts.jsonl", "--data.validation_path", "held-out.jsonl", "--objective.name", "policy",
            "--rounds.count", "2", "--rounds.prompts", "40", "--rounds.k", "4", "--rounds.patience", "0",
            "--rounds.keep_checkpoints", "true", "--rounds.rest", "1",
            "--rounds.sample=--max_new_tokens 24 --processes 2 --device cpu",
            "--rounds.score=--by length:12 --function judge.py:score", "--training.seq_len", "128",
            "--training.local_batch_size", "2", "--training.epochs", "1", "--training.gradient_accumulation_steps", "1",
            "--training.mixed_precision_param", "float32", "--checkpoint.interval", "3",
            "--metrics.enable_tensorboard", "false", "--model.attention_backend", "sdpa"]  # fmt: skip


def content(folder: Path) -> dict[str, bytes]:
    """The bytes that must be equal: parts of stores, prompts, the weights and state of each round's last step."""
    files = [*folder.rglob("part-*"), *folder.rglob("prompts.jsonl"), *folder.rglob("*.safetensors")]
    for run_folder in folder.glob("round-*/run"):
        last = max(run_folder.glob("checkpoint/step-*"), key=lambda path: int(path.name.partition("-")[2]))
        files += [last / "__0_0.distcp", last / "trainer.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def seen(out: Path, pattern: str) -> set[tuple[str, int]]:
    return {(str(path), path.stat().st_mtime_ns) for path in out.glob(pattern) if path.exists()}


def kill_once(work: Path, out: Path, draw: random.Random, seconds: float) -> str:
    """When, and whom; "": it had ended before."""
    event, who = draw.choice(["time", "time", *EVENTS]), draw.choice(("command", "child", "all"))
    before = seen(out, EVENTS.get(event, "*"))
    process = subprocess.Popen([PROGRAM, *command(str(out))], cwd=work, env=environment(work), start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    end = time.monotonic() + (draw.uniform(0.5, 0.5 * seconds) if event == "time" else seconds)
    while process.poll() is None and time.monotonic() < end:
        if event in EVENTS and seen(out, EVENTS[event]) - before:
            break
        time.sleep(0.02)
    if process.poll() is not None:
        return ""
    below = children(process.pid)
    for target in {"command": [process.pid], "child": [draw.choice(below or [process.pid])],
                   "all": [process.pid, *below]}[who]:  # fmt: skip
        try:
            os.kill(target, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return f"{event}, {who}: {ended(process, below)}"


def main() -> int:
    options, work = read_options(__doc__.splitlines()[0], 30)
    draw, failures = random.Random(options.seed), 0
    (work / "judge.py").write_text(FUNCTION)
    rows = (DEBUG / "additions.jsonl").read_text().splitlines(keepends=True)
    (work / "prompts.jsonl").write_text("".join(rows[:100]))
    (work / "held-out.jsonl").write_text("".join(rows[100:140]))
    if not (work / "model").exists():
        done = run(work, "train", *CONFIG, "--job.run_folder", "model", "--training.steps", "60")
        assert done.returncode == 0, done.stderr
    shutil.rmtree(work / "whole", ignore_errors=True)
    started = time.monotonic()
    done = run(work, *command("whole"))
    assert done.returncode == 0, done.stderr
    seconds, whole = time.monotonic() - started, content(work / "whole")
    print(f"undisturbed: {seconds:.0f} s, {len(whole)} files", flush=True)
    assert len(whole) > 12
    kills = 0
    while kills < options.kills:
        out, told = work / f"killed-{kills}", list[str]()
        while len(told) < KILLS and (killed := kill_once(work, out, draw, seconds)):
            told.append(killed)
        kills += len(told)
        done = run(work, *command(str(out)))
        is_raw = "Traceback" in done.stderr or "unexpected error" in done.stderr
        is_equal = not done.returncode and content(out) == whole
        failures += not is_equal or is_raw
        print(f"{kills}: {'; '.join(told)}; {'equal' if is_equal else 'DIFFERS'}{' RAW' * is_raw}", flush=True)
        if is_equal:
            shutil.rmtree(out)
        else:
            print(done.stdout[-2000:], done.stderr[-3000:], sep="\n", flush=True)
    print(f"{kills} kills, {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
