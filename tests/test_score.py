"""`titan-mi100 score`: what pays and what never does, whose code runs and how it is bounded, and what is kept."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO
from test_corpus import TOKENIZER

from titan_mi100.data.samples import LENGTH, PART_PROMPTS, STOP, Answer, Group, GroupStore, Sampled, Scored
from titan_mi100.files import user_code
from titan_mi100.text.judge import exact_value
from titan_mi100.text.scorers import Judged, calls_of, gold_of, scorer_of, without_thinking
from titan_mi100.tools import score

ROW = {"question": "1 + 1?", "answer": "so\n#### 2"}


def samples(folder: Path, texts: list[list[str]], rows: list[dict[str, Any]] | None = None, parts: int = -1) -> Path:
    """A store with a group for each list of texts; an answer that ends with ~ is cut off."""
    about = Sampled("samples", "s", "p", "t", len(texts), len(texts[0]), 0, 9, [2], "float32")
    store = GroupStore(folder, about)
    store.begin()
    groups = [
        Group(number, f"data.jsonl:{number + 1}", rows[number] if rows else ROW, [5, 6], [
            Answer([*(3 + ord(c) % 90 for c in text), 2], [-0.5] * (len(text) + 1), LENGTH if text[-1:] == "~" else STOP, text)
            for text in own
        ])
        for number, own in enumerate(texts)
    ]  # fmt: skip
    for number in range(store.count if parts < 0 else parts):
        store.write(number, [groups[prompt] for prompt in store.prompts_of(number)])
    return folder


def run(*words: object) -> int:
    return score.main([*map(str, words)])


def scores(folder: Path) -> list[list[float | None]]:
    store = GroupStore.open(folder, Scored)
    return [[answer.score for answer in group.answers] for part in range(store.count) for group in store.read(part)]


def test_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = samples(tmp_path / "s", [["2", "it is 3", "2~", "2"], ["2", "2", "x", ""]])
    assert run(folder, "--by", "number", "--by", "length:2=0.5", "--keep", "right", "--to", tmp_path / "k.jsonl", "--show", 2) == 0
    print(capsys.readouterr().out)
    print((tmp_path/"k.jsonl").read_text())
    print(scores(folder / "scored"))
    (tmp_path / "f.py").write_text("def f(prompt, answer, row):\n    return len(answer)\n")
    assert run(folder, "--function", f"{tmp_path}/f.py:f", "--out", tmp_path / "o", "--json") == 0
    print(capsys.readouterr())
    assert 0
