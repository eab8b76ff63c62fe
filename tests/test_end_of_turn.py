"""Base models: their eos_token ends a text, while their chat template ends a turn with another token."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import REPO, torchrun

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.prepare import prepare_data
from titan_mi100.errors import UserError
from titan_mi100.generation.engine import Model
from titan_mi100.text.assets import read_assets
from titan_mi100.text.chat_template import ChatTemplate
from titan_mi100.text.load import load_tokenizer
from titan_mi100.weights.adapter import merged_source
from titan_mi100.weights.convert import to_dcp, to_hf
from titan_mi100.weights.source import open_source

TOKENIZER = REPO / "tests" / "assets" / "tokenizer"
TEXT_END, TURN_END = "<|endoftext|>", "<|im_end|>"
ROWS = [
    {"messages": [{"role": "user", "content": f"Say {word}."}, {"role": "assistant", "content": word}]}
    for word in ("yes", "no", "on", "off", "up", "down")
]


def base_folder(path: Path, **changes: Any) -> Path:
    """A tokenizer as those of Qwen3's base models: eos_token is <|endoftext|>, the template is ChatML."""
    shutil.copytree(TOKENIZER, path, dirs_exist_ok=True)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "eos_token": TEXT_END, **changes}))
    return path


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def template_of(folder: Path) -> ChatTemplate:
    return ChatTemplate.from_folder(folder, tokenizer=load_tokenizer(folder))


@pytest.mark.parametrize("loss", ["assistant", "all", "last"])
def test_a_base_model_learns_the_tokens_and_masks_of_the_chat_model(tmp_path: Path, loss: str) -> None:
    rows = [*ROWS, {"messages": [*ROWS[0]["messages"], *ROWS[1]["messages"]]}]
    data = written(tmp_path / "a.jsonl", rows)
    config = DataConfig(path=(data,), loss=loss)
    base, chat = (prepare_data(config, str(folder), "", 256) for folder in (base_folder(tmp_path / "base"), TOKENIZER))
    assert (base.facts.end_of_turn, chat.facts.end_of_turn) == (TURN_END, TURN_END)
    assert base.facts.plan == chat.facts.plan and base.facts.sets == chat.facts.sets


def test_an_added_token_that_is_not_special_ends_no_turn(tmp_path: Path) -> None:
    turn = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}SHUT<|im_end|>\n{% endfor %}"
    entry = {"content": "SHUT", "special": False, "lstrip": False, "rstrip": False, "normalized": False}
    folder = base_folder(
        tmp_path, chat_template=turn + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    file = folder / "tokenizer.json"
    definition = json.loads(file.read_text())
    number = 1 + max(token["id"] for token in definition["added_tokens"])
    definition["added_tokens"].append({"id": number, **entry, "single_word": False})
    file.write_text(json.dumps(definition))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"][str(number)] = {**entry, "single_word": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert template_of(folder).end_of_turn == TURN_END
    # and where eos_token itself is written, it stays the end, whatever stands before it
    config["chat_template"] = turn.replace("<|im_end|>", "<|im_end|>{{ eos_token }}")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert template_of(folder).end_of_turn == TEXT_END


def test_a_template_without_an_end_is_refused(tmp_path: Path) -> None:
    turn = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    opened = "{% if add_generation_prompt %}assistant: {% endif %}"
    folder = base_folder(tmp_path / "base", chat_template=turn + opened)
    with pytest.raises(UserError, match=r"no '<\|endoftext\|>' ends the turn"):
        template_of(folder).render_turns(ROWS[0]["messages"])


def test_a_base_without_a_template_is_answered_with_a_file_that_works(tmp_path: Path) -> None:
    folder = base_folder(tmp_path / "base", chat_template=None)
    config = DataConfig(path=(written(tmp_path / "a.jsonl", ROWS),))
    with pytest.raises(UserError, match=r"no chat_template, or several") as refused:
        prepare_data(config, str(folder), "", 64)
    facts = prepare_data(config, str(folder), str(refused.value).rpartition(" e.g. ")[2], 64).facts
    assert facts.end_of_turn == TURN_END and facts.sets["train"].documents == len(ROWS)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base model's folder, made by a run on text; and a run that has learned conversations from it by heart."""
    path = tmp_path_factory.mktemp("base")
    common = (
        *("--training.seq_len", "64", "--training.target_tokens_per_step", "128", "--validation.prompts", "0"),
        *("--training.mixed_precision_param", "float32", "--metrics.enable_tensorboard", "false"),
    )
    text = written(path / "text.jsonl", [{"text": "a text " * 5}])
    folder = base_folder(path / "tokens")
    random = ("--model.flavor", "debug", "--model.tokenizer_path", str(folder), "--data.path", text)
    run(path / "random", *random, *common, "--training.steps", "1")
    base = path / "random" / "hf-step-1"
    chat = ("--checkpoint.initial_load_path", str(base), "--data.path", written(path / "a.jsonl", ROWS))
    quick = ("--training.steps", "40", "--optimizer.lr", "3e-3", "--lr_scheduler.warmup_steps", "5")
    run(path / "run", *chat, *common, *quick)
    run(path / "lora", *chat, *common, "--training.steps", "1", "--lora.rank", "4")
    return base, path / "run"


def run(folder: Path, *arguments: str) -> None:
    train = ("-m", "titan_mi100.train", "--job.run_folder", str(folder), "--checkpoint.export_hf", "true")
    torchrun(*train, *arguments, processes=1)


def named_ends(folder: Path) -> list[Any]:
    tokenizer, config, generation = (
        json.loads((folder / name).read_text())
        for name in ("tokenizer_config.json", "config.json", "generation_config.json")
    )
    return [tokenizer["eos_token"], tokenizer["pad_token"], config["eos_token_id"], generation["eos_token_id"]]


@pytest.mark.full
def test_an_export_names_the_end_and_other_programs_stop_there(trained: tuple[Path, Path]) -> None:
    base, folder = trained
    tokenizer = load_tokenizer(base)
    turn_end, text_end = (tokenizer.id_of(token) for token in (TURN_END, TEXT_END))
    assert named_ends(base) == [TEXT_END, TEXT_END, text_end, [text_end]]  # trained on text: nothing is changed
    for made in (folder / "checkpoint" / "step-40", folder / "hf-step-40"):
        assert named_ends(made) == [TURN_END, TEXT_END, turn_end, [turn_end, text_end]]
    transformers = pytest.importorskip("transformers")
    export = folder / "hf-step-40"
    theirs, model = (
        kind.from_pretrained(export, local_files_only=True)
        for kind in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM)
    )
    asked = theirs.apply_chat_template(
        ROWS[0]["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    said = model.generate(**asked, do_sample=False, max_new_tokens=20)[0, asked["input_ids"].shape[1] :].tolist()
    assert said == [*tokenizer.encode("yes"), turn_end]


@pytest.mark.full
def test_an_untrained_base_and_one_with_an_adapter_stop_at_the_end_of_a_turn(trained: tuple[Path, Path]) -> None:
    base, _ = trained
    model = Model(str(base), "", "", torch.device("cpu"), torch.float32)
    ends = {model.tokenizer.id_of(token) for token in (TURN_END, TEXT_END)}
    assert model.stop_ids == ends
    adapter = base.parents[1] / "lora" / "hf-step-1"
    assert Model(str(base), str(adapter), "", torch.device("cpu"), torch.float32).stop_ids == ends


@pytest.mark.full
def test_a_merge_stops_and_prompts_as_its_adapter_was_trained(trained: tuple[Path, Path], tmp_path: Path) -> None:
    base, folder = trained
    for number, name in enumerate(("checkpoint/step-1", "hf-step-1")):
        adapter = base.parents[1] / "lora" / name
        to_hf(merged_source(open_source(str(base)), adapter), tmp_path / str(number), verify="bytes")
        merged, full = read_assets(tmp_path / str(number)), read_assets(folder / "hf-step-40")
        assert named_ends(tmp_path / str(number)) == named_ends(folder / "hf-step-40")
        assert {n: c for n, c in merged.items() if "token" in n} == {n: c for n, c in full.items() if "token" in n}


@pytest.mark.full
def test_training_from_the_export_reads_the_rows_as_from_the_base(trained: tuple[Path, Path], tmp_path: Path) -> None:
    base, folder = trained
    config = DataConfig(path=(written(tmp_path / "a.jsonl", ROWS),))
    first, again = (prepare_data(config, str(path), "", 64).facts for path in (base, folder / "hf-step-40"))
    assert first.plan == again.plan and first.pad_id == again.pad_id


@pytest.mark.full
def test_a_conversion_without_training_changes_no_file(trained: tuple[Path, Path], tmp_path: Path) -> None:
    base, _ = trained
    to_dcp(open_source(str(base)), tmp_path / "dcp")
    to_hf(open_source(str(tmp_path / "dcp")), tmp_path / "hf", verify="bytes")
    assert read_assets(tmp_path / "hf") == read_assets(base)
