"""HF folders: what transformers writes is loaded, what is wrong is named."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_model import SPECS, reference

from titan_mi100.checkpoint.hashed_files import HashedFiles
from titan_mi100.errors import UserError
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.parallel.distributed import fill_parameters
from titan_mi100.shapes.base import ModelSpec, parameter_shapes
from titan_mi100.weights import convert
from titan_mi100.weights.base import Weights
from titan_mi100.weights.dcp import write_dcp
from titan_mi100.weights.source import open_source, open_weights


def folder_of(tmp_path: Path, spec: ModelSpec, max_shard_size: str = "5GB") -> Path:
    reference(spec).save_pretrained(tmp_path, max_shard_size=max_shard_size)
    return tmp_path


def open_checked(folder: Path, spec: ModelSpec) -> Weights:
    weights = open_weights(folder)
    weights.check(parameter_shapes(spec))
    return weights


@pytest.mark.parametrize("max_shard_size", ["5GB", "60KB"], ids=["one file", "sharded"])
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_a_folder_that_transformers_wrote_fills_the_model(name: str, max_shard_size: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    folder = folder_of(tmp_path, spec, max_shard_size)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (max_shard_size == "60KB")
    with torch.device("meta"):
        model = Qwen3(spec)
    model.to_empty(device="cpu")
    fill_parameters(model.named_parameters(), open_checked(folder, spec).read)
    expected = reference(spec).state_dict()
    assert all(torch.equal(parameter, expected[key]) for key, parameter in model.named_parameters())


def test_a_part_of_a_tensor_is_read_alone(tmp_path: Path) -> None:
    spec = SPECS["tied"]
    weights = open_checked(folder_of(tmp_path, spec), spec)
    name = "model.layers.1.mlp.down_proj.weight"
    part = weights.read(name, torch.Size((64, 96)), (5, 10), (7, 20))
    assert torch.equal(part, reference(spec).state_dict()[name][5:12, 10:30])


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop("model.layers.2.self_attn.q_norm.weight"), "missing: model.layers.2.self_attn.q_norm.weight"),
        (
            lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(2)}),
            "not part of this model: model.layers.3.mlp.up_proj.weight",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(63)}),
            "model.norm.weight has shape (63,), but the model needs (64,)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            "model.norm.weight has dtype 'I8', which cannot be trained",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(311, 64)}),
            "lm_head.weight is not model.embed_tokens.weight",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(change, expected: str, tmp_path: Path) -> None:
    spec = SPECS["tied"]
    folder = folder_of(tmp_path, spec)
    edit(folder, change)
    with pytest.raises(UserError) as caught:
        open_checked(folder, spec)
    assert expected in str(caught.value) and str(folder) in str(caught.value)


def test_a_tied_folder_may_hold_the_head_as_well(tmp_path: Path) -> None:
    spec = SPECS["tied"]
    folder = folder_of(tmp_path, spec)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    open_checked(folder, spec)


def test_a_tied_head_in_another_dtype_is_compared_by_its_values(tmp_path: Path) -> None:
    spec, embedding = SPECS["tied"], "model.embed_tokens.weight"
    folder = folder_of(tmp_path, spec)
    edit(folder, lambda t: t.update({"lm_head.weight": t[embedding].half()}))
    with pytest.raises(UserError, match=r"but lm_head.weight is not model.embed_tokens.weight"):
        open_checked(folder, spec)
    edit(folder, lambda t: t.update({embedding: t["lm_head.weight"].float()}))
    open_checked(folder, spec)


OLD_BUFFERS = ["model.rotary_emb.inv_freq", *(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(3))]


def test_the_rotary_buffers_of_old_folders_are_ignored_in_every_form(tmp_path: Path) -> None:
    spec = SPECS["tied"]
    folder = folder_of(tmp_path / "hf", spec)
    edit(folder, lambda t: t.update({name: torch.ones(8) for name in OLD_BUFFERS}))
    for what, convert_to in (("dcp", convert.to_dcp), ("pt", convert.to_torch), ("back", convert.to_hf)):
        source = open_source(folder)
        assert list(source.weights.kinds) == list(parameter_shapes(spec))
        convert_to(source, tmp_path / what, verify="bytes")
        written = tmp_path / what / ("model.pt" if what == "pt" else "")
        assert open_weights(written).kinds.keys() == parameter_shapes(spec).keys()
    torch.save(load_file(folder / "model.safetensors"), tmp_path / "pt" / "old.pt")
    write_dcp(HashedFiles(), tmp_path / "dcp", load_file(folder / "model.safetensors").items())
    for path in (folder, tmp_path / "pt" / "old.pt", tmp_path / "dcp"):
        weights = open_weights(path)
        assert set(OLD_BUFFERS) <= weights.kinds.keys()
        weights.check(parameter_shapes(spec))
    edit(folder, lambda t: t.update({"model.rotary_emb.inv_freq_scale": torch.ones(8)}))
    with pytest.raises(UserError, match=r"not part of this model: model\.rotary_emb\.inv_freq_scale$"):
        open_checked(folder, spec)


def test_an_untied_folder_is_not_a_tied_model(tmp_path: Path) -> None:
    spec = SPECS["untied"]
    folder = folder_of(tmp_path, spec)
    with pytest.raises(UserError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        open_checked(folder, dataclasses.replace(spec, tie_word_embeddings=True))
    tied = folder_of(tmp_path / "tied", SPECS["tied"])
    with pytest.raises(UserError, match=r"missing: lm_head.weight"):
        open_checked(tied, dataclasses.replace(SPECS["tied"], tie_word_embeddings=False))


def test_files_that_are_not_whole_are_named(tmp_path: Path) -> None:
    spec = SPECS["untied"]
    folder = folder_of(tmp_path, spec, "60KB")
    shards = sorted(folder.glob("*.safetensors"))
    whole = shards[1].read_bytes()
    shards[1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=f"{shards[1].name}: not a complete safetensors file"):
        open_weights(folder)
    shards[1].write_bytes(shards[0].read_bytes())
    with pytest.raises(UserError, match=f"{shards[1].name}: holds other tensors than .* says: "):
        open_weights(folder)
    shards[1].write_bytes(whole)
    index = folder / "model.safetensors.index.json"
    listed = index.read_text()
    index.write_text(listed.replace("model.norm.weight", "model.norm.wait"))
    with pytest.raises(UserError, match=r"holds other tensors than .* says: model.norm.w"):
        open_weights(folder)
    del (entries := json.loads(listed))["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(entries))
    with pytest.raises(UserError, match=r"holds other tensors than .* says: model.norm.weight"):
        open_weights(folder)
    index.write_text(listed)
    shards[1].unlink()
    with pytest.raises(UserError, match=f"{shards[1].name}: no such file; download it again"):
        open_weights(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(UserError, match="is not inside the folder"):
        open_weights(folder)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match=r"has no model: neither model.safetensors nor"):
        open_weights(tmp_path / "nothing")
