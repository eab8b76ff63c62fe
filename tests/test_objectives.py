"""An objective of two documents each and a further column (made_up_objective.py), in every layout against transformers
in fp64; and losses of several targets per token."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_documents, records_of
from gloo.job_parity import open_split, run_split, save
from made_up_objective import BETA, SEQ_LEN, SHARES, PairLoss, pairs, reference
from test_model import reference as transformers_model

from titan_mi100.data.microbatch import collate
from titan_mi100.data.packing import pack_together
from titan_mi100.model.loss import IGNORE, HeadMemory, Targets, token_losses
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.open_run import start
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.qwen3 import Qwen3Spec
from titan_mi100.workshop.made_up import made_up

SPEC = Qwen3Spec(320, 32, 48, 4, 4, 2, 8, False, rope_theta=1e4)
ROWS = 8
TP, PP = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
CP = {"context_parallel_degree": 2}


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    """Eight rows of one or two pairs; one pair has nothing supervised."""
    found = []
    for row in range(ROWS):
        share = 0.0 if row == 3 else 0.6
        found += random_documents(320, [[17, 15], [9, 7, 4, 12], [30, 2], [5, 5, 11, 11]][row % 4], row, share)
    return found


@cache
def make_case() -> dict[str, Any]:
    weights = transformers_model(SPEC).double().state_dict()
    return {"spec": SPEC, "weights": weights, "documents": documents(), "seq_len": SEQ_LEN}


@cache
def expected(theirs: bool = False) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients, document by document. Args: theirs: of transformers, whose rotary tables are rounded."""
    model: Any = transformers_model(SPEC).double() if theirs else Qwen3(SPEC).double()
    model.load_state_dict(make_case()["weights"])
    sums = []
    for ids, learned in documents():
        tokens = torch.from_numpy(ids.astype(np.int64))
        logits = model(tokens[None]).logits if theirs else model(tokens[None])
        targets = torch.stack((tokens[1:], (tokens[1:] + 1) % 320), 1)
        scores = logits[0, :-1].log_softmax(-1).gather(1, targets) @ torch.tensor(SHARES, dtype=torch.float64)
        sums.append(((scores - torch.from_numpy(reference(ids, learned))[:-1])[torch.from_numpy(learned[1:])]).sum())
    margins = torch.stack(sums[::2]) - torch.stack(sums[1::2])
    loss = -torch.nn.functional.logsigmoid(BETA * margins).mean()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def split(accumulation: int, ranks: int = 1, **options: Any) -> dict[str, Any]:
    size = ROWS // (accumulation * ranks)
    return {
        "param": "float64", "backend": "eager", "local_batch_size": size,
        "accumulation": accumulation, **options,
    }  # fmt: skip


def assert_equal(result: dict[str, Any], gradients: list[tuple[str, torch.Tensor]], theirs: bool = False) -> None:
    (loss, exact), bar = expected(theirs), 1e-6 if theirs else 1e-12
    assert result["loss"] == pytest.approx(loss, rel=bar)
    assert {name for name, _ in gradients} == set(exact)
    for name, gradient in gradients:
        assert (gradient - exact[name]).norm() <= bar * exact[name].norm(), name


def run_job(processes: int, splits: list[dict], folder: Path) -> None:
    given = {"case": make_case(), "splits": splits}
    for _, of_ranks in records_of("job_objective", given, folder, processes):
        for record in of_ranks:
            assert_equal(record, record["gradients"])


def data() -> Any:
    return made_up(pairs(documents()), pairs(documents()))


@pytest.mark.full
def test_pairs_on_one_process_and_after_a_resume(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "choose", lambda *_: PairLoss())
    options = {"data": data()}
    for each in (split(1), split(4, checkpointing="full"), split(2, parallelism={"zero_stage": 0})):
        result = run_split(world, make_case(), each, **options)
        for theirs in (False, True):
            assert_equal(result, result["gradients"], theirs)
    run = open_split(world, make_case(), split(2), **options)
    run.step()
    save(run, tmp_path)
    straight = [run.step().loss, run.validation_losses()[0]["loss"]]
    again = open_split(world, make_case(), split(2), checkpoint=tmp_path / "step-1", **options)
    assert [again.step().loss, again.validation_losses()[0]["loss"]] == straight


def test_pairs_on_two_processes(full: bool, tmp_path: Path) -> None:
    splits = [split(2, 2), split(2, parallelism=TP), split(4, parallelism=PP), split(2, parallelism=CP)]
    if full:
        names = ["GPipe", "Interleaved1F1B"]
        splits += [split(4, parallelism={**PP, "pipeline_parallel_schedule": name}) for name in names]
        splits += [split(2, 2, parallelism={"zero_stage": stage}) for stage in (0, 1, 2)]
        splits += [split(2, parallelism=TP, checkpointing="full"), split(2, 2, compile=True)]
    run_job(2, splits, tmp_path)


@pytest.mark.full
def test_pairs_on_four_processes(tmp_path: Path) -> None:
    layouts = ((4, {"data_parallel_replicate_degree": 2}), (2, TP), (2, PP), (1, {**TP, **PP}))
    layouts += ((2, CP), (1, {**CP, **TP}), (1, {**CP, **PP}), (1, {"context_parallel_degree": 4}))
    run_job(4, [split(2, ranks, parallelism=each) for ranks, each in layouts], tmp_path)


def test_further_arrays_are_told_apart_by_name() -> None:
    row, ones = pairs(documents()).row(0), np.ones(SEQ_LEN)
    first, second = (row._replace(more={name: value * ones for name, value in more}) for more in (
        (("x", 1), ("y", 2)), (("y", 2), ("x", 1)),
    ))  # fmt: skip
    found = collate([first, second])
    assert (found["x"] == 1).all() and (found["y"] == 2).all()
    with pytest.raises(AssertionError, match="other arrays"):
        collate([first, row])


def test_documents_of_a_record_share_a_row() -> None:
    lengths = np.random.default_rng(0).integers(1, 17, 200)
    packing = pack_together(lengths, 64, 2)
    assert sorted(packing.documents.tolist()) == list(range(200))
    for first, stop in zip(packing.starts[:-1], packing.starts[1:], strict=True):
        row = packing.documents[first:stop]
        assert lengths[row].sum() <= 64 and (row[::2] % 2 == 0).all() and (row[1::2] == row[::2] + 1).all()


@pytest.mark.parametrize("memory", [HeadMemory(1), HeadMemory(1 << 25), HeadMemory(1 << 25, 1 << 25)])
@pytest.mark.parametrize(("k", "weighted"), [(3, True), (1, True), (2, False), (1, False)])
def test_several_targets_per_token_equal_fp64(k: int, weighted: bool, memory: HeadMemory) -> None:
    """Ids each with weights that sum to less than one, as a teacher's best; blocks of 1,024 of 2,500 tokens."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(2, 7, 16), torch.randn(2500, 16)
    tokens, ids, weights = torch.tensor([1, 3, 12]), torch.randint(0, 2500, (3, k)), torch.rand(3, k) / k
    ids[1, -1], factors = IGNORE, torch.tensor([1.0, 0.5, 2.0])
    found = [x.clone().requires_grad_() for x in (hidden, weight)]
    weights = weights if weighted else torch.ones_like(weights)
    predicted = token_losses(*found, Targets(tokens, ids), memory=memory)
    losses = (predicted.losses * weights).sum(1)
    (losses * factors).sum().backward()
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    scores = (exact[0].flatten(0, 1)[tokens] @ exact[1].T).log_softmax(-1)
    known = ids != IGNORE
    wanted = -(scores.gather(1, ids.clamp(min=0)) * torch.where(known, weights, 0.0)).sum(1)
    (wanted * factors).sum().backward()
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(predicted.best.double(), scores.amax(1), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(found, exact, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-6)
