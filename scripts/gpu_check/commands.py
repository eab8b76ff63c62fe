"""The commands as a user types them: doctor, train, resume after SIGKILL, export, generate; fp16 and DPO."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_check.sections import WORK
from titan_mi100.config.kernels import AUTO, OWN
from titan_mi100.device import accelerator
from titan_mi100.errors import UserError
from titan_mi100.files.durable import sha256_of

_WORK = Path(os.environ.get(WORK, ""))


def _ask(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "titan_mi100", *words], capture_output=True, text=True)


def doctor() -> dict[str, Any]:
    """The doctor's lines. A failed check is a failure of this task."""
    done = _ask("doctor")
    return {"lines": [line for line in done.stdout.splitlines() if line.strip()], **_ended(done)}


def _ended(done: subprocess.CompletedProcess) -> dict[str, Any]:
    """The problem of a command that has failed, and the last line of its output."""
    problem = f"exit code {done.returncode}" if done.returncode else ""
    return {"problem": problem, "said": (done.stdout.splitlines() or [""])[-1][:200]}


def sanitizer(tool: str) -> dict[str, Any]:
    """One launch of each kernel under a tool of NVIDIA's compute-sanitizer. Raises UserError: it is not installed."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        raise UserError("compute-sanitizer is not installed; it comes with the CUDA toolkit")
    # memory from the driver, block by block: torch's allocator would hide what lies behind a tensor's end
    command = [program, "--tool", tool, "--error-exitcode", "9", "env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"]
    command += [sys.executable, "-c", "from gpu_check.kernels import launch_all; launch_all()"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return {"lines": [line for line in done.stdout.splitlines() if line][-15:], **_ended(done)}


def _start(name: str, steps: int, **options: Any) -> subprocess.Popen:
    """Start the trainer on the bundled data; its log is NAME.log. Args: options: section__key."""
    settings = {
        "job__run_folder": _WORK / name, "data__cache_folder": _WORK / "cache", "training__steps": steps,
        "training__local_batch_size": 8, "checkpoint__interval": steps // 4, "metrics__log_freq": 1,
        "validation__freq": steps, "validation__prompts": 0, "parallelism__zero_stage": -1,
        "training__mixed_precision_param": "bfloat16" if accelerator.count() else "float32",
        # by name: the trial of each backend would take minutes
        "model__attention_backend": OWN if accelerator.count() else AUTO, **options,
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in (f"--{key.replace('__', '.')}", str(value))]
    command = [sys.executable, "-m", "titan_mi100.train", "--job.config_file", "train_configs/debug.toml"]
    with (_WORK / f"{name}.log").open("ab") as log:
        return subprocess.Popen([*command, *words], stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _train(name: str, steps: int, **options: Any) -> dict[str, Any]:
    """Train to the end. If it fails, the result has the last lines of its log."""
    began = time.monotonic()
    code = _start(name, steps, **options).wait()
    losses, log = [loss for loss, _ in _steps(name).values()], (_WORK / f"{name}.log").read_text().splitlines()
    if code or not losses:
        return {"lines": log[-5:], "problem": f"exit code {code}", "said": ""}
    attention = next((line.partition("attention: ")[2] for line in log if "attention: " in line), "")
    said = f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {time.monotonic() - began:.0f} s; attention: {attention[:100]}"
    return {"losses": losses, "problem": "" if losses[-1] < losses[0] else "the loss does not fall", "said": said}


def _steps(name: str) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; those of a step that was taken twice are the later ones."""
    path = _WORK / name / "metrics.jsonl"
    rows = map(json.loads, path.read_text().split("\n")[:-1] if path.exists() else [])
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "grad_norm" in row}


def _exported(name: str) -> Path:
    return max((_WORK / name).glob("hf-step-*"))


def train(steps: int) -> dict[str, Any]:
    """Train and export."""
    return _train("whole", steps)


def killed(steps: int) -> dict[str, Any]:
    """The same run, killed in the middle and started again: losses, gradient norms and weights have the same bits."""
    process = _start("killed", steps)
    while process.poll() is None and len(_steps("killed")) <= steps // 2:
        time.sleep(0.05)
    process.kill()
    process.wait()
    last = max(_steps("killed"), default=0)
    if (resumed := _train("killed", steps))["problem"]:
        return resumed
    whole, again = _steps("whole"), _steps("killed")
    problems = [f"step {step} has other numbers" for step in whole if whole[step] != again.get(step)][:1]
    hashes = [{file.name: sha256_of(file) for file in _exported(name).iterdir()} for name in ("whole", "killed")]
    problems += ["the exported files differ"] if hashes[0] != hashes[1] else []
    said = f"SIGKILL after step {last} of {steps}; losses, norms and weights compared with those of the whole run"
    return {"killed_after": last, "problem": "; ".join(problems), "said": said}


def generate(steps: int) -> dict[str, Any]:
    """A greedy answer of the exported model."""
    done = _ask("generate", "--model", str(_exported("whole")), "--prompt", "23 + 48?", "--max_new_tokens", "16")
    return {"lines": done.stderr.splitlines()[-3:], **_ended(done)}


def fp16(steps: int) -> dict[str, Any]:
    """A run in fp16, which a CPU computes slowly."""
    return _train("fp16", steps // 2, training__mixed_precision_param="float16", checkpoint__export_hf="false")


def dpo(steps: int) -> dict[str, Any]:
    """DPO on the bundled pairs, from random weights. The policy begins as its reference: the first loss is ln 2."""
    pairs = {"objective__name": "preference", "data__path": "train_configs/debug/pairs.jsonl"}
    trained = _train("dpo", steps // 4, **pairs, training__seq_len=512)
    if "losses" in trained:
        trained["problem"] = "" if abs(trained["losses"][0] - 0.693) < 0.01 else "the first loss is not ln 2"
    return trained
