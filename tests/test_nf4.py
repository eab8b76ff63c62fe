"""The base of a LoRA run in 4 bits: in every layout the loss and gradients of peft in fp64 on the dequantised base."""

import dataclasses
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import REPO, torchrun
from gloo.job_parity import run_split
from test_lora import FP64, LORA, MODELS, assert_equals_peft, in_peft, make_case, peft_reference
from test_parity import ROWS, is_pipeline, pipeline
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from titan_mi100.config.check import check
from titan_mi100.config.settings import Config, LoRAConfig
from titan_mi100.model.nf4 import BLOCK, NF4Linear, codes_per_value, dequantize, quantize
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.base import ModelSpec

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}  # 4 heads: blocks of 64, on two ranks too
SPECS = {name: dataclasses.replace(spec, **WIDE) for name, spec in MODELS.items()}
NF4 = {**FP64, "lora": {**dataclasses.asdict(LORA), "base": "nf4"}}
TP2 = {"tensor_parallel_degree": 2}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_each_weight_becomes_the_nearest_of_16_values(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 256) * torch.logspace(-3, 3, 8)[:, None]
    weight[0, :BLOCK] = 0
    codes, largest = quantize(weight, dtype)
    assert codes.dtype == largest.dtype == dtype
    assert codes.shape == (8, 256 // codes_per_value(dtype)) and largest.shape == (8, 4)
    found = dequantize(codes, largest).double().view(8, 4, BLOCK)
    blocks, scale = weight.double().view(8, 4, BLOCK), largest.double()[..., None]
    assert not found[0, 0].any()
    # the widest gap of the table, at -1, is 0.31; what the dtype rounds comes on top
    assert ((found - blocks).abs() <= scale * (0.153 + torch.finfo(dtype).eps)).all()
    nibbles = codes.view(torch.uint8)
    assert len(torch.cat([nibbles >> 4, nibbles & 15]).unique()) == 16
    again = dequantize(*quantize(dequantize(codes, largest), dtype))
    assert torch.equal(again, dequantize(codes, largest))


def test_the_values_are_quantiles_of_the_normal_distribution() -> None:
    """The paper's construction: 8 intervals of equal probability below zero and 7 above, as bitsandbytes has it."""
    normal, offset = torch.distributions.Normal(0.0, 1.0), 0.9677083
    above = normal.icdf(torch.linspace(offset, 0.5, 9)[:-1].double())
    below = -normal.icdf(torch.linspace(offset, 0.5, 8)[:-1].double())
    expected = torch.cat([above, below, torch.zeros(1).double()]).sort().values
    every = torch.arange(16, dtype=torch.uint8)
    codes = (every << 4 | every).repeat(1, 4).view(1, 64).view(torch.float64)
    found = dequantize(codes, torch.ones(1, 2, dtype=torch.float64))[0, ::2][:16]
    torch.testing.assert_close(found, (expected / expected.max()), atol=1e-6, rtol=0)


def layer_of(codes: torch.Tensor, largest: torch.Tensor) -> NF4Linear:
    layer = NF4Linear(128, 48)
    layer.shrink(codes.dtype)
    layer.to_empty(device="cpu")
    layer.weight.data.copy_(codes)
    layer.largest.data.copy_(largest)
    return layer


def test_a_layer_and_its_gradient_are_those_of_its_dequantised_weight() -> None:
    torch.manual_seed(0)
    codes, largest = quantize(torch.randn(48, 128), torch.float64)
    layer = layer_of(codes, largest)
    x = torch.randn(2, 5, 128, dtype=torch.float64, requires_grad=True)
    y, other = layer(x), x.detach().clone().requires_grad_()
    expected = torch.nn.functional.linear(other, dequantize(codes, largest))
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-14, atol=0)
    assert layer.weight.grad is None


class HostCopies(TorchDispatchMode):
    """Counts the tensors made of numbers of the host: on a GPU each is a copy that the host waits for."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "lift_fresh" in str(func) or "_local_scalar_dense" in str(func)
        return func(*args, **(kwargs or {}))


def test_no_forward_and_no_backward_waits_for_a_copy_of_the_values_and_no_fake_table_is_kept() -> None:
    torch.manual_seed(0)
    codes, largest = quantize(torch.randn(48, 128), torch.bfloat16)
    counted = NF4Linear(128, 48)
    counted.shrink(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):  # as the memory counter does, in the same process
        counted.to_empty(device="cpu")
        counted(torch.randn(3, 128, dtype=torch.bfloat16))
    with torch.inference_mode():
        layer_of(codes, largest)
    layer = layer_of(codes, largest)
    x = torch.randn(3, 128, dtype=torch.bfloat16, requires_grad=True)
    with HostCopies() as seen:
        for _ in range(2):
            y = layer(x)
            y.sum().backward()
    assert seen.count == 0
    weight = dequantize(codes, largest)
    assert torch.equal(y, torch.nn.functional.linear(x, weight))
    assert torch.equal(x.grad, 2 * (torch.ones_like(y) @ weight))  # type: ignore[arg-type]
    assert not list(layer.buffers()) and layer.state_dict().keys() == {"weight", "largest"}


def in_4_bits(spec: ModelSpec) -> peft.PeftModel:
    """peft's model in fp64, of which each frozen matrix in a block is what 4 bits make of it."""
    model, changed = in_peft(spec), 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("base_layer.weight"):
                parameter.copy_(dequantize(*quantize(parameter, torch.float64)))
                changed += 1
    assert changed == 7 * spec.num_hidden_layers
    return model


@pytest.mark.parametrize("name", SPECS)
def test_one_process_has_pefts_loss_and_gradients(name: str, world: World) -> None:
    case, expected = make_case(name, SPECS[name]), peft_reference(SPECS[name], model=in_4_bits(SPECS[name]))
    half = {**NF4, "local_batch_size": 4, "accumulation": 2}
    for option in ({}, {"checkpointing": "full"}, {"parallelism": {"zero_stage": 0}, "checkpointing": "selective"}):
        assert_equals_peft(run_split(world, case, {**half, **option}), expected, option)


def compare(processes: int, options: list[dict], folder: Path) -> None:
    cases = {name: make_case(name, spec) for name, spec in SPECS.items()}
    expected = {name: peft_reference(spec, model=in_4_bits(spec)) for name, spec in SPECS.items()}
    splits = []
    for option in options:
        degrees = option.get("parallelism", {})
        ranks = processes // degrees.get("pipeline_parallel_degree", 1) // degrees.get("tensor_parallel_degree", 1)
        ranks //= degrees.get("context_parallel_degree", 1)
        splits.append({"local_batch_size": ROWS // (2 * ranks), "accumulation": 2, **NF4, **option})
    torch.save({"cases": cases, "splits": splits, "runs": {}}, folder / "job.pt")
    torchrun(str(REPO / "tests/gloo/job_lora.py"), str(folder / "job.pt"), str(folder), processes=processes)
    by_rank = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(processes)]
    for number, split in enumerate(splits):
        records = [rank["splits"][number] for rank in by_rank]
        for record in records:
            held = [pair for other in records for pair in other["gradients"]] if is_pipeline(split) else None
            assert_equals_peft({**record, "gradients": held or record["gradients"]}, expected[split["case"]], split)


@pytest.mark.full
def test_two_processes_have_pefts_gradients(full: bool, tmp_path: Path) -> None:
    options: list[dict] = [
        {"case": "untied", "checkpointing": "full"},
        {"case": "untied", "parallelism": TP2},
        {"case": "tied", "parallelism": pipeline()},
        {"case": "untied", "parallelism": {"context_parallel_degree": 2}},
    ]
    more: list[dict] = [
        {"case": "tied", "parallelism": {"zero_stage": 1}},
        {"case": "untied", "parallelism": {"zero_stage": 2}, "checkpointing": "selective"},
        {"case": "tied", "parallelism": {"zero_stage": 0}},
        {"case": "tied", "compile": True},
    ]
    compare(2, options + (more if full else []), tmp_path)


@pytest.mark.full
def test_four_processes_have_pefts_gradients(tmp_path: Path) -> None:
    options: list[dict] = [
        {"case": "untied", "parallelism": TP2},
        {"case": "tied", "parallelism": {"data_parallel_replicate_degree": 2}, "checkpointing": "full"},
        {"case": "untied", "parallelism": pipeline(), "checkpointing": "full"},
    ]
    compare(4, options, tmp_path)


def test_a_model_without_whole_blocks_is_refused() -> None:
    config = Config(lora=LoRAConfig(rank=4, base="nf4"))
    narrow = dataclasses.replace(SPECS["tied"], intermediate_size=96)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Config, "spec", lambda _: narrow)
        wrong = [one.text for one in check(config, 1, with_files=False) if one.key == "lora.base"]
        assert len(wrong) == 1 and "intermediate_size = 96 over 1 ranks" in wrong[0]
        patched.setattr(Config, "spec", lambda _: SPECS["tied"])
        assert not [one for one in check(config, 1, with_files=False) if one.key == "lora.base"]
