"""Folders of Qwen3 with experts in both forms, with random weights: there and back, training, adapters."""

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from gloo.job_parity import config_of, save
from safetensors.torch import load_file, save_file
from same_logits import assert_same_logits
from test_convert import same, tensors, tool, with_tokenizer
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from titan_mi100.config.check import check
from titan_mi100.config.settings import Config, ModelConfig
from titan_mi100.errors import UserError
from titan_mi100.files.stored import StoredTensors
from titan_mi100.model.loss import HeadMemory
from titan_mi100.open_run.run import Run
from titan_mi100.open_run.start import open_run
from titan_mi100.optim.optimizer import build_optimizer
from titan_mi100.parallel.build import Computation, Placement, build_model
from titan_mi100.parallel.distributed import World, build_mesh
from titan_mi100.planning.memory import HOST, PARAMETERS
from titan_mi100.planning.workload import Workload
from titan_mi100.shapes.base import parameter_shapes
from titan_mi100.shapes.families import PRESETS, read_hf_config, to_hf_config
from titan_mi100.weights import convert, load
from titan_mi100.weights.peft import read_adapter
from titan_mi100.weights.source import open_source
from titan_mi100.workshop.made_up import made_up, random_rows
from titan_mi100.workshop.rehearsal.counter import FusedKernel, TensorLedger

SETTINGS = {
    "vocab_size": 709, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2,
    "norm_topk_prob": True, "mlp_only_layers": [1], "max_position_embeddings": 512, "eos_token_id": 702,
    "initializer_range": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
FORMS = ("separate", "fused")
OWN = {"expert_rank": 2, "expert_alpha": 5.0, "dropout": 0.1}


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


def opened(folder: Path, world: World, train_router: bool = False, **split: Any) -> Run:
    """A run on random rows that starts from the folder."""
    config = config_of({"seq_len": 32}, {"local_batch_size": 4, "accumulation": 2, "load": str(folder), **split})
    config = dataclasses.replace(config, training=dataclasses.replace(config.training, train_router=train_router))
    return open_run(config, world, spec=read_hf_config(folder), data=made_up(random_rows(8, 32, 700, 0.5)))


@pytest.mark.parametrize("form", FORMS)
def test_a_published_folder_comes_back_bit_for_bit(form: str, folders: dict[str, Path], tmp_path: Path) -> None:
    folder = folders[form]
    tool("hf_to_dcp", "--input_dir", folder, "--output_dir", tmp_path / "dcp")
    tool("dcp_to_hf", "--input_dir", tmp_path / "dcp", "--output_dir", tmp_path / "hf")
    assert_same_logits(tmp_path / "hf")
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
    run = opened(folders[form], world, train_router=form == "fused")
    run.step()
    save(run, tmp_path / "saved")
    source = open_source(tmp_path / "saved" / "step-1", folders[form])
    convert.to_hf(source, tmp_path / "hf", "keep")
    assert_same_logits(tmp_path / "hf")
    before, after = tensors(folders[form]), tensors(tmp_path / "hf")
    assert before.keys() == after.keys()
    for name in before:  # the router is frozen, unless it shall be trained
        is_frozen = name.endswith("mlp.gate.weight") and form == "separate"
        assert torch.equal(before[name].float(), after[name]) == is_frozen, name
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        expected, found = theirs(ids).logits, run.model.parts[0](ids)
    assert (expected - found).abs().max() < 1e-5 * expected.abs().max()


TARGETS = {
    "both": ("q_proj", "o_proj", "experts"), "experts": ("experts",),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["both", *(pytest.param(k, marks=pytest.mark.full) for k in ("experts", "attention"))])
def test_an_adapter_has_the_same_logits_in_peft(
    kind: str, folders: dict[str, Path], tmp_path: Path, world: World
) -> None:
    folder, targets = folders["separate"], TARGETS[kind]
    lora: dict[str, Any] = {"rank": 3, "target_modules": targets, **(OWN if kind == "both" else {})}
    run = opened(folder, world, lora=lora)
    for _ in range(2):
        run.step()
    save(run, tmp_path / "saved")
    source = open_source(tmp_path / "saved" / "step-2", folder)
    convert.to_hf(source, tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    for name in ("base_layer.lora_A", "base_layer.lora_B", "lora_A", "lora_B"):
        own = f"base_model.model.model.layers.0.mlp.experts.{name}.weight"
        assert (own in stored) == ("experts" in targets)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    names = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    assert written["lora_dropout"] == 0.0  # peft refuses experts with dropout
    for key, value in {"rank_pattern": 2, "alpha_pattern": 5.0}.items():
        assert written.get(key) == (dict.fromkeys(names, value) if kind == "both" else None)
    named = {"base": folder, "adapter": tmp_path / "adapter", "output_dir": tmp_path / "merged", "dtype": "float32"}
    tool("merge_lora", *(part for name, value in named.items() for part in (f"--{name}", value)))
    base = Qwen3MoeForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.arange(24)[None]
    with torch.no_grad():
        before = base(ids).logits
        expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")(input_ids=ids).logits
        assert (before - expected).abs().max() > 1e-2 * expected.abs().max()  # every adapter does something
        merged = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
        for found in (merged, run.model.parts[0].eval()(ids)):
            assert (expected - found).abs().max() < 1e-5 * expected.abs().max()
    again = opened(folder, world, lora={**lora, "initial_load_path": str(tmp_path / "adapter")})
    ours = dict(run.model.trained_parameters())
    for name, parameter in again.model.trained_parameters():
        assert torch.equal(parameter, ours[name]), name
    if kind == "both":
        for change, words in (
            ({"expert_rank": 0}, "expert_rank = 2, not 3"),
            ({"expert_alpha": 4.0}, "= 5.0, not 4.0"),
        ):
            with pytest.raises(UserError, match=words):
                opened(folder, world, lora={**lora, **change, "initial_load_path": str(tmp_path / "adapter")})
        short = ["down_proj", "experts.gate_up_proj"]  # peft takes the ends of names, too, in any order
        spelt = {"target_parameters": short, "rank_pattern": dict.fromkeys(short, 2)}
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(written | spelt))
        assert read_adapter(tmp_path / "adapter")[0].expert_rank == 2
        for pattern in ({names[0]: 2}, {names[0]: 2, names[1]: 3}, dict.fromkeys(names, 0)):
            (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**written, "rank_pattern": pattern}))
            with pytest.raises(UserError, match="rank_pattern = "):
                read_adapter(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("mlp.experts.base_layer.lora_B.weight", (129, 10), "(129, 10), and is not of gate and up below each other"),
        ("mlp.experts.base_layer.lora_A.weight", (640,), "(640,), and is not a matrix"),
        ("mlp.experts.lora_B.weight", (), "(), and is not a matrix"),
        ("mlp.experts.lora_A.weight", (10, 64, 1), "(10, 64, 1), and is not a matrix"),
        ("mlp.experts.3.up_proj.lora_A.weight", (2, 64), "adapters of single experts are not supported, only of all"),
    ],
)
def test_adapters_of_experts_of_another_form_are_refused(
    name: str, shape: tuple[int, ...], expected: str, tmp_path: Path
) -> None:
    targets = {"target_modules": [], "target_parameters": ["gate_up_proj", "down_proj"]}
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **targets}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    stored = {f"base_model.model.model.layers.0.{name}": torch.zeros(shape)}
    save_file(stored, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=re.escape(expected)):
        read_adapter(tmp_path)


def changed(folder: Path, where: Path, config: dict[str, Any], stored: dict[str, torch.Tensor] | None = None) -> Path:
    where.mkdir()
    before = json.loads((folder / "config.json").read_text())
    after = {key: value for key, value in {**before, **config}.items() if value is not None}
    (where / "config.json").write_text(json.dumps(after))
    rewritten(where, tensors(folder) if stored is None else stored)
    return where


def test_folders_that_are_not_whole_or_not_ours_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for number, (config, expected) in enumerate((
        (fp8, "quantization_config ('fp8'): quantized weights are not supported; use the model's unquantized folder"),
        ({"output_router_logits": True}, "output_router_logits = True is not supported; only False"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers names layer 3, but there are 3, from 0"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers = ['1'] is not a list of the numbers of layers"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok = 6 is more than num_experts = 5"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size = 64 is not supported"),
    )):  # fmt: skip
        with pytest.raises(UserError, match=re.escape(expected)):
            read_hf_config(changed(folders["separate"], tmp_path / str(number), config))
    harmless = {"router_aux_loss_coef": 0.001, "output_router_logits": False, "norm_topk_prob": None}
    spec = read_hf_config(changed(folders["separate"], tmp_path / "harmless", harmless))
    assert spec.norm_topk_prob is False  # type: ignore[attr-defined]
    for form, name, change, expected in (
        ("separate", "mlp.experts.3.up_proj.weight", None, "missing: model.layers.2.mlp.experts.3.up_proj.weight"),
        ("separate", "mlp.experts.3.up_proj.weight", torch.float16, "have dtypes bfloat16, float16; use one"),
        ("fused", "mlp.experts.down_proj", None, "missing: model.layers.2.mlp.experts.down_proj"),
    ):  # fmt: skip
        stored = tensors(folders[form])
        whole = stored.pop(f"model.layers.2.{name}")
        stored |= {f"model.layers.2.{name}": whole.to(change)} if change else {}
        broken = changed(folders[form], tmp_path / f"{form} {change}", {}, stored)
        with pytest.raises(UserError, match=re.escape(expected)):
            open_source(broken)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"lora": {"rank": 4, "target_modules": ("q_proj", "gate_proj")}},
            "names gate_proj, which",
        ),
        ({"lora": {"rank": 4, "expert_rank": 2}}, 'no effect: target_modules does not name "experts"'),
        ({"training": {"train_router": True}, "lora": {"rank": 4}}, "has no effect: adapters leave it as it is"),
        ({"model": {"flavor": "debug"}, "training": {"train_router": True}}, "has no effect: this model has none"),
        (
            {"model": {"flavor": "debug"}, "lora": {"rank": 4, "target_modules": ("experts",)}},
            "names experts, which",
        ),
    ],
)
def test_settings_that_would_do_nothing_are_refused(settings: dict[str, dict[str, Any]], expected: str) -> None:
    config = Config(model=ModelConfig(flavor="moe-debug"))
    for section, values in settings.items():
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **values)})
    assert any(expected in str(problem) for problem in check(config, 1, with_files=False))


class ByDevice(TensorLedger):
    """A model on the meta device, which counts as the card; what is on the CPU is in the host's memory."""

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        super()._note(storage, size)
        if storage._cdata in self._blocks:
            self._blocks[storage._cdata].category = HOST if storage.device.type == "cpu" else PARAMETERS


class OnMeta(Placement):
    def put(self, build: Any, weights: torch.device, dtype: torch.dtype) -> Any:
        return build().to_empty(device="meta")


@pytest.mark.parametrize("layers", [1, pytest.param(48, marks=pytest.mark.full)])
def test_loading_for_qlora_reads_each_tensor_once_and_holds_parts_of_a_layer(
    layers: int, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 experts in 48 layers, as in the 30B, but narrow; rows are quantised in as many parts as the 30B's are."""
    spec = dataclasses.replace(PRESETS["30B-A3B"], vocab_size=64, hidden_size=64, head_dim=32, num_attention_heads=2,
                               num_key_value_heads=2, moe_intermediate_size=64, num_hidden_layers=layers)  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(spec)))
    shapes = spec.in_files(parameter_shapes(spec))
    rewritten(tmp_path, {name: torch.full(shape, 1.0).bfloat16() for name, shape in shapes.items()})
    monkeypatch.setattr(load, "_QUANTIZED_ROWS", load._QUANTIZED_ROWS * 64 // 2048)
    lora = {"rank": 8, "base": "nf4", "target_modules": ("q_proj", "experts")}
    config = config_of({"seq_len": 32}, {"local_batch_size": 1, "accumulation": 1, "load": str(tmp_path), "lora": lora,
                                         "param": "bfloat16"})  # fmt: skip
    reads, read = Counter[str](), StoredTensors.read

    def counted(self: StoredTensors, name: str, *more: Any) -> torch.Tensor:
        reads.update([name])
        return read(self, name, *more)

    monkeypatch.setattr(StoredTensors, "read", counted)
    on_meta = OnMeta(build_mesh(config.layout(1), world.device), world.device)
    with ByDevice() as ledger:
        model = build_model(Workload(config, 1, spec), Computation(FusedKernel(), HeadMemory()), on_meta)
        optimizer = build_optimizer(model.trained_parameters(), config.optimizer, 0, world.device)
        ledger.label((parameter for _, parameter in model.named_parameters()), PARAMETERS)
        start = len(ledger.events)
        load.load_weights(model, optimizer, Workload(config, 1, spec), None)
    held = sum(change for block, change in ledger.events if block.category != HOST)
    layer, peak = 2 * spec.layers[0].size, ledger.peak(start)[0]
    print(f"card {held:,} + {peak - held:,}, host {ledger.on_host():,}, {layer:,}")
    assert sum(p.nbytes for _, p in model.named_parameters()) <= held
    assert peak == held  # nothing of 16 bits, not even for a moment
    assert 0.1 * layer < ledger.on_host() < 0.25 * layer
    assert reads.keys() == shapes.keys()
    assert all(reads[name] == 1 for name in shapes if ".experts." in name)
