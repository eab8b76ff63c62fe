"""The real trainer on a pretended accelerator (tests/simgpu), whose queues run late, early or in a random order: every
weight, state and loss has the bits of the schedule `now`; and where the host waits for the device.
"""

import functools
import hashlib
import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from breaks.run import Break, read_breaks
from conftest import ASKED_FOR, ASSETS, FULL, REPO, torchrun
from simgpu.build import HERE, build, library, why_not

if "simgpu" not in os.environ.get("TITAN_TESTS_REQUIRE", ""):
    if why_not():
        pytest.skip(f"tests/simgpu cannot be built: {why_not()}", allow_module_level=True)
    if not (library().exists() or os.environ.get(ASKED_FOR)):
        # the compiler would take a third of the default tests' time
        pytest.skip("not built: python tests/simgpu/build.py builds it", allow_module_level=True)

BASE = f"""
[model]
flavor = "debug"
attention_backend = "chunked"
tokenizer_path = "{ASSETS / "tokenizer"}"
[data]
path = "{{folder}}/additions.jsonl"
validation_fraction = 0.1
[training]
seq_len = 64
local_batch_size = 2
gradient_accumulation_steps = 2
steps = 4
mixed_precision_param = "float32"
[optimizer]
lr = 1e-2
[validation]
freq = 1000
[metrics]
enable_tensorboard = false
"""
TWO = {"processes": 2, "training.gradient_accumulation_steps": 1}
DDP = {**TWO, "parallelism.zero_stage": 0}
HOST = {"memory.offload": "optimizer", "activation_checkpoint.mode": "full"}
LEAN = {"optimizer.state": "8bit", "optimizer.master": "bf16_sr"}
KINDS: dict[str, dict[str, Any]] = {
    "one process": {"validation.freq": 2, "validation.prompts": 2, "validation.prompt_tokens": 3},
    "fp16": {"training.mixed_precision_param": "float16"},
    "lean": LEAN,
    "QLoRA": {"lora.rank": 4, "lora.base": "nf4", "training.mixed_precision_param": "bfloat16"},
    "on the host": {**HOST, "memory.offload_activations": True},
    "lean on the host": {**HOST, **LEAN, "optimizer.master": "24bit"},
    "weights on the host": {"memory.offload": "weights"},
    "FSDP2": {**TWO, "checkpoint.interval": 2, "checkpoint.async_mode": "async"},
    "DDP": DDP,
    "DDP in bf16": {**DDP, "training.mixed_precision_reduce": "bfloat16"},
    "PP2": {**TWO, "parallelism.pipeline_parallel_degree": 2, "training.gradient_accumulation_steps": 4},
}
# in which the product does other things on a device than on a CPU
NOT_AS_ON_A_CPU = ("lean on the host", "weights on the host", "PP2")
only_full = pytest.mark.skipif(FULL not in os.environ, reason="only with --full")  # too long for --full-of

FOLDER = tempfile.TemporaryDirectory(prefix="simgpu-")  # removed at the end
# Where the host waits in every step from the third on: (what waits, file:function), times.
GATHERED = ["copy to the host pageable", "parallel/distributed.py:gather_values", 1]  # the step's one collective
OFFLOADED = [
    GATHERED,
    ["device.synchronize", "optim/lean.py:update", 1],
    ["event.synchronize", "parallel/offload.py:_wait", 29],  # deliberate: one for each matrix, before the norms
]
WAITS = {
    "on the host": OFFLOADED,
    "lean on the host": OFFLOADED,
    "weights on the host": [
        GATHERED,
        # torch's own: it accumulates gradients on the CPU, so each microbatch but the first waits for each of them
        ["copy to the host pageable", "torch", 46],
        ["event.synchronize", "torch", 46],
        ["stream.synchronize", "parallel/fsdp.py:_after_backward", 1],
    ],
}
# in the first two steps also: (kind, step); on each rank
TABLES = [["copy to the device pageable", "optim/formats.py:values_on", 2]]
REBUILT = [[f"copy to the {place} pageable", "parallel/base.py:forward_backward", 2] for place in ("device", "host")]
WARM_UP = [  # torch's schedule asks its neighbours
    [".item()", "parallel/pipeline.py:forward_backward", 1],
    ["copy to the device pageable", "parallel/pipeline.py:forward_backward", 1],
]
ALSO = {
    ("lean", 1): TABLES,
    ("lean on the host", 1): TABLES,
    ("DDP", 2): REBUILT,  # torch's reducer rebuilds its buckets after the first backward
    ("DDP in bf16", 2): REBUILT,
    ("PP2", 1): WARM_UP if int(version("torch").split(".")[1]) > 8 else [],
}


class Outcome(NamedTuple):
    """What a run has computed, and where its host waited: (what was called, step, waits, digest) by rank."""

    code: int
    metrics: list[list[float]]  # losses and norms, and answers
    digests: list[str]  # of the weights and the state of each rank
    saved: dict[str, str]  # file of a checkpoint -> hash
    ledger: list[list[Any]]
    output: str


@functools.cache
def shared() -> Path:
    """The folder of all runs, with their data and config."""
    folder = Path(FOLDER.name)
    rows = [{"question": f"{n} plus {n * 7 % 10}?", "answer": f"That is {n + n * 7 % 10}."} for n in range(120)]
    (folder / "additions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(BASE.format(folder=folder))
    return folder


@functools.cache
def run(kind: str, schedule: str, fault: Break | None = None) -> Outcome:
    """Run the trainer on the device, or with schedule "cpu" on the CPU."""
    options = dict(KINDS[kind])
    processes = options.pop("processes", 1)
    folder = Path(tempfile.mkdtemp(dir=shared()))
    job = [str(HERE / "job.py"), str(folder / "ledger"), "--job.config_file", str(shared() / "run.toml")]
    job += ["--job.run_folder", str(folder / "run")]
    job += [f"--{key}={str(value).lower() if value is True else value}" for key, value in options.items()]
    environment: dict[str, Any] = {
        "SIMGPU_SCHEDULE": schedule,
        "SIMGPU_LIBRARY": str(build()),
        "XDG_CACHE_HOME": str(shared()),
    }
    if fault is not None:
        module = ".".join(fault.place(REPO).relative_to(REPO).with_suffix("").parts)
        environment["SIMGPU_FAULT"] = json.dumps([module, fault.old, fault.new])
    done = torchrun(*job, processes=processes, check=False, timeout=120, **environment)

    def lines(name: str) -> list[Any]:
        paths = sorted((folder / "run").glob(name)) + sorted(folder.glob(name))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    names = ("loss", "grad_norm", "validation_loss", "answer")
    metrics = [[line.get(name) for name in names] for line in lines("metrics.jsonl") + lines("samples.jsonl")]
    files = sorted(folder.glob("run/checkpoint/*/*.distcp"))
    saved = {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    ledger = lines("ledger-*")
    digests = [line[3] for line in ledger if line[3]]
    return Outcome(done.returncode, metrics, digests, saved, ledger, done.stdout + done.stderr)


def control(kind: str) -> Outcome:
    sound = run(kind, "now")
    assert sound.code == 0 and len(sound.metrics) > 4 and sound.digests and sound.saved, sound.output[-3000:]
    return sound


def some(*names: str) -> list[Any]:
    """All kinds; by default only these are run."""
    return [kind if kind in names else pytest.param(kind, marks=pytest.mark.full) for kind in KINDS]


def faults() -> list[Any]:
    """The first; the others only with --full, as tests/breaks/run.py shows the same of each."""
    found = [broken for broken in read_breaks() if "test_simgpu" in broken.test]
    return [pytest.param(fault, marks=[only_full] * (fault != found[0]), id=fault.what) for fault in found]


@pytest.mark.parametrize("kind", some("on the host"))
@pytest.mark.parametrize("schedule", ["lag", pytest.param("random:1", marks=pytest.mark.full)])
def test_a_run_has_the_same_bits_whatever_the_device_does_first(kind: str, schedule: str) -> None:
    found = run(kind, schedule)
    assert found.code == 0, found.output[-3000:]
    assert found[1:4] == control(kind)[1:4]


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [kind if kind in NOT_AS_ON_A_CPU else pytest.param(kind, marks=only_full) for kind in KINDS]
)
def test_a_run_has_the_bits_of_the_cpu(kind: str) -> None:
    assert run(kind, "cpu")[1:3] == control(kind)[1:3]


@pytest.mark.parametrize("kind", some("on the host"))
def test_the_host_waits_only_where_it_must(kind: str) -> None:
    """Steps only; those that also save, validate or sample have them apart."""
    for name, step, waits, _ in control(kind).ledger:
        if name == "step":
            assert waits == sorted(WAITS.get(kind, [GATHERED]) + ALSO.get((kind, step), [])), step


@pytest.mark.parametrize("fault", faults())
def test_a_planted_fault_is_found(fault: Break) -> None:
    """The breaks of tests/breaks that name one of the tests above, in the process that they break."""
    schedule, _, kind = fault.test.partition("[")[2].removesuffix("]").rpartition("-")
    found, sound = run(kind, schedule or "now", fault), control(kind)
    assert "in plant" not in found.output, found.output[-3000:]
    assert found[1:4] != sound[1:4] if schedule else found.ledger != sound.ledger
