"""Before the data of a run are prepared: weights, what an export refuses, and the disk are checked."""

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ASSETS, REPO
from safetensors.torch import save_file
from test_trainer import SPEC

from titan_mi100.config import check
from titan_mi100.config.check import check_start
from titan_mi100.config.load import config_from_command_line, load_config
from titan_mi100.config.toml_file import tomllib
from titan_mi100.errors import UserError
from titan_mi100.files.patterns import matching_files
from titan_mi100.files.plain import LFS_POINTER
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.base import parameter_count, parameter_shapes
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.text.load import load_tokenizer
from titan_mi100.weights.base import EMBEDDING, HEAD, Kind, Weights, box
from titan_mi100.weights.convert import to_hf
from titan_mi100.weights.load import untrained_rows
from titan_mi100.weights.source import open_source

SINGLE, POINTER = "model.safetensors", LFS_POINTER + b"oid sha256:6f62\nsize 1192135096\n"


def model(folder: Path) -> Path:
    shutil.copytree(ASSETS / "tokenizer", folder)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in parameter_shapes(SPEC).items()}
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps(to_hf_config(SPEC)))
    return folder


def arguments(load: Path, *more: str) -> list[str]:
    data = ["--data.path", str(ASSETS / "arithmetic.jsonl"), "--job.dump_folder", str(load.parent / "runs")]
    return ["--checkpoint.initial_load_path", str(load), *data, "--training.seq_len", "16", *more]


def checked(load: Path, *more: str) -> None:
    check_start(load_config(arguments(load, *more), 1))


def shards(folder: Path, *names: str) -> None:
    (folder / SINGLE).unlink()
    for name in names:
        (folder / name).write_bytes(b"PK")


def spoil(name: str, content: bytes | dict[str, Any]) -> Callable[[Path], Any]:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda folder: (folder / name).write_bytes(text)


def index(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "model-1.safetensors")
    weight_map = dict.fromkeys(parameter_shapes(SPEC), "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model-1.safetensors").write_bytes(POINTER)


def other_names(folder: Path) -> None:
    tensors = {f"_orig_mod.{name}": torch.zeros(shape) for name, shape in parameter_shapes(SPEC).items()}
    save_file(tensors, folder / SINGLE)


def own_text(name: str, changed: Callable[[str], str]) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(changed((folder / name).read_text()))


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").touch()


GENERATION = "generation_config.json"
SPOILED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut off": (lambda f: os.truncate(f / SINGLE, 5000), f"{SINGLE}: not a complete safetensors file"),
    "pointer": (
        spoil(SINGLE, POINTER),
        "a pointer of git-lfs, a few lines in place of the file; fetch the file: git",
    ),
    "pointer, shard": (index, "model-1.safetensors: is a pointer of git-lfs"),
    "pointer, generation": (spoil(GENERATION, POINTER), "json: is a pointer of git-lfs"),
    "another shape": (
        lambda f: (f / "config.json").write_text(json.dumps({**to_hf_config(SPEC), "intermediate_size": 160})),
        "gate_proj.weight has shape",
    ),
    "layers missing": (
        lambda f: (f / "config.json").write_text(
            json.dumps({**to_hf_config(SPEC), "num_hidden_layers": 9, "layer_types": ["full_attention"] * 9})
        ),
        "missing: model.layers.",
    ),
    "names of a wrapper": (other_names, "names begin with '_orig_mod.', as wrappers leave them"),
    "a head is missing": (
        own_text(
            "config.json", lambda text: text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
        ),
        "missing: lm_head.weight; if the head is tied to the embedding, set tie_word_embeddings to true",
    ),
    "key twice": (
        own_text("config.json", lambda text: text.replace("{", '{"rope_theta": 5.0, ', 1)),
        "config.json: cannot be read as JSON: 'rope_theta' occurs twice in one object, with different values; download",
    ),
    "stop token of the config": (
        own_text("config.json", lambda text: text.replace("{", '{"eos_token_id": "</s>", ', 1)),
        "config.json: eos_token_id = '</s>' must be a token id or a list",
    ),
    "pickle": (lambda f: shards(f, "pytorch_model.bin"), "only pytorch_model.bin; name that file itself"),
    "pickles": (lambda f: shards(f, "a.bin", "b.bin"), "only a.bin, b.bin; write it with transformers: Auto"),
    "GGUF": (lambda f: shards(f, "q4.gguf"), "only q4.gguf; GGUF cannot be trained; download the model's safetensors"),
    "half a download": (lambda f: shards(f, f"{SINGLE}.incomplete"), "; download the whole folder again"),
    "adapter": (adapter, "is a PEFT adapter; name its base model here"),
    "stop token": (spoil(GENERATION, {"eos_token_id": "<|im_end|>"}), "must be a token id or a list"),
    "generation, no JSON": (spoil(GENERATION, b"{,}"), f"{GENERATION}: cannot be read as JSON"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_would_fail_hours_later_is_refused_at_the_start(case: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "model")
    checked(folder)
    SPOILED[case][0](folder)
    with pytest.raises(UserError) as refused:
        checked(folder)
    assert SPOILED[case][1] in str(refused.value)


def test_the_command_checks_before_anything_else_and_a_later_job_and_a_resumed_run_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = model(tmp_path / "model")
    (folder / SINGLE).write_bytes(POINTER)
    run = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["train", *arguments(folder, "--job.run_folder", str(run))])
    with pytest.raises(SystemExit, match="2"):
        config_from_command_line()
    assert "is a pointer of git-lfs" in capfd.readouterr().err and not run.exists()
    config_from_command_line(for_this_job=False)
    (run / "checkpoint" / "step-1").mkdir(parents=True)
    config_from_command_line()


def test_packages_that_the_run_will_need_are_looked_for_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, find, installed = model(tmp_path / "model"), check.find_spec, check.version
    monkeypatch.setattr(check, "find_spec", lambda name: None if name == "torchdata" else find(name))
    with pytest.raises(UserError, match=r"^torchdata is not installed; pip install 'torchdata>=0.11'$"):
        checked(folder)
    (folder.parent / "runs" / "x" / "checkpoint" / "step-1").mkdir(parents=True)
    with pytest.raises(UserError, match="torchdata is not installed"):  # a run that resumes needs them, too
        checked(folder, "--job.run_folder", str(folder.parent / "runs" / "x"))
    monkeypatch.setattr(check, "find_spec", find)
    monkeypatch.setattr(check, "version", lambda name: {"tiktoken": "0.9.0rc1"}.get(name) or installed(name))
    with pytest.raises(UserError, match=r"^tiktoken 0.9.0rc1 is older than 0.13; pip install 'tiktoken>=0.13'$"):
        checked(folder)
    metadata = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
    least = dict(re.match(r"([\w-]+)>=([\d.]+)", text).groups() for text in metadata)  # type: ignore[union-attr]
    monkeypatch.setattr(check, "version", lambda name: "0")
    with pytest.raises(UserError, match="torch 0 is older") as refused:
        checked(folder, "--metrics.enable_tensorboard", "true")
    named = dict(re.findall(r"'([\w-]+)>=([\d.]+)'", str(refused.value).partition("pip install")[2]))
    assert {n: v for n, v in least.items() if n not in ("tomli", "sentencepiece")} == named


def test_files_that_an_export_refuses_are_refused_at_the_start_if_there_will_be_one(tmp_path: Path) -> None:
    """A base of Qwen3 with a tokenizer whose config names a class that splits text differently."""
    folder, other = model(tmp_path / "model"), tmp_path / "tokenizer"
    shutil.copytree(ASSETS / "tokenizer", other)
    export = ("--checkpoint.export_hf", "true")
    given = (*export, "--model.tokenizer_path", str(other))
    checked(folder, *given)
    wrapped = dataclasses.replace(PRESETS["qwen3.5-debug"], is_wrapped=True)  # type: ignore[call-arg]
    (folder / "config.json").write_text(json.dumps(to_hf_config(wrapped)))
    tensors = {name: torch.zeros(shape) for name, shape in parameter_shapes(PRESETS["qwen3.5-debug"]).items()}
    save_file(tensors, folder / SINGLE)
    with pytest.raises(UserError) as refused:
        checked(folder, *given)
    message = str(refused.value)
    assert message.startswith("[checkpoint] export_hf = true: of the export's files tokenizer_config.json: ")
    assert "splits and normalises text differently" in message and str(tmp_path) not in message
    checked(folder, "--model.tokenizer_path", str(other))  # without an export it is of no account


def test_a_disk_too_small_for_a_checkpoint_and_the_export_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, count = model(tmp_path / "model"), parameter_count(SPEC)
    export = ("--checkpoint.export_hf", "true", "--checkpoint.export_dtype", "bfloat16")

    def free(size: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=size))

    free(count * 12)  # AdamW: weights and two moments in fp32
    checked(folder)
    with pytest.raises(UserError, match=r"but a checkpoint takes [\d.]+ kB, the export [\d.]+ kB; free some"):
        checked(folder, *export)
    free(count * 14)
    checked(folder, *export)
    free(count * 12 - 1)
    with pytest.raises(UserError, match=r"or set job\.run_folder"):
        checked(folder)
    checked(folder, "--lora.rank", "1")


def test_data_that_are_pointers_of_git_lfs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "it's.txt").write_bytes(POINTER)  # as text it would be trained on
    _, (problem,) = matching_files(str(tmp_path / "*.txt"))
    assert problem.endswith(f"fetch the file: git -C {tmp_path} lfs pull")


class Held(Weights):
    """Weights in memory."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.held, self.source = held, Path("held")
        self.kinds = {name: Kind(tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}

    def read(
        self, name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...], exactly: bool = False
    ) -> torch.Tensor:
        return self.held[name][box(offset, size)]


def test_tokens_of_the_data_whose_rows_look_untrained_are_found() -> None:
    generator = torch.Generator().manual_seed(0)
    for name in (EMBEDDING, HEAD):
        rows = torch.randn(800, 64, generator=generator) * 0.02 + 0.05
        rows[700] = 0
        rows[701] = rows.mean(0) + torch.randn(64, generator=generator) * 1e-4  # as resize_token_embeddings draws it
        rows[3] = 0  # not in the data
        base = Held({EMBEDDING: torch.randn(800, 64, generator=generator), name: rows})
        assert untrained_rows(base, {5, 9, 700, 701, 799}) == [700, 701]
        assert untrained_rows(base, {5, 9, 799}) == untrained_rows(base, ()) == []


def test_a_run_names_tokens_that_lora_leaves_untrained_and_a_draft_head_that_is_not_there(
    tmp_path: Path, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    spec, generator = PRESETS["qwen3.5-debug"], torch.Generator().manual_seed(0)
    folder = model(tmp_path / "model")
    config = to_hf_config(spec) | {"mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    ids = [tokenizer.id_of(text) for text in ("<|im_end|>", "<|im_start|>")]
    tensors = {name: torch.randn(shape, generator=generator) * 0.02 for name, shape in parameter_shapes(spec).items()}
    tensors[EMBEDDING][ids] = 0
    save_file(tensors, folder / SINGLE)
    given = [*arguments(folder)[:-1], "256", "--data.path", str(ASSETS / "chat.jsonl"), "--training.steps", "1"]
    rows = ("--lora.rank", "2", "--lora.trainable_tokens", "<|im_end|>", "<|im_start|>")
    for more, warns in ((("--lora.rank", "2"), True), (rows, False), ((), False)):
        caplog.clear()
        open_run(load_config([*given, *more], 1), world)
        named = 'rows of 2 tokens in the data look untrained, such as "<|im_start|>", "<|im_end|>"; LoRA does not train'
        assert (named in caplog.text) == warns
        assert ('set lora.trainable_tokens = ["<|im_start|>", "<|im_end|>"], or' in caplog.text) == warns
        assert "mtp_num_hidden_layers = 1, but the weights have no draft head (mtp.*)" in caplog.text
    caplog.clear()
    to_hf(open_source(folder), tmp_path / "export", verify="bytes")
    assert "mtp_num_hidden_layers = 1, but the weights have no draft head" in caplog.text
