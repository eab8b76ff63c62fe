"""A trained adapter leaves as a PEFT folder and comes back merged; peft itself is the reference."""

import json
import os
import shutil
from pathlib import Path

import peft
import pytest
import torch
from conftest import ASSETS
from safetensors.torch import load_file
from test_convert import folder_of, nothing_in, same, tensors, tool
from test_model import SPECS
from transformers import AutoModelForCausalLM

from titan_mi100.config.settings import LoRAConfig
from titan_mi100.errors import SaveError, UserError
from titan_mi100.generation import engine as inference
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.base import adapter_shapes
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.weights import convert
from titan_mi100.weights import peft as peft_io
from titan_mi100.weights.adapter import merged_source
from titan_mi100.weights.source import open_source

IDS = torch.arange(40)[None] * 7 % 311


def random_adapter(folder: Path, lora: LoRAConfig, base: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    shapes = adapter_shapes(SPECS["tied"], lora.rank, lora.target_modules)
    peft_io.write_adapter(
        folder, {n: torch.randn(s, generator=generator) * 0.1 for n, s in shapes.items()}, lora, str(base)
    )
    return folder


@torch.no_grad()
def logits(folder: Path, adapter: Path | None = None, ids: torch.Tensor = IDS) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    return model.eval()(ids).logits


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), LoRAConfig().target_modules], ids=["two", "all"])
def test_merged_is_base_and_adapter(targets: tuple[str, ...], tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", dtype=torch.float32)
    adapter = random_adapter(tmp_path / "adapter", LoRAConfig(4, 12.0, 0.0, targets), base)
    tool("merge_lora", "--base", base, "--adapter", adapter, "--output_dir", tmp_path / "merged")
    expected = logits(base, adapter)
    assert (logits(tmp_path / "merged") - expected).abs().max() <= 1e-5
    assert (logits(base) - expected).abs().max() > 0.1  # the adapter does something
    own = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload()
    for name, tensor in tensors(tmp_path / "merged").items():
        assert (tensor - own.state_dict()[name]).abs().max() <= 1e-6, name


def test_matrices_that_peft_leaves_out_are_refused(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base", dtype=torch.float32)
    adapter = random_adapter(tmp_path / "adapter", LoRAConfig(4, 12.0, 0.0, ("q_proj", "v_proj")), base)
    file = adapter / peft_io.CONFIG
    config, whole = json.loads(file.read_text()), logits(base, adapter)
    for targets in ([f"model.layers.{i}.self_attn.{name}_proj" for i in range(3) for name in "qv"], r".*\.[qv]_proj"):
        file.write_text(json.dumps({**config, "target_modules": targets}))
        peft_io.read_adapter(adapter)
        assert (logits(base, adapter) == whole).all()
    for targets, lacking in ((["v_proj"], 0), (["v_proj", "0.self_attn.q_proj"], 1)):
        file.write_text(json.dumps({**config, "target_modules": targets}))
        assert (logits(base, adapter) != whole).any()  # peft gives no warning
        with pytest.raises(UserError, match=f"target_modules lacks .*model.layers.{lacking}.self_attn.q_proj"):
            peft_io.read_adapter(adapter)


def test_a_bf16_base_is_rounded_once(tmp_path: Path) -> None:
    base = folder_of(tmp_path / "base")
    lora = LoRAConfig(4, 12.0, 0.0, ("o_proj",))
    adapter = random_adapter(tmp_path / "adapter", lora, base)
    convert.to_hf(merged_source(open_source(base), adapter), tmp_path / "merged")
    held, delta = tensors(base), load_file(adapter / peft_io.WEIGHTS)
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.o_proj"
        a, b = (delta[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        held[f"{name}.weight"] = (held[f"{name}.weight"].float() + 3.0 * (b @ a)).bfloat16()
    assert same(held, tensors(tmp_path / "merged"))


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run on a base of random weights, with its export."""
    from test_convert import train
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("lora")
    torch.manual_seed(3)
    settings = {k: v for k, v in to_hf_config(PRESETS["debug"]).items() if k not in ("architectures", "model_type")}
    Qwen3ForCausalLM(Qwen3Config(**settings)).save_pretrained(folder / "base")
    train(folder / "run", "--training.steps", "3", *options_of(folder / "base"), processes=1)
    return folder


def options_of(base: Path) -> tuple[str, ...]:
    lora = ("--lora.rank", "4", "--lora.alpha", "8", "--optimizer.lr", "1e-2", "--model.flavor", "")
    tokenizer = ("--model.tokenizer_path", str(ASSETS / "tokenizer"))
    return ("--checkpoint.export_hf", "true", "--checkpoint.initial_load_path", str(base), *tokenizer, *lora)


def test_a_lora_run_leaves_an_adapter_that_peft_loads(lora_run: Path, tmp_path: Path) -> None:
    exported, base = lora_run / "run" / "hf-step-3", lora_run / "base"
    assert sorted(os.listdir(exported)) == [
        "adapter_config.json", "adapter_model.safetensors", "titan_mi100.json", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    checkpoint = lora_run / "run" / "checkpoint" / "step-3"
    for name, adapter in (("by peft", exported), ("by checkpoint", checkpoint)):
        convert.to_hf(merged_source(open_source(base), adapter), tmp_path / name)
    assert same(tensors(tmp_path / "by peft"), tensors(tmp_path / "by checkpoint"))
    expected = logits(base, exported)
    assert (logits(tmp_path / "by peft") - expected).abs().max() <= 1e-5
    assert (logits(base) - expected).abs().max() > 1e-3


def test_an_adapter_leaves_in_the_dtype_that_was_asked_for(lora_run: Path, tmp_path: Path) -> None:
    convert.to_hf(open_source(lora_run / "run" / "checkpoint" / "step-3"), tmp_path / "adapter", "bfloat16")
    whole, rounded = (load_file(f / peft_io.WEIGHTS) for f in (lora_run / "run" / "hf-step-3", tmp_path / "adapter"))
    assert same({name: tensor.bfloat16() for name, tensor in whole.items()}, rounded)


def test_generation_reads_the_adapter_on_its_base(lora_run: Path, tmp_path: Path) -> None:
    base, checkpoint = lora_run / "base", lora_run / "run" / "checkpoint" / "step-3"
    tokenizer, cpu = str(ASSETS / "tokenizer"), torch.device("cpu")
    assert inference.Model(str(base), "", tokenizer, cpu, torch.float32).prompts.enable_thinking is None
    for adapter in (checkpoint, lora_run / "run" / "hf-step-3"):
        assert inference.Model(str(base), str(adapter), tokenizer, cpu, torch.float32).prompts.enable_thinking is False
    model = inference.Model(str(base), str(checkpoint), tokenizer, cpu, torch.float32).load()
    assert (model(IDS) - logits(base, lora_run / "run" / "hf-step-3")).abs().max() <= 1e-5
    with pytest.raises(UserError, match="is an adapter; name its base"):
        inference.Model(str(checkpoint), "", tokenizer, cpu, torch.float32)


def test_another_base_is_refused(lora_run: Path, tmp_path: Path) -> None:
    held = tensors(lora_run / "base")
    other = tmp_path / "other"
    model = AutoModelForCausalLM.from_pretrained(lora_run / "base")
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.save_pretrained(other)
    assert not same(held, tensors(other))
    checkpoint = lora_run / "run" / "checkpoint" / "step-3"
    with pytest.raises(UserError, match="was not trained on the weights"):
        merged_source(open_source(other), checkpoint)
    with pytest.raises(UserError, match=r"has shape \(4, \d+\), but the model needs"):
        merged_source(open_source(folder_of(tmp_path / "small")), lora_run / "run" / "hf-step-3")
    with pytest.raises(UserError, match="is an adapter; name its base"):
        merged_source(open_source(checkpoint), checkpoint)
    with pytest.raises(UserError, match="neither a PEFT folder"):
        merged_source(open_source(lora_run / "base"), lora_run / "base")


def test_an_adapter_that_peft_reads_as_another_is_no_export(
    lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = peft_io.write_adapter

    def unscaled(folder, tensors, lora, base) -> None:
        write(folder, tensors, lora, base)
        config = json.loads((folder / peft_io.CONFIG).read_text())
        (folder / peft_io.CONFIG).write_text(json.dumps({**config, "lora_alpha": 4}))

    def swapped(folder, tensors, lora, base) -> None:
        names = sorted(name for name in tensors if name.endswith("q_proj.lora_B.weight"))
        write(folder, {**tensors, names[0]: tensors[names[1]].clone()}, lora, base)

    source = open_source(lora_run / "run" / "checkpoint" / "step-3")
    for broken, reason in ((unscaled, "settings"), (swapped, "1 written tensors differ")):
        monkeypatch.setattr(peft_io, "write_adapter", broken)
        with pytest.raises(SaveError, match=reason):
            convert.to_hf(source, tmp_path / "adapter")
        assert nothing_in(tmp_path)


COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "--lora.base_model_name_or_path"


def snapshot_of(base: Path, hub: Path, name: str) -> Path:
    """The folder as the hub's cache holds it: a snapshot of links to blobs."""
    snapshot, blobs = (hub / f"models--{name.replace('/', '--')}" / part for part in (f"snapshots/{COMMIT}", "blobs"))
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in base.iterdir():
        shutil.copy(file, blobs / file.name)
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    return snapshot


@pytest.mark.parametrize("is_link", [False, True])
def test_an_adapter_names_its_base_as_the_hub_does(
    lora_run: Path, tmp_path: Path, is_link: bool, caplog: pytest.LogCaptureFixture
) -> None:
    base = snapshot_of(lora_run / "base", tmp_path / "hub", "Qwen/Qwen3-0.6B-Base")
    if is_link:
        (tmp_path / "Qwen3-0.6B").symlink_to(base)
    source = open_source(lora_run / "run" / "checkpoint" / "step-3")
    source.manifest["lora"]["base"] = str(tmp_path / "Qwen3-0.6B" if is_link else base)
    convert.to_hf(source, tmp_path / "adapter")  # peft loads it onto its base
    raw = json.loads((tmp_path / "adapter" / peft_io.CONFIG).read_text())
    assert (raw["base_model_name_or_path"], raw["revision"]) == ("Qwen/Qwen3-0.6B-Base", COMMIT)
    for name, warned in (("Qwen/Qwen3-0.6B", 1), ("Qwen/Qwen3-0.6B-Base", 0)):
        caplog.clear()
        other = base if not warned else snapshot_of(lora_run / "base", tmp_path / "hub", name)
        merged_source(open_source(other), tmp_path / "adapter")
        assert caplog.text.count("was trained on Qwen/Qwen3-0.6B-Base, but is merged into") == warned


def test_a_folder_that_is_named_like_a_model_is_no_name_on_the_hub(lora_run: Path, tmp_path: Path) -> None:
    base, matrices = lora_run / "base", load_file(lora_run / "run" / "hf-step-3" / peft_io.WEIGHTS)
    lora = LoRAConfig(4, 8.0)
    for path in ("Qwen/Qwen3-0.6B", "models--Qwen--Qwen3-0.6B", f"models--a/snapshots/{COMMIT}", "hub/snapshots/1"):
        folder = shutil.copytree(base, tmp_path / path)
        peft_io.write_adapter(tmp_path / "adapter", matrices, lora, str(folder))
        raw = json.loads((tmp_path / "adapter" / peft_io.CONFIG).read_text())
        assert (raw["base_model_name_or_path"], raw["revision"]) == (str(folder), None)


@pytest.mark.full
def test_a_key_names_the_base(world: World, lora_run: Path, tmp_path: Path) -> None:
    from test_convert import train

    def base_named(folder: Path) -> str:
        return json.loads((folder / peft_io.CONFIG).read_text())["base_model_name_or_path"]

    assert base_named(lora_run / "run" / "hf-step-3") == str(lora_run / "base")
    folder = shutil.copytree(lora_run / "run", tmp_path / "run")
    train(folder, "--training.steps", "4", NAME, "me/mine", *options_of(lora_run / "base"), processes=1)
    assert base_named(folder / "hf-step-4") == "me/mine"
    convert.to_hf(open_source(folder / "checkpoint" / "step-4"), tmp_path / "adapter")  # stored with the checkpoint
    assert base_named(tmp_path / "adapter") == "me/mine"
    later = LoRAConfig(4, 8.0, base_model_name_or_path="/srv/base")  # set after the last save
    with pytest.raises(UserError, match="hf-step-4: exists already"):
        convert.export(folder, 4, "auto", later, rank=0)
    shutil.rmtree(folder / "hf-step-4")
    convert.export(folder, 4, "auto", later, rank=0)
    assert base_named(folder / "hf-step-4") == "/srv/base"
