"""Pieces of the tokens: what they compute, how often, and what they keep."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gloo.job_parity import config_of, keep_gradients, whole
from parity.table import ROWS, Cell, dataset, spec_of
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from titan_mi100.config.settings import LoRAConfig
from titan_mi100.model.layers import Linear
from titan_mi100.model.lora import LoRALinear
from titan_mi100.model.pieces import in_pieces, uncomputed
from titan_mi100.model.qwen3 import MLP, Qwen3
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.families import PRESETS
from titan_mi100.workshop.made_up import made_up

SPLIT = {"local_batch_size": ROWS // 2, "accumulation": 2, "param": "float64"}
TOKENS = 32 * ROWS // 2  # of a forward
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
    "on the host": ("qwen3", {"checkpointing": "full", "memory": {"offload": "optimizer", "offload_activations": True}}),
}


def trained(world: World, family: str, split: dict[str, Any], pieces: int) -> dict[str, Any]:
    """The losses, gradients of the first step and weights of three steps."""
    case, memory = {"seq_len": 32}, {**split.get("memory", {}), "piece_tokens": pieces}
    config = config_of(case, {**SPLIT, **split, "memory": memory})
    spec = spec_of(Cell("one process", 1, {}, True, 2, family=family))
    if split.get("lora", {}).get("base") == "nf4":
        spec = replace(spec, intermediate_size=128, **({"moe_intermediate_size": 64} if "moe" in family else {}))
    run = open_run(config, world, spec=spec, data=made_up(dataset(32, 2 * ROWS)))
    cut = {module.piece_tokens for module in run.model.parts[0].modules() if hasattr(module, "piece_tokens")}
    assert cut == {pieces}
    gradients = keep_gradients(run)
    losses = [run.step().loss for _ in range(3)]
    weights = [(name, whole(p)) for name, p in run.model.trained_parameters()]
    return {"losses": losses, "gradients": gradients, "weights": weights}


@pytest.mark.parametrize("name", CASES)
def test_pieces_train_as_whole_rows_do(name: str, world: World) -> None:
    family, split = CASES[name]
    rows, pieces = (trained(world, family, split, size) for size in (0, 50))
    assert pieces["losses"] == pytest.approx(rows["losses"], rel=1e-12, abs=0)
    for kind in ("gradients", "weights"):
        for (name, whole), (_, found) in zip(rows[kind], pieces[kind], strict=True):
            assert (whole - found).norm() <= 1e-12 * whole.norm(), (kind, name)
