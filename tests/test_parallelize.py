"""What activation checkpointing and compile really do, counted. (Numbers under both: tests/test_parity.py.)"""

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import documents_of
from held_names import check_names
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_mi100.attention.torch_backends import Sdpa
from titan_mi100.config.layout import Layout
from titan_mi100.config.settings import (
    ActivationCheckpointConfig,
    CompileConfig,
    Config,
    LoRAConfig,
    ParallelismConfig,
    TrainingConfig,
)
from titan_mi100.model.init import Read, initial_values
from titan_mi100.model.loss import HeadMemory
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.open_run.model import keep_stages
from titan_mi100.parallel import build as building
from titan_mi100.parallel import distributed
from titan_mi100.parallel.build import Computation, Placement, build_model
from titan_mi100.parallel.distributed import World
from titan_mi100.parallel.fsdp import apply_fsdp
from titan_mi100.planning.memory import layers_per_stage
from titan_mi100.planning.workload import Workload
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import PRESETS

LAYERS = 3


class Downcasts(TorchDispatchMode):
    """Collects the operators that turn fp64 into less."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # to see the operators on its parts
        result = func(*args, **(kwargs or {}))

        def holds(values: Any, *dtypes: torch.dtype) -> bool:
            return any(isinstance(leaf, torch.Tensor) and leaf.dtype in dtypes for leaf in tree_leaves(values))

        if holds((args, kwargs), torch.float64) and holds(result, torch.float32, torch.bfloat16):
            self.found.add(str(func))
        return result


class Given(TorchFunctionMode):
    """Collects the tensors that operations return, and those that a second one returned, as `x.to(x.dtype)` does."""

    def __init__(self) -> None:
        super().__init__()
        self.first: list[torch.Tensor] = []
        self.again: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                (self.again if any(x is other for other in self.first) else self.first).append(x)
        return result


def build(world: World, mode: str, compile_config: CompileConfig, dtype: str = "bfloat16") -> Qwen3:
    spec = dataclasses.replace(PRESETS["debug"], num_hidden_layers=LAYERS)
    training = TrainingConfig(mixed_precision_param=dtype)
    config = Config(training=training, activation_checkpoint=ActivationCheckpointConfig(mode), compile=compile_config)
    return filled(world, config, spec, partial(initial_values, spec, 1))


def filled(world: World, config: Config, spec: ModelSpec, read: Read) -> Qwen3:
    mesh = distributed.build_mesh(Layout(), world.device)
    computation, placement = Computation(Sdpa(), HeadMemory()), Placement(mesh, world.device)
    sharded = build_model(Workload(config, 1, spec), computation, placement)
    distributed.fill_parameters(sharded.named_parameters(), read)
    return sharded.parts[0]


def run(model: Qwen3, boundary: int) -> torch.Tensor:
    ids = torch.arange(64).view(2, 32)
    documents = documents_of((ids % 32 >= boundary).long())
    return model(ids, documents=model.model.prepare(documents, ids.device), labels=ids, supervised=torch.arange(64))


@pytest.mark.parametrize(
    ("mode", "mlps", "attentions"), [("none", 0, 0), ("selective", LAYERS, 0), ("full", LAYERS, LAYERS)]
)
def test_backward_recomputes_what_the_mode_says(
    mode: str, mlps: int, attentions: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(world, mode, CompileConfig())
    calls = {"mlp": 0, "attention": 0}
    plain = Sdpa.__call__

    def counted(*arguments: Any) -> torch.Tensor:
        calls["attention"] += 1
        return plain(*arguments)

    monkeypatch.setattr(Sdpa, "__call__", counted)
    for layer in model.model.blocks():
        layer.mlp.register_forward_pre_hook(lambda *_: calls.update(mlp=calls["mlp"] + 1))
    loss = run(model, 20)
    assert calls == {"mlp": LAYERS, "attention": LAYERS}
    loss.sum().backward()
    assert calls == {"mlp": LAYERS + mlps, "attention": LAYERS + attentions}


@pytest.mark.parametrize("name", ["debug", "moe-debug", "qwen3.5-debug"])
@pytest.mark.parametrize(
    "lora", [LoRAConfig(), LoRAConfig(rank=2), LoRAConfig(rank=2, base="nf4")], ids=["whole", "LoRA", "QLoRA"]
)
def test_no_autograd_function_returns_what_two_operations_returned(
    name: str, lora: LoRAConfig, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled by torch 2.11, it would get no gradient without a word: pytorch issue 180642."""
    called, wrong = set[str](), set[str]()

    def watched(function: Any) -> Any:
        forward = function.forward

        def run(*inputs: Any) -> Any:
            with Given() as given:
                outputs = forward(*inputs)
            called.add(function.__name__)
            wrong.update(function.__name__ for x in tree_leaves(outputs) if any(x is other for other in given.again))
            return outputs

        return staticmethod(run)

    for function in torch.autograd.Function.__subclasses__():
        if function.__module__.startswith("titan_mi100."):
            monkeypatch.setattr(function, "forward", watched(function))
    config = Config(training=TrainingConfig(mixed_precision_param="float32"), lora=lora)
    read = lambda name, shape, offset, size: torch.full(size, 0.01)  # noqa: E731
    run(filled(world, config, PRESETS[name], read), 20).sum().backward()
    assert not wrong and "_BlockedCrossEntropy" in called
    assert ("_DeltaRule" in called) == ("3.5" in name) and ("_AdaptedProduct" in called) == bool(lora.rank)


@pytest.mark.full
@pytest.mark.parametrize(
    "mode",
    [pytest.param("none", marks=pytest.mark.full), "selective", pytest.param("full", marks=pytest.mark.full)],
)
def test_compile_compiles_both_parts_once_for_all_layers_and_all_documents(mode: str, world: World) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = build(world, mode, CompileConfig(enable=True, backend=counter))  # type: ignore[arg-type]
    for boundary in (20, 7, 13):
        run(model, boundary).sum().backward()
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_nothing_in_a_step_in_fp64_is_computed_in_less(world: World) -> None:
    """The parity table in fp64 could not see it: every layout would lose the same digits."""
    model = build(world, "selective", CompileConfig(), "float64")
    with Downcasts() as downcasts:
        run(model, 20).sum().backward()
    assert downcasts.found == set()
    assert all(p.grad is not None and p.grad.dtype == torch.float64 for p in model.parameters())


@pytest.mark.parametrize(("zero_stage", "reshards"), [(3, True), (2, False)])
@pytest.mark.parametrize("tied", [False, True])
def test_blocks_embedding_and_head_are_sharded_and_gathered_by_themselves(
    tied: bool, zero_stage: int, reshards: bool, world: World
) -> None:
    spec = dataclasses.replace(PRESETS["debug"], num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    mesh = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    apply_fsdp(model := Qwen3(spec), mesh, TrainingConfig(), Layout(zero_stage=zero_stage))
    groups = {name: each for name, each in model.named_modules() if isinstance(each, FSDPModule)}
    blocks, ends = [f"model.layers.{layer}" for layer in range(LAYERS)], ["", "model.embed_tokens", "lm_head"]
    assert groups.keys() == {*blocks, *(ends[:1] if tied else ends)}
    for name, each in groups.items():
        group = each._get_fsdp_state()._fsdp_param_group
        assert group is not None
        assert (group.post_forward_mesh_info is not None) == (reshards and name not in ("", "lm_head", blocks[-1])), (
            name
        )


def test_stages_are_balanced_by_what_is_recomputed_and_trained() -> None:
    def counts(mode: str = "none", lora: int = 0, given: tuple[int, ...] = ()) -> list[int]:
        config = Config(
            training=TrainingConfig(seq_len=1024, local_batch_size=1),
            parallelism=ParallelismConfig(pipeline_parallel_degree=2, pipeline_parallel_layers_per_stage=given),
            activation_checkpoint=ActivationCheckpointConfig(mode=mode),
            lora=LoRAConfig(rank=lora),
        )
        return list(layers_per_stage(Workload(config, 2, PRESETS["0.6B"]), supervised_share=1.0))

    # every token supervised: the head costs many blocks; fewer where blocks are recomputed, more where they are frozen
    assert (counts(), counts("full"), counts(lora=8), counts(given=(14, 14))) == ([22, 6], [20, 8], [23, 5], [14, 14])


def test_a_resumed_pipeline_keeps_its_stages() -> None:
    def kept(manifest: dict[str, Any], given: tuple[int, ...] = (), pp: int = 2) -> tuple[int, ...]:
        parallelism = ParallelismConfig(pipeline_parallel_degree=pp, pipeline_parallel_layers_per_stage=given)
        config = Config(training=TrainingConfig(seq_len=1024, local_batch_size=1), parallelism=parallelism)
        data: Any = SimpleNamespace(train_counts=SimpleNamespace(supervised_share=lambda _: 1.0))
        world = World(0, pp, torch.device("cpu"))
        after = keep_stages(config, world, PRESETS["0.6B"], data, manifest)
        return after.parallelism.pipeline_parallel_layers_per_stage

    saved: dict[str, Any] = {"layout": {"pp": 2}, "chosen": {"stages": [18, 10]}}
    assert kept(saved) == (18, 10) and kept(saved, given=(14, 14)) == (14, 14)
    assert kept({"layout": {"pp": 2}}) == (20, 8)  # by cost, as earlier versions cut
    assert kept(saved, pp=4) == kept({"layout": {"pp": 1}}) == ()  # another number of stages: chosen anew


@pytest.mark.parametrize("lora", [{}, {"rank": 2}, {"rank": 2, "base": "nf4"}])
def test_a_built_model_has_the_tensors_of_its_shape(
    lora: dict[str, Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a wrapper that replaces modules might drop one, such as a bias."""
    config, spec, layout = Config(lora=LoRAConfig(**lora)), PRESETS["debug"], Layout()
    mesh, before = distributed.build_mesh(layout, world.device), building.parallelize
    given = Workload(config, 1, spec), Computation(Sdpa(), HeadMemory()), Placement(mesh, world.device)
    check_names(build_model(*given).parts[0], spec, config.lora)

    def drops(model: Any, *rest: Any) -> None:
        before(model, *rest)
        del model.model.layers["1"].self_attn.q_norm.weight

    monkeypatch.setattr(building, "parallelize", drops)
    with pytest.raises(AssertionError, match=r"differ in model\.layers\.1\.self_attn\.q_norm\.weight"):
        check_names(build_model(*given).parts[0], spec, config.lora)
