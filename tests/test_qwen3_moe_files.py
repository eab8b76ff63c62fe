"""Folders of Qwen3 with experts in both forms, with random weights: there and back, training, adapters."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from gloo.job_parity import config_of, save
from safetensors.torch import load_file, save_file
from test_convert import same, tensors, tool, with_tokenizer
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from titan_mi100.data.made_up import made_up, random_rows
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.families import read_hf_config
from titan_mi100.weights import convert
from titan_mi100.weights.source import open_source

SETTINGS = {
    "vocab_size": 709, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "mlp_only_layers": [1], "max_position_embeddings": 512, "eos_token_id": 702,
    "initializer_range": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
FORMS = ("separate", "fused")


def rewritten(folder: Path, stored: dict[str, torch.Tensor]) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in both forms. transformers writes the separate one."""
    found = {form: tmp_path_factory.mktemp("published") / form for form in FORMS}
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SETTINGS)).bfloat16()
    for folder in found.values():
        model.save_pretrained(folder, max_shard_size="100KB")
        with_tokenizer(folder)
    rewritten(found["fused"], {name: tensor.clone() for name, tensor in model.state_dict().items()})
    return found


def opened(folder: Path, world: World, **split: Any) -> Run:
    """A run on random rows that starts from the folder."""
    config = config_of({"seq_len": 32}, {"local_batch_size": 4, "accumulation": 2, "load": str(folder), **split})
    return open_run(config, world, spec=read_hf_config(folder), data=made_up(random_rows(8, 32, 700, 0.5)))


@pytest.mark.parametrize("form", FORMS)
def test_a_published_folder_comes_back_bit_for_bit(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders[form]
    tool("hf_to_dcp", "--input_dir", folder, "--output_dir", tmp_path / "dcp", "--verify", "logits")
    tool("dcp_to_hf", "--input_dir", tmp_path / "dcp", "--output_dir", tmp_path / "hf", "--verify", "logits")
    before, after = tensors(folder), tensors(tmp_path / "hf")
    assert same(before, after)
    assert ("model.layers.0.mlp.experts.gate_up_proj" in after) == (form == "fused")
    assert ("model.layers.2.mlp.experts.4.down_proj.weight" in after) == (form == "separate")
    other = open_source(folders[FORMS[form == "separate"]])
    for name in (source := open_source(folder)).weights.kinds:
        assert torch.equal(source.weights.tensor(name), other.weights.tensor(name)), name


def test_every_expert_is_in_its_place(folders: dict[str, Path], tmp_path: Path) -> None:
    """Each matrix holds its own number, so that a permutation of experts, or of gate and up, would show."""
    stored = tensors(folders["separate"])
    experts = sorted(name for name in stored if ".experts." in name)
    for number, name in enumerate(experts):
        stored[name] = (torch.arange(stored[name].numel()).view(stored[name].shape) % 61 + 64 * number).float()
    changed = tmp_path / "numbered"
    changed.mkdir()
    (changed / "config.json").write_text((folders["separate"] / "config.json").read_text())
    rewritten(changed, stored)
    source = open_source(changed)
    for name in experts:
        *_, layer, _, _, expert, kind, _ = name.split(".")
        own = f"model.layers.{layer}.mlp.experts.{kind}.weight"
        whole = source.weights.tensor(own)
        matrix = whole.view(5, 64, 64)[int(expert)]
        assert torch.equal(matrix if kind == "down_proj" else matrix.T, stored[name]), name
        part = source.weights.read(own, torch.Size((320, 64)), (40, 8), (230, 16))
        assert torch.equal(part, whole[40:270, 8:24])
    convert.to_hf(source, tmp_path / "hf", verify="bytes")
    assert same(stored, tensors(tmp_path / "hf"))


@pytest.mark.parametrize("form", FORMS)
def test_what_was_trained_is_loaded_by_transformers(
    form: str, folders: dict[str, Path], tmp_path: Path, world: World
) -> None:
    run = opened(folders[form], world)
    run.step()
    save(run, tmp_path / "saved")
    source = open_source(tmp_path / "saved" / "step-1", folders[form])
    convert.to_hf(source, tmp_path / "hf", "keep", verify="logits")
    before, after = tensors(folders[form]), tensors(tmp_path / "hf")
    assert before.keys() == after.keys()
    for name in before:  # the router is frozen
        assert torch.equal(before[name].float(), after[name]) == name.endswith("mlp.gate.weight"), name
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        expected, found = theirs(ids).logits, run.model.parts[0](ids)
    assert (expected - found).abs().max() < 1e-5 * expected.abs().max()


TARGETS = ("q_proj", "o_proj", "experts")


@pytest.mark.parametrize("targets", [TARGETS, ("experts",), ("q_proj", "k_proj", "v_proj", "o_proj")])
def test_an_adapter_has_the_same_logits_in_peft(
    targets: tuple[str, ...], folders: dict[str, Path], tmp_path: Path, world: World
) -> None:
    folder = folders["separate"]
    run = opened(folder, world, lora={"rank": 3, "target_modules": targets})
    for _ in range(2):
        run.step()
    save(run, tmp_path / "saved")
    source = open_source(tmp_path / "saved" / "step-2", folder)
    convert.to_hf(source, tmp_path / "adapter", verify="logits")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name in ("base_layer.lora_A", "base_layer.lora_B", "lora_A", "lora_B"):
        own = f"base_model.model.model.layers.0.mlp.experts.{name}.weight"
        assert (own in stored) == ("experts" in targets)
    named = {"base": folder, "adapter": tmp_path / "adapter", "output_dir": tmp_path / "merged", "dtype": "float32"}
    tool("merge_lora", *(part for name, value in named.items() for part in (f"--{name}", value)))
    base = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        before = base(ids).logits
        expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(input_ids=ids).logits
        assert (before - expected).abs().max() > 1e-2 * expected.abs().max()  # every adapter does something
        merged = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
        for found in (merged, run.model.parts[0](ids)):
            assert (expected - found).abs().max() < 1e-5 * expected.abs().max()
    lora = {"rank": 3, "target_modules": targets, "initial_load_path": str(tmp_path / "adapter")}
    again = opened(folder, world, lora=lora)
    ours = dict(run.model.trained_parameters())
    for name, parameter in again.model.trained_parameters():
        assert torch.equal(parameter, ours[name]), name
