"""Every example of docs/DATA.md does what the page says."""

import re
from pathlib import Path

import pytest
from conftest import ASSETS, REPO
from test_prepare import load, supervised_texts

from titan_mi100.data.columns import PARTS, REASONING, WHOLE_PARTS
from titan_mi100.data.formats import FORMATS
from titan_mi100.text.load import load_tokenizer

PAGE = (REPO / "docs" / "DATA.md").read_text(encoding="utf-8")
EXAMPLES = [
    (name, rows, learned)
    for name, section in re.findall(r"^### (\w+)\n(.*?)(?=^##)", PAGE, re.S | re.M)
    for rows, learned in re.findall(r"```jsonl\n(.*?)```\nLearned:\n```text\n(.*?)\n```", section, re.S)
]


def test_every_format_has_an_example() -> None:
    assert {name for name, _, _ in EXAMPLES} == set(FORMATS)


def test_the_example_of_a_mask_is_learned_as_the_page_says(tmp_path: Path) -> None:
    [(rows, learned)] = re.findall(r"\*\*Masks.*?```jsonl\n(.*?)```\nLearned:\n```text\n(.*?)\n```", PAGE, re.S)
    (tmp_path / "rows.jsonl").write_text(rows)
    texts = supervised_texts(load(tmp_path / "rows.jsonl").train, load_tokenizer(ASSETS / "tokenizer"))
    assert texts == [learned]


def test_the_example_of_the_last_round_is_learned_as_the_page_says(tmp_path: Path) -> None:
    [(rows, learned)] = re.findall(r"With `last_round`:\n```jsonl\n(.*?)```\nLearned:\n```text\n(.*?)\n```", PAGE, re.S)
    (tmp_path / "rows.jsonl").write_text(rows)
    data = load(tmp_path / "rows.jsonl", loss="last_round")
    assert supervised_texts(data.train, load_tokenizer(ASSETS / "tokenizer")) == [learned]


def test_the_page_lists_the_columns_that_hold_a_part_of_the_prompt_or_answer() -> None:
    table = PAGE.partition("**Parts of the prompt or answer.**")[2].partition("So `gold")[0]
    found = [set(re.findall(r"`(\w+)`", line)) for line in table.splitlines() if line.startswith("| the ")]
    for names, code in zip(found, (PARTS, REASONING, WHOLE_PARTS), strict=True):
        ranges = {"b", "c", "d", "opb", "opc"} & code
        assert {name.lower() for name in names} - {"messages", "conversations", "reasoning_content"} | ranges == code


@pytest.mark.parametrize(("name", "rows", "learned"), EXAMPLES, ids=[name for name, _, _ in EXAMPLES])
def test_the_example_is_detected_and_learned_as_the_page_says(
    name: str, rows: str, learned: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(rows, encoding="utf-8")
    data = load(path)
    assert data.facts.summary[0].startswith(f"{path}: format {name}")
    assert "\n".join(supervised_texts(data.train, load_tokenizer(ASSETS / "tokenizer"))) == learned
