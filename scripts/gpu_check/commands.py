"""The commands as a user types them: train, SIGKILL, resume to the same bits, export, generate; fp16 and DPO."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from titan_mi100.device import accelerator

_QUESTION = "What is 23 + 48?"


def _folder() -> Path:
    return Path(os.environ["TITAN_GPU_CHECK"])


def _start(name: str, steps: int, tiny: bool, *options: str) -> subprocess.Popen:
    """Start the trainer on the bundled data. Its log is NAME.log."""
    on_gpu, folder = bool(accelerator.count()), _folder()
    settings = {
        "job.run_folder": folder / name, "data.cache_folder": folder / "cache", "training.steps": steps,
        "training.local_batch_size": 2 if tiny else 8, "checkpoint.interval": steps // 4, "metrics.log_freq": 1,
        "validation.freq": steps, "validation.prompts": 0, "parallelism.zero_stage": -1,
        "training.mixed_precision_param": "bfloat16" if on_gpu else "float32",
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "titan_mi100.train", "--job.config_file", "train_configs/debug.toml"]
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen([*command, *words, *options], stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _run(name: str, steps: int, tiny: bool, *options: str) -> dict[str, Any]:
    """Train to the end. Returns its measures; the last lines of its log, if it fails."""
    began = time.monotonic()
    code = _start(name, steps, tiny, *options).wait()
    rows, log = _metrics(name), (_folder() / f"{name}.log").read_text(errors="replace").splitlines()
    if code or not rows:
        return {"lines": log[-5:], "problem": f"exit code {code}", "said": ""}
    first, last = rows[min(rows)], rows[max(rows)]
    words = f"loss {first['loss']:.3f} to {last['loss']:.3f}, {last['tokens_per_second']:,.0f} tokens/s"
    chosen = next((line.partition("attention: ")[2] for line in log if "attention: " in line), "")
    return {"losses": [row["loss"] for row in rows.values()], "problem": "" if last["loss"] < first["loss"] else "the loss does not fall",
            "said": f"{words}, {time.monotonic() - began:.0f} s in all; attention {chosen[:100]}"}  # fmt: skip


def _metrics(name: str) -> dict[int, dict[str, Any]]:
    """The rows of steps in metrics.jsonl, by step; of a step that was taken twice, the later one."""
    path = _folder() / name / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    rows = [row for row in map(json.loads, lines) if "grad_norm" in row]
    return {row["step"]: row for row in rows}


def _weights(name: str) -> list[str]:
    """Hashes of the exported weights."""
    files = sorted((_folder() / name).glob("hf-step-*/*.safetensors"))
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]


def train(steps: int, tiny: bool) -> dict[str, Any]:
    """The whole run, which also exports its weights."""
    return _run("whole", steps, tiny)


def killed(steps: int, tiny: bool) -> dict[str, Any]:
    """The same run, killed in the middle and started again: losses, gradient norms and weights have the same bits."""
    process = _start("killed", steps, tiny)
    while process.poll() is None and len(_metrics("killed")) <= steps // 2:
        time.sleep(0.05)
    process.kill()
    process.wait()
    killed_at = max(_metrics("killed"), default=0)
    resumed = _run("killed", steps, tiny)
    if resumed["problem"]:
        return resumed
    runs = [
        {step: (row["loss"], row["grad_norm"]) for step, row in _metrics(name).items()} for name in ("whole", "killed")
    ]
    differs = [step for step in runs[0] if runs[0][step] != runs[1].get(step)]
    problem = f"step {differs[0]} differs from that of the run that was not killed" if differs else ""
    if not problem and (_weights("whole") != _weights("killed") or not _weights("whole")):
        problem = "the exported weights differ"
    said = f"killed after step {killed_at} of {steps}, resumed: {'other' if problem else 'the same'} losses, norms, weights"
    return {"killed_at": killed_at, "problem": problem, "said": said}


def generate(steps: int, tiny: bool) -> dict[str, Any]:
    """A greedy answer of the exported model, twice."""
    model = max((_folder() / "whole").glob("hf-step-*"))
    command = [sys.executable, "-m", "titan_mi100.tools.generate", "--model", str(model), "--prompt", _QUESTION]
    answers = []
    for _ in range(2):
        done = subprocess.run([*command, "--max_new_tokens", "16"], capture_output=True, text=True)
        if done.returncode:
            return {"lines": done.stderr.splitlines()[-3:], "problem": f"exit code {done.returncode}", "said": ""}
        answers.append(done.stdout.strip())
    problem = "" if answers[0] == answers[1] else "equal calls give other answers"
    return {"answers": answers, "problem": problem, "said": f"{_QUESTION} {' '.join(answers[0].split())[:80]}"}


def fp16(steps: int, tiny: bool) -> dict[str, Any]:
    """A run in fp16, which a CPU computes slowly."""
    return _run(
        "fp16", steps // 2, tiny, "--training.mixed_precision_param", "float16", "--checkpoint.export_hf", "false"
    )


def dpo(steps: int, tiny: bool) -> dict[str, Any]:
    """DPO on the bundled pairs, from the exported weights."""
    model = max((_folder() / "whole").glob("hf-step-*"))
    return _run(
        "dpo", steps // 4, tiny, "--objective.name", "preference", "--data.path", "train_configs/debug/pairs.jsonl",
        "--checkpoint.initial_load_path", str(model), "--model.flavor", "", "--training.seq_len", "512",
        "--optimizer.lr", "1e-3",
    )  # fmt: skip
