"""The sections of the GPU check: their tasks and time limits, what matters most first. Imports no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from titan_mi100.config.kernels import EXPLICIT, KERNELS, OWN, REFERENCE
from titan_mi100.config.toml_file import tomllib
from titan_mi100.workshop.measure.children import Task

CALLS = "first", "second"
WORK, RESULTS = "TITAN_GPU_CHECK_WORK", "TITAN_GPU_CHECK_RESULTS"  # name folders for the processes that measure
_WORKSHOP = "titan_mi100.workshop.measure"
_TINY = {"0.6B": "debug", "1.7B": "debug", "8B": "debug", "qwen3.5-0.8B": "qwen3.5-debug", "30B-A3B": "moe-debug"}


class Section(NamedTuple):
    """Tasks that share a process. Attributes: seconds: time limit of all of them together."""

    name: str
    seconds: float
    tasks: Sequence[Task]


class Training(NamedTuple):
    """Training steps to measure; steps.toml lists them.

    Attributes:
        batch: rows of a microbatch.
        forwards: microbatches of a step.
        checkpointing: activation_checkpoint.mode.
        layers: the model's first ones only; 0: all.
        profiled: a further step is profiled.
        changes: of the config.
    """

    model: str
    method: str
    seq: int
    batch: int = 1
    forwards: int = 1
    checkpointing: str = "none"
    layers: int = 0
    profiled: bool = False
    attention: str = OWN
    dtype: str = "bfloat16"
    changes: Mapping[str, Any] = MappingProxyType({})

    def tiny(self) -> "Training":
        """A run of the same kind for a CPU."""
        changes: Any = {"layers": 4 if "3.5" in self.model else 2, "changes": {**self.changes, "compile": {}}}
        return self._replace(model=_TINY[self.model], seq=64, dtype="float32", attention="sdpa", **changes)

    def task(self) -> Task:
        name = f"{self.model}{f', {self.layers} layers' * bool(self.layers)}/{self.method}/{self.seq} m={self.batch}"
        name += f" GA={self.forwards} {self.checkpointing} {self.attention} {self.dtype}"
        return _task(f"steps/{name}", "steps:measure", **{**self._asdict(), "changes": dict(self.changes)})


# heads, key heads, head size, dtype: 0.6B, 8B, Qwen3.5-0.8B, which are timed; others
_TIMED = ((16, 8, 128, "bfloat16"), (32, 8, 128, "bfloat16"), (8, 2, 256, "bfloat16"))
_SHAPES = (*_TIMED, (16, 8, 128, "float16"), (16, 8, 128, "float32"), (8, 4, 64, "bfloat16"), (4, 2, 32, "bfloat16"))


def sections_of(call: str, tiny: bool, beginnings: tuple[str, ...] = ("",)) -> list[Section]:
    """The sections of a call whose names begin so. Args: tiny: small sizes and long limits, for a CPU."""
    every = _second(tiny) if call == "second" else _first(tiny)
    chosen = [section for section in every if section.name.startswith(beginnings)]
    return [section._replace(seconds=10 * section.seconds) for section in chosen] if tiny else chosen


def _task(name: str, target: str, /, **arguments: Any) -> Task:
    """A task of this check, or of the workshop. An error in optional ones means that they are not available here."""
    own = "" if target.startswith(_WORKSHOP) else "gpu_check."
    optional = target.split(":")[0] in ("backends", "plain_loop")
    return Task(name, own + target, arguments, optional=optional)


def _steps(section: str, seconds: int, tiny: bool) -> Section:
    trainings = tomllib.loads(Path(__file__).with_name("steps.toml").read_text(encoding="utf-8"))
    asked = [Training(**training) for training in trainings[section]]
    return Section(section, seconds, [(training.tiny() if tiny else training).task() for training in asked])


def _commands(seconds: int, tiny: bool, *names: str) -> Section:
    tasks = [_task(f"commands/{name}", f"commands:{name}", steps=12 if tiny else 120) for name in names]
    return Section("commands", seconds, tasks)


def _first(tiny: bool) -> list[Section]:
    shapes, seq, timed = ([(2, 1, 32, "float16")], 96, 96) if tiny else (_SHAPES, 3000, 8192)
    tiles = [
        _task(f"attention kernels/{n} heads, {kv} of keys, size {dim}/{dtype}", "attention:tiles", heads=n, kv_heads=kv,
             dim=dim, dtype=dtype, seq=seq, timed=timed if (n, kv, dim, dtype) in shapes[:3] else 0)
        for n, kv, dim, dtype in shapes
    ]  # fmt: skip
    model, tokens, size = ("debug", 64, 512) if tiny else ("0.6B", 4096, 8192)
    shape = dict(zip(("heads", "kv_heads", "head_dim", "dtype"), shapes[0], strict=True), batch=2, seq=timed)
    backends = sorted(KERNELS.keys() - {EXPLICIT, REFERENCE})
    return [
        Section("environment", 35, [
            _task("environment/doctor", "commands:doctor"),
            _task("bandwidth/device 0", f"{_WORKSHOP}.products:bandwidth"),
            *(_task(f"gemm/{model}/{dtype}", f"{_WORKSHOP}.products:gemm", model=model, tokens=tokens, dtype=dtype)
              for dtype in ("bfloat16", "float16", "float32")),
        ]),
        Section("warm-up", 60, [_task("warm-up/attention", "attention:warm_up", shapes=shapes)]),
        Section("attention kernels", 60, tiles),
        Section("kernels", 75, [
            _task("kernels", "kernels:tasks", tiny=tiny),
            _task("kernels/optimizer", "kernels:optimizer", rows=size, columns=size),
            *(_task(f"attention/{name}/{model}/{shape['dtype']}/{timed}", "backends:measure", name=name,
                    shape=shape) for name in backends),
        ]),
        _steps("steps of 0.6B", 70, tiny),
        _commands(105, tiny, "train", "killed", "generate"),
        _steps("steps of 8B and Qwen3.5", 75, tiny),
        Section("plain loop", 40, [_task("plain loop/losses", "plain_loop:losses", tiny=tiny),
                                   _task("plain loop/0.6B, 8192", "plain_loop:speed", tiny=tiny)]),
        _steps("further steps", 65, tiny),
    ]  # fmt: skip


def _second(tiny: bool) -> list[Section]:
    shapes = [(4, 2, 32, "float16")] if tiny else [*_TIMED[:1], (4, 2, 32, "bfloat16"), (4, 2, 32, "float16")]
    tools = [_task(f"sanitizer/{tool}", "commands:sanitizer", tool=tool) for tool in ("memcheck", "racecheck")]
    warm, steps = _task("warm-up/attention", "attention:warm_up", shapes=shapes), _steps("more steps", 65, tiny)
    return [Section("warm-up", 25, [warm]), _commands(60, tiny, "fp16", "dpo"), steps, Section("sanitizer", 65, tools)]
