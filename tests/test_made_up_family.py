"""A second family of models (made_up_family.py) in every layout against plain loops in fp64, and through files.

What it shows: no file of the package knows a family beside those in shapes/ and model/.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPO, random_documents, torchrun
from gloo.job_parity import open_split, run_split, save
from made_up_family import CARRIED, MadeUp, MadeUpSpec, logits_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from titan_mi100.config.load import load_config
from titan_mi100.model.decode import Sampling, generate
from titan_mi100.model.init import initial_values
from titan_mi100.parallel.distributed import World, fill_parameters
from titan_mi100.planning.costs import train_flops
from titan_mi100.planning.memory import estimate
from titan_mi100.planning.workload import Workload
from titan_mi100.shapes.base import adapter_shapes
from titan_mi100.shapes.families import to_hf_config
from titan_mi100.weights import convert
from titan_mi100.weights.pieces import joined, read_pieces
from titan_mi100.weights.source import open_source, open_weights

SEQ_LEN, ROWS = 32, 8
SPECS = {"tied": MadeUpSpec(), "untied": MadeUpSpec(tie_word_embeddings=False)}
SPECS["wide"] = MadeUpSpec(  # for blocks of 64 values, also if two ranks split them
    hidden_size=128, channels=64, inner=128, heads=8, head_size=16, num_hidden_layers=2, tie_word_embeddings=False
)
RANK, TARGETS = 4, ("q_proj", "o_proj")
FP64 = {"param": "float64", "backend": "eager"}
TP, PP = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}
INTERLEAVED = {**PP, "pipeline_parallel_schedule": "Interleaved1F1B"}


def documents() -> list[tuple[np.ndarray, np.ndarray]]:
    found = []
    for row, share in enumerate((0.0, 0.9, 0.5, 1.0, 0.1, 0.7, 0.3, 0.05)):
        lengths = ([32], [17, 15], [20, 8, 4], [1, 2, 29])[row % 4]
        found += random_documents(320, lengths, seed=row, supervised_share=share)
    return found


def initial(spec: MadeUpSpec, name: str) -> Tensor:
    """The initial values, with something on the norms too."""
    shape = torch.Size(spec.parameters[name].shape)
    return initial_values(spec, 1, name, shape, (0,) * len(shape), tuple(shape)).double() + 0.05 * torch.randn(shape)


@cache
def stored(name: str) -> dict[str, Tensor]:
    """The weights as they are in files, fp64."""
    torch.manual_seed(0)
    return {parameter: initial(SPECS[name], parameter) for parameter in SPECS[name].parameters}


def read_from(tensors: dict[str, Tensor]) -> Any:
    def read(name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return tensors[name][tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))]

    return read


def held(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the model holds them."""
    with torch.device("meta"):
        model = MadeUp(SPECS[name])
    model = model.double().to_empty(device="cpu").requires_grad_(False)
    fill_parameters(model.named_parameters(), read_pieces(SPECS[name], read_from(tensors)))
    return dict(model.named_parameters())


def make_case(name: str) -> dict[str, Any]:
    weights, spec = held(name, stored(name)), SPECS[name]
    for matrix, shape in adapter_shapes(spec, RANK, TARGETS).items():
        weights[matrix] = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(len(weights)))
    return {"spec": spec, "weights": weights, "documents": documents(), "seq_len": SEQ_LEN}


@cache
def reference(name: str) -> dict[str, Any]:
    """Loss and gradients of plain loops over the documents."""
    weights = {key: value.clone().requires_grad_() for key, value in stored(name).items()}
    total, count = torch.zeros((), dtype=torch.float64), 0
    for ids, supervised in documents():
        logits = logits_of(SPECS[name], weights, torch.from_numpy(ids.astype(np.int64)))
        labels = torch.from_numpy(np.where(supervised[1:], ids[1:], -100).astype(np.int64))
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum")
        count += int(supervised[1:].sum())
    (total / count).backward()
    gradients = {key: value.grad for key, value in weights.items() if value.grad is not None}
    return {"loss": (total / count).item(), "gradients": held(name, gradients)}


def worst(result: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest relative difference of the loss and of each gradient."""
    assert {name for name, _ in result["gradients"]} == set(expected["gradients"])
    found = [abs(result["loss"] / expected["loss"] - 1)]
    for name, gradient in result["gradients"]:
        exact = expected["gradients"][name]
        found.append(((gradient.double() - exact).norm() / exact.norm()).item())
    return max(found)


def split(name: str, accumulation: int, ranks: int, **options: Any) -> dict[str, Any]:
    size = ROWS // (accumulation * ranks)
    return {**FP64, "case": name, "local_batch_size": size, "accumulation": accumulation, **options}


def run_job(processes: int, splits: list[dict], runs: dict[str, dict], folder: Path) -> list[dict[str, Any]]:
    """Each rank's records."""
    job, named = folder / "job.pt", {each["case"] for each in (*splits, *runs.values())}
    torch.save({"cases": {name: make_case(name) for name in named}, "splits": splits, "runs": runs}, job)
    torchrun(str(REPO / "tests/gloo/job_family.py"), str(job), str(folder), processes=processes, timeout=900)
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(processes)]


def assert_splits_equal_fp64(processes: int, splits: list[dict], runs: dict[str, dict], folder: Path) -> list[dict]:
    records = run_job(processes, splits, runs, folder)
    for number, each in enumerate(splits):
        of_ranks = [record["splits"][number] for record in records]
        is_pipeline = "pipeline_parallel_degree" in each.get("parallelism", {})
        every = [pair for record in of_ranks for pair in record["gradients"]]  # the ranks together hold all
        for record in of_ranks:
            found = worst({**record, "gradients": every} if is_pipeline else record, reference(each["case"]))
            assert found < 1e-12, (each, found)
    return records


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_one_process_equals_plain_loops(name: str, world: World) -> None:
    options: list[dict[str, Any]] = [{}, {"checkpointing": "selective"}, {"checkpointing": "full"}]
    options += [{"memory": {"offload": "optimizer"}}, {"parallelism": {"zero_stage": 0}}]
    for option in options:
        found = worst(run_split(world, make_case(name), split(name, 2, 1, **option)), reference(name))
        assert found < 1e-12, (option, found)


@pytest.mark.full
def test_two_processes_equal_plain_loops_and_resume_in_another_layout(tmp_path: Path) -> None:
    splits = [
        split("tied", 2, 2),
        split("untied", 2, 1, parallelism=TP, checkpointing="selective"),
        split("tied", 4, 1, parallelism=INTERLEAVED, checkpointing="full"),
        split("untied", 2, 2, parallelism={"zero_stage": 0}),
    ]
    straight = split("untied", 2, 2)
    first = {**split("untied", 2, 1, parallelism=TP), "stop": 2, "save": "saved"}
    runs = {"straight": {**straight, "stop": 4}, "first": first}
    runs["resumed"] = {**straight, "resume": "saved", "from": 2, "stop": 4}
    record = assert_splits_equal_fp64(2, splits, runs, tmp_path)[0]["runs"]
    losses = record["straight"]["losses"]
    assert [*record["first"]["losses"], *record["resumed"]["losses"]] == pytest.approx(losses, rel=1e-11)
    assert record["resumed"]["validation"] == pytest.approx(record["straight"]["validation"], rel=1e-11)


@pytest.mark.full
def test_every_layout_equals_plain_loops(tmp_path: Path) -> None:
    memory = [{"memory": {"offload": "optimizer"}}, {"memory": {"offload": "weights", "offload_activations": True}}]
    options: list[tuple[int, dict[str, Any]]] = [
        *((2, {"parallelism": {"zero_stage": stage}}) for stage in (0, 1, 2, 3)),
        *((1, {"parallelism": TP, "checkpointing": mode}) for mode in ("none", "full")),
        *((1, {"parallelism": {**PP, "pipeline_parallel_schedule": name}}) for name in ("1F1B", "GPipe")),
        (1, {"parallelism": INTERLEAVED, "checkpointing": "selective"}),
        (1, {"parallelism": {**PP, "pipeline_parallel_layers_per_stage": (3, 1)}}),
        (2, memory[0]),
        (2, {**memory[1], "checkpointing": "full"}),
        (2, {"compile": True, "checkpointing": "selective"}),
        (1, {"compile": True, "parallelism": TP}),
    ]
    splits = [split(name, 4, ranks, **each) for name in ("tied", "untied") for ranks, each in options]
    assert_splits_equal_fp64(2, splits, {}, tmp_path)


@pytest.mark.full
def test_layouts_of_two_axes_equal_plain_loops(tmp_path: Path) -> None:
    options: list[tuple[int, dict[str, Any]]] = [
        (4, {"data_parallel_replicate_degree": 2}),
        (2, TP),
        (2, PP),
        (1, {**TP, **INTERLEAVED}),
    ]
    splits = [split(name, 2, ranks, parallelism=each) for name in ("tied", "untied") for ranks, each in options]
    assert_splits_equal_fp64(4, splits, {}, tmp_path)


@pytest.mark.full
def test_adapters_and_small_states_are_the_same_in_every_layout(tmp_path: Path, world: World) -> None:
    lora = {"rank": RANK, "target_modules": TARGETS}
    kinds: dict[str, dict[str, Any]] = {
        "lora": {"lora": lora},
        "nf4": {"lora": {**lora, "base": "nf4"}, "param": "float32"},
        "8bit": {"optimizer": {"state": "8bit"}, "param": "float32"},
        "24bit": {"optimizer": {"master": "24bit", "state": "bf16"}, "param": "bfloat16"},
    }
    layouts: dict[str, tuple[int, dict[str, Any]]] = {"fsdp": (2, {}), "tp": (1, TP), "pp": (1, PP)}
    runs = {
        f"{kind} {layout}": {**split("wide", 2, ranks, parallelism=degrees, **options), "stop": 2}
        for kind, options in kinds.items()
        for layout, (ranks, degrees) in layouts.items()
    }
    records = run_job(2, [], runs, tmp_path)
    bars = {"lora": 1e-12, "nf4": 1e-6, "8bit": 1e-3, "24bit": 1e-2}
    for kind, options in kinds.items():
        run = open_split(world, make_case("wide"), split("wide", 2, 1, max_norm=1.0, **options))
        alone = [run.step().loss for _ in range(2)]
        for layout in layouts:
            assert records[0]["runs"][f"{kind} {layout}"]["losses"] == pytest.approx(alone, rel=bars[kind]), (
                kind,
                layout,
            )


def hf_folder(name: str, folder: Path, **more: Tensor) -> Path:
    folder.mkdir()
    save_file({**stored(name), **more}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(to_hf_config(SPECS[name])))
    return folder


def test_files_have_whole_tensors_and_what_is_carried(world: World, tmp_path: Path) -> None:
    """HF -> training -> checkpoint -> HF -> DCP -> HF; the carried tensor keeps its dtype and its NaN."""
    carried = torch.arange(15.0).view(3, 5).half()
    carried[0, 0] = torch.nan
    base = hf_folder("untied", tmp_path / "base", **{CARRIED: carried})
    options = ["--checkpoint.initial_load_path", str(base)]
    config = load_config(["--job.config_file", "debug.toml", "--model.flavor", "", *options], with_files=False)
    assert config.spec() == SPECS["untied"]
    case = split("untied", 2, 1)
    run = open_split(world, make_case("untied"), {**case, "load": str(base)})
    assert dict(run.model.passed_through).keys() == {CARRIED}
    run.step()
    save(run, tmp_path / "saved")
    after = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    resumed = open_split(world, make_case("untied"), case, checkpoint=tmp_path / "saved" / "step-1")
    assert resumed.model.passed_through[CARRIED].view(torch.int16).equal(carried.view(torch.int16))
    source = open_source(tmp_path / "saved" / "step-1")
    assert source.spec == SPECS["untied"]
    convert.to_hf(source, tmp_path / "hf", "keep", verify="bytes")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in {**stored("untied"), CARRIED: carried}.items()
    }
    assert tensors[CARRIED].dtype == torch.float16 and tensors.pop(CARRIED).view(torch.int16).equal(
        carried.view(torch.int16)
    )
    assert all(torch.equal(tensor, after[name]) for name, tensor in held("untied", tensors).items())
    convert.to_hf(source, tmp_path / "bf16", "bfloat16", verify="bytes")
    assert load_file(tmp_path / "bf16" / "model.safetensors")[CARRIED].dtype == torch.float16
    convert.to_dcp(open_source(tmp_path / "hf"), tmp_path / "dcp", verify="bytes")
    convert.to_hf(open_source(tmp_path / "dcp"), tmp_path / "again", verify="bytes")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(tensor, again[name]) for name, tensor in tensors.items())


def test_a_box_of_a_joined_tensor_is_that_of_the_whole(tmp_path: Path) -> None:
    save_file({k: v.contiguous() for k, v in held("untied", stored("untied")).items()}, tmp_path / "model.safetensors")
    weights, random = joined(open_weights(tmp_path), SPECS["untied"]), np.random.default_rng(0)
    for name in ("in_proj", "conv", "experts.up", "experts.down"):
        name = f"model.layers.0.{name}.weight"
        whole = stored("untied")[name]
        for _ in range(20):
            offset = tuple(int(random.integers(0, size)) for size in whole.shape)
            size = tuple(int(random.integers(1, n - o + 1)) for n, o in zip(whole.shape, offset, strict=True))
            box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
            assert torch.equal(weights.read(name, whole.shape, offset, size), whole[box]), (name, offset, size)


@pytest.mark.full
def test_what_is_carried_passes_through_every_layout(tmp_path: Path) -> None:
    carried = torch.randn(3, 5).half()
    base = hf_folder("untied", tmp_path / "base", **{CARRIED: carried})
    layouts = {"tp": (1, TP), "pp": (1, PP), "fsdp": (2, {}), "ddp": (2, {"zero_stage": 0})}
    runs, before = dict[str, dict[str, Any]](), ""
    for step, (name, (ranks, degrees)) in enumerate(layouts.items(), 1):
        start = {"resume": before, "from": step - 1} if before else {"load": str(base)}
        runs[name] = {**split("untied", 2, ranks, parallelism=degrees), **start, "stop": step, "save": name}
        before = name
    run_job(2, [], runs, tmp_path)
    for step, name in enumerate(layouts, 1):
        source = open_source(tmp_path / name / f"step-{step}")
        assert torch.equal(source.weights.tensor(CARRIED), carried), name
        assert source.weights.kinds.keys() == stored("untied").keys() | {CARRIED}, name


def test_decoding_keeps_each_kind_of_state() -> None:
    model = MadeUp(SPECS["tied"]).double().requires_grad_(False)
    fill_parameters(model.named_parameters(), read_pieces(SPECS["tied"], read_from(stored("tied"))))
    prompts = [torch.randint(0, 320, (length,)).tolist() for length in (9, 1, 4)]
    for prompt, answer in zip(prompts, generate(model, prompts, Sampling(), (), 6), strict=True):
        rows = list(prompt)
        for token in answer.ids:
            logits = logits_of(SPECS["tied"], stored("tied"), torch.tensor(rows))[-1]
            assert token == logits.argmax().item()
            rows.append(token)


def test_a_plan_reads_the_layers(tmp_path: Path) -> None:
    base = hf_folder("untied", tmp_path / "base")
    options = ["--checkpoint.initial_load_path", str(base)]
    config = load_config(["--job.config_file", "debug.toml", "--model.flavor", "", *options], with_files=False)
    (memory,) = estimate(Workload.of(config, 1), 0)
    spec, tokens = SPECS["untied"], 100
    size = sum(tensor.numel() for tensor in stored("untied").values())
    assert memory.categories["parameters"] == 4 * (size - 32)  # the final norm is not counted
    per_token = sum(layer.products for layer in spec.layers) + spec.vocab_size * spec.hidden_size
    assert train_flops(spec, tokens, tokens, 0) == 3 * 2 * tokens * per_token
