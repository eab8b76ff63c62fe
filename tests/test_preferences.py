"""Preference losses: against a dense loop over unpacked answers in fp64, in every layout, with the reference's pass."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_documents, records_of
from gloo.job_answers import data_of
from gloo.job_parity import open_split, run_split
from test_model import reference as transformers_model
from torch import Tensor

from titan_mi100.config.settings import ObjectiveConfig
from titan_mi100.losses import LOSSES, Logps, log_of_rest
from titan_mi100.model.init import initial_values
from titan_mi100.model.loss import Predicted
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.objectives.preference import Preference, sums_of_documents
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.qwen3 import Qwen3Spec

SPEC = Qwen3Spec(320, 32, 48, 4, 4, 2, 8, False, rope_theta=1e4)
SEQ_LEN, ROWS, SFT = 32, 8, 0.25
TP, PP = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
CP = {"context_parallel_degree": 2}


@cache
def make_case() -> dict[str, Any]:
    """Eight rows of one or two pairs; every answer has a learned token."""
    documents = []
    for row in range(ROWS):
        documents += random_documents(320, [[17, 15], [9, 7, 4, 12], [30, 2], [5, 5, 11, 11]][row % 4], row, 0.6)
    for _, learned in documents:
        learned[-1] = True
    labels = np.array([1, -1, -1, 1, 1] * len(documents), dtype=np.int8)[: len(documents)]
    weights = transformers_model(SPEC).double().state_dict()
    return {
        "spec": SPEC, "weights": weights, "documents": documents, "seq_len": SEQ_LEN, "together": 2, "labels": labels,
    }  # fmt: skip


def log_p(model: Callable[[Tensor], Tensor], ids: np.ndarray, learned: np.ndarray) -> Tensor:
    """Of the learned tokens of a document alone."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    scores = model(tokens[None])[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
    return scores[torch.from_numpy(learned[1:])]


def plain(name: str, c: list[Tensor], r: list[Tensor]) -> Tensor:
    """The loss of a pair as the papers write it, of (sum, reference's sum, tokens) of both answers."""
    (lc, rc, nc), (lr, rr, nr) = c, r
    usual = LOSSES[name].defaults.beta
    h, per_token = (lc - rc) - (lr - rr), (lc - rc) / nc - (lr - rr) / nr
    if name == "dpo":
        return -torch.log(1 / (1 + torch.exp(-usual * h)))
    if name == "cdpo":
        s = 1 / (1 + torch.exp(-usual * h))
        return -0.9 * s.log() - 0.1 * (1 - s).log()
    if name == "ipo":
        return (per_token - 1 / (2 * usual)) ** 2
    if name == "dpo_norm":
        return -torch.log(1 / (1 + torch.exp(-usual * per_token)))
    if name == "simpo":
        return -torch.log(1 / (1 + torch.exp(-(usual * (lc / nc - lr / nr) - 1.0))))
    odds = [torch.exp(m) / (1 - torch.exp(m)) for m in (lc / nc, lr / nr)]
    return -lc / nc - usual * torch.log(1 / (1 + torch.exp(-torch.log(odds[0] / odds[1]))))


@cache
def expected(name: str, sft: float = 0.0, swapped: bool = False) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """Loss, some measures and gradients of a step, pair by pair. The reference is what the run's seed makes."""
    case, loss = make_case(), LOSSES[name]
    policy, base = Qwen3(SPEC).double(), Qwen3(SPEC).double()
    policy.load_state_dict(case["weights"])
    base.load_state_dict({n: initial_values(SPEC, 0, n, p.shape, (0,) * p.ndim, tuple(p.shape)).double()
                          for n, p in base.named_parameters()})  # fmt: skip
    answers = []
    for ids, learned in case["documents"]:
        own = log_p(policy, ids, learned)
        with torch.no_grad():
            of_base = log_p(base, ids, learned).sum() if loss.has_reference else torch.zeros(())
        answers.append([own.sum(), of_base, torch.tensor(float(len(own)))])
    beta, margins = loss.defaults.beta, []
    if loss.is_paired:
        pairs = list(zip(answers[::2], answers[1::2], strict=True))
        pairs = [(r, c) for c, r in pairs] if swapped else pairs
        each = [plain(name, c, r) - sft * c[0] / c[2] for c, r in pairs]
        for c, r in pairs:
            rewards = [beta * (x[0] - x[1]) / (x[2] if loss.is_per_token else 1) for x in (c, r)]
            margins.append((rewards[0] - rewards[1]).item())
    else:
        each = []
        for (own, of_base, n), label in zip(answers, case["labels"], strict=True):
            s = 1 / (1 + torch.exp(-beta * (own - of_base)))
            each.append((1 - s if label > 0 else s) - (sft * own / n if label > 0 else 0))
            margins.append(float(label) * beta * (own - of_base).item())
    total = torch.stack(each).mean()
    total.backward()
    measures = {"margin": float(np.mean(margins)), "accuracy": float(np.mean([m > 0 for m in margins]))}
    return total.item(), measures, {n: p.grad for n, p in policy.named_parameters()}


def split(name: str, accumulation: int, ranks: int = 1, sft: float = 0.0, **options: Any) -> dict[str, Any]:
    return {
        "param": "float64", "backend": "eager", "local_batch_size": ROWS // (accumulation * ranks),
        "accumulation": accumulation, "objective": {"name": "preference", "loss": name, "sft_weight": sft}, **options,
    }  # fmt: skip


def case_of(name: str) -> dict[str, Any]:
    return make_case() | ({} if LOSSES[name].is_paired else {"together": 1})


def assert_equal(result: dict[str, Any], gradients: list[tuple[str, Tensor]], name: str, sft: float) -> None:
    loss, measures, exact = expected(name, sft)
    assert result["loss"] == pytest.approx(loss, rel=1e-12)
    for measure, value in measures.items():
        assert result["measures"][measure] == pytest.approx(value, rel=1e-11, abs=1e-12), measure
    assert {name for name, _ in gradients} == set(exact)
    for parameter, gradient in gradients:
        assert (gradient - exact[parameter]).norm() <= 1e-12 * exact[parameter].norm(), parameter


@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_and_its_gradients_equal_a_loop_over_answers_alone(name: str, full: bool, world: World) -> None:
    if not full and name not in ("orpo", "apo_zero_unpaired"):
        pytest.skip("with --full; of dpo the layouts below")
    for accumulation, sft in ((1, 0.0), (4, SFT), (8, 0.0)) if full else ((4, SFT),):
        case, wanted = case_of(name), split(name, accumulation, sft=sft)
        result = run_split(world, case, wanted, data=data_of(case))
        assert_equal(result, result["gradients"], name, sft)


def test_a_policy_that_is_its_reference_and_answers_that_are_swapped(world: World) -> None:
    case = make_case()
    run = open_split(world, case, split("dpo", 2), data=data_of(case))
    for name, parameter in run.model.named_parameters():
        whole = initial_values(SPEC, 0, name, parameter.shape, (0,) * parameter.ndim, tuple(parameter.shape))
        parameter.data.copy_(whole)
    result = run.step()
    assert result.loss == pytest.approx(math.log(2), abs=1e-15)
    assert abs(result.measures["margin"]) < 1e-13 and abs(result.measures["below_reference"]) < 1e-13
    assert result.measures["accuracy"] == 0.5
    swapped = {**case, "documents": [case["documents"][i ^ 1] for i in range(len(case["documents"]))]}
    result = run_split(world, swapped, split("dpo", 2), data=data_of(swapped))
    before = expected("dpo")[1]["margin"]
    assert result["measures"]["margin"] == pytest.approx(-before, rel=1e-11)
    assert result["loss"] == pytest.approx(expected("dpo", swapped=True)[0], rel=1e-12)


@pytest.mark.parametrize(("param", "accumulation"), [("float32", 8), ("float32", 1), ("bfloat16", 8)])
def test_the_first_step_is_a_tie(param: str, accumulation: int, world: World) -> None:
    """The reference's sums are the policy's: the same sum of the same forward. Beside other rows (one forward for all)
    some CPUs change the last bits, which still is a tie.
    """
    case = make_case()
    run = open_split(world, case, {**split("dpo", accumulation), "param": param}, data=data_of(case))
    for name, parameter in run.model.named_parameters():
        parameter.data.copy_(initial_values(SPEC, 0, name, parameter.shape, (0,) * parameter.ndim, parameter.shape))
    measures = run.step().measures
    assert measures["accuracy"] == 0.5
    limit = 1e-4 if accumulation == 1 else 0
    assert abs(measures["margin"]) <= limit and abs(measures["below_reference"]) <= limit


def run_job(processes: int, splits: list[dict], folder: Path, name: str = "dpo") -> None:
    given = {"case": case_of(name), "splits": splits}
    for each, of_ranks in records_of("job_answers", given, folder, processes):
        for record in of_ranks:
            objective = each["objective"]
            assert_equal(record, record["gradients"], objective["loss"], objective["sft_weight"])


def test_preferences_on_two_processes(full: bool, tmp_path: Path) -> None:
    splits = [split("dpo", 2, 2, SFT), split("dpo", 2, parallelism=TP), split("dpo", 4, parallelism=PP)]
    splits.append(split("dpo", 2, 1, SFT, parallelism=CP))
    if full:
        names = ["GPipe", "Interleaved1F1B"]
        splits += [split("dpo", 4, parallelism={**PP, "pipeline_parallel_schedule": name}) for name in names]
        splits += [split("dpo", 2, 2, parallelism={"zero_stage": stage}) for stage in (0, 1, 2)]
        splits += [split(name, 2, 2) for name in LOSSES if LOSSES[name].is_paired]
        splits += [split("ipo", 2, parallelism=TP, checkpointing="full"), split("dpo", 2, 2, compile=True)]
    run_job(2, splits, tmp_path)


@pytest.mark.full
def test_preferences_on_four_processes(tmp_path: Path) -> None:
    layouts = ((4, {"data_parallel_replicate_degree": 2}), (2, TP), (2, PP), (1, {**TP, **PP}))
    layouts += ((2, CP), (1, {**CP, **TP}), (1, {**CP, **PP}), (1, {"context_parallel_degree": 4}))
    run_job(4, [split("dpo", 2, ranks, SFT, parallelism=each) for ranks, each in layouts], tmp_path)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_are_finite_where_probabilities_are_not(name: str, dtype: torch.dtype) -> None:
    """Certain answers, impossible ones, and both of a pair alike; the gradient of equal answers is that of beta / 2."""
    sums = torch.tensor([0.0, -1e-12, -1e4, -3.0], dtype=dtype)
    chosen = sums.repeat_interleave(4).requires_grad_()
    rejected = sums.repeat(4).requires_grad_()
    tokens = torch.full_like(chosen, 3.0).detach()
    factors, reference = ObjectiveConfig(name="preference", loss=name).factors, torch.full_like(tokens, -2.0)
    first, second = (Logps(x, reference, tokens) for x in (chosen, rejected))
    loss = LOSSES[name]
    each = loss.of(factors, first, second if loss.is_paired else torch.ones_like(tokens))
    each.sum().backward()
    assert each.isfinite().all() and chosen.grad is not None and chosen.grad.isfinite().all()
    if name == "dpo":
        torch.testing.assert_close(chosen.grad[[0, 5, 10, 15]], torch.full((4,), -0.05, dtype=dtype))


def test_log_of_rest_is_accurate_near_zero_and_far_from_it() -> None:
    given = torch.tensor([-1e-12, -1e-5, -0.5, -0.7, -5.0, -40.0], dtype=torch.float64, requires_grad=True)
    exact = torch.tensor(
        [math.log(-math.expm1(x)) if x > -1 else math.log1p(-math.exp(x)) for x in given.tolist()], dtype=torch.float64
    )
    found = log_of_rest(given)
    torch.testing.assert_close(found, exact, rtol=1e-14, atol=0)
    found.sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(given.grad, given.detach().exp() / torch.expm1(given.detach()), rtol=1e-12, atol=0)


def test_sums_of_documents_of_any_lengths() -> None:
    torch.manual_seed(0)
    documents = torch.tensor([[0, 0, 0, 1, 2, 2, -1], [0, 1, 1, 1, 1, 1, 1], [-1] * 7])
    tokens = torch.tensor([0, 2, 3, 5, 7, 8, 13, 14])
    values = torch.randn(8, dtype=torch.float64, requires_grad=True)
    found = sums_of_documents(values, tokens, documents)
    exact = torch.zeros(3, 7, dtype=torch.float64)
    for token, value in zip(tokens.tolist(), values.detach(), strict=True):
        if (document := int(documents.flatten()[token])) >= 0:
            exact[token // 7, document] += value
    torch.testing.assert_close(found, exact, rtol=1e-15, atol=1e-15)
    (found * torch.arange(21).view(3, 7)).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0, 0, 1, 2, 7, 8, 8, 0]


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_finite_differences_in_any_order_of_pairs(name: str) -> None:
    """Of the objective's whole loss with respect to the log probability of each token, in fp64."""
    torch.manual_seed(1)
    loss = LOSSES[name]
    objective = Preference(loss, ObjectiveConfig(name="preference", loss=name).factors, SFT)
    documents = torch.tensor([[0] * 4 + [1] * 3 + [2] * 2 + [3] * 5 + [-1, -1]])
    tokens = torch.tensor([1, 2, 4, 5, 7, 10, 11, 12])
    log_p = (-torch.rand(len(tokens), dtype=torch.float64) - 0.1).requires_grad_()
    columns = {"document_ids": documents, "label": torch.tensor([[1, -1, -1, 1] + [0] * 12])}
    columns["reference"] = torch.tensor([[-1.0, -2.0, -0.5, -3.0] + [0.0] * 12], dtype=torch.float64)

    def total(values: Tensor) -> Tensor:
        return objective.loss(Predicted(-values[:, None], values, torch.ones(8, 1, dtype=torch.bool)), tokens, columns)[
            0
        ]

    assert torch.autograd.gradcheck(total, (log_p,), eps=1e-6, atol=1e-8, rtol=1e-6)
    # the second pair first: documents 2, 3, 0, 1 of the same row
    order = torch.tensor([4, 5, 6, 7, 0, 1, 2, 3])
    moved = torch.tensor([0, 3, 4, 5, 8, 9, 11, 12])
    swapped = {"document_ids": torch.tensor([[0] * 2 + [1] * 5 + [2] * 4 + [3] * 3 + [-1, -1]])}
    swapped |= {name: columns[name][:, [2, 3, 0, 1, *range(4, 16)]] for name in ("label", "reference")}
    known = torch.ones(8, 1, dtype=torch.bool)
    again = objective.loss(Predicted(-log_p[order, None], log_p[order], known), moved, swapped)
    torch.testing.assert_close(again[0], total(log_p), rtol=1e-14, atol=0)
