"""The real trainer on a pretended accelerator (tests/simgpu), whose queues run late, early or in a random order: every
weight, state and loss has the bits of the schedule `now`; and where the host waits for the device.
"""

import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import ASSETS, REPO, job_environment
from forked import ForkServer
from simgpu.build import HERE, build, why_not

if "simgpu" not in os.environ.get("TITAN_TESTS_REQUIRE", "") and why_not():
    pytest.skip(f"tests/simgpu cannot be built: {why_not()}", allow_module_level=True)

BASE = f"""
[model]
flavor = "debug"
attention_backend = "chunked"
tokenizer_path = "{ASSETS / "tokenizer"}"
[data]
path = "{{folder}}/additions.jsonl"
validation_fraction = 0.2
[training]
seq_len = 64
local_batch_size = 2
gradient_accumulation_steps = 2
steps = 5
mixed_precision_param = "float32"
[optimizer]
lr = 1e-2
[validation]
freq = 1000
[metrics]
enable_tensorboard = false
"""
TWO = {"processes": 2, "training.gradient_accumulation_steps": 1}
OFFLOAD = {"memory.offload": "optimizer", "activation_checkpoint.mode": "full"}
LEAN = {"optimizer.state": "8bit", "optimizer.master": "bf16_sr"}
KINDS: dict[str, dict[str, Any]] = {
    "one process": {},
    "fp16": {"training.mixed_precision_param": "float16"},
    "lean": LEAN,
    "QLoRA": {"lora.rank": 4, "lora.base": "nf4", "training.mixed_precision_param": "bfloat16"},
    "optimizer on the host": OFFLOAD,
    "lean on the host": {**OFFLOAD, **LEAN, "optimizer.master": "24bit"},
    "inputs on the host": {**OFFLOAD, "memory.offload_activations": True},
    "weights on the host": {"memory.offload": "weights"},
    "saves": {"checkpoint.interval": 2, "checkpoint.async_mode": "async"},
    "validation and samples": {"validation.freq": 2, "validation.prompts": 2, "validation.prompt_tokens": 3},
    "FSDP2": TWO,
    "DDP": {**TWO, "parallelism.zero_stage": 0},
    "DDP in bf16": {**TWO, "parallelism.zero_stage": 0, "training.mixed_precision_reduce": "bfloat16"},
    "PP2": {**TWO, "parallelism.pipeline_parallel_degree": 2, "training.gradient_accumulation_steps": 4},
}


class Outcome(NamedTuple):
    """What a run has computed, and where its host waited; of the ledger: (what was called, step) -> waits."""

    code: int
    losses: list[tuple[float, float]]  # loss and norm of each step
    saved: dict[str, str]  # file of a checkpoint -> hash
    ledger: list[tuple[str, int, list[list[Any]]]]
    output: str


@functools.cache
def server(device: bool) -> ForkServer:
    environment = job_environment()
    if device:
        path = os.pathsep.join([environment["PYTHONPATH"], str(HERE), str(build())])
        environment |= {"PYTHONPATH": path, "SIMGPU_SCHEDULE": "now"}
    return ForkServer(environment)


@functools.cache
def shared() -> Path:
    """The folder of all runs, with their data and config."""
    folder = Path(tempfile.mkdtemp(prefix="simgpu-"))
    rows = [{"question": f"{n} plus {n * 7 % 10}?", "answer": f"That is {n + n * 7 % 10}."} for n in range(120)]
    (folder / "additions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(BASE.format(folder=folder))
    return folder


@functools.cache
def run(kind: str, schedule: str) -> Outcome:
    """Run the trainer on the device, or with schedule "cpu" on the CPU."""
    options = dict(KINDS[kind])
    processes = options.pop("processes", 1)
    folder = Path(tempfile.mkdtemp(dir=shared()))
    arguments = [f"--{key}={str(value).lower() if value is True else value}" for key, value in options.items()]
    job = [str(HERE / "job.py"), str(folder / "ledger"), "--job.config_file", str(shared() / "run.toml")]
    job += ["--job.run_folder", str(folder / "run"), *arguments]
    environment = {**job_environment(), "SIMGPU_SCHEDULE": schedule, "XDG_CACHE_HOME": str(shared())}
    code, output, errors = server(schedule != "cpu").run(job, processes, environment, REPO, 120)
    metrics = folder / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return Outcome(
        code,
        [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line],
        {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.glob("run/checkpoint/*/*.distcp"))
        },
        [tuple(json.loads(line)) for rank in sorted(folder.glob("ledger-*")) for line in rank.read_text().splitlines()],
        output + errors,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["lag", "random:1"])
def test_a_run_has_the_same_bits_whatever_the_device_does_first(kind: str, schedule: str) -> None:
    control, found = run(kind, "now"), run(kind, schedule)
    assert control.code == 0 and len(control.losses) == 5 and control.saved, control.output[-3000:]
    assert found.code == 0, found.output[-3000:]
    assert found[1:3] == control[1:3]
