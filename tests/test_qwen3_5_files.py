"""Folders of Qwen3.5 in the published form, with random weights: vision tower, draft head, shards, several dtypes."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from gloo.job_parity import config_of, save
from safetensors.torch import load_file, save_file
from same_logits import assert_same_logits, compare
from test_convert import same, tensors, tool, with_tokenizer
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from titan_mi100.errors import UserError
from titan_mi100.files.model import check_weights
from titan_mi100.generation.engine import Model
from titan_mi100.model.decode import Sampling, generate
from titan_mi100.model.families import MODELS
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World, fill_parameters
from titan_mi100.shapes.base import differences, parameter_shapes
from titan_mi100.shapes.families import read_hf_config
from titan_mi100.shapes.qwen3_5 import every_fourth
from titan_mi100.text.assets import PROCESSORS, run_assets
from titan_mi100.text.bpe import PATTERNS, QWEN3_5
from titan_mi100.weights import convert
from titan_mi100.weights.pieces import read_pieces
from titan_mi100.weights.source import open_source
from titan_mi100.workshop.made_up import made_up, random_rows

ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
TEXT = {
    "vocab_size": 709, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "max_position_embeddings": 512, "eos_token_id": 702,
    "initializer_range": 0.1, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
          "num_position_embeddings": 16, "patch_size": 4}  # fmt: skip
IMAGES = {"image_token_id": 705, "video_token_id": 706, "vision_start_token_id": 707, "vision_end_token_id": 708}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("published") / "qwen3.5"
    torch.manual_seed(0)
    config = Qwen3_5Config(text_config=TEXT, vision_config=VISION, tie_word_embeddings=False, **IMAGES)
    model = Qwen3_5ForConditionalGeneration(config).bfloat16()
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "linear_attn.norm.weight")):
            parameter.data = parameter.data.float()
    model.save_pretrained(found, max_shard_size="100KB")
    draft = {"mtp.fc.weight": torch.randn(64, 128).bfloat16(), "mtp.norm.weight": torch.full((64,), torch.nan).half()}
    save_file(draft, found / "mtp.safetensors", {"format": "pt"})
    index = json.loads((found / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(draft, "mtp.safetensors")
    (found / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in PROCESSORS:
        (found / name).write_text(f'{{"of": "{name}"}}')
    file = with_tokenizer(found) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = PATTERNS[QWEN3_5]  # transformers takes its class
    file.write_text(json.dumps(content))
    return found


def of_folder(folder: Path) -> Any:
    """Our model with its weights, in fp32."""
    source = open_source(folder)
    assert source.spec is not None
    model = MODELS[source.spec.model_type](source.spec).requires_grad_(False)
    fill_parameters(model.named_parameters(), read_pieces(source.spec, source.weights.read))
    return model


def opened(folder: Path, world: World, **split: Any) -> Run:
    """A run on random rows that starts from the folder."""
    rows, case = random_rows(8, 32, 700, 0.5), {"seq_len": 32}
    config = config_of(case, {"local_batch_size": 4, "accumulation": 2, "load": str(folder), **split})
    return open_run(config, world, spec=read_hf_config(folder), data=made_up(rows))


def test_a_published_folder_comes_back_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    tool("hf_to_dcp", "--input_dir", folder, "--output_dir", tmp_path / "dcp")
    tool("dcp_to_hf", "--input_dir", tmp_path / "dcp", "--output_dir", tmp_path / "hf")
    assert_same_logits(tmp_path / "hf")
    before, after = tensors(folder), tensors(tmp_path / "hf")
    assert same(before, after) and len([name for name in after if name.startswith("model.visual.")]) > 10
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16, torch.float32, torch.float16}
    convert.to_torch(open_source(folder), tmp_path / "pt")
    assert torch.load(tmp_path / "pt" / "model.pt").keys() == before.keys()
    written, read = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "hf", folder))
    assert written == read
    # without these files vLLM loads no folder that has a vision tower
    of_run = run_assets(read_hf_config(folder), str(folder), str(folder), "")
    for name in PROCESSORS:
        assert (tmp_path / "hf" / name).read_bytes() == of_run[name] == (folder / name).read_bytes(), name


# What servers read, by vLLM's vllm/model_executor/models/qwen3_5.py (00def4f842) and layers/mamba/gdn_linear_attn.py
# (0218d0504d), and by SGLang's python/sglang/srt/models/qwen3_5.py (005fa71189), seen on 2026-11-27. For text alone
# vLLM reads `model.language_model.` in later versions only.
SERVED = (
    r"((embed_tokens|norm|layers\.\d+\.(input_layernorm|post_attention_layernorm|mlp\.(gate|up|down)_proj"
    r"|self_attn\.([qkvo]_proj|[qk]_norm)|linear_attn\.(in_proj_(qkv|z|b|a)|conv1d|norm|out_proj)))\.weight"
    r"|layers\.\d+\.linear_attn\.(A_log|dt_bias))"
)


def test_servers_read_every_name_that_an_export_writes(folder: Path) -> None:
    for is_wrapped, prefix in ((True, "model.language_model."), (False, "model.")):
        spec = dataclasses.replace(read_hf_config(folder), is_wrapped=is_wrapped)  # type: ignore[call-arg]
        read = re.compile(rf"{re.escape(prefix)}{SERVED}|lm_head\.weight")
        names = [*map(spec.stored_name, parameter_shapes(spec))]
        assert len(names) > 40 and [name for name in names if not read.fullmatch(name)] == []


def test_names_of_text_folders_with_or_without_the_prefix_are_read_and_twice_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    plain, stored = tmp_path / "plain", tensors(folder)
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text())["text_config"]))
    text = {name: tensor for name, tensor in stored.items() if ".visual." not in name and "mtp." not in name}
    for prefix in ("model.", "model.language_model."):
        renamed = {name.replace("model.language_model.", prefix): tensor for name, tensor in text.items()}
        save_file(renamed, plain / "model.safetensors", {"format": "pt"})
        source = open_source(plain)
        assert source.spec is not None and not source.spec.is_wrapped  # type: ignore[attr-defined]
        name = "model.layers.0.linear_attn.A_log"
        assert torch.equal(source.weights.tensor(name), stored[name.replace("model.", "model.language_model.", 1)])
    save_file({**renamed, "model.norm.weight": text["lm_head.weight"][0].clone()}, plain / "model.safetensors")
    with pytest.raises(UserError, match=r"model\.norm\.weight.* are the same tensor of the model; remove one of each"):
        open_source(plain)


def test_what_was_trained_is_loaded_by_transformers_and_answers_alike(
    folder: Path, tmp_path: Path, world: World
) -> None:
    run = opened(folder, world)
    assert {name.split(".")[0] for name in run.model.passed_through} == {"model", "mtp"}
    run.step()
    save(run, tmp_path / "saved")
    source = open_source(tmp_path / "saved" / "step-1", folder)
    convert.to_hf(source, tmp_path / "bf16", "bfloat16", verify="bytes")
    kinds = {name: tensor.dtype for name, tensor in tensors(tmp_path / "bf16").items()}
    assert kinds == {name: tensor.dtype for name, tensor in tensors(folder).items()}  # each as it was in the base
    convert.to_hf(source, tmp_path / "hf", "keep")
    assert_same_logits(tmp_path / "hf")
    before, after = tensors(folder), tensors(tmp_path / "hf")
    assert before.keys() == after.keys()
    carried = {name for name in before if name.startswith(("model.visual.", "mtp."))}
    assert same({name: before[name] for name in carried}, {name: after[name] for name in carried})
    assert all(not torch.equal(before[name].float(), after[name]) for name in before.keys() - carried)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [3], [40, 41, 42, 43]]
    answers = generate(of_folder(tmp_path / "hf"), prompts, Sampling(), (), 9)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, eos_token_id=None)
        assert answer.ids == ids[0, len(prompt) :].tolist()


def test_an_adapter_has_the_same_logits_in_peft(folder: Path, tmp_path: Path, world: World) -> None:
    run = opened(folder, world, lora={"rank": 4})
    for _ in range(2):
        run.step()
    save(run, tmp_path / "saved")
    source = open_source(tmp_path / "saved" / "step-2", folder)
    convert.to_hf(source, tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    first = "base_model.model.model.language_model.layers.0.linear_attn.in_proj_qkv.lora_"
    assert stored[f"{first}A.weight"].shape == (4, 64) and stored[f"{first}B.weight"].shape == (128, 4)
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "down_proj"} < {*targets} and len(targets) == 10
    assert not [name for name in PROCESSORS if (tmp_path / "adapter" / name).exists()]  # they are the base's
    merged = tmp_path / "merged"
    tool(
        "merge_lora", "--base", folder, "--adapter", tmp_path / "adapter", "--output_dir", merged, "--dtype", "float32"
    )
    base = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(24)[None]
    with torch.no_grad():
        expected = theirs(input_ids=ids).logits
        for model in (of_folder(merged), run.model.parts[0]):
            assert (expected - model(ids)).abs().max() < 1e-5 * expected.abs().max()


def test_an_export_in_fp32_has_all_24_bits_of_whole_weights_and_of_those_in_parts(
    folder: Path, tmp_path: Path, world: World
) -> None:
    run = opened(folder, world, param="bfloat16", optimizer={"master": "24bit", "state": "bf16"})
    run.step()
    save(run, tmp_path / "saved")
    source = open_source(tmp_path / "saved" / "step-1", folder)
    convert.to_hf(source, tmp_path / "fp32", "float32", verify="bytes")
    convert.to_hf(source, tmp_path / "bf16", "bfloat16", verify="bytes")
    wide, narrow = tensors(tmp_path / "fp32"), tensors(tmp_path / "bf16")
    for name in ("self_attn.q_proj", "linear_attn.in_proj_qkv", "linear_attn.conv1d"):
        name = f"model.language_model.layers.{3 if 'self' in name else 0}.{name}.weight"
        assert not torch.equal(wide[name], narrow[name].float()), name
        error = (wide[name] - narrow[name].float()).abs().max() / wide[name].abs().max()
        assert error < 2**-8, name


def test_a_head_that_is_tied_in_text_config_only_is_refused(folder: Path, tmp_path: Path) -> None:
    """transformers' class for images and text would start it with random values."""
    config = json.loads((folder / "config.json").read_text())
    for outer, inner, expected in (
        (None, True, "tie_word_embeddings is False, and True in text_config; give both the value"),
        (True, False, "tie_word_embeddings is True, and False in text_config"),
        (None, None, False),
        (None, False, False),
        (True, None, True),
        (True, True, True),
    ):
        for part, value in ((config, outer), (config["text_config"], inner)):
            part.pop("tie_word_embeddings", None)
            part |= {} if value is None else {"tie_word_embeddings": value}
        (tmp_path / "config.json").write_text(json.dumps(config))
        if isinstance(expected, bool):
            assert read_hf_config(tmp_path).tie_word_embeddings == expected
        else:
            with pytest.raises(UserError, match=expected):
                read_hf_config(tmp_path)


def test_a_comparison_loads_the_class_of_the_config_and_finds_what_it_would_draw_at_random(
    folder: Path, tmp_path: Path
) -> None:
    """The class for text alone takes the key in text_config."""
    for file in folder.iterdir():
        shutil.copy(file, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for file in tmp_path.glob("*.safetensors"):
        held = load_file(file)
        if held.pop("lm_head.weight", None) is not None:
            save_file(held, file, {"format": "pt"})
            index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
            del index["weight_map"]["lm_head.weight"]
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for outer, wrong in ((False, True), (True, False)):
        config |= {"tie_word_embeddings": True}
        config["text_config"] |= {"tie_word_embeddings": True}
        (tmp_path / "config.json").write_text(json.dumps(config))
        source = open_source(tmp_path)
        assert source.spec is not None
        (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": outer}))
        problems = compare(tmp_path, source.weights, source.spec)[0]
        assert bool(problems) == wrong and ("does not find lm_head.weight" in "".join(problems)) == wrong


def test_tensors_are_named_as_the_folder_has_them(folder: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    (given / "config.json").write_text((folder / "config.json").read_text())
    spec, stored, name = read_hf_config(given), tensors(folder), "visual.pos_embed.weight"
    text = {own: tensor for own, tensor in stored.items() if ".visual." not in own}
    layer, of_vision = "model.language_model.layers.0.mlp.up_proj.weight", stored[f"model.{name}"]

    def check(path: Path) -> None:
        check_weights(path, lambda _: parameter_shapes(spec), spec.own_name, spec.passes_through)

    save_file({**text, f"model.language_model.{name}": of_vision}, given / "model.safetensors")
    check(given)
    convert.to_hf(open_source(given), tmp_path / "export", verify="bytes")
    assert same(tensors(tmp_path / "export"), {**text, f"model.{name}": of_vision})
    save_file({**text, name: of_vision}, given / "model.safetensors")
    for read in (open_source, check):
        with pytest.raises(UserError, match=f"not part of this model: {name}; rename them to begin with 'model.visual"):
            read(given)
    del text[layer]
    save_file({**text, f"{layer}s": of_vision}, given / "model.safetensors")
    for read in (open_source, check):
        with pytest.raises(UserError, match=f"missing: {layer}\n.*: not part of this model: {layer}s"):
            read(given)


def test_generation_keeps_in_fp32_what_training_does(folder: Path) -> None:
    model = Model(str(folder), "", "", torch.device("cpu"), torch.bfloat16).load()
    dtypes = {name.rpartition("linear_attn.")[2]: p.dtype for name, p in model.named_parameters() if ".0." in name}
    wide = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert wide == {"decay.A_log", "decay.dt_bias", "norm.weight"}


def test_what_differs_in_the_files_alone_is_the_same_model(folder: Path) -> None:
    spec = read_hf_config(folder)
    assert differences(spec, dataclasses.replace(spec, is_wrapped=False)) == []  # type: ignore[call-arg]
    assert differences(spec, dataclasses.replace(spec, layer_types=every_fourth(4, 2)))  # type: ignore[call-arg]
