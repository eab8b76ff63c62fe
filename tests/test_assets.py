"""The bundled tokenizer and data are what tests/assets/make.py makes, and are usable."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

REPO = Path(__file__).resolve().parent.parent
ASSETS = REPO / "tests" / "assets"
USER = {"role": "user", "content": "1 + 1?"}
THINKING = {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n2."}


def read_json(name: str) -> dict[str, Any]:
    return json.loads((ASSETS / "tokenizer" / name).read_text(encoding="utf-8"))


def read_jsonl(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ASSETS / name).read_text(encoding="utf-8").splitlines()]


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    # as transformers renders: blocks trimmed
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(read_json("tokenizer_config.json")["chat_template"]).render(
        messages=messages, **options
    )


def test_the_script_makes_the_committed_files_byte_for_byte(tmp_path: Path) -> None:
    runpy.run_path(str(ASSETS / "make.py"))["main"](tmp_path)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(made) == 5
    for name, content in made.items():
        assert (ASSETS / name).read_bytes() == content, name
    assert sum(map(len, made.values())) < 400_000


def test_the_default_run_s_data_is_what_its_script_makes_and_every_sum_is_right(tmp_path: Path) -> None:
    folder = REPO / "train_configs" / "debug"
    runpy.run_path(str(folder / "make_additions.py"))["main"](tmp_path)
    content = (folder / "additions.jsonl").read_text(encoding="utf-8")
    assert (tmp_path / "additions.jsonl").read_text(encoding="utf-8") == content and len(content) < 200_000
    pairs = set()
    for row in map(json.loads, content.splitlines()):
        a, b = map(int, re.findall(r"[0-9]+", row["question"]))
        assert all(10 <= number < 100 for number in (a, b))
        pairs.add(frozenset((a, b)))
        *equations, result = row["answer"].split(", ")
        assert result == f"so {a + b}." and len(equations) in (2, 3)
        for equation in equations:
            left, right = equation.split(" = ")
            assert sum(map(int, left.split(" + "))) == int(right)
    # so a held-out sum is not in the training data in other words
    assert len(pairs) == len(content.splitlines()) == 2000
    content = (folder / "pairs.jsonl").read_text(encoding="utf-8")
    assert (tmp_path / "pairs.jsonl").read_text(encoding="utf-8") == content
    for row in map(json.loads, content.splitlines()):
        a, b = map(int, re.findall(r"[0-9]+", row["prompt"]))
        assert row["chosen"].endswith(f"so {a + b}.") and not row["rejected"].endswith(f"so {a + b}.")


def test_ids_are_bytes_then_merges_by_rank_then_added_tokens() -> None:
    tokenizer = read_json("tokenizer.json")
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    assert sorted(vocab.values()) == list(range(700))
    assert all(len(token) == 1 for token, number in vocab.items() if number < 256)
    assert [vocab[left + right] for left, right in merges] == list(range(256, 700))
    assert [token["id"] for token in tokenizer["added_tokens"]] == list(range(700, 709))


def test_the_tokenizer_returns_the_text_it_was_given() -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(ASSETS / "tokenizer" / "tokenizer.json"))
    texts = [message["content"] for row in read_jsonl("chat.jsonl") for message in row["messages"]]
    texts += [row["answer"] for row in read_jsonl("arithmetic.jsonl")]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_arithmetic_answers_end_in_their_number_and_every_equation_holds() -> None:
    rows = read_jsonl("arithmetic.jsonl")
    assert len(rows) == len({row["question"] for row in rows}) == 600
    for row in rows:
        text, result = row["answer"].split("\n#### ")
        equations = [part for part in text.replace(",", "").rstrip(".").split(" ") if part]
        for i, word in enumerate(equations):
            if word != "=":
                continue
            start = i
            while start > 0 and (equations[start - 1] in "+-*/" or equations[start - 1].isdigit()):
                start -= 1
            left = " ".join(equations[start:i])
            assert eval(left) == int(equations[i + 1].rstrip(".")), row  # digits and + - * / only
        assert int(result) >= 0
        assert result in text


def test_an_answer_that_ends_the_conversation_has_a_think_block_and_earlier_ones_lose_theirs() -> None:
    text = render([USER, THINKING, USER, {"role": "assistant", "content": "Still 2."}])
    assert text == (
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2.<|im_end|>\n"
        "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nStill 2.<|im_end|>\n"
    )
    assert render([USER, THINKING]).endswith("assistant\n<think>\nEasy.\n</think>\n\n2.<|im_end|>\n")


def test_the_generation_prompt_closes_the_think_block_when_thinking_is_off() -> None:
    prompt = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert render([USER], add_generation_prompt=True) == prompt
    assert render([USER], add_generation_prompt=True, enable_thinking=True) == prompt
    assert render([USER], add_generation_prompt=True, enable_thinking=False) == prompt + "<think>\n\n</think>\n\n"


def test_every_bundled_conversation_renders() -> None:
    rows = read_jsonl("chat.jsonl")
    assert len(rows) == 40
    for row in rows:
        text = render(row["messages"])
        assert text.count("<|im_start|>") == text.count("<|im_end|>") == len(row["messages"])
    tool = render(rows[-1]["messages"])
    assert '<tool_call>\n{"arguments": {"a": 17, "b": 25}, "name": "add"}\n</tool_call>' in tool
    assert "<tool_response>\n42\n</tool_response>" in tool


@pytest.mark.parametrize("messages", [[USER, THINKING], [USER, THINKING, USER, THINKING], [USER]])
def test_transformers_renders_the_same(messages: list[dict[str, Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ASSETS / "tokenizer")
    assert tokenizer.apply_chat_template(messages, tokenize=False) == render(messages)
