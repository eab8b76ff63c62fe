"""One global batch, however it is split, gives the loss and gradients that transformers gives in fp64, document by
document: the trainer's own step, on one process here and on two real gloo processes."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPO, random_documents, torchrun
from gloo.job_parity import keep_gradients, open_split, run_split
from test_model import SPECS, reference
from torch.utils._python_dispatch import TorchDispatchMode

from titan_mi100.config.settings import LoRAConfig
from titan_mi100.model import layers
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.base import ModelSpec

SEQ_LEN, ROWS = 32, 8
MODELS = {name: SPECS[name] for name in ("tied", "untied")}  # an odd vocabulary: FSDP2's shards are uneven
MODELS |= {f"{name}, even": dataclasses.replace(spec, vocab_size=312) for name, spec in MODELS.items()}


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    """Eight rows' worth, supervision very uneven: two rows' documents have none, one has a single token."""
    found = []
    for row, share in enumerate((0.0, 0.0, 0.9, 0.5, 0.1, 1.0, 0.3, 0.0)):
        lengths = [32] if row in (0, 5) else [17, 15] if row % 2 else [20, 8, 4]
        found += random_documents(311, lengths, seed=row, supervised_share=share)
    found[-1][1][3] = True
    return found


def make_case(name: str) -> dict:
    spec = MODELS[name]
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


def backward_of_all(model: torch.nn.Module) -> tuple[float, int]:
    """The mean loss over all documents, after its backward, and the number of supervised tokens."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, supervised in documents():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        labels = torch.from_numpy(np.where(supervised[1:], ids[1:], -100).astype(np.int64))
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum")
        count += int(supervised[1:].sum())
    (total / count).backward()
    return (total / count).item(), count


def fp64_reference(spec: ModelSpec) -> dict:
    model = reference(spec).double()
    loss, count = backward_of_all(model)
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    norm = torch.sqrt(sum(g.square().sum() for g in gradients.values())).item()
    return {"loss": loss, "gradients": gradients, "grad_norm": norm, "supervised": count}


def assert_equal_to_reference(result: dict, expected: dict, what: object) -> None:
    assert result["supervised"] == expected["supervised"]
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-6), what
    assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-6), what
    assert {name for name, _ in result["gradients"]} == set(expected["gradients"])
    for name, gradient in result["gradients"]:
        exact = expected["gradients"][name]
        assert (gradient.double() - exact).norm() <= 2e-6 * exact.norm(), (what, name)


OFFLOADED: list[dict] = [
    {"memory": {"offload": "optimizer"}},
    {"memory": {"offload": "weights", "offload_activations": True}, "checkpointing": "full"},
]


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_every_split_on_one_process_equals_fp64(name: str, world: World) -> None:
    case, expected = make_case(name), fp64_reference(SPECS[name])
    splits = [{"local_batch_size": size, "accumulation": ROWS // size} for size in (8, 4, 2, 1)]
    for stage in (0, 1, 2):
        split = {"local_batch_size": 2, "accumulation": 4, "backend": "chunked"}
        splits.append({**split, "parallelism": {"zero_stage": stage}})
    splits += [{"local_batch_size": 4, "accumulation": 2, "checkpointing": mode} for mode in ("full", "selective")]
    splits += [{"local_batch_size": 2, "accumulation": 4, **options} for options in OFFLOADED]
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


def run_processes(processes: int, splits: list[dict], folder: Path) -> list[list[dict]]:
    """Each split's records by rank."""
    job = folder / "job.pt"
    torch.save({"cases": {name: make_case(name) for name in MODELS}, "splits": splits}, job)
    torchrun(str(REPO / "tests/gloo/job_parity.py"), str(job), str(folder), processes=processes)
    by_rank = [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(processes)]
    return [list(records) for records in zip(*by_rank, strict=True)]


def assert_splits_equal_fp64(processes: int, splits: list[dict], folder: Path) -> None:
    splits = [{**split, "case": case_of(split)} for split in splits]
    expected = {name: fp64_reference(spec) for name, spec in MODELS.items()}
    for split, records in zip(splits, run_processes(processes, splits, folder), strict=True):
        for record in records:  # what every rank holds; in a pipeline the ranks together hold all
            held = [pair for other in records for pair in other["gradients"]] if is_pipeline(split) else None
            result = {**record, "gradients": held or record["gradients"]}
            assert_equal_to_reference(result, expected[split["case"]], split)


def case_of(split: dict) -> str:
    """Tensor parallel divides the vocabulary."""
    return split["case"] + (", even" if "tensor_parallel_degree" in split.get("parallelism", {}) else "")


def is_pipeline(split: dict) -> bool:
    return "pipeline_parallel_degree" in split.get("parallelism", {})


def pipeline(schedule: str = "1F1B", **others: int) -> dict:
    return {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule, **others}


def in_bf16(copies: bool, mode: str, accumulation: int = 4, **options: Any) -> dict:
    split = {"local_batch_size": ROWS // accumulation, "accumulation": accumulation, "checkpointing": mode, **options}
    return {"param": "bfloat16", "copies": copies, "case": "tied", **split}


def assert_same_bits(cast: dict, shared: dict) -> None:
    assert (cast["loss"], cast["grad_norm"]) == (shared["loss"], shared["grad_norm"])
    assert [name for name, _ in cast["gradients"]] == [name for name, _ in shared["gradients"]]
    assert all(a.equal(b) for (_, a), (_, b) in zip(cast["gradients"], shared["gradients"], strict=True))


@pytest.mark.parametrize(
    ("mode", "accumulation", "rank", "small"),
    [("none", 4, 0, 0), ("selective", 1, 0, 0), ("full", 2, 0, 1 << 20), ("none", 2, 4, 1 << 20)],
)
def test_forwards_that_share_copies_of_weights_give_the_same_bits(
    mode: str, accumulation: int, rank: int, small: int, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each weight is cast once a step; the gradient of a large one in the first microbatch only. Small ones are
    cast together, and their gradients are cast and, but for the first microbatch's, added together."""
    monkeypatch.setattr(layers, "SMALL", small)
    records, casts, case = [], [], make_case("tied")
    if rank:
        config = LoRAConfig(rank=rank)
        case["weights"] |= {name: torch.randn(shape) for name, shape in config.shapes(case["spec"]).items()}
    for copies in (False, True):
        run = open_split(world, case, in_bf16(copies, mode, accumulation, lora={"rank": rank}))
        gradients = keep_gradients(run)
        with Casts([p for name, p in run.model.trained_parameters() if "proj" in name]) as counter:
            result = run.step()
        records.append({"loss": result.loss, "grad_norm": result.grad_norm, "gradients": gradients})
        casts.append((counter.down, counter.up))
    assert counter.together == (2 * accumulation if small else 0)
    assert_same_bits(*records)
    weights = (14 if rank else 7) * SPECS["tied"].num_hidden_layers
    forwards = accumulation * (1 if mode == "none" else 2)
    assert casts == [(weights * forwards, weights * accumulation), (weights, weights * (accumulation if small else 1))]


class Casts(TorchDispatchMode):
    """Counts casts of these weights to bf16, and of tensors of their shapes from bf16."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.places, self.shapes = {w.data_ptr() for w in weights}, {w.shape for w in weights}
        self.down = self.up = self.together = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.down += args[0].data_ptr() in self.places
            self.up += (args[0].dtype, args[0].shape in self.shapes) == (torch.bfloat16, True)
        elif func is torch.ops.aten._foreach_copy_.default:
            self.down += sum(x.data_ptr() in self.places for x in args[1])
            self.up += sum(x.dtype == torch.bfloat16 and x.shape in self.shapes for x in args[1])
        self.together += func in (torch.ops.aten._foreach_copy_.default, torch.ops.aten._foreach_add_.List)
        return result


def test_layouts_that_share_copies_of_weights_give_the_same_bits(tmp_path: Path) -> None:
    layouts: list[dict] = [
        {"mode": "full", "parallelism": {"tensor_parallel_degree": 2}, "case": "tied, even"},
        {"mode": "none", "parallelism": pipeline()},
        {"mode": "selective", "parallelism": pipeline("GPipe"), "case": "untied"},
    ]
    splits = [in_bf16(copies, **layout) for layout in layouts for copies in (False, True)]
    records = run_processes(2, splits, tmp_path)
    for cast, shared in zip(records[::2], records[1::2], strict=True):
        for pair in zip(cast, shared, strict=True):
            assert_same_bits(*pair)


def test_every_split_on_two_processes_equals_fp64(full: bool, tmp_path: Path) -> None:
    options: list[dict] = [
        {},
        {"parallelism": {"zero_stage": 1}},
        {"parallelism": {"zero_stage": 2}, "backend": "eager"},
        {"parallelism": {"zero_stage": 0}, "checkpointing": "selective"},
        {"parallelism": {"tensor_parallel_degree": 2}, "checkpointing": "full"},
        {"parallelism": pipeline(), "checkpointing": "selective"},
        {"parallelism": pipeline("GPipe"), "checkpointing": "full", "backend": "chunked"},
        *OFFLOADED,
    ]
    if full:
        options += [
            {"compile": True, "parallelism": pipeline(), "checkpointing": "selective"},
            {"compile": True, "backend": "eager"},
            {"compile": True, "parallelism": {"tensor_parallel_degree": 2}},
            {"compile": True, "parallelism": {"zero_stage": 0}},
        ]
    splits = []
    for first, name in enumerate(("tied", "untied")):
        for option in options if full else options[first::2]:  # each with one of the models, or with both
            if option.get("compile") and options.index(option) % 2 == first:  # takes ten times as long: with one
                continue
            degrees = option.get("parallelism", {})
            ranks = 1 if "pipeline_parallel_degree" in degrees or "tensor_parallel_degree" in degrees else 2
            for accumulation in (1, 4) if not option else (2,):
                size = ROWS // (accumulation * ranks)
                splits.append({"case": name, "local_batch_size": size, "accumulation": accumulation, **option})
    # other orders: some put both of the rows without supervision into one microbatch of one rank
    splits += [{"case": "tied", "local_batch_size": 1, "accumulation": 4, "seed": seed} for seed in (1, 2)]
    assert_splits_equal_fp64(2, splits, tmp_path)


@pytest.mark.full
def test_layouts_of_two_axes_on_four_processes_equal_fp64(tmp_path: Path) -> None:
    layouts: list[tuple[int, dict]] = [  # data-parallel ranks
        (4, {"data_parallel_replicate_degree": 2}),
        (2, pipeline()),
        (2, pipeline(data_parallel_replicate_degree=2)),
        (2, {"tensor_parallel_degree": 2}),
        (1, pipeline(tensor_parallel_degree=2)),
    ]
    splits = [
        {"case": name, "local_batch_size": ROWS // (2 * ranks), "accumulation": 2, "parallelism": degrees}
        for name in ("tied", "untied")
        for ranks, degrees in layouts
    ]
    offloaded = {"case": "untied", "accumulation": 2, **OFFLOADED[0]}
    splits += [
        {**offloaded, "local_batch_size": ROWS // (2 * ranks), "parallelism": degrees}
        for ranks, degrees in layouts
        if not is_pipeline({"parallelism": degrees})
    ]
    assert_splits_equal_fp64(4, splits, tmp_path)


def test_bf16_compute_keeps_fp32_gradients_near_fp64(world: World) -> None:
    case, expected = make_case("tied"), fp64_reference(SPECS["tied"])
    result = run_split(world, case, {"local_batch_size": 4, "accumulation": 2, "param": "bfloat16"})
    assert result["loss"] == pytest.approx(expected["loss"], rel=5e-3)
    for name, gradient in result["gradients"]:
        assert gradient.dtype == torch.float32
        exact = expected["gradients"][name]
        assert 1e-5 < (gradient.double() - exact).norm() / exact.norm() < 5e-2, name  # bf16 did run, and is near
