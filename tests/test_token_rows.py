"""Rows of tokens that LoRA trains, rsLoRA and LoRA+, as a user runs them: resume, export, peft, refusals. That they
have peft's gradients in every layout is in test_lora.py."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ASSETS
from safetensors.torch import load_file
from test_adapter import logits
from test_convert import tensors, train
from test_lora import MODELS, ROWS_TOO, adapter_values
from test_model import reference
from test_train import checkpoint_tensors
from transformers import Qwen3Config, Qwen3ForCausalLM

from titan_mi100.config.check import check
from titan_mi100.config.load import load_config
from titan_mi100.config.settings import Config, LoRAConfig, OptimizerConfig
from titan_mi100.errors import UserError
from titan_mi100.open_run.start import with_token_ids
from titan_mi100.optim.optimizer import build_optimizer
from titan_mi100.shapes.base import ROWS
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.text.load import load_tokenizer
from titan_mi100.weights import convert
from titan_mi100.weights import peft as peft_io
from titan_mi100.weights.adapter import merged_source
from titan_mi100.weights.source import open_source

TOKENS = ("<|im_end|>", "<think>")
LORA = (
    "--lora.rank", "4", "--lora.scaling", "sqrt_rank", "--lora.b_lr_ratio", "4", "--lora.trainable_tokens", *TOKENS,
    "--optimizer.lr", "1e-2", "--model.flavor", "", "--checkpoint.interval", "2", "--training.steps", "3",
)  # fmt: skip


BOTH = [pytest.param(True, id="tied"), pytest.param(False, marks=pytest.mark.full, id="untied")]


@pytest.fixture(scope="module", params=BOTH)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    torch.manual_seed(3)
    spec = dataclasses.replace(PRESETS["debug"], tie_word_embeddings=request.param)
    settings = {key: value for key, value in to_hf_config(spec).items() if key not in ("architectures", "model_type")}
    Qwen3ForCausalLM(Qwen3Config(**settings)).save_pretrained(folder / "base")
    train(folder / "run", *options_of(folder / "base"), processes=1)
    return folder


def options_of(base: Path) -> tuple[str, ...]:
    paths = ("--checkpoint.initial_load_path", str(base), "--model.tokenizer_path", str(ASSETS / "tokenizer"))
    return (*LORA, *paths, "--checkpoint.export_hf", "true")


def ids() -> list[int]:
    tokenizer = load_tokenizer(ASSETS / "tokenizer")
    return sorted(map(tokenizer.id_of, TOKENS))


def test_only_these_rows_change_and_peft_loads_the_export(run: Path, tmp_path: Path) -> None:
    exported, base = run / "run" / "hf-step-3", run / "base"
    is_tied = json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    tables = ["embed_tokens"] if is_tied else ["embed_tokens", "lm_head"]
    config = json.loads((exported / peft_io.CONFIG).read_text())
    assert config["trainable_token_indices"] == {table: ids() for table in tables} and config["use_rslora"]
    saved = {name for name in load_file(exported / peft_io.WEIGHTS) if name.endswith(ROWS)}
    assert saved == {f"base_model.model.{'model.' * (table != 'lm_head')}{table}{ROWS}" for table in tables}
    for name, adapter in (("by peft", exported), ("by checkpoint", run / "run" / "checkpoint" / "step-3")):
        convert.to_hf(merged_source(open_source(base), adapter), tmp_path / name)
    merged, before = tensors(tmp_path / "by peft"), tensors(base)
    assert all(torch.equal(merged[name], other) for name, other in tensors(tmp_path / "by checkpoint").items())
    for table in ("model.embed_tokens.weight", "lm_head.weight")[: len(tables)]:
        changed = (merged[table] != before[table]).any(1).nonzero().flatten().tolist()
        assert changed == ids(), table
    asked = torch.tensor([[*ids(), 5, ids()[0], 9]])
    expected = logits(base, exported, asked)
    assert (logits(tmp_path / "by peft", ids=asked) - expected).abs().max() <= 1e-5
    assert (logits(base, ids=asked) - expected).abs().max() > 1e-3


@pytest.mark.full
def test_a_run_resumes_bit_for_bit_and_others_start_from_its_adapter(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint" / "step-3")
    train(tmp_path / "run", *options_of(run / "base"), processes=1)
    whole, resumed = (checkpoint_tensors(folder / "run" / "checkpoint" / "step-3") for folder in (run, tmp_path))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    start = ("--lora.initial_load_path", str(run / "run" / "hf-step-3"), "--optimizer.lr", "0")
    options = [word for word in options_of(run / "base") if word not in ("--optimizer.lr", "1e-2")]
    train(tmp_path / "more", *options, *start, processes=1)
    same = checkpoint_tensors(tmp_path / "more" / "checkpoint" / "step-3")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in same.items() if not name.startswith("optimizer."))


def test_b_has_its_own_learning_rate() -> None:
    named = [(f"q.lora_{x}.weight", torch.nn.Parameter(torch.ones(2, 2))) for x in "AB"]
    named += [(f"model.embed_tokens{ROWS}", torch.nn.Parameter(torch.ones(2, 2)))]
    optimizer = build_optimizer(named, OptimizerConfig(lr=0.01), 0, torch.device("cpu"), b_lr_ratio=16.0)
    for _, parameter in named:
        parameter.grad = torch.ones(2, 2)
    optimizer.update(1.0)  # the first step of AdamW moves each weight by its learning rate
    moved = [1 - float(parameter.detach()[0, 0]) for _, parameter in named]
    decay = 0.01 * OptimizerConfig().weight_decay
    assert moved == pytest.approx([0.01 + decay, 16 * (0.01 + decay), 0.01 + decay], rel=1e-4)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"trainable_tokens": ("<|im_end|>",)}, 'trainable_tokens = ["<|im_end|>"] has no effect with rank = 0'),
        ({"scaling": "sqrt_rank"}, 'scaling = "sqrt_rank" has no effect with rank = 0'),
        ({"b_lr_ratio": 2.0}, "b_lr_ratio = 2.0 has no effect with rank = 0"),
        ({"rank": 4, "b_lr_ratio": 0.0}, "b_lr_ratio = 0 would never train B"),
        ({"rank": 4, "trainable_tokens": ("a", "b", "a")}, "trainable_tokens names 'a' twice"),
        ({"rank": 4, "trainable_tokens": ("",)}, "trainable_tokens names ''"),
    ],
)
def test_settings_without_sense_are_refused(lora: dict, message: str) -> None:
    [problem] = [str(one) for one in check(Config(lora=LoRAConfig(**lora)), None) if "lora" in one.key]
    assert message in problem


def test_a_text_that_is_no_token_is_refused_by_name(tmp_path: Path) -> None:
    names = ("--lora.rank", "2", "--lora.trainable_tokens", "<|im_end|>", "two words", "<|nothing|>")
    config = load_config(["--model.flavor", "debug", "--model.tokenizer_path", str(ASSETS / "tokenizer"), *names,
                          "--data.path", str(ASSETS / "chat.jsonl")], 1)  # fmt: skip
    with pytest.raises(UserError, match=r"trainable_tokens names 'two words', '<\|nothing\|>': no single token of"):
        with_token_ids(config.lora, config.tokenizer_path(), PRESETS["debug"].vocab_size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainable_token_indices": [0, 7, 200, 311]}, "trainable_token_indices is none of"),
        ({"trainable_token_indices": {"embed_tokens": [0, 7, 200]}}, "rows of tokens|shape"),
        ({"trainable_token_indices": {"embed_tokens": [7, 0, 200, 311]}}, "has other ids than ascending ones"),
        ({"trainable_token_indices": {"embed_tokens": [0, 7, 200, True]}}, "has other ids than ascending ones"),
        ({"trainable_token_indices": {"embed_tokens": [0, 7, 200, 312]}}, "trains row 312, but"),
        ({"trainable_token_indices": {"lm_head": [0, 7, 200, 311]}}, "has rows of tokens of embed_tokens, unlike"),
        ({"trainable_token_indices": None}, "has rows of tokens of embed_tokens, unlike"),
        ({"use_rslora": "yes"}, "use_rslora = 'yes' is neither true nor false"),
    ],
)
def test_folders_of_peft_with_other_rows_are_refused(change: dict, message: str, tmp_path: Path) -> None:
    spec = MODELS["tied"]
    peft_io.write_adapter(tmp_path, adapter_values(spec, ROWS_TOO), ROWS_TOO, "")
    lora, weights = peft_io.read_adapter(tmp_path)
    assert (lora.token_ids, lora.scaling) == (ROWS_TOO.token_ids, "sqrt_rank")
    weights.check(lora.shapes(spec))
    file = tmp_path / peft_io.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    reference(spec).save_pretrained(tmp_path / "base")
    base = open_source(tmp_path / "base")
    with pytest.raises(UserError, match=message):
        merged_source(base, tmp_path)
