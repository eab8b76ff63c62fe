"""What a conversion refuses, and that nothing is left of one that is refused, fails or is interrupted."""

import dataclasses
import errno
import itertools
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_convert import folder_of, nothing_in, same, save_in_chunks, tensors, tool, with_tokenizer

from titan_mi100.checkpoint import sealed
from titan_mi100.cli import run as run_command
from titan_mi100.errors import SaveError, UserError
from titan_mi100.files import durable
from titan_mi100.text import assets
from titan_mi100.weights import convert
from titan_mi100.weights import hf as hf_io
from titan_mi100.weights.source import open_source, open_weights


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
    read, pieces = convert._tensors, itertools.count()

    def slowly(*arguments):
        for piece in read(*arguments):
            if next(pieces) >= count:
                marker.touch()
                time.sleep(0.5)
            yield piece

    monkeypatch.setattr(convert, "_tensors", slowly)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


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
        (folder / "number.pt", "its entry 'step' is a"),
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
        (lambda f: os.truncate(f / hf_io.SINGLE, 5000), hf_io.SINGLE, "not a complete safetensors file"),
        (
            lambda f: (f / hf_io.SINGLE).write_bytes(b"\xff\xff\x0f\0\0\0\0\0{}"),
            hf_io.SINGLE,
            "not a complete safetensors",
        ),
        (lambda f: (f / hf_io.SINGLE).write_bytes(b"\xff" * 8), hf_io.SINGLE, "claims a header of"),
        (overlap, hf_io.SINGLE, "not a complete safetensors file"),
        (point_outside, hf_io.INDEX, "'../x' is not inside the folder"),
        (lambda f: (f / hf_io.INDEX).write_text("{}"), hf_io.INDEX, "programs differ in which they read"),
        (lose_a_shard, "model-00002-of-00002.safetensors", "no such file"),
        (reshape, "model.norm.weight", "has shape (63,), but the model needs (64,)"),
        (
            pickle_instead,
            "pytorch_model.bin",
            "name that file itself instead of its folder",
        ),
        (pickle_under_its_name, hf_io.SINGLE, "claims a header of"),
        (other_family, "config.json", "model_type = 'qwen2'; only 'qwen3'"),
        (own_code, "config.json", "asks to run Python code"),
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


def test_the_tools_end_with_code_2_one_message_and_no_output(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "hf")
    other_family(folder)
    result = tool("hf_to_dcp", "--input_dir", folder, "--output_dir", tmp_path / "dcp", check=False)
    assert result.returncode == 2 and not (tmp_path / "dcp").exists()
    assert "model_type = 'qwen2'" in result.stderr and "Traceback" not in result.stderr + result.stdout
    result = tool("dcp_to_hf", "--input_dir", tmp_path, "--output_dir", tmp_path / "x", check=False)
    assert result.returncode == 2 and "has no model" in result.stderr


def test_an_output_that_is_there_is_left_alone(tmp_path: Path) -> None:
    source = open_source(folder_of(tmp_path / "hf"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    with pytest.raises(UserError, match="not overwritten"):
        convert.to_dcp(source, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["mine"]


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


def swap_tensors(folder: Path, kinds, pieces, shard_bytes: int):
    """Every byte is there, under another name: two matrices of one shape."""
    held = dict(pieces)
    a, b = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    held[a], held[b] = held[b], held[a]
    return hf_io.write_hf(folder, kinds, ((name, held[name]) for name in kinds), shard_bytes)


@pytest.mark.parametrize(
    ("target", "broken", "reason"),
    [
        ("write_hf", flip_after(hf_io.write_hf), "1 written tensors differ"),
        ("write_hf", swap_tensors, "2 written tensors differ"),
        ("export_assets", edit_config({"rope_theta": 5e5}), "another model: rope_theta: 500000.0, 10000.0"),
        ("export_assets", edit_config({"rope_theta": 1e4, "tie_word_embeddings": False}), "missing: lm_head"),
        ("export_assets", edit_config({"rope_theta": 1e4, "num_hidden_layers": 2}), "layer_types = "),
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
    with durable.atomic_output_folder(tmp_path / "x") as aside:
        (aside / "half").write_text("half")
        with pytest.raises(UserError), durable.atomic_output_folder(tmp_path / "x"):
            raise UserError("the second one fails")
        assert (aside / "half").exists()
    assert (tmp_path / "x" / "half").exists()


def test_a_damaged_dcp_folder_does_not_start_a_run(tmp_path: Path) -> None:
    convert.to_dcp(open_source(with_tokenizer(folder_of(tmp_path / "hf"))), tmp_path / "dcp", verify="bytes")
    manifest = tmp_path / "dcp" / sealed.MANIFEST
    manifest.write_text(manifest.read_text().replace("step", "stop"))
    with pytest.raises(UserError, match="damaged checkpoint"):
        open_source(tmp_path / "dcp")


def test_a_run_is_no_model_but_its_checkpoints_are(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint" / "step-7").mkdir(parents=True)
    with pytest.raises(UserError, match=r"name one of its checkpoints or exports, such as .*step-7"):
        open_weights(tmp_path / "run")


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


def test_chunks_that_overlap_are_refused(tmp_path: Path) -> None:
    """As many values as the tensor has, but not of all its places: the rest would be whatever was in memory."""
    save_in_chunks(tmp_path / "dcp", torch.randn(8, 16), [(0, 0, 8, 8), (0, 4, 8, 8)])
    with pytest.raises(UserError, match="overlap or leave gaps"):
        open_weights(tmp_path / "dcp")


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
    with pytest.raises(UserError, match="nowhere: is not a folder"):
        open_source(checkpoint, tmp_path / "nowhere")
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("rope_parameters", None)
    (other / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    with pytest.raises(UserError, match=r"does not describe the model that was trained .*rope_theta: 500.0, "):
        open_source(checkpoint, other)
    with pytest.raises(UserError, match="is inside"):
        convert.to_hf(open_source(checkpoint), checkpoint / "hf")
    convert.to_hf(open_source(checkpoint), tmp_path / "hf", verify="bytes")  # and with its own it goes
    (tmp_path / "hf-step-1" / "mine").mkdir(parents=True)
    assert not convert.is_exported(tmp_path / "hf-step-1", "auto", is_adapter=False)
    with pytest.raises(UserError, match="hf-step-1: exists already, and is not overwritten"):
        convert.to_hf(open_source(checkpoint), tmp_path / "hf-step-1")


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
