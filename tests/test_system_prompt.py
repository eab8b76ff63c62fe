"""data.system_prompt: conversations without a system message get this one, in training and when the model is used."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ASSETS

from titan_mi100.config.load import load_config
from titan_mi100.config.settings import DataConfig
from titan_mi100.data.prepare import prepare_data
from titan_mi100.data.prepared import Prepared
from titan_mi100.errors import UserError
from titan_mi100.generation.engine import PromptBuilder
from titan_mi100.shapes.families import PRESETS
from titan_mi100.text.assets import PROMPTS, PromptSettings, prompt_settings, run_assets
from titan_mi100.text.chat_template import ChatTemplate
from titan_mi100.text.load import load_tokenizer
from titan_mi100.tools import inspect_data
from titan_mi100.workshop import harness

TOKENIZER, PROMPT = ASSETS / "tokenizer", "Answer in one word. 🙂"
OWN = {"role": "system", "content": "My own."}
ASKED, SAID = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
SYSTEM = "<|im_start|>system\n{}<|im_end|>\n"


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, prompt: str = "", **options: Any) -> Prepared:
    return prepare_data(DataConfig(path=(str(path),), system_prompt=prompt, **options), str(TOKENIZER), "", 256)


def texts(data: Prepared) -> list[str]:
    rows, tokenizer = data.sources[0].rows, load_tokenizer(TOKENIZER)
    row = rows.row(0)
    return [
        tokenizer.decode(row.input_ids[row.document_ids == number].tolist())
        for number in range(row.document_ids.max() + 1)
    ]


def test_it_stands_before_conversations_that_have_none_and_makes_other_data(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [ASKED, SAID]}, {"messages": [OWN, ASKED, SAID]})
    bare, prompted = load(path), load(path, PROMPT)
    without, with_own = sorted(texts(bare), key=len)
    assert sorted(texts(prompted), key=len) == sorted([SYSTEM.format(PROMPT) + without, with_own], key=len)
    assert with_own == SYSTEM.format("My own.") + without
    assert prompted.train_counts.supervised == bare.train_counts.supervised  # the answers alone are learned
    assert prompted.folder != bare.folder and prompted.facts.plan != bare.facts.plan
    assert prompted.sources[0].fingerprint != bare.sources[0].fingerprint
    assert (bare.facts.system_prompt, prompted.facts.system_prompt) == ("", PROMPT)
    assert f"system message added: {PROMPT!r}" in prompted.facts.summary and len(bare.facts.summary) + 1 == len(
        prompted.facts.summary
    )
    questions = write(tmp_path / "q.jsonl", {"question": "2 + 2?", "answer": "4"})
    assert texts(load(questions, PROMPT)) == [SYSTEM.format(PROMPT) + without]


def test_it_is_refused_where_no_conversations_are(tmp_path: Path) -> None:
    text = write(tmp_path / "text.jsonl", {"text": "plain"})
    with pytest.raises(UserError, match="system_prompt is for conversations, and no data file holds any; leave it out"):
        load(text, PROMPT)
    assert load(text).facts.system_prompt is None
    arguments = ["--model.flavor", "debug", "--model.tokenizer_path", str(TOKENIZER), "--data.system_prompt", PROMPT]
    with pytest.raises(UserError, match=r'system_prompt.* has no effect with format = "text"'):
        load_config([*arguments, "--data.path", str(text), "--data.format", "text"])
    mixed = write(tmp_path / "chat.jsonl", {"messages": [ASKED, SAID]}), text
    both = prepare_data(DataConfig(path=tuple(map(str, mixed)), system_prompt=PROMPT), str(TOKENIZER), "", 256)
    assert sorted(text.startswith(SYSTEM.format(PROMPT)) for text in texts(both)) == [False, True]


def test_the_page_of_the_data_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": [ASKED, SAID]})
    given = ["--model.flavor", "debug", "--model.tokenizer_path", str(TOKENIZER), "--data.path", str(path)]
    assert inspect_data.main([*given, "--data.system_prompt", "Be brief.", "--html", str(tmp_path / "data.html")]) == 0
    page = (tmp_path / "data.html").read_text()
    assert "system message added:" in page and "Be" in page and "brief" in page


def test_checkpoints_and_exports_say_it_and_prompts_are_as_in_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(TOKENIZER, tmp_path / "model"))
    spec, named = PRESETS["debug"], (str(TOKENIZER), "")

    def recorded(*of_data: Any) -> PromptSettings:
        return prompt_settings(run_assets(spec, str(folder), *named, *of_data), folder)

    assert recorded() == recorded(None, "") == PromptSettings()
    assert recorded(False, PROMPT) == PromptSettings(False, PROMPT)
    assets = run_assets(spec, "", *named, None, PROMPT)
    assert json.loads(assets[PROMPTS]) == {"system_prompt": PROMPT}
    (folder / PROMPTS).write_bytes(assets[PROMPTS])
    assert recorded() == recorded(None, None) == PromptSettings(None, PROMPT)  # text alone was trained: as before
    assert recorded(True, "") == PromptSettings(True)  # conversations without it: it is not what was trained last

    model: Any = SimpleNamespace(
        tokenizer=load_tokenizer(TOKENIZER), template=ChatTemplate.from_folder(TOKENIZER), prompts=recorded()
    )
    build = PromptBuilder(model, None, None)
    said = f"system message {PROMPT!r}, as the model was trained (titan_mi100.json); --system TEXT overrides"
    assert said in capsys.readouterr().err
    path = write(tmp_path / "a.jsonl", {"messages": [ASKED, SAID]})
    [trained] = texts(load(path, PROMPT))
    assert trained.startswith(build("p", "2 + 2?").text)
    assert trained.startswith(build("p", [ASKED]).text) and "My own." in build("p", [OWN, ASKED]).text
    assert PROMPT not in build("p", [OWN, ASKED]).text
    for system, shown in (("Other.", "Other."), ("", "")):
        text = PromptBuilder(model, system, None)("p", "2 + 2?").text
        assert PROMPT not in text and text.startswith(SYSTEM.format(shown) if shown else "<|im_start|>user")
    assert PromptBuilder(model, None, None, raw=True)("p", "2 + 2?").text == "2 + 2?"
    assert "as the model was trained" not in capsys.readouterr().err


def test_a_harness_asks_with_the_system_message_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_prompt, without = (Path(shutil.copytree(TOKENIZER, tmp_path / name)) for name in ("with", "without"))
    for folder in (with_prompt, without):
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").touch()
    (with_prompt / PROMPTS).write_text(json.dumps({"system_prompt": PROMPT}))
    started: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(harness.subprocess, "run", run)
    monkeypatch.setattr(harness, "find_spec", lambda _: SimpleNamespace(origin="lm_eval"))

    def added(folder: Path, *options: str) -> list[str]:
        """What the command of lm_eval ends with, after our options."""
        assert harness.main([str(folder), "tasks", *options]) == 0
        command = started.pop()
        return command[command.index("--output_path") + 2 + len(options) :]

    chat = "--apply_chat_template"
    assert added(with_prompt, chat) == ["--system_instruction", PROMPT]
    assert added(with_prompt) == added(without, chat) == []
    assert added(with_prompt, chat, "--system_instruction=x") == []
