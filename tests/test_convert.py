"""Converters as gates: what comes out is what went in, bit for bit, or there is no output and a reason."""

import dataclasses
import errno
import io
import itertools
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ASSETS, REPO, torchrun
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_model import SPECS, reference
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from transformers import AutoModelForCausalLM, AutoTokenizer

from titan_mi100.checkpoint import sealed
from titan_mi100.cli import run as run_command
from titan_mi100.config import assets
from titan_mi100.config.model_spec import PRESETS
from titan_mi100.config.settings import CheckpointConfig, Config, ModelConfig
from titan_mi100.data.made_up import made_up, random_rows
from titan_mi100.errors import SaveError, UserError
from titan_mi100.files import durable
from titan_mi100.generation import engine as inference
from titan_mi100.logging import log
from titan_mi100.model import decode
from titan_mi100.open_run import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.weights import convert
from titan_mi100.weights import hf as hf_io
from titan_mi100.weights.export import is_exported
from titan_mi100.weights.source import open_source, open_weights
from titan_mi100.weights.verify_logits import compare

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


def forked(function: Callable[[], object], output: Path) -> int:
    """Run the function in a copy of this process, with its output in a file; returns the copy's id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        sys.stdout = sys.stderr = os.fdopen(descriptor, "w")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background has it ignored
        function()
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def slow_pieces(count: int, marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the piece of this number on, in writing or in verifying, a conversion is slow; it says so by `marker`."""
    read, pieces = convert._pieces, itertools.count()

    def slowly(*arguments):
        for piece in read(*arguments):
            if next(pieces) >= count:
                marker.touch()
                time.sleep(0.5)
            yield piece

    monkeypatch.setattr(convert, "_pieces", slowly)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


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


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors go in several pieces, as large ones do."""
    monkeypatch.setattr("titan_mi100.weights.convert._PIECE_BYTES", 5000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(("name", "shard"), [("tied", "5GB"), ("untied", "60KB"), ("wide heads", "60KB")])
def test_hf_to_dcp_to_hf_is_bit_identical(
    name: str, shard: str, dtype: torch.dtype, tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "SHARD_BYTES", 60_000 if shard == "60KB" else 5_000_000_000)
    source = folder_of(tmp_path / "hf", name, dtype, shard)
    verify = "logits" if dtype == torch.bfloat16 else "bytes"
    convert.to_dcp(open_source(source), tmp_path / "dcp", verify=verify)
    convert.to_hf(open_source(tmp_path / "dcp"), tmp_path / "back", verify=verify)
    assert same(tensors(source), tensors(tmp_path / "back"))
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    assert (len(files) > 1) == (shard == "60KB")
    if len(files) > 1:
        index = json.loads((tmp_path / "back" / hf_io.INDEX).read_text())
        listed = {(n, f.name) for f in files for n in safe_open(f, framework="pt").keys()}  # noqa: SIM118
        assert listed == set(index["weight_map"].items())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors(source).values())
    before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("hf", "back"))
    assert before == after
    entries = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata.values()
    chunks, size = sum(len(entry.chunks) for entry in entries), sum(t.nbytes for t in tensors(source).values())
    assert chunks > len(entries)
    # no chunk takes along the storage of the whole tensor that it is a part of
    assert (tmp_path / "dcp" / "__0_0.distcp").stat().st_size < size + 2500 * chunks
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
    assert "the same logits from transformers" in result.stdout
    before, after = (AutoModelForCausalLM.from_pretrained(f).eval() for f in (source, tmp_path / "back"))
    ids = torch.arange(40)[None] * 7 % 311
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)
    assert after.generation_config.eos_token_id[0] == AutoTokenizer.from_pretrained(tmp_path / "back").eos_token_id
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
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


def test_a_torch_file_comes_and_goes(tmp_path: Path, small_pieces: None) -> None:
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


class Bad:
    """A pickle that would run a command."""

    def __reduce__(self):
        return os.system, ("touch ran-the-pickle",)


def write_bad_torch_files(folder: Path) -> list[tuple[Path, str]]:
    torch.save({"a": torch.ones(2), "b": Bad()}, folder / "code.pt")
    torch.save({"a": torch.ones(2), "step": 3}, folder / "number.pt")
    torch.save([torch.ones(2)], folder / "list.pt")
    (folder / "cut.pt").write_bytes((folder / "number.pt").read_bytes()[:-40])
    return [
        (folder / "code.pt", "system"),
        (folder / "number.pt", "'step' is no tensor"),
        (folder / "list.pt", "not a dict"),
        (folder / "cut.pt", "damaged"),
    ]


def test_a_torch_file_that_is_no_dict_of_tensors_is_refused_and_nothing_of_it_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for path, expected in write_bad_torch_files(tmp_path):
        with pytest.raises(UserError, match=expected) as caught:
            convert.to_dcp(open_source(path), tmp_path / "out" / "dcp")
        assert str(path) in str(caught.value)
    assert nothing_in(tmp_path / "out") and not (tmp_path / "ran-the-pickle").exists()


def header_of(file: Path) -> tuple[dict, bytes]:
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_header(file: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def overlap(folder: Path) -> None:
    header, data = header_of(folder / hf_io.SINGLE)
    names = [name for name in header if name.endswith("norm.weight")]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]
    write_header(folder / hf_io.SINGLE, header, data)


def point_outside(folder: Path) -> None:
    index = {"weight_map": dict.fromkeys(tensors(folder), "../x")}
    (folder / hf_io.SINGLE).rename(folder.parent / "x")
    (folder / hf_io.INDEX).write_text(json.dumps(index))


def lose_a_shard(folder: Path) -> None:
    names = list(tensors(folder))
    first = "model-00001-of-00002.safetensors"
    (folder / hf_io.SINGLE).rename(folder / first)
    weight_map = {**dict.fromkeys(names, first), names[0]: "model-00002-of-00002.safetensors"}
    (folder / hf_io.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def reshape(folder: Path) -> None:
    held = tensors(folder)
    save_file({**held, "model.norm.weight": held["model.norm.weight"][:-1].clone()}, folder / hf_io.SINGLE)


def pickle_instead(folder: Path) -> None:
    (folder / hf_io.SINGLE).unlink()
    torch.save({"a": Bad()}, folder / "pytorch_model.bin")


def pickle_under_its_name(folder: Path) -> None:
    torch.save({"a": Bad()}, folder / hf_io.SINGLE)


def other_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))


def deeper(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4, "layer_types": None}))


def own_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "modeling_x.Model"}}))


@pytest.mark.parametrize(
    ("spoil", "file", "reason"),
    [
        (lambda f: os.truncate(f / hf_io.SINGLE, 5000), hf_io.SINGLE, "not a whole safetensors file"),
        (
            lambda f: (f / hf_io.SINGLE).write_bytes(b"\xff\xff\x0f\0\0\0\0\0{}"),
            hf_io.SINGLE,
            "not a whole safetensors",
        ),
        (lambda f: (f / hf_io.SINGLE).write_bytes(b"\xff" * 8), hf_io.SINGLE, "claims a header of"),
        (overlap, hf_io.SINGLE, "not a whole safetensors file"),
        (point_outside, hf_io.INDEX, "'../x' is not inside the folder"),
        (lambda f: (f / hf_io.INDEX).write_text("{}"), hf_io.INDEX, "of which programs read either"),
        (lose_a_shard, "model-00002-of-00002.safetensors", "no such file"),
        (reshape, "model.norm.weight", "has shape (63,), the model's is (64,)"),
        (pickle_instead, "pytorch_model.bin", "whose pickle may run code"),
        (pickle_under_its_name, hf_io.SINGLE, "claims a header of"),
        (other_family, "config.json", "model_type = 'qwen2'; only 'qwen3'"),
        (own_code, "config.json", "asks for Python code"),
        (deeper, "hf", "missing: model.layers.3."),
        (lambda f: (f / "config.json").unlink(), "config.json", "needs"),
    ],
)
def test_a_bad_folder_is_named_and_nothing_is_written(spoil, file: str, reason: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf")
    spoil(folder)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError) as caught:
        convert.to_hf(open_source(folder), tmp_path / "out" / "hf")
    assert file in str(caught.value) and reason in str(caught.value)
    assert nothing_in(tmp_path / "out")


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


def test_the_tools_end_with_code_2_one_message_and_no_output(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf")
    other_family(folder)
    result = tool("hf_to_dcp", "--input_dir", folder, "--output_dir", tmp_path / "dcp", check=False)
    assert result.returncode == 2 and not (tmp_path / "dcp").exists()
    assert "model_type = 'qwen2'" in result.stderr and "Traceback" not in result.stderr + result.stdout
    result = tool("dcp_to_hf", "--input_dir", tmp_path, "--output_dir", tmp_path / "x", check=False)
    assert result.returncode == 2 and "holds no model" in result.stderr


def test_an_output_that_is_there_is_left_alone(tmp_path: Path) -> None:
    source = open_source(folder_of(tmp_path / "hf"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(UserError, match="not overwritten"):
        convert.to_dcp(source, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["mine"]


def test_nan_weights_are_warned_of_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = folder_of(tmp_path / "hf")
    held = tensors(folder)
    held["model.layers.1.mlp.up_proj.weight"][50, 3] = torch.nan
    save_file(held, folder / hf_io.SINGLE, metadata={"format": "pt"})
    convert.to_dcp(open_source(folder), tmp_path / "dcp", verify="bytes")
    assert "NaN or infinite values in 1 tensors: model.layers.1.mlp.up_proj.weight" in caplog.text
    convert.to_hf(open_source(tmp_path / "dcp"), tmp_path / "back", verify="bytes")
    assert same(held, tensors(tmp_path / "back"))


@pytest.fixture(autouse=True)
def _heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's log reaches pytest, whatever a test before has set up."""
    import logging

    monkeypatch.setattr(logging.getLogger("titan_mi100"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("titan_mi100"), "level", logging.INFO)


def flip_after(function):
    """The function, after which one byte of what it wrote is another."""

    def spoiled(folder: Path, *rest, **options):
        result = function(folder, *rest, **options)
        file = max(folder.iterdir(), key=lambda f: f.stat().st_size)
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        return result

    return spoiled


def edit_config(change: dict):
    def spoiled(*arguments):
        made = assets.export_assets(*arguments)
        config = json.loads(made["config.json"])
        config.pop("rope_parameters", None)
        return {**made, "config.json": json.dumps({**config, **change}).encode()}

    return spoiled


def forget_the_end(*arguments):
    return {**assets.export_assets(*arguments), "generation_config.json": b'{"eos_token_id": 5}'}


def swap_tensors(folder: Path, kinds, pieces, shard_bytes: int):
    """Every byte is there, under another name: two matrices of one shape."""
    held = dict(pieces)
    a, b = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    held[a], held[b] = held[b], held[a]
    return hf_io.write_hf(folder, kinds, ((name, held[name]) for name in kinds), shard_bytes)


@pytest.mark.parametrize(
    ("target", "broken", "reason"),
    [
        ("write_hf", flip_after(hf_io.write_hf), "1 tensors are not what was read"),
        ("write_hf", swap_tensors, "2 tensors are not what was read"),
        ("export_assets", edit_config({"rope_theta": 5e5}), "logits differ from ours"),
        ("export_assets", edit_config({"rope_theta": 1e4, "tie_word_embeddings": False}), "not tied"),
        ("export_assets", edit_config({"rope_theta": 1e4, "num_hidden_layers": 2}), "cannot load it"),
        ("export_assets", forget_the_end, "does not stop at"),
    ],
)
def test_an_export_that_is_not_the_model_is_no_export(
    target: str, broken, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = with_tokenizer(folder_of(tmp_path / "hf"))
    convert.to_dcp(open_source(source), tmp_path / "dcp", verify="bytes")
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(convert, target, broken)
    with pytest.raises(SaveError, match=reason):
        convert.to_hf(open_source(tmp_path / "dcp"), tmp_path / "out" / "hf")
    assert nothing_in(tmp_path / "out")
    convert.to_hf(open_source(tmp_path / "dcp"), tmp_path / "out" / "hf", verify="off")  # it was the gate


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    convert.to_dcp(open_source(folder_of(tmp_path / "hf")), tmp_path / "dcp")
    file = tmp_path / "dcp" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(content)
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"damaged checkpoint: .*__0_0.distcp"):
        convert.to_hf(open_source(tmp_path / "dcp"), tmp_path / "out" / "hf", verify="off")
    assert nothing_in(tmp_path / "out")


@pytest.mark.parametrize("to", ["dcp", "hf", "torch"])
def test_a_full_disk_leaves_nothing(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(folder_of(tmp_path / "hf"))
    (tmp_path / "out").mkdir()
    sync, count = os.fsync, iter(range(100))

    def full(descriptor: int) -> None:
        if next(count) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        getattr(convert, f"to_{to}")(source, tmp_path / "out" / to, verify="bytes")
    monkeypatch.undo()
    assert nothing_in(tmp_path / "out")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 10))
    with pytest.raises(UserError, match="are free"):
        getattr(convert, f"to_{to}")(source, tmp_path / "out" / to)
    assert nothing_in(tmp_path / "out")


def test_a_kill_leaves_nothing_that_looks_finished_and_the_next_start_clears_it(tmp_path: Path) -> None:
    source, out = folder_of(tmp_path / "hf", "untied"), tmp_path / "out"
    out.mkdir()
    for count in (0, 20, 37, 60):  # in writing and in verifying: there are 36 tensors
        marker = tmp_path / f"at {count}"
        with pytest.MonkeyPatch.context() as patch:
            slow_pieces(count, marker, patch)
            child = forked(lambda: convert.to_hf(open_source(source), out / "hf", verify="bytes"), tmp_path / "said")
        wait_for(marker)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left = os.listdir(out)
        assert len(left) == 1 and left[0].startswith(".hf.") and left[0].endswith(".incomplete")
    convert.to_hf(open_source(source), out / "hf", verify="bytes")
    assert os.listdir(out) == ["hf"] and same(tensors(source), tensors(out / "hf"))


def test_what_another_process_is_writing_is_left_alone(tmp_path: Path) -> None:
    with durable.appearing_folder(tmp_path / "x") as aside:
        (aside / "half").write_text("half")
        with pytest.raises(UserError), durable.appearing_folder(tmp_path / "x"):
            raise UserError("the second one fails")
        assert (aside / "half").exists()
    assert (tmp_path / "x" / "half").exists()


DEBUG = ("--job.config_file", str(REPO / "train_configs" / "debug.toml"), "--metrics.enable_tensorboard", "false")


def train(folder: Path, *arguments: str, processes: int = 2) -> subprocess.CompletedProcess:
    run = ("-m", "titan_mi100.train", *DEBUG, "--job.run_folder", str(folder), *arguments)
    return torchrun(*run, processes=processes)


PP2 = ("--parallelism.pipeline_parallel_degree", "2", "--training.gradient_accumulation_steps", "2")
TP2 = ("--parallelism.tensor_parallel_degree", "2", "--training.gradient_accumulation_steps", "2")


def test_a_run_ends_with_its_export_and_layouts_with_the_same_weights_export_the_same_bytes(tmp_path: Path) -> None:
    """Two steps under FSDP2; then one without learning under a pipeline and tensor parallel: the same weights."""
    run = tmp_path / "run"
    train(run, "--training.steps", "2", "--checkpoint.export_hf", "true")
    assert sorted(os.listdir(run / "hf-step-2")) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert is_exported(run / "hf-step-2", "auto", is_adapter=False)  # so the next start would leave it alone
    convert.to_hf(open_source(run / "checkpoint" / "step-2"), tmp_path / "fsdp2-hf", verify="bytes")
    for name, layout in (("pp2", PP2), ("tp2", TP2)):
        shutil.copytree(run, tmp_path / name)
        train(tmp_path / name, "--training.steps", "3", "--optimizer.lr", "0", *layout)
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
        found.append({name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()})
    expected = {name: tensor.float() for name, tensor in tensors(source).items()}
    assert all(same(expected, held) for held in found)


def test_a_damaged_dcp_folder_does_not_start_a_run(tmp_path: Path) -> None:
    convert.to_dcp(open_source(with_tokenizer(folder_of(tmp_path / "hf"))), tmp_path / "dcp", verify="bytes")
    manifest = tmp_path / "dcp" / sealed.MANIFEST
    manifest.write_text(manifest.read_text().replace("step", "stop"))
    with pytest.raises(UserError, match="damaged checkpoint"):
        open_source(tmp_path / "dcp")


def test_a_run_is_no_model_but_its_checkpoints_are(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint" / "step-7").mkdir(parents=True)
    with pytest.raises(UserError, match=r"name one of its checkpoints, such as .*step-7"):
        open_weights(tmp_path / "run")


def test_inspect_lists_and_compares(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "hf")
    convert.to_dcp(open_source(source), tmp_path / "dcp", verify="bytes")
    shown = json.loads(tool("inspect_dcp", tmp_path / "dcp", "--json", "--verify").stdout)
    assert shown["sealed"] and shown["verified"] and shown["step"] == 0
    assert shown["tensors"]["model.norm.weight"] == {"shape": [64], "dtype": "bfloat16"}
    assert shown["model_values"] == sum(t.numel() for t in tensors(source).values())
    text = tool("inspect_dcp", tmp_path / "dcp").stdout
    assert "step 0" in text and "model.layers.2.mlp.down_proj.weight" in text and "(64, 96)" in text
    assert "35 tensors are bit-identical, 0 have other" in tool("inspect_dcp", source, tmp_path / "dcp").stdout
    held = tensors(source)
    held["model.norm.weight"][3] += 0.5
    del held["model.layers.0.mlp.up_proj.weight"]
    held["model.layers.1.mlp.up_proj.weight"] = held["model.layers.1.mlp.up_proj.weight"].float()
    save_file(held, source / hf_io.SINGLE)
    result = tool("inspect_dcp", source, tmp_path / "dcp", check=False)
    assert result.returncode == 1
    assert f"only in {tmp_path / 'dcp'}: model.layers.0.mlp.up_proj.weight" in result.stdout
    assert "model.norm.weight: values differ by up to 0.5" in result.stdout
    assert "model.layers.1.mlp.up_proj.weight: (96, 64) float32, (96, 64) bfloat16" in result.stdout
    assert tool("inspect_dcp", tmp_path / "nowhere", check=False).returncode == 2


def test_values_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", dtype=torch.float32)
    held = tensors(folder)
    held["model.norm.weight"][7] = 1e6
    save_file(held, folder / hf_io.SINGLE, metadata={"format": "pt"})
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"model.norm.weight has values that float16 cannot hold"):
        convert.to_hf(open_source(folder), tmp_path / "out" / "hf", "float16")
    assert nothing_in(tmp_path / "out")
    convert.to_hf(open_source(folder), tmp_path / "out" / "hf", "bfloat16")


def test_logits_that_are_not_finite_here_only_are_no_agreement(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf", dtype=torch.float32)
    weights = open_weights(folder)
    same_ones = compare(folder, weights, weights.kinds, SPECS["tied"], texts=False)
    assert same_ones[0] == [] and same_ones[1] <= 1e-5
    convert.to_torch(open_source(folder), tmp_path / "pt")
    held = torch.load(tmp_path / "pt" / "model.pt", weights_only=True)
    held["model.norm.weight"][0] = torch.nan
    torch.save(held, tmp_path / "pt" / "nan.pt")
    other = open_weights(tmp_path / "pt" / "nan.pt")
    assert "not finite" in compare(folder, other, other.kinds, SPECS["tied"], texts=False)[0][0]


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
        convert.to_dcp(open_source(source), tmp_path / f"{name} dcp", verify="logits")
        convert.to_hf(open_source(tmp_path / f"{name} dcp"), tmp_path / f"{name} back", verify="logits")
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
    ("boxes", "parts"),
    [([(0, 0, 64, 40), (0, 40, 64, 56)], 1), ([(40, 0, 24, 96), (0, 0, 25, 96), (25, 0, 15, 96)], 3)],
    ids=["columns", "rows"],
)
def test_chunks_are_put_together(boxes: list[tuple[int, int, int, int]], parts: int, tmp_path: Path) -> None:
    """As tensor parallel and FSDP leave them, in a folder by DCP's own writer; rows are read chunk by chunk."""
    whole = torch.randn(64, 96)
    save_in_chunks(tmp_path / "dcp", whole, boxes)
    weights = open_weights(tmp_path / "dcp")
    found = list(weights.parts("w"))
    assert len(found) == parts and torch.equal(torch.cat(found), whole)
    assert torch.equal(weights.tensor("w"), whole)
    assert torch.equal(weights.read("w", whole.shape, (3, 30), (39, 20)), whole[3:42, 30:50])


def test_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    """As many values as the tensor has, but not of all its places: the rest would be whatever was in memory."""
    save_in_chunks(tmp_path / "dcp", torch.randn(8, 16), [(0, 0, 8, 8), (0, 4, 8, 8)])
    with pytest.raises(UserError, match="are not the whole of it"):
        open_weights(tmp_path / "dcp")


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


def run_checkpoint(folder: Path, tmp_path: Path) -> Path:
    """A DCP folder whose manifest is as a run's: it says which model was trained."""
    source = open_source(folder_of(tmp_path / "base"))
    convert.to_dcp(source, folder, verify="bytes")
    manifest = sealed.read_manifest(folder)
    written = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()}
    sealed.write_manifest(folder, written, {"step": 1, "fingerprints": {"model": dataclasses.asdict(source.spec)}})
    return folder


def test_assets_of_another_model_or_of_nowhere_are_refused(tmp_path: Path) -> None:
    checkpoint = run_checkpoint(tmp_path / "step-1", tmp_path)
    with pytest.raises(UserError, match="nowhere: is no folder"):
        open_source(checkpoint, tmp_path / "nowhere")
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("rope_parameters", None)
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    with pytest.raises(UserError, match=r"is not of the model that was trained .*rope_theta: 500.0, "):
        open_source(checkpoint, other)
    with pytest.raises(UserError, match="is inside of"):
        convert.to_hf(open_source(checkpoint), checkpoint / "hf")
    convert.to_hf(open_source(checkpoint), tmp_path / "hf", verify="bytes")  # and with its own it goes
    (tmp_path / "hf-step-1").mkdir()
    with pytest.raises(UserError, match="hf-step-1: is there, but is no export"):
        is_exported(tmp_path / "hf-step-1", "auto", is_adapter=False)


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id = 'x' must be"),
        ("generation_config.json", "[]", "must hold one JSON object"),
        ("config.json", {"quantization_config": {"bits": 4}}, "quantized weights are not supported"),
    ],
)
def test_a_config_that_would_make_another_model_of_it_is_refused(
    file: str, content: str | dict, reason: str, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "hf")
    if isinstance(content, dict):
        content = json.dumps({**json.loads((folder / file).read_text()), **content})
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=reason) as caught:
        convert.to_hf(open_source(folder), tmp_path / "back")
    assert str(folder / file) in str(caught.value) and not (tmp_path / "back").exists()


def test_an_export_says_what_it_is_whatever_the_base_said(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    convert.to_hf(open_source(folder), tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_a_converted_folder_may_be_called_like_a_step(tmp_path: Path) -> None:
    convert.to_dcp(open_source(folder_of(tmp_path / "hf")), tmp_path / "step-9", verify="bytes")
    assert open_source(tmp_path / "step-9").manifest["step"] == 0


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("count", [3, 40], ids=["writing", "verifying"])
def test_a_conversion_that_is_told_to_end_clears_up(
    count: int, sent: signal.Signals, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = folder_of(tmp_path / "hf"), tmp_path / "out"
    out.mkdir()
    slow_pieces(count, tmp_path / "marker", monkeypatch)
    program = partial(convert.to_dcp, open_source(folder), out / "dcp", verify="bytes")
    child = forked(lambda: run_command(program), tmp_path / "said")
    wait_for(tmp_path / "marker")
    os.kill(child, sent)
    _, status = os.waitpid(child, 0)
    said = (tmp_path / "said").read_text()
    assert os.waitstatus_to_exitcode(status) == code and "Traceback" not in said
    assert ("interrupted" in said) == (sent == signal.SIGINT)
    assert nothing_in(out)
