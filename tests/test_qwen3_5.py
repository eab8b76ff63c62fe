"""Qwen3.5 against transformers' in fp64, with its casts to fp32 lifted, and the isolation of documents."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPO, random_documents, supervised_of, torchrun
from gloo.job_parity import open_split
from lifted import lifted as logits_in_fp64
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import Documents
from titan_mi100.config.settings import CompileConfig
from titan_mi100.model.decode import Sampling, generate
from titan_mi100.model.init import initial_values
from titan_mi100.model.lora import lora_values
from titan_mi100.model.qwen3_5 import Qwen3_5
from titan_mi100.parallel.build import apply_compile
from titan_mi100.parallel.distributed import World, fill_parameters
from titan_mi100.shapes.base import adapter_pieces, adapter_shapes
from titan_mi100.shapes.families import to_hf_config
from titan_mi100.shapes.qwen3_5 import FULL, LINEAR, LINEARS, Qwen3_5Spec, every_fourth
from titan_mi100.weights.pieces import read_pieces

HEADS = {"head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "rope_theta": 1e4}
SPECS = {
    "tied": Qwen3_5Spec(311, 64, 96, 4, 4, 2, 2, 4, True, every_fourth(4), **HEADS, pad_token_id=208),
    "untied, as many value heads": Qwen3_5Spec(311, 48, 80, 3, 6, 1, 3, 3, False, (FULL, LINEAR, LINEAR), **HEADS),
}


def lifted(hf: Any, ids: Tensor) -> Tensor:
    return logits_in_fp64(hf, ids, modeling_qwen3_5, "Qwen3_5TextRotaryEmbedding")


def reference(spec: Qwen3_5Spec) -> Any:
    settings = {k: v for k, v in to_hf_config(spec).items() if k not in ("architectures", "model_type")}
    torch.manual_seed(1)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings, attn_implementation="eager"))
    with torch.no_grad():  # norms as they start would hide a weight that is not applied
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "A_log" not in name:
                parameter.uniform_(-0.5, 0.5)
            elif parameter.ndim > 1:
                parameter.mul_(4)
    return model.double()


def held(spec: Qwen3_5Spec, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by HF's names as the model holds them."""
    model = Qwen3_5(spec).double().requires_grad_(False)

    def read(name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
        return tensors[name][tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))]

    fill_parameters(model.named_parameters(), read_pieces(spec, read))
    return dict(model.named_parameters())


def ours(spec: Qwen3_5Spec, hf: Any, backend: str = "eager") -> Qwen3_5:
    model = Qwen3_5(spec, make_backend(backend, "cpu")).double()
    model.load_state_dict(held(spec, hf.state_dict()))
    return model


def draw(spec: Qwen3_5Spec, *shape: int) -> Tensor:
    return torch.randint(0, spec.vocab_size, shape, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("name", SPECS)
def test_logits_and_every_gradient_equal_transformers(name: str) -> None:
    spec = SPECS[name]
    hf = reference(spec)
    model, ids = ours(spec, hf), draw(spec, 2, 131)
    labels = ids.roll(-1, 1)
    labels[0, :11] = -100
    expected = lifted(hf, ids)
    assert (model(ids) - expected).abs().max() < 1e-10 * expected.abs().max()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    model(ids, labels=labels, supervised=supervised_of(labels)).sum().backward()
    exact = held(spec, {name: parameter.grad for name, parameter in hf.named_parameters()})
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (parameter.grad - exact[name]).abs().max() / exact[name].abs().max()
        assert error < 1e-10, (name, error)


def test_packed_documents_are_as_alone_and_see_no_other() -> None:
    spec = SPECS["tied"]
    model, lengths = ours(spec, reference(spec)), (2, 61, 1, 1, 64, 66, 5)
    ids = draw(spec, 1, sum(lengths))
    documents = model.model.prepare(Documents(1, sum(lengths), lengths), ids.device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(ids, positions, documents)[0]
    alone = torch.cat([model(part[None])[0] for part in ids[0].split(list(lengths))])
    assert (packed - alone).abs().max() < 1e-12 * alone.abs().max()
    changed = ids.clone()
    changed[0, 2:63] = draw(spec, 1, 62)[0, 1:]
    after = model(changed, positions, documents)[0]
    assert torch.equal(after[:2], packed[:2]) and torch.equal(after[63:], packed[63:])
    assert not torch.equal(after[2:63], packed[2:63])


def test_decoding_a_batch_is_as_each_prompt_alone_and_as_without_a_cache() -> None:
    spec = SPECS["tied"]
    model = ours(spec, reference(spec)).requires_grad_(False)
    prompts = [draw(spec, length).tolist() for length in (70, 1, 3, 64)]
    for prompt, answer in zip(prompts, generate(model, prompts, Sampling(), (), 6), strict=True):
        (alone,) = generate(model, [prompt], Sampling(), (), 6)
        rows = list(prompt)
        for token in answer.ids:
            assert token == model(torch.tensor([rows]))[0, -1].argmax().item()
            rows.append(token)
        assert alone.ids == answer.ids


@pytest.mark.full
def test_compiled_blocks_take_rows_of_any_batch_and_length() -> None:
    spec = SPECS["tied"]
    model, plain = (ours(spec, reference(spec)) for _ in range(2))
    apply_compile(model, CompileConfig(enable=True, backend="aot_eager"), is_whole=True)
    torch._dynamo.reset()  # a process may compile a function for a few shapes only
    for shape in ((4, 32), (2, 32)):
        ids = draw(spec, *shape)
        found = model(ids)
        assert (found - plain(ids)).abs().max() < 1e-12
        found.sum().backward()
    torch._dynamo.reset()


WIDE = Qwen3_5Spec(  # for blocks of 64 values, also if two ranks split them
    320, 128, 128, 2, 4, 2, 2, 4, False, (LINEAR, FULL), 32, 32, 32, rope_theta=1e4, initializer_range=0.1
)
SMALL = ("decay.A_log", "linear_attn.norm.weight")
TP, PP = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}


def wide_case() -> dict[str, Any]:
    documents = []
    for row in range(8):
        documents += random_documents(320, ([32], [17, 15], [20, 8, 4], [1, 2, 29])[row % 4], seed=row)
    read = lambda *where: initial_values(WIDE, 1, *where)  # noqa: E731
    stored = {n: read(n, torch.Size(p.shape), (0,) * len(p.shape), p.shape) for n, p in WIDE.parameters.items()}
    weights = held(WIDE, {name: tensor.double() for name, tensor in stored.items()})
    for name, shape in adapter_shapes(WIDE, 4, LINEARS).items():
        value = lora_values(2, name.replace("lora_B", "lora_A"), torch.Size(shape), (0, 0), shape)
        pieces = {held: p for held, p in adapter_pieces(WIDE, 4).items() if p.whole == name}
        weights |= {n: value[p.start : p.start + p.shape[0]] for n, p in pieces.items()} or {name: value}
    return {"spec": WIDE, "weights": weights, "documents": documents, "seq_len": 32}


@pytest.mark.full
def test_adapters_and_small_states_are_the_same_in_every_layout(tmp_path: Path, world: World) -> None:
    kinds: dict[str, tuple[str, dict[str, Any]]] = {  # layouts that it meets, and its options
        "lora": ("fsdp tp pp ddp", {"lora": {"rank": 4}, "param": "float64"}),
        "nf4": ("fsdp tp", {"lora": {"rank": 4, "base": "nf4"}, "param": "float32"}),
        "8bit": ("fsdp tp pp", {"optimizer": {"state": "8bit"}, "param": "float32"}),
        "24bit": ("fsdp tp pp", {"optimizer": {"master": "24bit", "state": "bf16"}, "param": "bfloat16"}),
        "fp16": ("fsdp pp", {"param": "float16"}),
        "compiled": ("fsdp", {"compile": True, "param": "float64"}),
        "recomputed": ("tp", {"checkpointing": "selective", "param": "float64"}),
        "on the host": ("fsdp", {"checkpointing": "full", "param": "float64", "memory": {"offload": "optimizer"}}),
    }
    layouts = {"fsdp": (2, {}), "tp": (1, TP), "pp": (1, PP), "ddp": (2, {"zero_stage": 0})}
    case, runs = wide_case(), {}
    for kind, (names, options) in kinds.items():
        for layout in names.split():
            ranks, degrees = layouts[layout]
            size = {"local_batch_size": 4 // ranks, "accumulation": 2, "backend": "eager"}
            runs[f"{kind} {layout}"] = {"case": "wide", **size, "parallelism": degrees, **options, "stop": 3}
    job = tmp_path / "job.pt"
    torch.save({"cases": {"wide": case}, "splits": [], "runs": runs}, job)
    torchrun(str(REPO / "tests/gloo/job_lora.py"), str(job), str(tmp_path), processes=2, timeout=900)
    records = torch.load(tmp_path / "rank-0.pt", weights_only=False)["runs"]
    bars = {"nf4": 5e-6, "8bit": 1e-3, "24bit": 1e-2, "fp16": 1e-3}
    torch._dynamo.reset()
    for kind, (names, options) in kinds.items():
        split = {"case": "wide", "local_batch_size": 4, "accumulation": 2, "backend": "eager", "max_norm": 1.0}
        run = open_split(world, case, {**split, **options})
        alone = [run.step().loss for _ in range(3)]
        assert alone[2] < alone[0] or kind == "fp16"  # its first steps look for the scale
        for name in (f"{kind} {layout}" for layout in names.split()):
            assert records[name]["losses"] == pytest.approx(alone, rel=bars.get(kind, 1e-11)), name
            if options["param"].endswith("16") or kind == "nf4":
                found = {n: dtype for n, dtype in records[name]["dtypes"].items() if n.endswith(SMALL)}
                assert {*found.values()} == {torch.float32}
