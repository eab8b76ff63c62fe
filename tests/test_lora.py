"""LoRA: in every layout the loss and the gradients of peft on transformers in fp64; only adapters are trained, saved
and sent; folders that peft reads and writes."""

import dataclasses
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from conftest import ASSETS, REPO, torchrun
from gloo.job_parity import open_split, run_split
from safetensors.torch import load_file, save_file
from test_model import SPECS, reference
from test_parity import ROWS, SEQ_LEN, backward_of_all, documents, is_pipeline, pipeline
from test_train import checkpoint_tensors, losses, metrics
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from titan_mi100.attention.torch_backends import Chunked
from titan_mi100.checkpoint.resume import FoundCheckpoint, check_same_run
from titan_mi100.config.check import check
from titan_mi100.config.settings import Config, LoRAConfig, lora_identity
from titan_mi100.errors import UserError
from titan_mi100.model import loss
from titan_mi100.model.layers import Linear
from titan_mi100.model.lora import LoRALinear, apply_lora, base_fingerprint, is_adapter, lora_values
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.parallel.base import without_dropout
from titan_mi100.parallel.distributed import World
from titan_mi100.planning.costs import train_flops
from titan_mi100.shapes.base import ModelSpec, adapter_shapes, parameter_shapes
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.shapes.qwen3 import LINEARS
from titan_mi100.weights.peft import CONFIG, WEIGHTS, open_adapter, read_adapter, write_adapter

# an even vocabulary, and layers for two stages per rank
MODELS = {name: dataclasses.replace(SPECS[name], vocab_size=312, num_hidden_layers=4) for name in ("tied", "untied")}
LORA = LoRAConfig(rank=4, alpha=6.0)
FP64 = {"lora": dataclasses.asdict(LORA), "param": "float64"}
ROWS_TOO = dataclasses.replace(LORA, token_ids=(0, 7, 200, 311), scaling="sqrt_rank")
WITH_ROWS = {**FP64, "lora": dataclasses.asdict(ROWS_TOO)}
SOME = {**FP64, "lora": {"rank": 4, "alpha": 6.0, "target_modules": ("q_proj", "v_proj", "down_proj")}}


def adapter_values(spec: ModelSpec, lora: LoRAConfig = LORA) -> dict[str, torch.Tensor]:
    """Both matrices random: from B = 0, A would have no gradient."""
    generator = torch.Generator().manual_seed(5)
    shapes = lora.shapes(spec)
    return {name: 0.2 * torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def exact_reference(spec: ModelSpec) -> Qwen3ForCausalLM:
    """transformers' model in fp64 throughout: its norms and its eager softmax compute in fp32, whatever they get."""
    model = reference(spec).double()
    model.set_attn_implementation("sdpa")
    for module in model.modules():
        if isinstance(module, Qwen3RMSNorm):
            module.forward = partial(exact_norm, module)  # type: ignore[method-assign]
    return model


def exact_norm(norm: Qwen3RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)


def in_peft(spec: ModelSpec, lora: LoRAConfig = LORA, targets: str | None = None) -> peft.PeftModel:
    modules = targets or list(lora.target_modules)
    config = peft.LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), target_modules=modules, task_type="CAUSAL_LM")
    config.use_rslora = lora.scaling == "sqrt_rank"
    tables = ("embed_tokens", "lm_head")[: 1 if spec.tie_word_embeddings else 2]
    config.trainable_token_indices = {table: [*lora.token_ids] for table in tables} if lora.token_ids else None
    model = peft.get_peft_model(exact_reference(spec), config, autocast_adapter_dtype=False)
    values = adapter_values(spec, lora)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(values.pop(ours_of(name)))
    assert not values
    return model


def ours_of(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default", "")


def make_case(name: str, spec: ModelSpec | None = None) -> dict:
    spec = spec or MODELS[name]
    weights = {k: v.double() for k, v in reference(spec).state_dict().items() if k in parameter_shapes(spec)}
    return {"spec": spec, "weights": weights | adapter_values(spec), "documents": documents(), "seq_len": SEQ_LEN}


def peft_reference(spec: ModelSpec, lora: LoRAConfig = LORA, model: peft.PeftModel | None = None) -> dict:
    model = model or in_peft(spec, lora)
    mean, _ = backward_of_all(model)
    gradients = {ours_of(name): p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": mean, "gradients": gradients}


def assert_equals_peft(result: dict, expected: dict, what: object) -> None:
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-12), what
    norm = torch.sqrt(sum(g.square().sum() for g in expected["gradients"].values())).item()
    assert result["grad_norm"] == pytest.approx(norm, rel=1e-12), what
    assert {name for name, _ in result["gradients"]} == expected["gradients"].keys(), what
    for name, gradient in result["gradients"]:
        exact = expected["gradients"][name]
        assert (gradient - exact).norm() <= 1e-12 * exact.norm(), (what, name)


@pytest.mark.parametrize("name", MODELS)
def test_one_process_has_pefts_loss_and_gradients(name: str, world: World) -> None:
    case, expected = make_case(name), peft_reference(MODELS[name])
    half = {**FP64, "local_batch_size": 4, "accumulation": 2}
    zero1 = {"parallelism": {"zero_stage": 1}, "checkpointing": "full"}
    selective = {"checkpointing": "selective", "backend": "chunked"}
    pieces = {"memory": {"piece_tokens": 50}, "checkpointing": "full"}
    for option in ({}, {"parallelism": {"zero_stage": 0}}, zero1, selective, pieces):
        assert_equals_peft(run_split(world, case, {**half, **option}), expected, option)
    every = {**FP64["lora"], "target_modules": ("all-linear",)}
    in_theirs = peft_reference(MODELS[name], model=in_peft(MODELS[name], targets="all-linear"))
    assert_equals_peft(run_split(world, case, {**half, "lora": every}), in_theirs, "all-linear")
    some = LoRAConfig(**SOME["lora"])
    case["weights"] |= adapter_values(MODELS[name], some)
    assert_equals_peft(run_split(world, case, {**half, **SOME}), peft_reference(MODELS[name], some), "some modules")
    case["weights"] |= adapter_values(MODELS[name], ROWS_TOO)
    for option in ({}, {"checkpointing": "full", "parallelism": {"zero_stage": 1}}):
        record = run_split(world, case, {**half, **WITH_ROWS, **option})
        assert_equals_peft(record, peft_reference(MODELS[name], ROWS_TOO), ("rows of tokens", option))


def run_processes(processes: int, options: list[dict], runs: dict[str, dict], folder: Path) -> list[dict]:
    """Checks the splits against peft; each rank's records of the runs."""
    cases = {name: make_case(name) for name in MODELS}
    for name, case in cases.items():
        case["weights"] |= adapter_values(MODELS[name], ROWS_TOO)  # a model takes those that it has
    splits = []
    for option in options:
        degrees = option.get("parallelism", {})
        ranks = processes // max(degrees.get("pipeline_parallel_degree", 1), 1)
        ranks //= degrees.get("tensor_parallel_degree", 1) * degrees.get("context_parallel_degree", 1)
        splits.append({"local_batch_size": ROWS // (2 * ranks), "accumulation": 2, **FP64, **option})
    torch.save({"cases": cases, "splits": splits, "runs": runs}, folder / "job.pt")
    torchrun(str(REPO / "tests/gloo/job_lora.py"), str(folder / "job.pt"), str(folder), processes=processes)
    by_rank = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(processes)]
    of_rows = {split["lora"]["token_ids"]: LoRAConfig(**split["lora"]) for split in splits}
    expected = {
        (name, tokens): peft_reference(MODELS[name], lora) for name in MODELS for tokens, lora in of_rows.items()
    }
    for number, split in enumerate(splits):
        records = [rank["splits"][number] for rank in by_rank]
        for record in records:
            held = [pair for other in records for pair in other["gradients"]] if is_pipeline(split) else None
            assert_equals_peft(
                {**record, "gradients": held or record["gradients"]},
                expected[split["case"], split["lora"]["token_ids"]],
                split,
            )
    return [rank["runs"] for rank in by_rank]


TP2 = {"tensor_parallel_degree": 2}
CP2 = {"context_parallel_degree": 2}


@pytest.mark.full
def test_two_processes_have_pefts_gradients_and_train_save_and_resume_adapters_only(full: bool, tmp_path: Path) -> None:
    options: list[dict] = [
        {"case": "untied", "checkpointing": "full"},
        {"case": "tied", "parallelism": {"zero_stage": 0}},
        {"case": "untied", "parallelism": TP2, "checkpointing": "full"},
        {"case": "tied", "parallelism": pipeline()},
        {"case": "tied", **WITH_ROWS, "memory": {"piece_tokens": 20}},
        {"case": "untied", **WITH_ROWS, "parallelism": TP2, "memory": {"piece_tokens": 20}, "checkpointing": "full"},
        {"case": "tied", **WITH_ROWS, "parallelism": pipeline()},
        {"case": "untied", **WITH_ROWS, "parallelism": CP2},
    ]
    more: list[dict] = [
        {"case": "tied"},
        {"case": "untied", "parallelism": {"zero_stage": 2}, "checkpointing": "selective"},
        {"case": "tied", "parallelism": {"zero_stage": 1}},
        {"case": "tied", "parallelism": TP2},
        {"case": "untied", "parallelism": pipeline(), "checkpointing": "full"},
        {"case": "tied", "parallelism": pipeline("GPipe"), "checkpointing": "selective"},
        {"case": "untied", "parallelism": pipeline("Interleaved1F1B")},
        {"case": "tied", "parallelism": TP2, "compile": True},
        {"case": "untied", "compile": True, "checkpointing": "selective"},
        {"case": "tied", **WITH_ROWS, "parallelism": TP2},
        {"case": "untied", **WITH_ROWS, "parallelism": pipeline("Interleaved1F1B")},
        {"case": "untied", **WITH_ROWS, "parallelism": {"zero_stage": 2}},
        {"case": "tied", **WITH_ROWS, "parallelism": {"zero_stage": 0}},
    ]
    options += more if full else []
    one = {"case": "tied", "local_batch_size": 2, "accumulation": 2, **FP64}
    whole = {**one, "local_batch_size": 4}
    random = {**one, "lora": {**FP64["lora"], "dropout": 0.2}, "param": "bfloat16", "checkpointing": "full"}
    rows = {**one, "lora": {**WITH_ROWS["lora"], "b_lr_ratio": 4.0}}
    powersgd = {"zero_stage": 0, "powersgd_rank": 1, "powersgd_start_step": 2}
    runs = {
        "straight": {**one, "stop": 4},
        "half": {**one, "stop": 2, "save": "half"},
        "same": {**one, "stop": 4, "resume": "half", "from": 2},
        "PP2": {**whole, "stop": 4, "resume": "half", "from": 2, "parallelism": pipeline(), "save": "pp"},
        "rows": {**rows, "stop": 4},
        "rows half": {**rows, "stop": 2, "save": "rows"},
        "rows same": {**rows, "stop": 4, "resume": "rows", "from": 2},
        "rows PP2": {**rows, "local_batch_size": 4, "stop": 4, "resume": "rows", "from": 2, "parallelism": pipeline()},
        "random": {**random, "stop": 4},
        "random half": {**random, "stop": 2, "save": "random"},
        "random same": {**random, "stop": 4, "resume": "random", "from": 2},
    }
    if full:
        runs |= {
            "rows TP2": {**rows, "local_batch_size": 4, "stop": 4, "resume": "rows", "from": 2, "parallelism": TP2},
            "PowerSGD": {**random, "stop": 3, "parallelism": powersgd},
            "random TP2": {**random, "local_batch_size": 4, "stop": 1, "parallelism": TP2},
            "random PP2": {**random, "local_batch_size": 4, "stop": 1, "parallelism": pipeline()},
            "DDP": {**one, "stop": 4, "resume": "half", "from": 2, "parallelism": {"zero_stage": 0}},
            "TP2": {**whole, "stop": 4, "resume": "half", "from": 2, "parallelism": TP2},
            "PP2 to ZeRO-2": {**one, "stop": 5, "resume": "pp", "from": 4, "parallelism": {"zero_stage": 2}},
        }
    ranks = run_processes(2, options, runs, tmp_path)
    shapes = adapter_shapes(MODELS["tied"], LORA.rank, LINEARS)
    for index, rank in enumerate(ranks):
        for name, record in rank.items():
            replicated = runs[name].get("parallelism", {}).get("zero_stage") == 0  # the first replica counts for all
            second_copy = name == "rows PP2" and index == 1  # the head's, of a tied embedding's rows
            assert record["copies"] == (len(record["weights"]) if replicated and index else second_copy), name
            dtype = torch.float64 if runs[name]["param"] == "float64" else torch.float32
            base = torch.float64 if runs[name]["param"] == "float64" else torch.bfloat16
            # trained rows are written into the memory of the table, whose own nobody reads
            table = {"model.embed_tokens.weight"} if name.startswith("rows") else set()
            assert all(is_adapter(changed) for changed in record["changed"] - table), name
            assert {dtype} == {record["dtypes"][weight] for weight in record["weights"]}, name
            assert {base} == {d for weight, d in record["dtypes"].items() if weight not in record["weights"]}, name
            assert not record["validation_drew"], name
            assert record["validation"][0] == record["validation"][1], name
        assert rank["straight"]["changed"] == shapes.keys()
        for name in {"same", "DDP", "TP2", "PP2", "rows TP2", "rows PP2"} & rank.keys():
            straight = rank["rows" if name.startswith("rows") else "straight"]
            assert rank[name]["losses"] == pytest.approx(straight["losses"][2:], rel=1e-10), name
            assert rank[name]["validation"] == pytest.approx(straight["validation"], rel=1e-10), name
            for weight, tensor in rank[name]["weights"].items():
                exact = straight["weights"][weight]
                assert (tensor - exact).norm() <= 1e-9 * exact.norm(), (name, weight)
        assert not full or len(rank["PP2 to ZeRO-2"]["losses"]) == 1
        for before, after in (("straight", "same"), ("rows", "rows same"), ("random", "random same")):
            assert rank[after]["losses"] == rank[before]["losses"][2:]
            assert all(torch.equal(t, rank[before]["weights"][n]) for n, t in rank[after]["weights"].items())
        adapters = 4 * sum(np.prod(shape) for shape in shapes.values())
        if full:
            assert rank["PowerSGD"]["sent"][0] == adapters and 0 < rank["PowerSGD"]["sent"][-1] < adapters
            assert rank["DDP"]["sent"] == [2 * adapters] * 2
    # what each rank would drop: data-parallel ranks and stages each their own, tensor-parallel ranks the same
    assert ranks[0]["random"]["draw"] != ranks[1]["random"]["draw"]
    if full:
        assert ranks[0]["random PP2"]["draw"] != ranks[1]["random PP2"]["draw"]
        assert ranks[0]["random TP2"]["draw"] == ranks[1]["random TP2"]["draw"]
    for folder in ("half/step-2", "pp/step-4", "random/step-2"):
        saved = checkpoint_tensors(tmp_path / folder)
        state = {f"optimizer.{name}.{key}" for name in shapes for key in ("step", "exp_avg", "exp_avg_sq")}
        assert saved.keys() == shapes.keys() | state
        assert all(tuple(saved[name].shape) == shape for name, shape in shapes.items())


@pytest.mark.full
def test_layouts_of_two_axes_have_pefts_gradients(tmp_path: Path) -> None:
    replicas = {"data_parallel_replicate_degree": 2}
    options: list[dict] = [
        {"case": "tied", "parallelism": replicas},
        {"case": "untied", "parallelism": replicas, "checkpointing": "full"},
        {"case": "tied", "parallelism": pipeline()},
        {"case": "untied", "parallelism": pipeline(**replicas)},
        {"case": "untied", "parallelism": TP2},
        {"case": "tied", "parallelism": pipeline(**TP2), "checkpointing": "selective"},
    ]
    run_processes(4, options, {}, tmp_path)


def test_a_fresh_adapter_changes_nothing_and_is_a_function_of_seed_and_name() -> None:
    def draw(seed: int, name: str, offset: tuple[int, int] = (0, 0), size: tuple[int, int] = (4, 64)) -> torch.Tensor:
        return lora_values(seed, name, torch.Size((4, 64)), offset, size)

    name = "model.layers.0.mlp.up_proj.lora_A.weight"
    assert torch.equal(draw(1, name), draw(1, name))
    assert torch.equal(draw(1, name)[2:, 8:], draw(1, name, (2, 8), (2, 56)))
    assert not torch.equal(draw(1, name), draw(2, name)) and not torch.equal(draw(1, name), draw(1, f"other.{name}"))
    assert 0.11 < draw(1, name).abs().max() <= 1 / 8 and abs(draw(1, name).mean()) < 0.02
    linear = torch.nn.Linear(64, 4)
    torch.nn.init.kaiming_uniform_(linear.weight, a=5**0.5)  # as peft
    assert linear.weight.std().item() == pytest.approx(draw(1, name).std().item(), rel=0.15)
    assert not draw(1, name.replace("lora_A", "lora_B")).any()


def test_dropout_keeps_the_mean_and_is_off_in_validation() -> None:
    torch.manual_seed(0)
    linear = LoRALinear(Linear(16, 8), LoRAConfig(rank=2, alpha=2.0, dropout=0.25))
    x = torch.randn(1, 16)
    plain = linear.weight @ x[0] + linear.lora_B.weight @ linear.lora_A.weight @ x[0]
    drawn = torch.stack([linear(x)[0] for _ in range(4000)])
    assert drawn.std(dim=0).max() > 0.05
    torch.testing.assert_close(drawn.mean(dim=0), plain, atol=0.02, rtol=0)
    with without_dropout([linear]):
        torch.testing.assert_close(linear(x)[0], plain)
    assert linear.training


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
def test_recomputation_drops_what_the_forward_dropped(compiled: bool, world: World) -> None:
    lora = {**FP64["lora"], "dropout": 0.3}
    split = {**FP64, "lora": lora, "local_batch_size": 8, "accumulation": 1, "compile": compiled}
    case, found = make_case("tied"), []
    for mode in ("none", "selective") if compiled else ("none", "selective", "full"):
        found.append(run_split(world, case, {**split, "checkpointing": mode}))
    for other in found[1:]:
        assert other["loss"] == found[0]["loss"] and other["grad_norm"] == pytest.approx(found[0]["grad_norm"], 1e-12)
    other_draw = run_split(world, case, {**split, "seed": 4})["loss"]
    assert abs(other_draw - found[0]["loss"]) > 1e-3  # more than another order of the rows makes


class Shapes(TorchDispatchMode):
    """Collects the shapes of what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found |= {tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result


def test_the_frozen_head_gets_no_gradient_and_frozen_weights_are_bf16(world: World) -> None:
    case = make_case("untied")
    model = open_split(world, case, {**FP64, "param": "bfloat16", "local_batch_size": 8, "accumulation": 1}).model
    kinds = {(is_adapter(name), p.requires_grad, p.dtype) for name, p in model.named_parameters()}
    assert kinds == {(True, True, torch.float32), (False, False, torch.bfloat16)}
    assert [name for name, _ in model.trained_parameters()] == [n for n, _ in model.named_parameters() if is_adapter(n)]
    hidden, labels = torch.randn(1, 4, 64, requires_grad=True), torch.arange(4)[None]
    for frozen in (True, False):
        weight = torch.randn(2000, 64, requires_grad=not frozen)  # more than one block of the loss
        summed = loss.head_loss(hidden, weight, labels, torch.arange(4), memory=loss.HeadMemory(1))
        with Shapes() as shapes:
            summed.sum().backward()
        assert (tuple(weight.shape) in shapes.found) is not frozen and hidden.grad is not None


def test_flops_without_the_weights_gradients() -> None:
    spec = PRESETS["0.6B"]
    values = sum(np.prod(shape) for shape in adapter_shapes(spec, 8, LINEARS).values())
    matrices = sum(np.prod(s) for n, s in parameter_shapes(spec).items() if "layers" in n and len(s) == 2)
    assert train_flops(spec, 1000, 0, 0, values) == 4 * matrices * 1000 + 6 * values * 1000
    assert train_flops(spec, 0, 10, 0, values) == 4 * 151936 * 1024 * 10
    assert train_flops(spec, 0, 0, 1, values) == train_flops(spec, 0, 0, 1)


# PEFT's folders


def with_adapter(spec: ModelSpec, tensors: dict[str, torch.Tensor], lora: LoRAConfig) -> Qwen3:
    with torch.device("meta"):
        model = Qwen3(spec, Chunked())
    apply_lora(model, lora, torch.float32)
    weights = {k: v for k, v in reference(spec).state_dict().items() if k in parameter_shapes(spec)}
    model.load_state_dict({**weights, **tensors}, assign=True)
    return model.double()


@pytest.mark.parametrize("targets", [LINEARS, ("v_proj", "up_proj")])
def test_peft_reads_what_we_write_and_we_what_peft_writes(targets: tuple[str, ...], tmp_path: Path) -> None:
    spec, lora = MODELS["tied"], dataclasses.replace(LORA, target_modules=targets)
    ids = torch.arange(24)[None]
    values = adapter_values(spec, lora)
    write_adapter(tmp_path / "ours", values, lora, "some/base")
    loaded = peft.PeftModel.from_pretrained(exact_reference(spec), tmp_path / "ours", autocast_adapter_dtype=False)
    assert loaded.peft_config["default"].base_model_name_or_path == "some/base"
    expected = with_adapter(spec, values, lora)(ids)
    torch.testing.assert_close(loaded.double()(ids).logits, expected, atol=1e-12, rtol=1e-12)
    plain = exact_reference(spec)(ids).logits
    assert (plain - expected).abs().max() > 1e-3

    in_peft(spec, lora).save_pretrained(tmp_path / "theirs")
    found, weights = read_adapter(tmp_path / "theirs")
    assert found == dataclasses.replace(lora, target_modules=targets)
    matrices = {name: weights.tensor(name) for name in weights.kinds}
    torch.testing.assert_close(with_adapter(spec, matrices, found)(ids), expected, atol=1e-12, rtol=1e-12)
    assert read_adapter(tmp_path / "ours")[0] == found


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter", adapter_values(MODELS["tied"]), LORA, "")
    return tmp_path / "adapter"


def read_checked(folder: Path) -> None:
    lora, weights = read_adapter(folder)
    weights.check(adapter_shapes(MODELS["tied"], lora.rank, lora.target_modules))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type = 'IA3'; only LORA"),
        ({"peft_type": ["LORA"]}, "only LORA"),
        ({"use_dora": True}, "use_dora = True is not supported; merge the adapter"),
        ({"use_rslora": 1}, "use_rslora = 1 is neither true nor false"),
        ({"bias": "all"}, "bias = 'all' is not supported"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"a_key_of_tomorrow": 1}, "a_key_of_tomorrow = 1 is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' changes the base"),
        ({"r": 8}, r"has shape (4, 64), but the model needs (8, 64)"),
        ({"r": True}, "r = True is not a rank"),
        ({"r": 10**30}, "is not a rank"),
        ({"lora_alpha": 0}, "lora_alpha = 0"),
        ({"lora_alpha": 10**400}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "NaN is not a finite number"),
        ({"lora_dropout": 1.0}, "lora_dropout = 1.0"),
        ({"base_model_name_or_path": ["x"]}, r"base_model_name_or_path = .'x'. is neither a name nor a path"),
        ({"base_model_name_or_path": "x" * 5000}, "base_model_name_or_path = 'xxx"),
        ({"k" * 5000: 1}, "kkkk... = 1 is not supported"),
        ({"auto_map": {"AutoModel": "evil.py"}}, "auto_map asks to run Python code"),
    ],
)
def test_settings_that_we_cannot_express_are_refused(change: dict, message: str, adapter: Path) -> None:
    config = json.loads((adapter / CONFIG).read_text()) | change
    (adapter / CONFIG).write_text(json.dumps(config))
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")) as caught:
        read_checked(adapter)
    assert str(adapter) in str(caught.value)


def test_folders_that_are_not_whole_adapters_are_refused(adapter: Path, tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(UserError, match=message):
            read_checked(adapter)

    good, config = load_file(adapter / WEIGHTS), (adapter / CONFIG).read_bytes()
    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for tensors, message in (
        ({**good, "base_model.model.lm_head.weight": torch.zeros(2, 2)}, "has base_model.model.lm_head.weight, which"),
        ({**good, first.removeprefix("base_model.model."): good[first].clone()}, "is not a LoRA matrix"),
        ({k: v for k, v in good.items() if k != first}, "missing: .*q_proj.lora_A"),
        ({**good, first: good[first][:2].clone()}, r"has shape \(2, 64\), but the model needs \(4, 64\)"),
        ({**good, first: good[first].flatten()}, r"has shape \(256,\)"),
        ({**good, first: good[first].int()}, "cannot be trained"),
        ({}, "has no tensors"),
    ):
        save_file(tensors, adapter / WEIGHTS)
        refused(message)
    save_file(good, adapter / WEIGHTS)
    read_checked(adapter)
    for content, message in ((b"[1]", "one JSON object"), (b"{", "cannot be read as JSON"), (b"[" * 99999, "as JSON")):
        (adapter / CONFIG).write_bytes(content)
        refused(message)
    (adapter / CONFIG).unlink()
    refused("no such file; name a folder that peft's save_pretrained wrote")
    (adapter / CONFIG).write_bytes(config)
    (adapter / WEIGHTS).write_bytes((adapter / WEIGHTS).read_bytes()[:-9])
    refused("not a complete safetensors file")
    (adapter / WEIGHTS).write_bytes((1 << 40).to_bytes(8, "little"))
    refused("claims a header")
    (adapter / WEIGHTS).rename(tmp_path / "elsewhere")
    refused("no such file; download it again")
    (adapter / "adapter_model.bin").write_bytes(b"a pickle")
    refused("adapter_model.bin: is a pickle")
    (adapter / WEIGHTS).symlink_to(tmp_path / "elsewhere")
    refused("is a link to")


def test_an_adapter_that_does_not_fit_the_run_is_refused(adapter: Path) -> None:
    start = dataclasses.replace(LORA, initial_load_path=str(adapter))
    shapes = adapter_shapes(MODELS["tied"], 4, LINEARS)
    read = open_adapter(dataclasses.replace(start, dropout=0.5), shapes).read
    name = "model.layers.1.mlp.up_proj.lora_B.weight"
    assert torch.equal(read(name, torch.Size((96, 4)), (8, 1), (3, 2)), adapter_values(MODELS["tied"])[name][8:11, 1:3])
    for change, message in (
        ({"rank": 8}, r"initial_load_path = .* has rank = 4, not 8; set \[lora\]"),
        ({"alpha": 7.0}, "alpha = 6.0, not 7.0"),
        ({"target_modules": ("q_proj",)}, "target_modules = "),
        ({"scaling": "sqrt_rank"}, "has scaling = rank, not sqrt_rank"),
        ({"token_ids": (7,)}, r"has trainable_tokens with the ids \[\], not \[7\]; set \[lora\]"),
    ):
        with pytest.raises(UserError, match=message):
            open_adapter(dataclasses.replace(start, **change), shapes)
    for changed, message in (
        ({"num_hidden_layers": 3}, "not part of this model: model.layers.3.* and 6 more"),
        ({"num_hidden_layers": 5}, "missing: model.layers.4"),
        ({"intermediate_size": 98}, r"has shape \(96, 4\), but the model needs \(98, 4\)"),
    ):
        with pytest.raises(UserError, match=message):
            open_adapter(start, adapter_shapes(dataclasses.replace(MODELS["tied"], **changed), 4, LINEARS))


# The trainer as a user runs it


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    spec = dataclasses.replace(PRESETS["debug"], num_hidden_layers=2)
    for name, seed in (("base", 1), ("other", 2)):
        (folder / name).mkdir()
        torch.manual_seed(seed)
        weights = {key: torch.randn(shape) * 0.05 for key, shape in parameter_shapes(spec).items()}
        save_file({key: value.bfloat16() for key, value in weights.items()}, folder / name / "model.safetensors")
        (folder / name / "config.json").write_text(json.dumps(to_hf_config(spec)))
    path = folder / "small.toml"
    path.write_text(
        f"""
[model]
tokenizer_path = "{ASSETS / "tokenizer"}"
[data]
path = "{ASSETS / "arithmetic.jsonl"}"
validation_fraction = 0.1
[training]
seq_len = 128
steps = 6
mixed_precision_param = "float32"
[optimizer]
lr = 2e-3
[lora]
rank = 4
dropout = 0.1
[activation_checkpoint]
mode = "full"
[metrics]
enable_tensorboard = false
[checkpoint]
initial_load_path = "base"
interval = 3
"""
    )
    return path


def train(config: Path, run_folder: Path, *arguments: str, code: int = 0) -> str:
    command = ("-m", "titan_mi100.train", "--job.config_file", str(config), "--job.run_folder", str(run_folder))
    result = torchrun(*command, *arguments, processes=1, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_a_run_resumes_bit_identically_on_its_own_base_only(config: Path, tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    output = train(config, whole)
    shapes = adapter_shapes(dataclasses.replace(PRESETS["debug"], num_hidden_layers=2), 4, LINEARS)
    trained = sum(int(np.prod(shape)) for shape in shapes.values())
    assert f"LoRA: {trained:,} of " in output and "fresh, seed 42" in output and "weights from" in output
    assert losses(whole)[-1] < losses(whole)[0]
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoint" / "step-6")
    manifest = json.loads((resumed / "checkpoint" / "step-3" / "manifest.json").read_text())
    numbers = {"rank": 4, "alpha": 16.0, "dropout": 0.1}
    assert manifest["lora"] == {**numbers, "target_modules": list(LINEARS), "base": str(config.parent / "base")}
    other = ("--checkpoint.initial_load_path", str(config.parent / "other"))
    assert "the run now differs from it: base (changed)" in train(config, resumed, *other, code=2)
    output = train(config, resumed)
    assert "weights from" in output and f"resumed from {resumed / 'checkpoint' / 'step-3'}" in output
    assert [e.get("validation_loss") for e in metrics(resumed)] == [e.get("validation_loss") for e in metrics(whole)]
    assert losses(resumed) == losses(whole)
    expected = checkpoint_tensors(whole / "checkpoint" / "step-6")
    found = checkpoint_tensors(resumed / "checkpoint" / "step-6")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert {name for name in found if not name.startswith("optimizer.")} == shapes.keys()


def test_another_adapter_or_none_is_refused_by_name_unless_allowed() -> None:
    def about(lora: LoRAConfig | None) -> dict:
        prints = {"lora": lora_identity(lora, LINEARS), "base": "ab"} if lora else {}
        return json.loads(json.dumps({"fingerprints": {"seed": 1, **prints}, "data": {}}))

    with_lora = FoundCheckpoint(Path("step-1"), about(LORA), {})
    check_same_run(with_lora, about(LORA), ())
    check_same_run(FoundCheckpoint(Path("step-1"), about(None), {}), about(None), ())
    for now, message in (
        (dataclasses.replace(LORA, rank=8), r"differs from it: lora.rank \(4, now 8\);"),
        (dataclasses.replace(LORA, dropout=0.5), r"differs from it: lora.dropout \(0.0, now 0.5\);"),
        (dataclasses.replace(LORA, target_modules=("q_proj",)), "differs from it: lora.target_modules"),
        (None, r"lora.rank \(4, now None\)"),
    ):
        with pytest.raises(UserError, match=message):
            check_same_run(with_lora, about(now), ("base",))
        check_same_run(with_lora, about(now), ("lora", "base"))
    rows = [dataclasses.replace(LORA, token_ids=(token,)) for token in (7, 8)]
    with pytest.raises(UserError, match=r"trained the rows of the tokens \[7\], now \[8\]; keep lora.trainable_tokens"):
        check_same_run(FoundCheckpoint(Path("step-1"), about(rows[0]), {}), about(rows[1]), ("lora",))
    with pytest.raises(UserError, match=r"lora.rank \(None, now 4\)"):
        check_same_run(FoundCheckpoint(Path("step-1"), about(None), {}), about(LORA), ())


def test_a_run_starts_from_an_adapter(config: Path, tmp_path: Path) -> None:
    lora, spec = LoRAConfig(4, 16.0), dataclasses.replace(PRESETS["debug"], num_hidden_layers=2)
    values = {name: tensor.float() for name, tensor in adapter_values(spec, lora).items()}
    write_adapter(tmp_path / "adapter", values, lora, "")
    start = ("--lora.initial_load_path", str(tmp_path / "adapter"), "--optimizer.lr", "0", "--training.steps", "1")
    assert f"from {tmp_path / 'adapter'}" in train(config, tmp_path / "run", *start)
    saved = checkpoint_tensors(tmp_path / "run" / "checkpoint" / "step-1")
    assert all(torch.equal(saved[name], value) for name, value in values.items())


def test_a_base_is_known_by_the_names_shapes_dtypes_and_first_bytes_of_its_tensors() -> None:
    sample = 4096  # bytes of a tensor; the fingerprints in checkpoints are of so many
    size = 3 * sample
    tensors = {"a": torch.arange(size, dtype=torch.uint8).view(-1, 64), "b": torch.arange(8.0).view(2, 4)}

    def fingerprint(changed: dict[str, torch.Tensor]) -> str:
        found = {**tensors, **changed}
        rows: list[int] = []

        def read(name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
            assert tuple(shape) == tuple(found[name].shape) and not any(offset)
            rows.append(size[0])
            return found[name][: size[0]]

        digest = base_fingerprint(read, {name: tuple(tensor.shape) for name, tensor in found.items()})
        assert max(rows) == sample // 64  # not more than is needed is read
        return digest

    def with_byte(place: int) -> dict[str, torch.Tensor]:
        other = tensors["a"].clone()
        other.view(-1)[place] += 1
        return {"a": other}

    same = fingerprint({})
    assert fingerprint(with_byte(sample)) == fingerprint(with_byte(size - 1)) == same
    others = [with_byte(0), with_byte(sample - 1), {"b": tensors["b"] + 1}, {"b": tensors["b"].view(4, 2)}]
    others += [{"b": tensors["b"].int().view(torch.float32)}, {"b": tensors["b"].view(torch.int32)}]
    digests = {fingerprint(other) for other in others}
    assert same not in digests and len(digests) == len(others)


def test_what_makes_no_sense_is_said(tmp_path: Path) -> None:
    def said(**lora: object) -> list[str]:
        return [str(one) for one in check(Config(lora=LoRAConfig(**lora)), None) if "lora" in one.key]  # type: ignore[arg-type]

    every = ("all-linear",)
    assert said() == said(rank=8, target_modules=("q_proj",)) == said(rank=8, target_modules=every) == []
    assert "did you mean q_proj?" in said(rank=8, target_modules=("q_prj",))[0]
    assert "did you mean all-linear?" in said(rank=8, target_modules=("all_linear",))[0]
    [beside] = said(rank=8, target_modules=(*every, "q_proj"))
    assert beside.startswith('[lora] target_modules names "all-linear" beside others; it stands alone')
    both = (lora_identity(LoRAConfig(target_modules=names), LINEARS) for names in (every, LINEARS))
    assert len({str(identity) for identity in both}) == 1
    assert "some servers silently drop its adapter" in said(rank=8, target_modules=("in_proj_a",))[0]
    [empty] = said(rank=8, target_modules=())
    assert empty.startswith("[lora] target_modules is empty, but rank = 8; name some")
    assert said(rank=8, alpha=0.0)[0].startswith("[lora] alpha = 0")
    [lacking] = said(initial_load_path=str(tmp_path))
    assert lacking.endswith(" needs lora.rank; set it to the adapter's")
    assert "is not a folder" in said(rank=8, initial_load_path=str(tmp_path / "no"))[0]
