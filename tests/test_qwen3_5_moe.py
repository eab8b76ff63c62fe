"""Qwen3.5 with experts against transformers' in fp64, and folders as they are published: with a vision tower, and a
draft head whose experts are in the other form."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import supervised_of
from gloo.job_parity import save
from lifted import lifted
from safetensors.torch import save_file
from same_logits import assert_same_logits
from test_convert import same, tensors, tool, with_tokenizer
from test_qwen3_5_files import IMAGES, ROPE, VISION, opened
from test_qwen3_moe import Tensors, draw
from torch import Tensor
from transformers import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
)
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

from titan_mi100.attention.base import Documents
from titan_mi100.model.decode import Sampling, generate
from titan_mi100.model.qwen3_5_moe import Qwen3_5Moe
from titan_mi100.parallel.distributed import World, fill_parameters
from titan_mi100.shapes.families import to_hf_config
from titan_mi100.shapes.qwen3_5 import every_fourth
from titan_mi100.shapes.qwen3_5_moe import Qwen3_5MoeSpec
from titan_mi100.text.bpe import PATTERNS, QWEN3_5
from titan_mi100.weights import convert
from titan_mi100.weights.pieces import joined, read_pieces
from titan_mi100.weights.source import open_source

HEADS = {"head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "rope_theta": 1e4}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
SPEC = Qwen3_5MoeSpec(311, 64, 40, 4, 4, 2, 2, 4, False, every_fourth(4, 2), **HEADS, **EXPERTS, pad_token_id=208)


def reference(spec: Qwen3_5MoeSpec) -> Any:
    settings = {k: v for k, v in to_hf_config(spec).items() if k not in ("architectures", "model_type")}
    torch.manual_seed(1)
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**settings, attn_implementation="eager"))
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "A_log" not in name:
                parameter.uniform_(-0.5, 0.5)
            elif parameter.ndim > 1:
                parameter.normal_(0, 0.08)
    return model.double()


def held(spec: Qwen3_5MoeSpec, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    model = Qwen3_5Moe(spec).double().requires_grad_(False)
    fill_parameters(model.named_parameters(), read_pieces(spec, joined(Tensors(stored), spec).read))
    return dict(model.named_parameters())


def test_logits_gradients_documents_and_answers() -> None:
    hf = reference(SPEC)
    model, ids = Qwen3_5Moe(SPEC).double(), draw(SPEC, 2, 70)  # type: ignore[arg-type]
    model.load_state_dict(held(SPEC, hf.state_dict()))
    labels = ids.roll(-1, 1)
    labels[0, :11] = -100
    expected = lifted(hf, ids, modeling_qwen3_5_moe, "Qwen3_5MoeTextRotaryEmbedding")
    assert (model(ids) - expected).abs().max() < 1e-10 * expected.abs().max()
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    model(ids, labels=labels, supervised=supervised_of(labels)).sum().backward()
    exact = held(SPEC, {name: parameter.grad for name, parameter in hf.named_parameters()})
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        error = (parameter.grad - exact[name]).abs().max() / exact[name].abs().max()
        assert error < 1e-10, (name, error)
    model.requires_grad_(False)
    lengths = (2, 41, 1, 26)
    documents = model.model.prepare(Documents(1, 70, lengths), ids.device)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(ids[:1], positions, documents)[0]
    alone = torch.cat([model(part[None])[0] for part in ids[0].split(list(lengths))])
    assert (packed - alone).abs().max() < 1e-12 * alone.abs().max()
    (answer,) = generate(model, [ids[0, :9].tolist()], Sampling(), (), 4)
    rows = ids[0, :9].tolist()
    for token in answer.ids:
        assert token == model(torch.tensor([rows]))[0, -1].argmax().item()
        rows.append(token)


TEXT = {
    "vocab_size": 709, "hidden_size": 64, "shared_expert_intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "eos_token_id": 702,
    "max_position_embeddings": 512, "initializer_range": 0.1, **EXPERTS, "moe_intermediate_size": 64,
    "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip


@pytest.fixture(scope="module", params=["fused", pytest.param("separate", marks=pytest.mark.full)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft head has its experts in the form that the text part has not."""
    found = tmp_path_factory.mktemp("published") / request.param
    torch.manual_seed(0)
    config = Qwen3_5MoeConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False, **IMAGES)
    model = Qwen3_5MoeForConditionalGeneration(config).bfloat16()
    model.save_pretrained(found)
    stored = tensors(found)
    if request.param == "fused":
        stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        draft = {f"mtp.layers.0.mlp.experts.{n}.up_proj.weight": torch.randn(8, 64).bfloat16() for n in range(3)}
    else:
        draft = {"mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 16, 64).bfloat16()}
    for file in found.glob("*.safetensors*"):
        file.unlink()
    save_file({**stored, **draft}, found / "model.safetensors", {"format": "pt"})
    file = with_tokenizer(found) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PATTERNS[QWEN3_5]
    file.write_text(json.dumps(content))
    return found


def test_a_published_folder_comes_back_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    tool("hf_to_dcp", "--input_dir", folder, "--output_dir", tmp_path / "dcp", "--verify", "bytes")
    tool("dcp_to_hf", "--input_dir", tmp_path / "dcp", "--output_dir", tmp_path / "hf")
    assert_same_logits(tmp_path / "hf")
    before, after = tensors(folder), tensors(tmp_path / "hf")
    assert same(before, after) and len([name for name in after if name.startswith("mtp.")]) in (1, 3)
    written, read = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "hf", folder))
    assert written == read


def test_training_and_adapters_of_experts_as_transformers_and_peft_have_them(
    folder: Path, tmp_path: Path, world: World
) -> None:
    run = opened(folder, world)
    run.step()
    save(run, tmp_path / "saved")
    convert.to_hf(open_source(tmp_path / "saved" / "step-1", folder), tmp_path / "hf", "keep")
    assert_same_logits(tmp_path / "hf")
    before, after = tensors(folder), tensors(tmp_path / "hf")
    assert before.keys() == after.keys()
    run = opened(folder, world, lora={"rank": 3, "target_modules": ("q_proj", "in_proj_qkv", "experts")})
    for _ in range(2):
        run.step()
    save(run, tmp_path / "adapted")
    convert.to_hf(open_source(tmp_path / "adapted" / "step-2", folder), tmp_path / "adapter")
    base = Qwen3_5MoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(input_ids=ids).logits
        assert (expected - run.model.parts[0](ids)).abs().max() < 2e-5 * expected.abs().max()
