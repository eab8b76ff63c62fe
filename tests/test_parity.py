"""One global batch, however it is split, gives the loss and gradients that transformers gives in fp64, document by
document: the trainer's own step, on one process here and on two real gloo processes."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPO, random_documents, torchrun
from gloo.job_parity import run_split
from test_model import SPECS, reference

from titan_mi100.distributed import World
from titan_mi100.model_spec import ModelSpec

SEQ_LEN, ROWS = 32, 8


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    """Eight rows' worth, supervision very uneven: two rows' documents have none, one has a single token."""
    found = []
    for row, share in enumerate((0.0, 0.0, 0.9, 0.5, 0.1, 1.0, 0.3, 0.0)):
        lengths = [32] if row in (0, 5) else [17, 15] if row % 2 else [20, 8, 4]
        found += random_documents(311, lengths, seed=row, supervised_share=share)
    found[-1][1][3] = True
    return found


def make_case(name: str) -> dict:
    spec = SPECS[name]
    return {
        "spec": spec,
        "weights": {
            key: value
            for key, value in reference(spec).state_dict().items()
            if not (spec.tie_word_embeddings and key == "lm_head.weight")
        },
        "documents": documents(),
        "seq_len": SEQ_LEN,
    }


def fp64_reference(spec: ModelSpec) -> dict:
    model = reference(spec).double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, supervised in documents():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        labels = torch.from_numpy(np.where(supervised[1:], ids[1:], -100).astype(np.int64))
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum")
        count += int(supervised[1:].sum())
    (total / count).backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    norm = torch.sqrt(sum(g.square().sum() for g in gradients.values())).item()
    return {"loss": (total / count).item(), "gradients": gradients, "grad_norm": norm, "supervised": count}


def assert_equal_to_reference(result: dict, expected: dict, what: object) -> None:
    assert result["supervised"] == expected["supervised"]
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6), what
    assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-6), what
    assert result["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in result["gradients"].items():
        exact = expected["gradients"][name]
        assert (gradient.double() - exact).norm() <= 2e-6 * exact.norm(), (what, name)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_every_split_on_one_process_equals_fp64(name: str, world: World) -> None:
    case, expected = make_case(name), fp64_reference(SPECS[name])
    splits = [{"local_batch_size": size, "accumulation": ROWS // size} for size in (8, 4, 2, 1)]
    splits += [{"local_batch_size": 2, "accumulation": 4, "reduce_every": False, "backend": "sdpa_mask"}]
    splits += [{"local_batch_size": 4, "accumulation": 2, "checkpointing": mode} for mode in ("full", "selective")]
    one_document_per_row = {"local_batch_size": len(documents()), "accumulation": 1, "seq_len": 32}
    losses = []
    for split in splits:
        result = run_split(world, case, split)
        assert_equal_to_reference(result, expected, split)
        losses.append(result["loss"])
    assert max(losses) - min(losses) <= 1e-6
    # unpacked: each document alone in a row of its own, by documents that fill more than half of it
    alone = {**case, "documents": [pad_document(d) for d in documents()]}
    result = run_split(world, alone, {**one_document_per_row, "seq_len": 64})
    assert_equal_to_reference(result, expected, "one document per row")
    assert abs(result["loss"] - losses[0]) <= 1e-6


def pad_document(document: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The document with unsupervised tokens behind it, too long to share a row of 64."""
    ids, supervised = document
    return np.pad(ids, (0, 40 - len(ids))), np.pad(supervised, (0, 40 - len(ids)))


def test_every_split_on_two_processes_equals_fp64(tmp_path: Path) -> None:
    options: list[dict] = [
        {},
        {"reduce_every": False},
        {"checkpointing": "full"},
        {"checkpointing": "selective", "reshard": "always"},
        {"reshard": "never", "backend": "eager"},
        {"compile": True, "backend": "sdpa_mask"},
        {"replicas": 2},
    ]
    splits = [
        {"case": name, "local_batch_size": size, "accumulation": 4 // size, **option}
        for name in ("tied", "untied")
        for size in (4, 2, 1)
        for option in (options if size == 2 else options[:2])
    ]
    # other orders: some put both of the rows without supervision into one microbatch of one rank
    splits += [{"case": "tied", "local_batch_size": 1, "accumulation": 4, "seed": seed} for seed in (1, 2)]
    job, out = tmp_path / "job.pt", tmp_path / "out.pt"
    torch.save({"cases": {name: make_case(name) for name in ("tied", "untied")}, "splits": splits}, job)
    torchrun(str(REPO / "tests/gloo/job_parity.py"), str(job), str(out))
    expected = {name: fp64_reference(SPECS[name]) for name in ("tied", "untied")}
    results = torch.load(out, weights_only=False)
    assert len(results) == len(splits)
    for split, result in zip(splits, results, strict=True):
        assert_equal_to_reference(result, expected[split["case"]], split)


def test_replicas_of_shards_on_four_processes_equal_fp64(tmp_path: Path) -> None:
    splits = [
        {"case": name, "local_batch_size": 1, "accumulation": 2, "replicas": 2, "reduce_every": every}
        for name in ("tied", "untied")
        for every in (True, False)
    ]
    job, out = tmp_path / "job.pt", tmp_path / "out.pt"
    torch.save({"cases": {name: make_case(name) for name in ("tied", "untied")}, "splits": splits}, job)
    torchrun(str(REPO / "tests/gloo/job_parity.py"), str(job), str(out), processes=4)
    for split, result in zip(splits, torch.load(out, weights_only=False), strict=True):
        assert_equal_to_reference(result, fp64_reference(SPECS[split["case"]]), split)


def test_bf16_compute_keeps_fp32_gradients_near_fp64(world: World) -> None:
    case, expected = make_case("tied"), fp64_reference(SPECS["tied"])
    result = run_split(world, case, {"local_batch_size": 4, "accumulation": 2, "param": "bfloat16"})
    assert result["loss"] == pytest.approx(expected["loss"], rel=5e-3)
    for name, gradient in result["gradients"].items():
        assert gradient.dtype == torch.float32
        exact = expected["gradients"][name]
        assert 1e-5 < (gradient.double() - exact).norm() / exact.norm() < 5e-2, name  # bf16 did run, and is near
