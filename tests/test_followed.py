"""The remedies of messages that tests/remedies.py drew are followed: what then comes works, or says another thing.

FOLLOWED and NOT_HERE were the first of `sorted(remedies.messages(), key=remedies.rank)` on 2026-11-27. A message that
is gone is deleted; another seed in remedies.py draws others.
"""

import gzip
import json
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import remedies
import torch
from conftest import ASSETS, REPO
from safetensors.torch import save_file
from test_distill import student
from test_what_rows_say import WRITES

from titan_mi100.checkpoint import sealed
from titan_mi100.config.load import load_config, make_run_folder
from titan_mi100.config.settings import JobConfig
from titan_mi100.data.files import unpack_parquet
from titan_mi100.data.prepare import check_teacher, prepare_run
from titan_mi100.errors import UserError
from titan_mi100.files.durable import remove_any, sha256_of
from titan_mi100.files.stored import open_safetensors
from titan_mi100.launch import launcher
from titan_mi100.open_run.start import open_run
from titan_mi100.parallel.distributed import World
from titan_mi100.shapes.base import parameter_shapes
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.text.load import load_tokenizer
from titan_mi100.tools import convert, generate, inspect_data, new_config, plan, prepare_corpus
from titan_mi100.weights.base import StoredWeights
from titan_mi100.weights.experts import AdapterOfExperts
from titan_mi100.weights.peft import read_adapter
from titan_mi100.weights.source import open_source
from titan_mi100.workshop import harness

TOKENIZER = ASSETS / "tokenizer"
Call = Callable[[Path], object]


def said(call: Call, folder: Path, printed: pytest.CaptureFixture[str], logged: pytest.LogCaptureFixture) -> str:
    """The message that a call ends with; "": it works."""
    printed.readouterr()
    logged.clear()
    try:
        code = call(folder)
    except UserError as error:
        return str(error)
    except SystemExit as error:
        code = error.code
    text = printed.readouterr().err + logged.text
    return text if isinstance(code, int) and code else ""


def config(*words: str) -> Call:
    usual = {"model.flavor": "debug", "model.tokenizer_path": str(TOKENIZER), "data.path": str(ASSETS / "chat.jsonl")}
    start = [word for key, value in usual.items() if f"--{key}" not in words for word in (f"--{key}", value)]
    return lambda folder: load_config([word.replace("F/", f"{folder}/") for word in (*start, *words)], 1) and None


def rows(**settings: str) -> Call:
    def call(folder: Path) -> None:
        here = {key: value.replace("F/", f"{folder}/") for key, value in settings.items()}
        prepare_run(student(folder, **here), None)

    return call


def command(main: Any, *words: str) -> Call:
    """A tool in this process. F/ in a word is the folder of the test."""

    def call(folder: Path) -> object:
        given = [word.replace("F/", f"{folder}/") for word in words]
        if main.__code__.co_argcount:
            return main(given)
        before, sys.argv = sys.argv, ["titan-mi100", *given]
        try:
            return main()
        finally:
            sys.argv = before

    return call


def both(*calls: Call) -> Call:
    return lambda folder: [call(folder) for call in calls][-1]


def wrote(name: str, content: str | bytes = "") -> Call:
    def call(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return call


def gone(name: str) -> Call:
    return lambda folder: remove_any(folder / name)


def copied(source: Path, name: str) -> Call:
    return lambda folder: shutil.copytree(source, folder / name, dirs_exist_ok=True)


def moved(old: str, new: str) -> Call:
    return lambda folder: (folder / old).rename(folder / new)


def tensors(name: str, **arrays: Any) -> Call:
    def call(folder: Path) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({key.replace("__", "."): value for key, value in arrays.items()}, folder / name)

    return call


def edited(name: str, **change: Any) -> Call:
    def call(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        kept = {key: value for key, value in (content | change).items() if value is not None}
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(kept))

    return call


ADAPTER = edited("a/adapter_config.json", peft_type="LORA", r=2, target_modules=["q_proj"])
MATRIX = "base_model__model__model__layers__0__self_attn__q_proj__lora_A__weight"
ODD, PROPER = (tensors("a/adapter_model.safetensors", **{name: torch.zeros(2, 2)}) for name in ("odd", MATRIX))


def corpus(name: str, *words: str) -> Call:
    given = ("--input", "F/in.jsonl", "--output_dir", f"F/{name}", "--tokenizer", str(TOKENIZER), "--workers", "1")
    return command(prepare_corpus.main, *given, *words)


def without_pyarrow(call: Call) -> Call:
    def hidden(folder: Path) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "pyarrow", None)
            return call(folder)

    return hidden


def plain(folder: Path) -> None:
    shapes = parameter_shapes(PRESETS["debug"])
    torch.save({name: torch.zeros(shape) for name, shape in shapes.items()}, folder / "m.pt")


def made_run(folder: Path) -> None:
    make_run_folder(JobConfig(run_folder=str(folder / "run")), False)


def experts(folder: Path) -> None:
    stored = open_safetensors(folder / "a.safetensors")
    AdapterOfExperts(StoredWeights(folder, stored, {name: name for name in stored.kinds}), 2)


def other_manifest(folder: Path) -> None:
    path = folder / "run/checkpoint/step-0" / sealed.MANIFEST
    content = json.loads(path.read_text())
    content["fingerprints"]["model"]["model_type"] = "unknown"
    path.write_text(json.dumps(content))
    (path.parent / sealed.MANIFEST_HASH).write_text(f"{sha256_of(path)}  {path.name}\n")


PLAIN, OTHER_MANIFEST = plain, other_manifest
CHATML = str(REPO / "train_configs/chatml.jinja")
CONVERTED = ("--input_dir", "F/m.pt", "--output_dir", "F/dcp")
PREFERS = ("--objective.name", "preference")
SHARD = "out/shards/000/000000.json"
CHAT = str(ASSETS / "chat.jsonl")
STUDENT = ("--model.flavor", "debug", "--model.tokenizer_path", str(TOKENIZER), "--data.path", CHAT)
VERIFY = command(prepare_corpus.main, "--output_dir", "F/out", "--verify")
TEXT = wrote("in.jsonl", '{"text": "one"}\n' * 20)


def hf(name: str, preset: str = "debug", **more: Any) -> Call:
    """An HF folder: a tokenizer and a shape."""
    shape = edited(f"{name}/config.json", **to_hf_config(PRESETS[preset]) | more)
    return both(copied(TOKENIZER, name), shape, wrote(f"{name}/model.safetensors"))


def run(**settings: str) -> Call:
    """A run that saves its first step, in F/run."""

    def call(folder: Path) -> None:
        (folder / "run").mkdir(exist_ok=True)
        opened = open_run(student(folder, **settings), World(0, 1, torch.device("cpu")), folder / "run")
        if not (folder / "run/checkpoint").exists():
            opened.save()
        opened.close()

    return call


def NOTHING(folder: Path) -> None:
    pass


SAVED = run()
NF4 = ("--lora.rank", "4", "--lora.base", "nf4")
TEMPLATE = WRITES.replace("BODY", "{{ m.content }}")
DATED, FIXED = (f"{{% set day = {day} %}}{TEMPLATE}" for day in ("strftime_now('%d')", "'1'"))
MODEL_OF = ("--data", CHAT, "--gpus", "1", "--memory", "24GB", "--method", "full", "--output", "F/x.toml")
HEADER = json.dumps({"a": {"dtype": "F8_E8M0", "shape": [1], "data_offsets": [0, 1]}}).encode()
PARQUET = wrote("in.parquet", b"PAR1")
TWO_NAMES = {f"{start}embed_tokens__weight": torch.zeros(768, 128) for start in ("model__", "model__language_model__")}
EXPERTS = "model__layers__0__mlp__experts__lora_A__weight"
MENDED = ("tools/plan", "no layout fits GiB ;")  # was drawn; its remedy is now that of a plan
OF_A_SHARD = ("data/corpora/shards", "remove it; the shard is then")  # was drawn; files/plain.py raises it now
# Message -> what is there before, the call that it refuses, words of its remedy, what the remedy says to do, the call
# then, and what that says; "": it works.
FOLLOWED: dict[tuple[str, str], tuple[Call, Call, str, Call, Call, str]] = {
    ("workshop/harness", "lm_eval cannot use a path with"): (
        NOTHING, command(harness.main, "F/a,b", "tasks"), "rename it, or make a link to it",
        NOTHING, command(harness.main, "F/ab", "tasks"), "lm_eval is not installed"),
    ("weights/peft", "has , which is not a"): (
        both(ADAPTER, ODD), lambda f: read_adapter(f / "a"), "rename it", PROPER, lambda f: read_adapter(f / "a"), ""),
    ("data/prepare", "copy the teacher's tokenizer files into"): (
        edited("m/config.json"), lambda f: check_teacher(str(f / "m"), str(TOKENIZER)),
        "copy the teacher's tokenizer files into it",
        copied(TOKENIZER, "m"), lambda f: check_teacher(str(f / "m"), str(TOKENIZER)), ""),
    ("data/build", "the chat template writes the date"): (
        wrote("t.jinja", DATED), rows(**{"model.chat_template": "F/t.jinja"}), "to a copy with a fixed date",
        wrote("t.jinja", FIXED), rows(**{"model.chat_template": "F/t.jinja"}), ""),
    ("config/check", "checkpoint.load_step and fresh exclude each other;"): (
        SAVED, config("--checkpoint.load_step", "0", "--checkpoint.fresh", "true", "--job.run_folder", "F/run"),
        "keep one", NOTHING, config("--checkpoint.load_step", "0", "--job.run_folder", "F/run"), ""),
    ("data/corpora/making", "was started with different ; use"): (
        both(TEXT, corpus("out")), corpus("out", "--eos", "none"), "use the same, or name another --output_dir",
        corpus("out"), corpus("new", "--eos", "none"), ""),
    ("launch/launcher", "srun, or WORLD_SIZE, says that processes"): (
        NOTHING, lambda f: launcher.main([], {"WORLD_SIZE": "2"}), "unset RANK and WORLD_SIZE",
        NOTHING, lambda f: launcher.main(["--max_restarts"], {}), "--max_restarts needs a value"),
    ("data/corpora/making", "input files have changed since it"): (
        both(TEXT, corpus("out"), lambda f: os.utime(f / "in.jsonl", (1, 1))), corpus("out"),
        "name another --output_dir", NOTHING, corpus("new"), ""),
    ("data/build", "[data] is for conversations, and no"): (
        TEXT, rows(**{"data.path": "F/in.jsonl", "data.system_prompt": "x"}), "leave it out",
        NOTHING, rows(**{"data.path": "F/in.jsonl"}), ""),
    ("data/corpora/making", "is not empty and is not"): (
        both(TEXT, wrote("out/x")), corpus("out"), "name a new --output_dir", NOTHING, corpus("new"), ""),
    ("generation/engine", "has no config.json beside it, so"): (
        both(PLAIN, hf("m")), command(generate.main, "--model", "F/m.pt", "--prompt", "x"), "titan-mi100 convert",
        both(command(convert.torch_to_dcp, *CONVERTED), command(convert.dcp_to_hf, "--input_dir", "F/dcp",
                                                               "--output_dir", "F/hf", "--hf_assets_path", "F/m")),
        command(generate.main, "--model", "F/hf", "--prompt", "x", "--max_new_tokens", "1"), ""),
    ("config/check_layout", 'lora.base parallelism.tensor_parallel_degree = "nf4" needs blocks'): (
        hf("m", hidden_size=96), config("--checkpoint.initial_load_path", "F/m", "--model.flavor", "", *NF4),
        'use "whole"',
        NOTHING, config("--checkpoint.initial_load_path", "F/m", "--model.flavor", "", *NF4[:3], "whole"), ""),
    ("checkpoint/resume", "or the run now differs from"): (
        SAVED, run(**{"data.loss": "all"}), "or allow it: --checkpoint.allow_changed data",
        NOTHING, run(**{"data.loss": "all", "checkpoint.allow_changed": "data"}), ""),
    ("weights/experts", "has shape , and is not"): (
        tensors("a.safetensors", **{EXPERTS: torch.zeros(2)}),
        experts, "save it again",
        tensors("a.safetensors", **{EXPERTS: torch.zeros(2, 2)}),
        experts, ""),
    ("config/settings", "model.flavor checkpoint.initial_load_path is not set; name"): (
        hf("m"), config("--model.flavor", ""), "name an HF folder in checkpoint.initial_load_path, or a preset",
        NOTHING, config("--model.flavor", "", "--checkpoint.initial_load_path", "F/m"), ""),
    ("weights/peft", "has no tensors; copy it again"): (
        both(ADAPTER, tensors("a/adapter_model.safetensors")), lambda f: read_adapter(f / "a"), "copy it again",
        PROPER, lambda f: read_adapter(f / "a"), ""),
    MENDED: (
        NOTHING, command(plan.main, "--search", "--device", "mi50", "--model.flavor", "32B", "--lora.rank", "16"),
        "base weights in 4 bits (QLoRA) (lora.base = nf4", NOTHING,
        command(plan.main, "--search", "--device", "mi50", "--model.flavor", "8B", *NF4), ""),
    ("tools/new_config", "has no tokenizer; download the whole"): (
        both(hf("m"), gone("m/tokenizer.json")), command(new_config.main, "--model", "F/m", *MODEL_OF),
        "download the whole folder again", hf("m"), command(new_config.main, "--model", "F/m", *MODEL_OF), ""),
    ("tools/new_config", "--trainer is for --from X.yaml; leave"): (
        hf("m"), command(new_config.main, "--model", "F/m", "--trainer", "TRL", *MODEL_OF), "leave it out",
        NOTHING, command(new_config.main, "--model", "F/m", *MODEL_OF), ""),
    ("config/check_layout", 'memory.offload = " " moves next'): (
        NOTHING, config("--lora.rank", "4", "--memory.offload", "optimizer"), 'use "weights"',
        NOTHING, config("--lora.rank", "4", "--memory.offload", "weights"), ""),
    ("text/base", "character of the text is a"): (
        NOTHING, lambda f: load_tokenizer(TOKENIZER).encode("\ud800"), "replace it by U+FFFD",
        NOTHING, lambda f: load_tokenizer(TOKENIZER).encode("\ufffd"), ""),
    ("config/check", "lora.dropout = objective.name disturbs the sums"): (
        NOTHING, config(*PREFERS, "--lora.rank", "4", "--lora.dropout", "0.1"), "set it to 0",
        NOTHING, config(*PREFERS, "--lora.rank", "4", "--lora.dropout", "0"), ""),
    ("config/load", "move it away, or name another"): (
        wrote("run/train.log/x"), made_run, "move it away, or name another job.run_folder",
        moved("run/train.log", "away"),
        made_run, ""),
    ("files/tables", "if its weights are quantized, use"): (
        wrote("a.safetensors", len(HEADER).to_bytes(8, "little") + HEADER + b"0"),
        lambda f: open_safetensors(f / "a.safetensors"), "use the model's unquantized folder",
        tensors("a.safetensors", a=torch.zeros(1)), lambda f: open_safetensors(f / "a.safetensors"), ""),
    ("config/check", "lora. = is more than hidden_size"): (
        NOTHING, config("--lora.rank", "4096"), "lower it", NOTHING, config("--lora.rank", "128"), ""),
    ("text/chat_template", "no chat_template, or several, and no"): (
        both(copied(TOKENIZER, "t"), edited("t/tokenizer_config.json", chat_template=None)),
        rows(**{"model.tokenizer_path": "F/t"}), "name a Jinja file in model.chat_template, e.g. ",
        NOTHING, rows(**{"model.tokenizer_path": "F/t", "model.chat_template": CHATML}), ""),
    ("weights/pieces", "remove one of each and are"): (
        both(hf("m", "qwen3.5-debug"), tensors("m/model.safetensors", **TWO_NAMES)), lambda f: open_source(f / "m"),
        "remove one of each", tensors("m/model.safetensors", **dict([*TWO_NAMES.items()][:1])),
        lambda f: open_source(f / "m"), "missing: "),
    OF_A_SHARD: (
        both(TEXT, corpus("out"), gone("out/corpus.json"), edited(SHARD, tokens="x")), corpus("out"),
        "remove it; the shard is then made again", gone(SHARD), corpus("out"), ""),
    ("launch/launcher", "CONFIG_FILE is not read here; unset"): (
        NOTHING, lambda f: launcher.main(["--max_restarts"], {"CONFIG_FILE": "x.toml"}),
        "unset it, and write --job.config_file",
        NOTHING, lambda f: launcher.main(["--max_restarts"], {}), "--max_restarts needs a value"),
    ("weights/source", "use another checkpoint"): (
        both(SAVED, OTHER_MANIFEST), lambda f: open_source(f / "run/checkpoint/step-0"), "use another checkpoint",
        both(gone("run"), SAVED), lambda f: open_source(f / "run/checkpoint/step-0"), ""),
    ("text/load", "name a folder with tokenizer.json, or"): (
        wrote("t/x"), lambda f: load_tokenizer(f / "t"), "name a folder with tokenizer.json",
        NOTHING, lambda f: load_tokenizer(TOKENIZER), ""),
    ("files/durable", "name another file with cannot be"): (
        wrote("x.html"), command(inspect_data.main, *STUDENT, "--html", "F/x.html"), "name another file with --html",
        NOTHING, command(inspect_data.main, *STUDENT, "--html", "F/y.html"), ""),
    ("files/model", "is a run folder; name one"): (
        SAVED, lambda f: open_source(f / "run"), "checkpoint/step-0",
        NOTHING, lambda f: open_source(f / "run/checkpoint/step-0"), ""),
    ("data/files", "is parquet, which needs pyarrow: pip"): (
        PARQUET, without_pyarrow(lambda f: unpack_parquet(str(f / "in.parquet"), 0)), "or convert to JSONL",
        TEXT, rows(**{"data.path": "F/in.jsonl"}), ""),
    ("data/files", "copy or write the file again"): (
        wrote("in.jsonl.gz", gzip.compress(b'{"text": "abc"}\n')[:-4]), rows(**{"data.path": "F/in.jsonl.gz"}),
        "copy or write the file again", TEXT, rows(**{"data.path": "F/in.jsonl"}), ""),
    ("launch/launcher", "one node is started here; for"): (
        NOTHING, lambda f: launcher.parse(["--nnodes", "2"], ""), "run on each: torchrun --nnodes 2",
        NOTHING, lambda f: launcher.parse(["--nproc_per_node", "8"], ""), ""),
    ("launch/launcher", "-- is given twice, as and"): (
        NOTHING, lambda f: launcher.parse(["--nproc_per_node", "1", "--nproc_per_node", "2"], ""), "keep one",
        NOTHING, lambda f: launcher.parse(["--nproc_per_node", "1"], ""), ""),
    ("attention/choice", "[model] attention_backend = : is refused"): (
        NOTHING, run(**{"model.attention_backend": "flash_attn"}), "use auto",
        NOTHING, run(**{"model.attention_backend": "auto"}), ""),
    ("config/check", 'data.earlier_thinking objective.name = "unroll" makes several'): (
        NOTHING, config(*PREFERS, "--data.earlier_thinking", "unroll"), "use template, mask or context",
        NOTHING, config(*PREFERS, "--data.earlier_thinking", "mask"), ""),
    ("weights/source", "is not a folder; name one"): (
        both(PLAIN, hf("m")), command(convert.torch_to_dcp, *CONVERTED, "--hf_assets_path", "F/x"),
        "name one with config.json and tokenizer files",
        NOTHING, command(convert.torch_to_dcp, *CONVERTED, "--hf_assets_path", "F/m"), ""),
}  # fmt: skip
NOT_HERE = {  # drawn, too, but not provoked on any machine of the tests
    ("text/assets", "[checkpoint] export_hf = true: of the"): "only a defect of the files that the export makes itself",
    ("parallel/distributed", "this machine has GPUs ( ),"): "needs a GPU",
    ("files/pool", "/dev/shm: ; semaphores are kept there:"): "needs a mount that is full",
    ("data/prepare", "changed while it was read; start"): "needs a file that changes at the right moment",
    ("text/other", "needs a newer sentencepiece; run: pip"): "needs another package, so a network",
}


def test_the_table_is_of_forty_messages_that_there_are() -> None:
    assert len(FOLLOWED) >= 40 and {*FOLLOWED, *NOT_HERE} - {MENDED, OF_A_SHARD} <= {*remedies.messages()}


SLOW = ("attention/choice", "tools/plan", "checkpoint/resume")
MARKS = {message: [pytest.mark.full] if message[0] in SLOW else [] for message in FOLLOWED}
ASKED = [pytest.param(message, marks=marks, id=" ".join(message)) for message, marks in MARKS.items()]


@pytest.mark.parametrize("message", ASKED)
def test_a_remedy_leads_on(message: tuple[str, str], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    before, call, words, follow, again, then = FOLLOWED[message]
    said_by = partial(
        said, folder=tmp_path, printed=request.getfixturevalue("capfd"), logged=request.getfixturevalue("caplog")
    )
    request.getfixturevalue("world")
    before(tmp_path)
    refused = said_by(call)
    assert words in refused, refused
    follow(tmp_path)
    after = said_by(again)
    assert (then in after and words not in after) if then else not after, after
