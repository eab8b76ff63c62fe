"""Pieces of the tokens: what they compute, how often, and what they keep."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gloo.job_parity import config_of, keep_gradients, whole
from parity.table import ROWS, Cell, dataset, spec_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from titan_mi100.config.settings import LoRAConfig
from titan_mi100.model.layers import Linear, Operands
from titan_mi100.model.lora import LoRALinear, _dropped
from titan_mi100.model.pieces import in_pieces
from titan_mi100.model.qwen3 import MLP
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.planning.costs import recomputed_flops
from titan_mi100.workshop.made_up import made_up

SPLIT = {"local_batch_size": ROWS // 2, "accumulation": 2, "param": "float64"}
LORA = {"rank": 4, "alpha": 6.0, "target_modules": ("all-linear",)}
DROPOUT = {**LORA, "dropout": 0.3}
ALSO_EXPERTS = {**LORA, "target_modules": ("q_proj", "gate_proj", "experts")}
FAMILIES = ("qwen3", "qwen3.5", "qwen3_moe", "qwen3.5_moe")
CASES = {
    **{f"{family}, {mode}": (family, {"checkpointing": mode}) for family in FAMILIES for mode in ("none", "full")},
    "selective": ("qwen3", {"checkpointing": "selective"}),
    "LoRA": ("qwen3", {"lora": LORA}),
    "LoRA with dropout": ("qwen3", {"lora": DROPOUT}),
    "recomputed LoRA with dropout": ("qwen3.5", {"lora": DROPOUT, "checkpointing": "full"}),
    "QLoRA": ("qwen3", {"lora": {**LORA, "base": "nf4"}}),
    "recomputed QLoRA with dropout": ("qwen3.5", {"lora": {**DROPOUT, "base": "nf4"}, "checkpointing": "full"}),
    "adapters of experts": ("qwen3.5_moe", {"lora": ALSO_EXPERTS, "checkpointing": "full"}),
    "experts in 4 bits": ("qwen3_moe", {"lora": {**ALSO_EXPERTS, "base": "nf4"}}),
    "on the host": (
        "qwen3",
        {"checkpointing": "full", "memory": {"offload": "optimizer", "offload_activations": True}},
    ),
}

QUICK = ("qwen3, none", "qwen3.5, full", "LoRA with dropout", "recomputed QLoRA with dropout", "experts in 4 bits")


def opened(world: World, family: str, split: dict[str, Any], pieces: int) -> Run:
    memory = {**split.get("memory", {}), "piece_tokens": pieces}
    config = config_of({"seq_len": 32}, {**SPLIT, **split, "memory": memory})
    spec = spec_of(Cell("one process", 1, {}, True, 2, family=family))
    if config.lora.base == "nf4":  # blocks of 64
        inner = {"moe_intermediate_size": 64} if "moe" in family else {}
        spec = replace(spec, intermediate_size=128, **inner)  # type: ignore[type-var]
    run = open_run(config, world, spec=spec, data=made_up(dataset(32, 2 * ROWS)))
    cut = {module.piece_tokens for module in run.model.parts[0].modules() if hasattr(module, "piece_tokens")}
    assert cut == {pieces}
    return run


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in CASES])
def test_pieces_train_as_whole_rows_do(name: str, world: World) -> None:
    """The losses of three steps, the gradients of the first and the weights behind the last, in fp64."""
    runs = [opened(world, *CASES[name], pieces=size) for size in (0, 50)]
    gradients = [keep_gradients(run) for run in runs]
    losses = [[run.step().loss for _ in range(3)] for run in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12, abs=0)
    weights = ([(name, whole(p)) for name, p in run.model.trained_parameters()] for run in runs)
    for rows, pieces in (gradients, weights):
        for (name, expected), (_, found) in zip(rows, pieces, strict=True):
            assert (found - expected).norm() <= 1e-12 * expected.norm(), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_recomputed_block_does_not_compute_its_pieces_once_more(family: str, mode: str, world: World) -> None:
    """Nor does backward compute the last product of a piece again."""
    counts = []
    for size in (0, 50):
        run = opened(world, family, {"checkpointing": mode}, size)
        with FlopCounterMode(display=False) as counter:
            run.step()
        counts.append(counter.get_total_flops())
    plans = [recomputed_flops(run.model.parts[0].model.spec, 32 * ROWS, 0, mode, is_cut) for is_cut in (False, True)]
    assert counts[1] - counts[0] == plans[1] - plans[0]


def test_pieces_are_as_even_as_can_be_and_add_up_gradients_in_fp32() -> None:
    draw, sizes = torch.Generator().manual_seed(0), []
    x, gain = (torch.randn(size, generator=draw).bfloat16().requires_grad_() for size in ((2, 500, 3), (3,)))

    def function(x: Tensor, gain: Tensor) -> Tensor:
        sizes.append(x.shape[1])
        return x * gain

    y = in_pieces(function, 300, [x], [gain])
    assert torch.equal(y, x * gain) and sizes == [250] * 4
    y.backward(ones := torch.ones_like(y))
    pieces = [(x[row, start : start + 250].float()).sum(0).bfloat16() for row in (0, 1) for start in (0, 250)]
    assert torch.equal(gain.grad, torch.stack(pieces).float().sum(0).bfloat16())
    assert torch.equal(x.grad, ones * gain) and sizes == [250] * 8


def test_what_nobody_reads_takes_no_memory_and_is_not_computed() -> None:
    x, weight = torch.randn(1, 5, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    layer = Linear(4, 3)
    with FlopCounterMode(display=False) as counter:
        y = layer.compute(x, None, Operands(weight), is_read=False)
    assert y.shape == (1, 5, 3) and y.untyped_storage().nbytes() == 4 and counter.get_total_flops() == 0
    grad = torch.randn(1, 5, 3)
    found = torch.autograd.grad(y, (x, weight), grad)
    assert all(map(torch.equal, found, torch.autograd.grad(F.linear(x, weight), (x, weight), grad)))


@pytest.mark.parametrize("part", [(0, 1), (1, 2)])
def test_a_piece_drops_what_the_row_would(part: tuple[int, int]) -> None:
    layer = LoRALinear(Linear(8, 3), LoRAConfig(rank=2, dropout=0.3))
    layer.part, x = part, torch.randn(2, 50, 8 // part[1], dtype=torch.float64)
    torch.manual_seed(3)
    expected = _dropped(x, layer)
    torch.manual_seed(3)
    mask = layer.mask(torch.empty(2, 50, 5, dtype=torch.float64))
    assert mask is not None and torch.equal(torch.ops.aten.native_dropout_backward(x, mask, 1 / 0.7), expected)


def test_a_bias_is_added_in_pieces(world: World) -> None:
    spec = spec_of(Cell("one process", 1, {}, True, 2))
    mlp, x = MLP(spec).double(), torch.randn(2, 32, spec.hidden_size, dtype=torch.float64, requires_grad=True)
    for layer in mlp.children():
        layer.bias = torch.nn.Parameter(torch.randn(layer.out_features, dtype=torch.float64))
    whole_rows = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
    mlp.piece_tokens = 20
    for a, b in zip(whole_rows, torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()]), strict=True):
        assert (a - b).norm() <= 1e-12 * a.norm()
