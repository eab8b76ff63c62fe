"""Converters as gates: what comes out is what went in, bit for bit, or there is no output and a reason."""

import dataclasses
import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ASSETS, REPO, torchrun
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from same_logits import assert_same_logits, compare
from test_model import SPECS, reference
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from transformers import AutoModelForCausalLM, AutoTokenizer

from titan_mi100.checkpoint.checkpointer import Checkpointer
from titan_mi100.config.settings import CheckpointConfig, Config, ModelConfig, OptimizerConfig
from titan_mi100.generation import engine as inference
from titan_mi100.log import log
from titan_mi100.model import decode
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.families import PRESETS
from titan_mi100.text import assets
from titan_mi100.weights import convert
from titan_mi100.weights import hf as hf_io
from titan_mi100.weights.source import open_source, open_weights
from titan_mi100.workshop.made_up import made_up, random_rows

TOOLS = REPO / "checkpoint_tools"
TOKENIZER = ASSETS / "tokenizer"


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def tool(name: str, *arguments: object, check: bool = True) -> Result:
    """A tool's command line, in this process: starting Python and torch anew takes longer than what they do here."""
    output = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    before = log.handlers, log.level, log.propagate, signal.getsignal(signal.SIGTERM)
    code = 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output[0]), redirect_stderr(output[1]):
        patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        try:
            runpy.run_path(str(TOOLS / f"{name}.py"), run_name="__main__")
        except SystemExit as error:
            code = int(error.code or 0)
    log.handlers, log.level, log.propagate = before[:3]
    signal.signal(signal.SIGTERM, before[3])
    for stream in output:
        stream.seek(0)
    result = Result(code, *(stream.read() for stream in output))
    assert not check or code == 0, result
    return result


def folder_of(path: Path, name: str = "tied", dtype: torch.dtype = torch.bfloat16, shard: str = "5GB") -> Path:
    """An HF folder as transformers writes it, with a tokenizer whose vocabulary is the model's."""
    reference(SPECS[name]).to(dtype).save_pretrained(path, max_shard_size=shard)
    return path


def with_tokenizer(path: Path) -> Path:
    for file in TOKENIZER.iterdir():
        shutil.copy(file, path)
    return path


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """By the safetensors library alone."""
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Bit for bit, NaN too."""
    alike = {name: (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape) for name in a.keys() & b.keys()}
    raw = [{name: tensor.detach().flatten().view(torch.uint8) for name, tensor in held.items()} for held in (a, b)]
    return a.keys() == b.keys() and all(alike.values()) and all(torch.equal(raw[0][k], raw[1][k]) for k in a)


def nothing_in(folder: Path) -> bool:
    return not any(folder.iterdir())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("name", "shard"), [("tied", "5GB"), ("untied", "60KB"), ("wide heads", "60KB")])
def test_hf_to_dcp_to_hf_is_bit_identical(
    name: str, shard: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "SHARD_BYTES", 60_000 if shard == "60KB" else 5_000_000_000)
    source = folder_of(tmp_path / "hf", name, dtype, shard)
    convert.to_dcp(open_source(source), tmp_path / "dcp")
    convert.to_hf(open_source(tmp_path / "dcp"), tmp_path / "back")
    if dtype == torch.bfloat16:
        assert_same_logits(tmp_path / "back")
    assert same(tensors(source), tensors(tmp_path / "back"))
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "60KB")
    if len(files) > 1:
        index = json.loads((tmp_path / "back" / hf_io.INDEX).read_text())
        listed = {(n, f.name) for f in files for n in safe_open(f, framework="pt").keys()}  # noqa: SIM118
        assert listed == set(index["weight_map"].items())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(source).values())
    before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("hf", "back"))
    assert after.items() >= before.items()
    assert after.keys() - before.keys() == {"rope_theta", "torch_dtype"}  # where transformers 4 looks for them
    entries = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata.values()
    # no tensor takes along the storage that it is a part of
    size = sum(t.nbytes for t in tensors(source).values())
    assert (tmp_path / "dcp" / "__0_0.distcp").stat().st_size < size + 2500 * len(entries)
    # torch's own tools read the folder in between
    stock = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in tensors(source).items()}
    dcp.load(stock, checkpoint_id=tmp_path / "dcp")
    assert same(tensors(source), stock)
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "stock.pt")
    assert same(tensors(source), torch.load(tmp_path / "stock.pt", weights_only=True))


def test_transformers_reads_an_export_as_it_read_the_source(tmp_path: Path) -> None:
    source = with_tokenizer(folder_of(tmp_path / "hf", dtype=torch.float32))
    tool("hf_to_dcp", "--input_dir", source, "--output_dir", tmp_path / "dcp")
    result = tool("dcp_to_hf", "--input_dir", tmp_path / "dcp", "--output_dir", tmp_path / "back")
    assert "every tensor read again and equal" in result.stdout
    assert_same_logits(tmp_path / "back")
    before, after = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (source, tmp_path / "back"))
    ids = torch.arange(40)[None] * 7 % 311
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)
    assert after.generation_config.eos_token_id[0] == AutoTokenizer.from_pretrained(tmp_path / "back").eos_token_id
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(
    "tied", [pytest.param(True, id="tied"), pytest.param(False, id="untied", marks=pytest.mark.full)]
)
def test_a_checkpoint_and_its_export_say_the_same(tied: bool, tmp_path: Path) -> None:
    """64 greedy tokens on 20 prompts: ours from the DCP folder, transformers from the HF folder made of it."""
    model = reference(dataclasses.replace(PRESETS["debug"], tie_word_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim > 1 else 1)  # so that it says something
    model.save_pretrained(tmp_path / "hf")
    convert.to_dcp(open_source(with_tokenizer(tmp_path / "hf")), tmp_path / "dcp")
    convert.to_hf(open_source(tmp_path / "dcp"), tmp_path / "export")
    found = inference.Model(str(tmp_path / "dcp"), "", "", torch.device("cpu"), torch.float32)
    draw = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 700, (3 + 2 * i,), generator=draw).tolist() for i in range(20)]
    ours = [said.ids for said in decode.generate(found.load(), prompts, decode.Sampling(), frozenset(), 64)]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    theirs.generation_config.eos_token_id = None
    for number, (prompt, said) in enumerate(zip(prompts, ours, strict=True)):
        assert len(said) == 64 and len(set(said)) > 5
        with torch.no_grad():  # what they find likeliest after each token of ours is what they would say
            likeliest = theirs(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert likeliest.tolist() == said
        if number == 0:
            whole = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=64, pad_token_id=0)
            assert whole[0, len(prompt) :].tolist() == said


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_dtype_is_what_a_cast_gives(dtype: str, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "hf", dtype=torch.float32)
    convert.to_dcp(open_source(source), tmp_path / "dcp")
    convert.to_hf(open_source(tmp_path / "dcp"), tmp_path / "back", dtype)
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors(source).items()}
    assert same(expected, tensors(tmp_path / "back"))
    assert assets.config_dtype(assets.read_assets(tmp_path / "back")) == dtype


def test_a_runis_exported_in_the_dtype_of_its_base_and_anything_else_as_it_is(tmp_path: Path) -> None:
    """A run's weights are fp32, whatever they come from; its config.json is the base's."""
    folder = folder_of(tmp_path / "hf", dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    convert.to_dcp(open_source(folder), tmp_path / "dcp", verify="bytes")
    source = open_source(tmp_path / "dcp")
    of_a_run = dataclasses.replace(source, manifest={"fingerprints": {}})
    for found, dtype in ((source, torch.float32), (of_a_run, torch.bfloat16)):
        convert.to_hf(found, tmp_path / str(dtype), verify="bytes")
        assert {tensor.dtype for tensor in tensors(tmp_path / str(dtype)).values()} == {dtype}


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", "neither"])
def test_a_converted_folder_names_its_own_dtype_so_a_later_export_has_it(key: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", dtype=torch.float32)
    config = {n: v for n, v in json.loads((folder / "config.json").read_text()).items() if n != "dtype"}
    (folder / "config.json").write_text(json.dumps(config | ({} if key == "neither" else {key: "float32"})))
    convert.to_dcp(open_source(folder), tmp_path / "same", verify="off")
    assert (tmp_path / "same" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    convert.to_dcp(open_source(folder), tmp_path / "dcp", "bfloat16", verify="off")
    source = open_source(tmp_path / "dcp")
    assert assets.config_dtype(source.assets) == "bfloat16"
    convert.to_torch(source, tmp_path / "torch", "float16", verify="off")
    assert assets.config_dtype(assets.read_assets(tmp_path / "torch")) == "float16"
    convert.to_hf(dataclasses.replace(source, manifest={"fingerprints": {}}), tmp_path / "export", verify="off")
    assert {tensor.dtype for tensor in tensors(tmp_path / "export").values()} == {torch.bfloat16}


def test_a_torch_file_comes_and_goes(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "hf", "untied")
    convert.to_dcp(open_source(source), tmp_path / "dcp", verify="bytes")
    convert.to_torch(open_source(tmp_path / "dcp"), tmp_path / "torch")
    assert sorted(os.listdir(tmp_path / "torch")) == ["config.json", "generation_config.json", "model.pt"]
    content = torch.load(tmp_path / "torch" / "model.pt", weights_only=True)
    assert same(tensors(source), content)
    trainer = {"model": content, "optimizer": {"state": {}}, "step": 7}
    torch.save(trainer, tmp_path / "torch" / "nested.pt")
    for name in ("model.pt", "nested.pt"):
        convert.to_dcp(open_source(tmp_path / "torch" / name), tmp_path / f"dcp of {name}")
        convert.to_hf(open_source(tmp_path / f"dcp of {name}"), tmp_path / f"hf of {name}", verify="bytes")
        assert same(tensors(source), tensors(tmp_path / f"hf of {name}"))


def test_the_one_torch_file_of_a_folder_is_read_and_several_are_named(tmp_path: Path) -> None:
    source, folder = folder_of(tmp_path / "hf", "untied"), tmp_path / "saved"
    shutil.copytree(source, folder)
    (folder / hf_io.SINGLE).unlink()
    torch.save(tensors(source), folder / "consolidated.00.pth")
    (folder / "training_args.bin").write_bytes(b"no weights")
    given = ("--input_dir", folder, "--output_dir")
    tool("torch_to_dcp", *given, tmp_path / "dcp", "--verify", "bytes")
    convert.to_hf(open_source(tmp_path / "dcp"), tmp_path / "back", verify="bytes")
    assert same(tensors(source), tensors(tmp_path / "back"))
    shutil.copy(folder / "consolidated.00.pth", folder / "consolidated.01.pth")
    said = tool("torch_to_dcp", *given, tmp_path / "two", check=False)
    what = f"{folder}: has several files of torch.save, consolidated.00.pth, consolidated.01.pth; name one of them"
    assert said.returncode == 2 and what in said.stderr and not (tmp_path / "two").exists()


def test_only_the_model_of_a_downloaded_folder_is_read(tmp_path: Path) -> None:
    """`hf download` fetches all of a repository, and keeps records of its own beside it."""
    folder = with_tokenizer(folder_of(tmp_path / "hf"))
    names = {path.name for path in folder.iterdir()}
    strays = ("pytorch_model.bin", "modeling_qwen3.py", "model.gguf", "README.md", "optimizer.pt", ".gitattributes")
    below = ("onnx/model.onnx", "original/model.safetensors", ".cache/huggingface/download/x.0badcafe.incomplete")
    for name in (*strays, *below):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"something else")
    convert.to_hf(open_source(folder), tmp_path / "back", verify="bytes")
    assert {path.name for path in (tmp_path / "back").iterdir()} == names
    assert same(tensors(tmp_path / "back"), load_file(folder / hf_io.SINGLE))


def test_nan_weights_are_warned_of_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path / "hf")
    held = tensors(folder)
    held["model.layers.1.mlp.up_proj.weight"][50, 3] = torch.nan
    save_file(held, folder / hf_io.SINGLE, metadata={"format": "pt"})
    convert.to_dcp(open_source(folder), tmp_path / "dcp", verify="bytes")
    assert "1 tensors have NaN or infinite values: model.layers.1.mlp.up_proj.weight" in caplog.text
    convert.to_hf(open_source(tmp_path / "dcp"), tmp_path / "back", verify="bytes")
    assert same(held, tensors(tmp_path / "back"))


DEBUG = (
    *("--job.config_file", str(REPO / "train_configs" / "debug.toml"), "--metrics.enable_tensorboard", "false"),
    *("--training.seq_len", "128", "--validation.prompts", "0"),
)


def train(folder: Path, *arguments: str, processes: int = 2) -> subprocess.CompletedProcess:
    run = ("-m", "titan_mi100.train", *DEBUG, "--job.run_folder", str(folder), *arguments)
    return torchrun(*run, processes=processes)


NO_EXPORT = ("--checkpoint.export_hf", "false")
PP2 = ("--parallelism.pipeline_parallel_degree", "2", "--training.gradient_accumulation_steps", "2")
TP2 = ("--parallelism.tensor_parallel_degree", "2", "--training.gradient_accumulation_steps", "2")


@pytest.mark.full
def test_a_run_ends_with_its_export_and_layouts_with_the_same_weights_export_the_same_bytes(tmp_path: Path) -> None:
    """Two steps under FSDP2; then one without learning under a pipeline and tensor parallel: the same weights."""
    run = tmp_path / "run"
    train(run, "--training.steps", "2", "--checkpoint.export_hf", "true")
    assert sorted(os.listdir(run / "hf-step-2")) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "titan_mi100.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    said = {(run / folder / "titan_mi100.json").read_text() for folder in ("hf-step-2", "checkpoint/step-2")}
    assert list(map(json.loads, said)) == [{"enable_thinking": False}]
    assert convert.is_exported(run / "hf-step-2", "auto", is_adapter=False)  # so the next start would leave it alone
    convert.to_hf(open_source(run / "checkpoint" / "step-2"), tmp_path / "fsdp2-hf", verify="bytes")
    for name, layout in (("pp2", PP2), ("tp2", TP2)):
        shutil.copytree(run, tmp_path / name)
        train(tmp_path / name, "--training.steps", "3", "--optimizer.lr", "0", *NO_EXPORT, *layout)
        checkpoint = tmp_path / name / "checkpoint" / "step-3"
        layouts = json.loads((checkpoint / "manifest.json").read_text())["layout"]
        assert layouts["pp"] == (2 if name == "pp2" else 1) and layouts["tp"] == (2 if name == "tp2" else 1)
        convert.to_hf(open_source(checkpoint), tmp_path / f"{name}-hf", verify="bytes")
    exports = [tmp_path / "fsdp2-hf", tmp_path / "pp2-hf", tmp_path / "tp2-hf", run / "hf-step-2"]
    contents = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in exports]
    assert contents[0] == contents[1] == contents[2] == contents[3]
    assert not any("optimizer" in name or "exp_avg" in name for name in tensors(tmp_path / "pp2-hf"))
    stock = {n: torch.empty(t.shape) for n, t in tensors(run / "hf-step-2").items()}
    dcp.load(stock, checkpoint_id=run / "checkpoint" / "step-2")
    assert same(stock, tensors(run / "hf-step-2"))


def test_a_run_starts_alike_from_hf_dcp_and_torch(world: World, tmp_path: Path) -> None:

    source = with_tokenizer(folder_of(tmp_path / "hf"))
    convert.to_dcp(open_source(source), tmp_path / "dcp", verify="bytes")
    convert.to_torch(open_source(tmp_path / "dcp"), tmp_path / "torch")
    found = []
    for path in (source, tmp_path / "dcp", tmp_path / "torch" / "model.pt"):
        config = Config(
            model=ModelConfig(attention_backend="eager"), checkpoint=CheckpointConfig(initial_load_path=str(path))
        )
        model = open_run(config, world, data=made_up(random_rows(1, 1024, 10, supervised_share=0.5))).model
        found.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    expected = {name: tensor.float() for name, tensor in tensors(source).items()}
    assert all(same(expected, held) for held in found)


@pytest.mark.full
def test_24_bits_of_an_fp32_folder_are_trained_on_and_come_back_where_fp32_is_asked_for(
    world: World, tmp_path: Path
) -> None:
    source = with_tokenizer(folder_of(tmp_path / "hf", dtype=torch.float32))
    exact = tensors(source)

    def opened(path: Path, master: str) -> Any:
        config = Config(
            model=ModelConfig(attention_backend="eager"),
            checkpoint=CheckpointConfig(initial_load_path=str(path)),
            optimizer=OptimizerConfig(master=master),
        )
        return open_run(config, world, data=made_up(random_rows(1, 1024, 10, supervised_share=0.5)))

    def weights(run: Any) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in run.model.named_parameters()}

    run = opened(source, "24bit")
    assets_of_run = assets.run_assets(run.config.spec(), str(source), str(source), "")
    saved = Checkpointer(tmp_path / "run", run.model, run.optimizer, world, run.config.layout(1), assets=assets_of_run)
    saved.save(1, run.progress.trainer_state(), run.about)
    checkpoint = open_source(tmp_path / "run" / "step-1")
    for dtype in ("keep", "float32"):
        convert.to_hf(checkpoint, tmp_path / dtype, dtype, verify="bytes")
        convert.to_dcp(checkpoint, tmp_path / f"dcp {dtype}", dtype, verify="bytes")
        convert.to_hf(open_source(tmp_path / f"dcp {dtype}"), tmp_path / f"{dtype} again", "keep", verify="bytes")
        assert same(tensors(tmp_path / dtype), tensors(tmp_path / f"{dtype} again"))
    assert same(tensors(tmp_path / "keep"), weights(run))
    wide = tensors(tmp_path / "float32")
    assert all(((wide[name] - exact[name]).abs() <= exact[name].abs() * 2.0**-16).all() for name in exact)
    assert not all(torch.equal(wide[name].bfloat16().float(), wide[name]) for name in exact)
    step = tmp_path / "run" / "step-1"
    assert same(weights(opened(step, "fp32")), wide)
    assert same(weights(opened(step, "bf16_sr")), weights(run))
    again = opened(step, "24bit")
    assert same(weights(again), weights(run))
    assert all(
        torch.equal(a, b)
        for (_, a), (_, b) in zip(again.optimizer.named_state(), run.optimizer.named_state(), strict=True)
    )


def test_inspect_lists(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "hf")
    convert.to_dcp(open_source(source), tmp_path / "dcp", verify="bytes")
    shown = json.loads(tool("inspect_dcp", tmp_path / "dcp", "--json", "--verify").stdout)
    assert shown["sealed"] and shown["verified"] and shown["step"] == 0
    assert shown["tensors"]["model.norm.weight"] == {"shape": [64], "dtype": "bfloat16"}
    assert shown["model_values"] == sum(t.numel() for t in tensors(source).values())
    text = tool("inspect_dcp", tmp_path / "dcp").stdout
    assert "step: 0\n" in text and "model.layers.2.mlp.down_proj.weight" in text and "(64, 96)" in text
    assert tool("inspect_dcp", tmp_path / "nowhere", check=False).returncode == 2


def test_what_counts_is_the_dtype_of_the_files_and_not_the_configs(tmp_path: Path) -> None:
    """fp32 weights under a config.json that says bfloat16, and bf16 ones with fp32 norms."""
    folder = folder_of(tmp_path / "hf", dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    mixed = {n: t if "norm" in n else t.bfloat16() for n, t in tensors(folder).items()}
    shutil.copytree(folder, tmp_path / "mixed")
    save_file(mixed, tmp_path / "mixed" / hf_io.SINGLE, metadata={"format": "pt"})
    for source, expected in ((folder, tensors(folder)), (tmp_path / "mixed", mixed)):
        name = source.name
        convert.to_dcp(open_source(source), tmp_path / f"{name} dcp")
        convert.to_hf(open_source(tmp_path / f"{name} dcp"), tmp_path / f"{name} back")
        assert_same_logits(tmp_path / f"{name} back")
        assert same(tensors(tmp_path / f"{name} back"), expected)


def wrapped(weights: dict, kind: str) -> dict:
    prefix = {"module": "module.", "compiled": "_orig_mod."}.get(kind)
    return {"model": weights, "step": 3} if prefix is None else {prefix + n: t for n, t in weights.items()}


@pytest.mark.parametrize("kind", ["nested", "module", "compiled"])
def test_what_other_trainers_write_is_read(kind: str, tmp_path: Path) -> None:
    source = folder_of(tmp_path / "hf")
    dcp.save({**wrapped(tensors(source), kind), "optimizer.x": torch.ones(3)}, checkpoint_id=tmp_path / "dcp")
    torch.save(wrapped(tensors(source), kind), tmp_path / "x.pt")
    for number, path in enumerate((tmp_path / "dcp", tmp_path / "x.pt")):
        convert.to_hf(open_source(path, source), tmp_path / f"{number}", verify="bytes")
        assert same(tensors(tmp_path / f"{number}"), tensors(source))


@pytest.mark.parametrize(
    "boxes",
    [[(0, 0, 64, 40), (0, 40, 64, 56)], [(40, 0, 24, 96), (0, 0, 25, 96), (25, 0, 15, 96)]],
    ids=["columns", "rows"],
)
def test_chunks_are_put_together(boxes: list[tuple[int, int, int, int]], tmp_path: Path) -> None:
    """As tensor parallel and FSDP leave them, in a folder by DCP's own writer."""
    whole = torch.randn(64, 96)
    save_in_chunks(tmp_path / "dcp", whole, boxes)
    weights = open_weights(tmp_path / "dcp")
    assert torch.equal(weights.tensor("w"), whole)
    assert torch.equal(weights.tensor("w", torch.bfloat16), whole.bfloat16())
    assert torch.equal(weights.read("w", whole.shape, (3, 30), (39, 20)), whole[3:42, 30:50])


def save_in_chunks(folder: Path, whole: torch.Tensor, boxes: list[tuple[int, int, int, int]]) -> None:
    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            item = plan.items[0]
            items = [
                dataclasses.replace(
                    item,
                    type=WriteItemType.SHARD,
                    index=MetadataIndex("w", torch.Size(box[:2])),
                    tensor_data=dataclasses.replace(
                        item.tensor_data,
                        chunk=ChunkStorageMetadata(torch.Size(box[:2]), torch.Size(box[2:])),
                    ),
                )
                for box in boxes
            ]
            self.plan = dataclasses.replace(plan, items=items)
            return self.plan

        def create_global_plan(self, all_plans):
            plans, metadata = create_default_global_save_plan(all_plans)
            return plans, dataclasses.replace(metadata, planner_data={"w": ("w",)})

        def resolve_data(self, item):
            (row, column), (rows, columns) = item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes
            return whole[row : row + rows, column : column + columns].contiguous()

    dcp.save({"w": whole}, checkpoint_id=folder, planner=Planner())


def test_an_export_says_what_it_is_whatever_the_base_said(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    convert.to_hf(open_source(folder), tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_a_converted_folder_may_be_called_like_a_step(tmp_path: Path) -> None:
    convert.to_dcp(open_source(folder_of(tmp_path / "hf")), tmp_path / "step-9", verify="bytes")
    assert open_source(tmp_path / "step-9").manifest["step"] == 0


def test_logits_that_are_not_finite_here_only_are_no_agreement(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", dtype=torch.float32)
    weights = open_weights(folder)
    same_ones = compare(folder, weights, SPECS["tied"])
    assert same_ones[0] == [] and same_ones[1] <= 1e-5
    convert.to_torch(open_source(folder), tmp_path / "pt")
    held = torch.load(tmp_path / "pt" / "model.pt", weights_only=True)
    held["model.norm.weight"][0] = torch.nan
    torch.save(held, tmp_path / "pt" / "nan.pt")
    other = open_weights(tmp_path / "pt" / "nan.pt")
    assert "finite at other places" in compare(folder, other, SPECS["tied"])[0][0]
