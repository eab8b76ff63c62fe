"""Exact match: what counts as the answer, and what is counted."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ASSETS
from test_generate import write_folder

from titan_mi100.generation import engine as inference
from titan_mi100.generation.engine import AnswerBatch
from titan_mi100.model.decode import Generated
from titan_mi100.text.judge import extract
from titan_mi100.tools import exact_match


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("hf"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 3 + 4 = 7.\n#### 7", "7"),
        ("#### 1\nno: #### 2 apples, not 3", "2"),
        ("#### $1,234.50", "1234.5"),
        ("the answer is 1,234,567.", "1234567"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("a dash --5", "-5"),
        ("what is left is 10 - 3", "3"),
        ("#### 007.00", "7"),
        ("#### 100", "100"),
        ("#### -0.0", "0"),
        ("#### 0.10", "0.1"),
        ("#### 12,345,678,901,234,567,890,123,456,789,012.50", "12345678901234567890123456789012.5"),
        ("10-3 = 7, pages 3-5", "5"),
        ("pairs 1,2", "2"),
        ("it is -3", "-3"),
        ("a half is .5", "0.5"),
        ("It costs 18.", "18"),
        ("12\n####", None),
        ("no number", None),
        ("", None),
    ],
)
def test_the_answer_is_the_number_behind_the_mark_or_the_last(text: str, expected: str | None) -> None:
    assert extract(text) == expected


def test_exact_match_counts_and_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = tmp_path / "data.jsonl", tmp_path / "output.jsonl"
    rows = [{"question": f"{n} and 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1:,}"} for n in (1, 2, 1999, 4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = inference.Model(str(folder), "", "", torch.device("cpu"), torch.float32)
    answers = ["It is 2.", "#### 4", "1999 + 1 = 2000\n#### 2000.0", "none"]
    asked: list[int] = []

    def load_answer(*_: Any) -> AnswerBatch:
        def answer(prompts: Any, numbers: Any) -> list[Generated]:
            asked.extend(numbers)
            return [Generated(model.tokenizer.encode(answers[number]), number != 3) for number in numbers]

        return answer

    monkeypatch.setattr(exact_match, "load_answer", load_answer)
    arguments = ["--model", str(folder), "--data", str(data), "--batch_size", "3", "--max_new_tokens", "99"]
    assert exact_match.main([*arguments, "--output", str(output), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    expected = {"n": 4, "correct": 2, "score": 0.5, "no_answer": 0.25, "stopped_by_length": 1}
    assert summary == {"data": str(data), **expected}
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(row["gold"], row["extracted"], row["correct"]) for row in kept] == [
        ("2", "2", True), ("3", "4", False), ("2000", "2000", True), ("5", None, False)]  # fmt: skip
    output.write_text("".join(output.read_text().splitlines(True)[:3]))
    assert exact_match.main([*arguments, "--output", str(output)]) == 0
    assert asked == [0, 1, 2, 3, 3]
    assert "2 of 4 correct, exact match 50.0%; 25.0% without an answer, 1 stopped" in capsys.readouterr().out
    assert exact_match.main([*arguments, "--limit", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["score"] == 1.0
    for line, problem in ((b'{"question": "x", "answer": "5"}', "no gold answer"), (b'{"question": "x"}', "wrong row")):
        data.write_bytes(json.dumps(rows[0]).encode() + b"\n" + line + b"\n")
        assert exact_match.main(arguments) == 2
        assert f"data.jsonl:2: {problem}" in capsys.readouterr().err


def test_transformers_says_the_same(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    data, output = tmp_path / "data.jsonl", tmp_path / "answers.jsonl"
    data.write_text("".join((ASSETS / "arithmetic.jsonl").read_text().splitlines(True)[:5]))
    arguments = ["--model", str(folder), "--data", str(data), "--output", str(output)]
    assert exact_match.main([*arguments, "--max_new_tokens", "24", "--batch_size", "3", "--device", "cpu"]) == 0
    network: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    model = inference.Model(str(folder), "", "", torch.device("cpu"), torch.float32)
    build = inference.PromptBuilder(model, None, None)
    said = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(said) == 5
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "eos_token_id": sorted(model.stop_ids)}
    for row in said:
        ids = build("row", row["question"]).ids
        answer = network.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist()
        kept = [token for token in answer if token not in model.stop_ids]
        assert model.tokenizer.decode(kept) == row["output"]
