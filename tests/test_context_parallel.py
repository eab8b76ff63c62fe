"""Context parallel: rows of any documents, dropout and isolation on real processes; which tokens each rank has."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import REPO, random_documents, records_of, torchrun
from gloo.job_parity import run_split
from parity import table as parity
from test_layouts import assert_within_the_bars

from titan_mi100.config.check_layout import check_split
from titan_mi100.config.settings import LoRAConfig, ParallelismConfig, TrainingConfig
from titan_mi100.model.families import MODELS
from titan_mi100.parallel.context_parallel import ContextRanks, MixByHeads, repeated
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import PRESETS
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.shapes.qwen3_5 import Qwen3_5Spec, every_fourth

SEQ = 32
# Rows: one document; borders at, before and behind multiples of the degree; documents shorter than the convolution, and
# than a rank's share; padding.
LENGTHS = ([32], [16, 16], [15, 17], [17, 15], [1, 1, 1, 2, 3, 24], [4, 4, 8, 16], [30], [3, 5, 21])
CP2, CP4 = ({"context_parallel_degree": degree} for degree in (2, 4))
TP, PP = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
QWEN3 = Qwen3Spec(320, 32, 48, 2, 4, 2, 8, False, rope_theta=1e4)
QWEN3_5 = Qwen3_5Spec(320, 32, 48, 4, 4, 2, 4, 8, True, every_fourth(4, 2), 16, 8, 8, rope_theta=1e4)
LORA = {"rank": 4, "target_modules": ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"), "dropout": 0.3}


def case_of(spec: ModelSpec, changed: int | None = None) -> dict[str, Any]:
    """Rows of which some have no supervised token. Args: changed: number of a document that has other tokens."""
    documents = []
    for row, lengths in enumerate(LENGTHS):
        documents += random_documents(320, lengths, row, (0.5, 1.0, 0.0, 0.2)[row % 4])
    if changed is not None:
        ids, learned = documents[changed]
        documents[changed] = (ids + 1) % 320, learned
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in MODELS[spec.model_type](spec).named_parameters()}
    shapes |= LoRAConfig(**LORA).shapes(spec)
    draw = torch.Generator().manual_seed(5)
    weights = {name: 0.2 * torch.randn(shape, generator=draw) + ("norm" in name) for name, shape in shapes.items()}
    return {"spec": spec, "weights": weights, "documents": documents, "seq_len": SEQ, "together": 1, "labels": None}


def split(degrees: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"local_batch_size": 4, "accumulation": 2, "param": "float64", "parallelism": degrees, **options}


def assert_equals_one_process(
    spec: ModelSpec, splits: list[dict[str, Any]], processes: int, world: World, folder: Path
) -> None:
    case = case_of(spec)
    torch.save({"cases": {"": case}, "splits": [{**each, "case": ""} for each in splits]}, folder / "job.pt")
    job = str(REPO / "tests/gloo/job_parity.py")
    torchrun(job, str(folder / "job.pt"), str(folder), processes=processes)
    by_rank = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(processes)]
    for number, each in enumerate(splits):
        expected = run_split(world, case, {**each, "parallelism": {}})
        exact = dict(expected["gradients"])
        found = [pair for record in by_rank for pair in record[number]["gradients"]]
        assert {name for name, _ in found} == exact.keys()
        for name, gradient in found:
            assert (gradient - exact[name]).norm() <= 1e-12 * exact[name].norm(), (each, name)
        for key in ("loss", "grad_norm", "supervised", "tokens"):
            assert all(record[number][key] == pytest.approx(expected[key], rel=1e-12) for record in by_rank), key


def test_rows_of_any_documents_on_two_processes(full: bool, world: World, tmp_path: Path) -> None:
    dropout = split(CP2, lora=LORA, local_batch_size=8, accumulation=1)
    assert_equals_one_process(QWEN3, [split(CP2, checkpointing="full"), dropout], 2, world, tmp_path)
    splits = [split(CP2, local_batch_size=1, accumulation=8, checkpointing="selective"), split(CP2, compile=True)]
    splits += [split({**CP2, "zero_stage": stage}) for stage in (1, 2)]
    splits += [split(CP2, memory={"offload": "weights"}), split(CP2, memory={"offload": "optimizer"})]
    splits += [{**dropout, "checkpointing": "full"}]
    assert_equals_one_process(QWEN3_5, splits[: None if full else 1], 2, world, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("spec", [QWEN3, QWEN3_5])
def test_rows_of_any_documents_on_four_processes(spec: ModelSpec, world: World, tmp_path: Path) -> None:
    dropped = [split(degrees, lora=LORA) for degrees in (CP4, {**CP2, **TP})]
    splits = [split(CP4), split({**CP2, **TP}, checkpointing="full"), split({**CP2, **PP}, checkpointing="selective")]
    assert_equals_one_process(spec, [*splits, *dropped], 4, world, tmp_path)


@pytest.mark.parametrize("spec", [QWEN3, pytest.param(QWEN3_5, marks=pytest.mark.full)])
def test_changing_a_document_leaves_the_others_bit_identical(spec: ModelSpec, tmp_path: Path) -> None:
    each, changed = split(CP2, k=3, param="float32"), 2
    before, after = (
        next(records_of("job_answers", {"case": case_of(spec, which), "splits": [each]}, tmp_path, 2))[1][0]["recorded"]
        for which in (None, changed)
    )
    of_token = np.repeat(before["documents"], before["tokens"])
    assert (before["documents"] == after["documents"]).all() and (of_token == changed).any()
    is_same = (before["log_p"] == after["log_p"]).all(1) & (before["ids"] == after["ids"]).all(1)
    assert is_same[of_token != changed].all() and not is_same[of_token == changed].all()


@pytest.mark.full
def test_a_run_goes_on_with_another_degree(tmp_path: Path) -> None:
    pairs = [("CP2", "CP4"), ("CP4", "one process"), ("one process", "CP2"), ("CP2 x PP2", "CP2")]
    assert_within_the_bars(parity.resume("float64", tmp_path, pairs=pairs, models=(True,), steps=2, layers=2))


def test_degrees_that_heads_cannot_share_are_refused() -> None:
    spec, training = replace(QWEN3, num_attention_heads=12, num_key_value_heads=4), TrainingConfig(seq_len=96)
    delta = replace(QWEN3_5, linear_num_key_heads=2)

    def problems(spec: ModelSpec, cp: int, tp: int = 1, training: TrainingConfig = training, **lora: Any) -> list[str]:
        parallelism = ParallelismConfig(context_parallel_degree=cp, tensor_parallel_degree=tp)
        found = check_split(parallelism, LoRAConfig(**lora), training, spec)
        return [problem.text for problem in found if problem.key == "parallelism.context_parallel_degree"]

    assert not any(problems(spec, cp) for cp in (1, 2, 4, 12)) and not problems(spec, 6, 2) and not problems(delta, 2)
    assert problems(spec, 3)[0].endswith("num_key_value_heads = 4; possible: 1, 2, 4, 12")
    assert problems(spec, 4, 2)[0].endswith("with tensor_parallel_degree = 2; possible: 1, 2, 6")
    assert "linear_num_key_heads = 2" in problems(delta, 4)[0]
    assert problems(spec, 4, training=TrainingConfig(seq_len=90)) == ["= 4 does not divide seq_len = 90; use 92"]
    experts = {"rank": 2, "target_modules": ("experts",), "dropout": 0.1}
    assert "set [lora] dropout = 0" in problems(PRESETS["30B-A3B"], 2, **experts)[0]
    assert not problems(PRESETS["30B-A3B"], 2, **{**experts, "dropout": 0.0})


@pytest.mark.parametrize("size", [2, 4])
def test_each_supervised_token_is_on_one_rank_and_they_are_spread_evenly(size: int) -> None:
    ranks = [ContextRanks(size, rank, Mock()) for rank in range(size)]
    ids = torch.arange(64).view(2, 32)
    cut = [rank.cut({"input_ids": ids, "positions": ids, "labels": ids}) for rank in ranks]
    assert all((each["labels"] == ids).all() for each in cut)
    for index in (np.arange(40, 61), np.array([3, 33]), np.array([0])):  # an answer at a row's end; fewer than ranks
        shared = [rank.share(index, torch.device("cpu")) for rank in ranks]
        assert all((each.every.numpy() == index).all() for each in shared)
        has = [[] if each.numbers[0] == len(index) else each.numbers.tolist() for each in shared]
        assert sorted(itertools.chain(*has)) == [*range(len(index))] and all(len(each.own) for each in shared)
        if len(index) > size:
            assert max(map(len, has)) - min(map(len, has)) <= 1
        for tokens, each, places in zip(cut, shared, has, strict=True):
            assert tokens["input_ids"].flatten()[each.own].tolist()[: len(places)] == index[places].tolist()


def test_the_exchange_is_part_of_a_compiled_graph(world: World) -> None:
    group = torch.distributed.group.WORLD
    assert group is not None
    around, weight = MixByHeads(ContextRanks(1, 0, group)), torch.randn(8, 4, dtype=torch.float64)

    def mixed(q: torch.Tensor, k: torch.Tensor, strength: torch.Tensor) -> torch.Tensor:
        def mix(q: torch.Tensor, k: torch.Tensor, strength: torch.Tensor, taps: torch.Tensor) -> torch.Tensor:
            return q * k.sum((1, 3), keepdim=True) * strength[..., None].to(q.dtype) * taps.sum()

        return around(mix, (q, k, strength), (weight,))

    x = [
        torch.randn(1, 6, 2, 4, dtype=torch.float64),
        torch.randn(1, 6, 2, 4, dtype=torch.float64),
        torch.randn(1, 6, 2),
    ]
    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager")
    results = []
    for function in (mixed, compiled):
        leaves = [each.clone().requires_grad_() for each in x]
        output = function(*leaves)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_of_copied_heads_are_summed_in_fp32() -> None:
    x = torch.ones(1, 1, 2, 1, dtype=torch.bfloat16, requires_grad=True)
    copies = repeated(x, 3)
    assert copies.shape == (1, 1, 6, 1)
    copies.backward(torch.tensor([256.0, 0.75, 0.75, 1, 2, 3], dtype=torch.bfloat16).view(1, 1, 6, 1))
    assert x.grad is not None and x.grad.flatten().tolist() == [258, 6]  # in bf16 256 + 0.75 + 0.75 is 256
