"""The sections of the GPU check: their tasks and time limits, what matters most first. Imports no torch."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from titan_mi100.config.kernels import OWN
from titan_mi100.tools.new_config import METHODS, Change
from titan_mi100.workshop.measure.children import Task

CALLS = "first", "second"
_LORA, _QLORA, _LEAN = METHODS["lora"][0][1], METHODS["lora"][1][1], METHODS["full"][2][1]
_COMPILED: Change = {"compile": {"enable": True}}
_TINY_MODELS = {
    "0.6B": "debug",
    "1.7B": "debug",
    "8B": "debug",
    "qwen3.5-0.8B": "qwen3.5-debug",
    "30B-A3B": "moe-debug",
}


class Section(NamedTuple):
    """Tasks that share a process.

    Attributes:
        seconds: time limit of all of them together.
    """

    name: str
    seconds: int
    tasks: Sequence[Task]


class Training(NamedTuple):
    """Training steps to measure.

    Attributes:
        forwards: microbatches of a step.
        checkpointing: activation_checkpoint.mode.
        changes: of the config.
        layers: of the model; 0: all.
        is_profiled: a further step is profiled.
    """

    model: str
    method: str
    seq: int
    batch: int
    forwards: int
    checkpointing: str
    changes: Mapping[str, Any] = MappingProxyType({})
    layers: int = 0
    is_profiled: bool = False
    attention: str = OWN
    dtype: str = "bfloat16"


TRAININGS: Mapping[str, Sequence[Training]] = {
    "steps of 0.6B": (
        Training("0.6B", "full", 8192, 1, 2, "none", is_profiled=True),
        Training("0.6B", "full", 8192, 1, 2, "selective"),
        Training("0.6B", "full", 1024, 1, 2, "none", is_profiled=True),
        Training("0.6B", "LoRA", 2048, 8, 1, "none", _LORA, is_profiled=True),
    ),
    "steps of 8B and Qwen3.5": (
        Training("8B", "LoRA", 2048, 2, 1, "selective", _LORA, is_profiled=True),
        Training("8B", "QLoRA", 2048, 2, 1, "selective", _QLORA, is_profiled=True),
        Training("qwen3.5-0.8B", "full", 2048, 4, 1, "full", is_profiled=True),
    ),
    "further steps": (
        Training("30B-A3B", "LoRA", 2048, 2, 1, "selective", _LORA, layers=4, is_profiled=True),
        Training("0.6B", "full, compiled", 8192, 1, 2, "none", _COMPILED, is_profiled=True),
        Training("0.6B", "full, fp16", 2048, 4, 1, "none", dtype="float16"),
        Training("1.7B", "full, lean", 2048, 4, 1, "selective", _LEAN),
    ),
    "more steps": (
        Training("0.6B", "full", 1024, 8, 2, "none"),
        Training("0.6B", "full", 8192, 1, 2, "none", attention="varlen"),
        Training("0.6B", "LoRA", 2048, 1, 4, "none", _LORA),
        Training("0.6B", "LoRA, compiled", 2048, 8, 1, "none", {**_LORA, **_COMPILED}),
        Training("30B-A3B", "QLoRA", 2048, 2, 1, "selective", _QLORA, layers=4),
        Training("30B-A3B", "full, lean", 2048, 2, 1, "selective", _LEAN, layers=2),
    ),
}
# heads, key heads, head size of 0.6B, 8B and Qwen3.5-0.8B; then of other models
HEADS = ((16, 8, 128), (32, 8, 128), (8, 2, 256))
_VALUES = (*((*heads, "bfloat16") for heads in HEADS), (16, 8, 128, "float16"), (16, 8, 128, "float32"),
           (8, 4, 64, "bfloat16"), (4, 2, 32, "bfloat16"))  # fmt: skip


def sections_of(call: str, tiny: bool) -> list[Section]:
    """The sections of a call. Args: tiny: with sizes for a CPU, to try the check itself."""

    def task(name: str, target: str, seconds: float = 120, optional: bool = False, **arguments: Any) -> Task:
        return Task(name, f"gpu_check.{target}", arguments, seconds=seconds, optional=optional)

    def certified(name: str, target: str, optional: bool = False, **arguments: Any) -> Task:
        return Task(name, f"titan_mi100.workshop.measure.{target}", arguments, optional=optional)

    def steps(section: str, seconds: int) -> Section:
        return Section(section, seconds, [_training_task(one, tiny) for one in TRAININGS[section]])

    values = [_tiny_heads(one) for one in _VALUES[3:4]] if tiny else _VALUES
    heads = [_tiny_heads((*HEADS[0], "float32"))[:3]] if tiny else HEADS
    commands = {"steps": 12 if tiny else 120, "tiny": tiny}
    product = {"model": "debug" if tiny else "0.6B", "tokens": 64 if tiny else 4096}
    if call == "second":
        return [
            Section("commands", 55, [
                task("commands/train", "commands:train", **commands),
                task("commands/fp16", "commands:fp16", **commands),
                task("commands/dpo", "commands:dpo", **commands),
            ]),
            Section("auto", 45, [task("auto/0.6B", "attention:automatic", tiny=tiny)]),
            steps("more steps", 60),
            Section("sanitizer", 55, [
                task(f"sanitizer/{tool}", "sanitizer:check", tool=tool, tiny=tiny) for tool in ("memcheck", "racecheck")
            ]),
        ]  # fmt: skip
    return [
        Section("environment", 45, [
            task("environment/packages", "environment:packages"),
            task("environment/doctor", "environment:doctor"),
            certified("bandwidth/device 0", "products:bandwidth"),
            *(certified(f"gemm/{product['model']}/{dtype}", "products:gemm", **product, dtype=dtype)
              for dtype in ("bfloat16", "float16", "float32")),
        ]),
        Section("warm-up", 55, [task("warm-up/attention", "attention:warm_up", values=values)]),
        Section("values", 70, [
            *(task(f"values/attention/{n}.{kv}.{dim}/{dtype}", "attention:values", heads=n, kv_heads=kv, dim=dim,
                   dtype=dtype, seq=96 if tiny else 3000) for n, kv, dim, dtype in values),
            task("values/optimizer", "optimizer:tasks", what="values", tiny=tiny),
            task("values/kernels", "kernels:tasks", what="values", tiny=tiny),
        ]),
        Section("speed", 60, [
            *(task(f"speed/attention/{n}.{kv}.{dim}", "attention:speed", heads=n, kv_heads=kv, dim=dim,
                   seq=128 if tiny else 8192) for n, kv, dim in heads),
            task("speed/optimizer", "optimizer:tasks", what="speed", tiny=tiny),
            task("speed/kernels", "kernels:tasks", what="speed", tiny=tiny),
        ]),
        steps("steps of 0.6B", 70),
        Section("commands", 95, [
            task(f"commands/{name}", f"commands:{name}", **commands) for name in ("train", "killed", "generate")
        ]),
        steps("steps of 8B and Qwen3.5", 75),
        Section("plain loop", 40, [
            task("plain loop/losses", "plain_loop:losses", tiny=tiny),
            *(task(f"plain loop/0.6B/{batch} x {seq}", "plain_loop:speed", seq=seq, batch=batch, tiny=tiny)
              for batch, seq in ((1, 8192), (8, 1024))),
        ]),
        steps("further steps", 70),
    ]  # fmt: skip


def _tiny_heads(heads: tuple[int, int, int, str]) -> tuple[int, int, int, str]:
    return (2, 1, 32, heads[3])


def _training_task(training: Training, tiny: bool) -> Task:
    if tiny:
        model, layers = _TINY_MODELS[training.model], 4 if training.model.startswith("qwen3.5") else 2
        changes = {**training.changes, "compile": {"enable": False}}
        training = training._replace(model=model, layers=layers, seq=64, changes=changes)
        training = training._replace(dtype="float32", attention="sdpa")
    model = training.model + (f", {training.layers} layers" if training.layers else "")
    name = (
        f"{model}/{training.method}/{training.seq} m={training.batch} GA={training.forwards} {training.checkpointing}"
    )
    name += f" {training.attention} {training.dtype}"
    return Task(f"steps/{name}", "gpu_check.steps:measure", training._asdict(), optional="compile" in training.changes)
