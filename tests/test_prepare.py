"""From files to packed rows: nothing lost, nothing invented, the right tokens supervised, every row accounted for."""

import csv
import errno
import gzip
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from conftest import ASSETS, REPO, SHARED_DATA
from test_malformed import ALL_LINES, GOOD, mutated

from titan_mi100.checkpoint.resume import differing
from titan_mi100.config.layout import IGNORE
from titan_mi100.config.settings import CheckpointConfig, Config, DataConfig, ModelConfig
from titan_mi100.data import build as build_module
from titan_mi100.data import cache as cache_module
from titan_mi100.data import prepare as prepare_module
from titan_mi100.data import prepared as prepared_module
from titan_mi100.data import tokenise
from titan_mi100.data.prepare import prepare_data, prepare_run
from titan_mi100.data.prepared import PackedDataset, Prepared, RefusedData
from titan_mi100.errors import UserError
from titan_mi100.files import child
from titan_mi100.files.durable import sha256_of
from titan_mi100.shapes.families import PRESETS, to_hf_config
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.load import load_tokenizer

ARITHMETIC = ASSETS / "arithmetic.jsonl"
BOM = b"\xef\xbb\xbf"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(ASSETS / "tokenizer")


def load(
    *paths: Path,
    seq_len: int = 256,
    tokenizer: Path = ASSETS / "tokenizer",
    template: Path | str = "",
    cache_folder: Path | str = "",
    **options: Any,
) -> Prepared:
    config = DataConfig(path=tuple(map(str, paths)), cache_folder=str(cache_folder), **options)
    return prepare_data(config, str(tokenizer), str(template), seq_len)


def write(path: Path, *rows: dict[str, Any] | str) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def qa(question: str, answer: str) -> dict[str, Any]:
    return {"question": question, "answer": answer}


def say(*turns: str, **last: Any) -> dict[str, Any]:
    roles = ("user", "assistant") * len(turns)
    messages: list[dict[str, Any]] = [{"role": r, "content": c} for r, c in zip(roles, turns, strict=False)]
    messages[-1].update(last)
    return {"messages": messages}


def documents(dataset: PackedDataset) -> list[tuple[list[int], list[int]]]:
    """Ids and supervised ids of each document of each row."""
    found = []
    for index in range(len(dataset)):
        row = dataset.row(index)
        for number in range(row.document_ids.max() + 1):
            labels = row.labels[row.document_ids == number]
            found.append((row.input_ids[row.document_ids == number].tolist(), labels[labels != IGNORE].tolist()))
    return found


def supervised_texts(dataset: PackedDataset, tokenizer: Tokenizer) -> list[str]:
    return sorted(tokenizer.decode(supervised) for _, supervised in documents(dataset))


def ledger(data: Prepared | RefusedData) -> list[dict[str, str]]:
    path = data.ledger() if isinstance(data, Prepared) else data.ledger
    return list(csv.DictReader(path.open(encoding="utf-8", newline="")))


def answers_of(path: Path) -> list[str]:
    return sorted(json.loads(line)["answer"] + "<|im_end|>" for line in path.open(encoding="utf-8"))


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the real data is not beside this checkout")
@pytest.mark.full
def test_gsm8k_is_learned_exactly_and_fills_its_rows() -> None:
    folder, path = SHARED_DATA / "qwen3_tokenizer", SHARED_DATA / "gsm8k" / "train.jsonl"
    data = load(path, seq_len=1024, tokenizer=folder)
    assert supervised_texts(data.train, load_tokenizer(folder)) == answers_of(path)
    counts = data.train_counts
    assert counts.documents == 7473 and counts.tokens == 1_460_527
    assert counts.tokens / (counts.rows * 1024) >= 0.995
    assert Counter(row["status"] for row in ledger(data)) == {"kept": 7473}


def test_the_answers_and_their_end_tokens_are_supervised_and_nothing_else(tmp_path: Path, tokenizer: Tokenizer) -> None:
    answers = answers_of(ARITHMETIC)
    assert supervised_texts(load(ARITHMETIC).train, tokenizer) == answers
    rows = [json.loads(line) for line in ARITHMETIC.open(encoding="utf-8")]
    messages = write(tmp_path / "messages.jsonl", *(say(row["question"], row["answer"]) for row in rows))
    assert supervised_texts(load(messages).train, tokenizer) == answers
    renamed = write(tmp_path / "renamed.jsonl", *({"f": r["question"], "g": r["answer"], "h": 1} for r in rows))
    assert supervised_texts(load(renamed, prompt_column="f", response_column="g").train, tokenizer) == answers


def test_several_turns_and_text_that_is_not_in_nfc(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "chat.jsonl", say("one", "ONE", "ONE", "\u0065\u0301 two"))
    found = documents(load(path).train)
    assert [tokenizer.decode(supervised) for _, supervised in found] == ["ONE<|im_end|>\u00e9 two<|im_end|>"]


def test_text_and_tokens_are_taken_as_they_are(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = write(tmp_path / "text.jsonl", {"text": "plain words"}, {"text": "ended<|im_end|>"})
    ids = [[*tokenizer.encode("plain words"), tokenizer.eos_token_id], tokenizer.encode("ended<|im_end|>")]
    assert sorted(documents(load(text).train)) == sorted((row, row[1:]) for row in ids)
    tokens = write(tmp_path / "tokens.jsonl", {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]})
    assert documents(load(tokens).train) == [([5, 6, 7, 8], [7, 8])]
    unknown = write(tmp_path / "unknown.jsonl", {"input_ids": [5, tokenizer.n_vocab]})
    with pytest.raises(RefusedData, match=rf"{unknown}:1: unknown token id: input_ids\[1\] = {tokenizer.n_vocab}"):
        load(unknown)


def test_the_bytes_of_a_set_are_those_that_its_supervised_tokens_spell(tmp_path: Path, tokenizer: Tokenizer) -> None:
    chat = write(tmp_path / "chat.jsonl", say("ä", "größer 🙂"), say("b", "再见！<|im_end|>", "c", "été"))
    counted = load(chat, validation_path=(str(chat),)).facts.sets
    answers = len("größer 🙂再见！été".encode())
    assert {name: count.supervised_bytes for name, count in counted.items()} == dict.fromkeys(counted, answers)
    assert counted.keys() == {"train", "validation"}
    end_only = write(tmp_path / "end.jsonl", {"input_ids": [5, tokenizer.eos_token_id, tokenizer.pad_token_id]})
    assert load(end_only).train_counts.supervised_bytes == 0


@pytest.mark.parametrize("options", [{}, {"overlong": "split"}], ids=["whole", "pieces that cut characters"])
def test_what_has_no_loss_has_no_bytes(options: dict[str, str], tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "text.jsonl", *({"text": "再见！🌻" * n} for n in range(1, 40)))
    data = load(path, seq_len=32 if options else 1024, **options)
    labels = [label for i in range(len(data.train)) for label in data.train.row(i).labels.tolist() if label != IGNORE]
    counted = data.train_counts
    assert counted.supervised == len(labels)
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert counted.supervised_bytes == sum(len(tokenizer.token_bytes(i)) for i in labels if i not in ends)


def test_the_loss_says_which_turns_are_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = say("one", "ONE", "two", "TWO")
    row["messages"][1]["weight"] = 1
    path = write(tmp_path / "chat.jsonl", row)
    one, two = "ONE<|im_end|>", "TWO<|im_end|>"
    for loss, learned in (("assistant", one + two), ("last", two), ("weight", one)):
        assert supervised_texts(load(path, loss=loss).train, tokenizer) == [learned], loss
    [(ids, supervised)] = documents(load(path, loss="all").train)
    assert supervised == ids[1:]


def test_a_weight_of_zero_is_heard_and_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", say("a", "b"), say("one", "ONE", weight=0))
    with pytest.raises(RefusedData, match=f"{path}:2: nothing is supervised"):
        load(path)


def test_earlier_reasoning_is_learned_where_the_template_shows_it(tmp_path: Path, tokenizer: Tokenizer) -> None:
    row = say("one", "ONE", "two", "TWO", reasoning_content="second")
    row["messages"][1]["reasoning_content"] = "first"
    path = write(tmp_path / "chat.jsonl", row)
    first, second = "<think>\nfirst\n</think>\n\nONE<|im_end|>", "<think>\nsecond\n</think>\n\nTWO<|im_end|>"
    expected = {"template": ["ONE<|im_end|>" + second], "mask": [second], "unroll": [first, second]}
    for how, texts in expected.items():
        data = load(path, earlier_thinking=how)
        assert supervised_texts(data.train, tokenizer) == texts, how
        assert ledger(data)[0]["status"] == ("split" if how == "unroll" else "kept")


def test_an_empty_think_block_is_learned_on_request(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "chat.jsonl", say("one", "ONE"))
    learned = load(path, empty_think="supervised")
    assert supervised_texts(learned.train, tokenizer) == ["<think>\n\n</think>\n\nONE<|im_end|>"]


def test_overlong_rows_are_dropped_cut_split_or_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "rows.jsonl", qa("a", "b"), qa("a", "bcd " * 50), qa("abc " * 60, "b"))
    whole = {len(ids): (ids, supervised) for ids, supervised in documents(load(path).train)}
    long_answer, long_question = sorted(whole)[1:]
    if whole[long_answer][1] == whole[long_question][1][-2:]:
        long_answer, long_question = long_question, long_answer
    size = 64

    with pytest.raises(RefusedData, match=r"66\.7% of the rows (.|\n)*; 1 allows any share") as caught:
        load(path, seq_len=size)
    assert [row["status"] for row in ledger(caught.value)] == ["kept", "dropped", "dropped"]
    dropped = load(path, seq_len=size, max_lost_share=1.0)
    assert [row["status"] for row in ledger(dropped)] == ["kept", "dropped", "dropped"]
    assert len(documents(dropped.train)) == 1
    lost = f"2 rows, {long_answer + long_question:,} tokens (longer than seq_len: 2, the first at {path}:2)"
    assert f"  dropped: {lost}" in dropped.facts.summary

    cut = load(path, seq_len=size, overlong="truncate", max_lost_share=1.0)
    assert [row["status"] for row in ledger(cut)] == ["kept", "truncated", "dropped"]
    assert "its beginning has no supervised token" in ledger(cut)[2]["reason"]
    ids, supervised = whole[long_answer]
    begin = len(ids) - len(supervised) - 1  # of the answer: a line break follows the end token
    assert (ids[:size], supervised[: size - begin]) in documents(cut.train)

    split = load(path, seq_len=size, overlong="split")
    assert [row["status"] for row in ledger(split)] == ["kept", "split", "split"]
    found = documents(split.train)
    assert all(supervised for _, supervised in found)
    pieces = [ids[start : start + size] for start in range(0, len(ids), size)]
    assert [piece for piece in pieces if piece in [found_ids for found_ids, _ in found]] == pieces
    assert int(ledger(split)[2]["documents"]) == 1  # the question's pieces hold nothing to learn

    with pytest.raises(RefusedData, match=rf"{path}:2: longer than seq_len: {long_answer} tokens"):
        load(path, seq_len=size, overlong="error", on_bad_row="skip")
    with pytest.raises(RefusedData, match=r"no row is left to train on\nledger: 3 rows(.|\n)*raise training.seq_len"):
        load(path, seq_len=4)


BAD_ROWS = {'{"question": "a", "answer": "b"': "not JSON", '["question"]': "object", "[" * 100_000: "nest"}


def test_every_bad_row_is_named_with_file_line_and_reason_or_skipped_up_to_a_cap(tmp_path: Path) -> None:
    good = json.dumps(qa("a", "b"))
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(line for bad in BAD_ROWS for line in (good, bad)) + "\n", newline="")
    with pytest.raises(RefusedData) as caught:
        load(path)
    found = str(caught.value).splitlines()
    assert len(found) == len(BAD_ROWS) + 1
    for number, (line, reason) in enumerate(zip(found, BAD_ROWS.values(), strict=False)):
        assert line.startswith(f"{path}:{2 * number + 2}: ") and reason in line, line
    assert found[-1] == "correct these rows, or skip them with --data.on_bad_row skip"
    rejected = [row for row in ledger(caught.value) if row["status"] == "rejected"]
    assert [int(row["line"]) for row in rejected] == [2 * number + 2 for number in range(len(BAD_ROWS))]
    assert all(row["reason"] for row in rejected)

    data = load(path, on_bad_row="skip", max_bad_rows=len(BAD_ROWS))
    assert data.train_counts.documents == len(BAD_ROWS)
    assert any(line.startswith(f"  rejected: {len(BAD_ROWS)} rows") for line in data.facts.summary)
    with pytest.raises(RefusedData, match=rf"more than \[data\] max_bad_rows = {len(BAD_ROWS) - 1}"):
        load(path, on_bad_row="skip", max_bad_rows=len(BAD_ROWS) - 1)


def format_of(name: str) -> dict[str, str]:
    columns = {"prompt_column": "question", "response_column": "answer"} if name == "columns" else {}
    return {"format": name, **columns}


@pytest.mark.parametrize("name", GOOD)
def test_each_of_300_malformed_lines_stands_in_the_ledger_with_its_number_and_reason(name: str, tmp_path: Path) -> None:
    """What test_malformed.py shows of the readers, through everything that a run does with its data."""
    bad = [(line, reason) for form, line, reason in ALL_LINES if form == name]
    good = json.dumps(GOOD[name][0]).encode()
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([good, *(part for line, _ in bad for part in (line, good))]) + b"\n")
    with pytest.raises(RefusedData) as caught:
        load(path, **format_of(name))
    assert str(caught.value).startswith(f"{path}:2: ")
    rows = ledger(caught.value)
    assert [int(row["line"]) for row in rows] == list(range(1, 2 * len(bad) + 2))
    assert {row["status"] for row in rows[::2]} <= {"kept", "duplicate"}
    for row, (_, reason) in zip(rows[1::2], bad, strict=True):
        assert row["status"] == "rejected" and reason in row["reason"], row


def test_10000_mutated_lines_are_all_in_the_ledger(full: bool, tmp_path: Path) -> None:
    """By default a quarter of them."""
    draw = random.Random(5)
    total = 0
    for name, examples in GOOD.items():
        lines = [json.dumps(row).encode() for row in examples]
        count = -(-10_000 // len(GOOD)) // (1 if full else 4)
        made = [mutated(draw, lines).replace(b"\n", b" ") for _ in range(count)]
        path = tmp_path / f"{name}.jsonl"
        path.write_bytes(b"\n".join([*lines, *made]) + b"\n")
        data = load(path, on_bad_row="skip", max_bad_rows=count, **format_of(name))
        rows = ledger(data)
        numbered = enumerate([*lines, *made], 1)
        assert [int(row["line"]) for row in rows] == [n for n, line in numbered if line.removeprefix(BOM).strip()]
        assert all(row["reason"] for row in rows if row["status"] != "kept")
        assert data.train_counts.documents == sum(int(row["documents"]) for row in rows)
        total += count
    assert total >= (10_000 if full else 2_400)


def test_a_thousand_bad_rows_are_counted_not_listed(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", *[{"question": "a"}] * 1000)
    with pytest.raises(RefusedData) as caught:
        load(path, prompt_column="question", response_column="answer")
    lines = str(caught.value).splitlines()
    assert len(lines) == 6 and lines[5].startswith("... and 995 more; 1,000 bad rows in total (")
    assert len(ledger(caught.value)) == 1000


def test_duplicates_are_found_reported_and_never_straddle_the_split(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = ARITHMETIC.read_text(encoding="utf-8").splitlines()
    unlike = [json.dumps(dict(reversed(json.loads(line).items()))) for line in lines]  # other key order, same content
    path = write(tmp_path / "twice.jsonl", *lines, qa("in between", "so that no period fits"), *unlike)
    data = load(path, validation_fraction=0.3)
    train, held_out = (supervised_texts(part, tokenizer) for part in (data.train, data.validation[0].rows))
    assert len(train) + len(held_out) == 1201
    assert 0.2 < len(held_out) / 1201 < 0.4
    once = "so that no period fits<|im_end|>"
    assert all(part.count(text) % 2 == 0 for part in (train, held_out) for text in part if text != once)
    rows = ledger(data)
    assert [row["status"] for row in rows].count("duplicate") >= 600
    assert rows[601]["reason"] == f"of {path}:1" and rows[601]["set"] == rows[0]["set"]

    dropped = load(path, duplicates="drop")
    assert dropped.train_counts.documents == len(set(lines)) + 1
    assert ledger(dropped)[601]["reason"] == f"of {path}:1, left out"


def test_validation_files_with_rows_of_the_training_files_are_warned_of(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", qa("a", "b"), qa("c", "d"))
    held_out = write(tmp_path / "held_out.jsonl", qa("e", "f"), qa("c", "d"))
    data = load(train, validation_path=(str(held_out),))
    assert data.facts.warnings == [
        f"1 validation rows are training rows too, so the validation loss is too low ({held_out}:2 is {train}:2)"
    ]
    assert len(documents(data.validation[0].rows)) == 2
    assert load(train).facts.fingerprints == data.facts.fingerprints  # a resume may add or change validation


def test_a_template_of_ones_own_and_a_tokenizer_without_one(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write(tmp_path / "rows.jsonl", qa("one", "ONE"))
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ('\\n>> ' if m.role == 'user' else '') }}"
        "{{ m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    file = shutil.copytree(ASSETS / "tokenizer", tmp_path / "tokenizer")
    content = json.loads((file / "tokenizer_config.json").read_text())
    (file / "tokenizer_config.json").write_text(json.dumps({**content, "chat_template": None}))
    (file / "chat_template.jinja").unlink(missing_ok=True)
    for source in (file, ASSETS / "tokenizer"):
        read = load_tokenizer(source)
        [(ids, supervised)] = documents(load(path, tokenizer=source, template=template).train)
        assert read.decode(ids) == "<|im_start|>user\n>> one<|im_end|><|im_start|>assistantONE<|im_end|>"
        assert read.decode(supervised) == "ONE<|im_end|>"
    with pytest.raises(UserError, match=r"no chat_template, .*or name a Jinja file in model.chat_template"):
        load(path, tokenizer=file)
    template.write_text("{{ strftime_now('%Y') }}")
    with pytest.raises(UserError, match="rows would change from day to day; set model"):
        load(path, template=template)


@pytest.mark.parametrize("base", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_text_is_learned_with_one_end_token_or_refused(base: bool, tmp_path: Path) -> None:
    """A chat model's tokenizer ends with <|im_end|>; a base model's with <|endoftext|>, and has <|im_end|>, too."""
    folder = shutil.copytree(ASSETS / "tokenizer", tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    end, text_end = ("<|endoftext|>" if base else "<|im_end|>"), "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": end}))
    tokenizer = load_tokenizer(folder)
    rendered = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb"
    for text, learned in (
        ("a b", f"a b{end}"),
        ("a b \n", f"a b \n{end}"),
        (f"a b{end}", f"a b{end}"),
        (f"a b\n{end}", f"a b\n{end}"),
        (f"a b{end}\n", f"a b{end}"),
        (f"a b{end}{end}", f"a b{end}"),
        (f"a b{end} \n{end}\n\n", f"a b{end}"),
        (f"a b{text_end}", f"a b{text_end}"),
        (f"a{text_end}b", f"a{text_end}b{end}"),
        (f"a b{text_end}\n{text_end}", f"a b{text_end}"),
        (f"{rendered}<|im_end|>", "" if base else f"{rendered}<|im_end|>"),
        (f"{rendered}<|im_end|>\n", "" if base else f"{rendered}<|im_end|>"),
        (f"{rendered}<|im_end|>\n<|endoftext|>", "" if base else f"{rendered}<|im_end|>"),
        ("a<|endoftext|><|im_end|>", "" if base else "a<|endoftext|>"),
        ("a b<|eot_id|>", ""),
        (f"a b<|eot_id|>\n{end}", ""),
    ):
        path = write(tmp_path / "rows.jsonl", {"text": text})
        if learned:
            [(ids, _)] = documents(load(path, tokenizer=folder).train)
            assert tokenizer.decode(ids) == learned and ids == tokenizer.encode(learned), text
        else:
            with pytest.raises(RefusedData, match=r"other end token: the text ends with <\|\w+\|>, but"):
                load(path, tokenizer=folder)


def test_globs_and_several_formats_at_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write(tmp_path / "b.jsonl", qa("a", "columns"))
    write(tmp_path / "a.jsonl", say("a", "messages"))
    data = load(tmp_path / "*.jsonl")
    assert supervised_texts(data.train, tokenizer) == ["columns<|im_end|>", "messages<|im_end|>"]
    assert data.facts.summary[0] == f"{tmp_path / 'a.jsonl'}: format messages (OpenAI)"
    with pytest.raises(UserError, match=r"no\*.jsonl: matches no file"):
        load(tmp_path / "no*.jsonl")


def test_what_is_easily_a_mistake_is_warned_of(tmp_path: Path) -> None:
    row = say("one", "ONE", "two", "TWO")
    row["messages"][1]["reasoning_content"] = "first"
    path = write(tmp_path / "rows.jsonl", say("a", "b"), row, say("long " * 300, "x"))
    data = load(path, max_lost_share=1.0)
    assert [re.split("[,;]", line)[0] for line in data.facts.warnings] == [
        f"{path}: 33.3% of the rows and 92.0% of the tokens are lost to training.seq_len",
        "1 row with earlier reasoning that the template leaves out",
    ]
    assert ledger(data)[1]["reason"] == "earlier reasoning left out: of 1 turns, by the template"
    assert not load(path, earlier_thinking="unroll", overlong="split").facts.warnings


def test_what_is_lost_to_seq_len_is_warned_of_and_more_than_half_of_a_paths_rows_refused(tmp_path: Path) -> None:
    short, long = qa("a", "b"), qa("a", "bcd " * 50)

    def of(number: int, lost: int) -> Path:
        return write(tmp_path / f"{number}-{lost}.jsonl", *[long] * lost, *[short] * (number - lost))

    def shares(*paths: Path, **options: Any) -> list[str]:
        data = load(*paths, seq_len=150, **options)
        return [re.sub(r"^.*/|\.\d% of the|and|are lost.*", "", line) for line in data.facts.warnings]

    assert not shares(of(100, 2)) and not shares(of(10, 9), overlong="split")
    assert shares(of(40, 2)) == ["40-2.jsonl: 5 rows  32 tokens "]  # few rows may be much text
    assert shares(of(10, 2)) == ["10-2.jsonl: 20 rows  70 tokens "]
    [cut] = shares(write(tmp_path / "cut.jsonl", qa("a", "bcd " * 120)), overlong="truncate")
    assert cut == "cut.jsonl: 0 rows  60 tokens "
    for paths, options in (
        ((of(10, 8),), {}),
        ((of(100, 1), of(10, 8)), {}),  # of all rows only 8%
        ((of(100, 1),), {"validation_path": (str(of(10, 8)),)}),
        ((of(20, 2),), {"max_lost_share": 0.05}),
    ):
        with pytest.raises(RefusedData) as caught:
            load(*paths, seq_len=150, **options)  # type: ignore[arg-type]
        first, last = str(caught.value).splitlines()
        assert "are lost to training.seq_len; 95% of the rows have at most " in first
        assert first.endswith('tokens: raise it, or set data.overlong = "split"')
        assert last.startswith("that is more than [data] max_lost_share = 0.") and last.endswith("; 1 allows any share")
    assert load(of(10, 8), seq_len=150, max_lost_share=1.0).train
    with pytest.raises(RefusedData, match=r"0\.0% of the rows and 60(.|\n)* \[data\] max_cut_share = 0\.5 allows"):
        load(tmp_path / "cut.jsonl", seq_len=150, overlong="truncate", max_cut_share=0.5)
    assert load(of(10, 8), seq_len=150, overlong="split", max_cut_share=0.0).train


HARMLESS = {"timestamp": 1.5, "id": 7, "uuid": "x", "model": "gpt", "metadata": {"a": [1]}}


def test_harmless_keys_are_ignored_and_counted_and_others_only_by_name(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain, marked = say("a", "b", "c", "d"), say("a", "b", "c", "d")
    marked["messages"] = [message | HARMLESS for message in marked["messages"]]
    marked["messages"][0]["content"] = [{"type": "text", "text": "a", "annotations": []}]
    shared = {"conversations": [{"from": "human", "value": "a", "id": 1}, {"from": "gpt", "value": "b", "model": "x"}]}
    expected = documents(load(write(tmp_path / "plain.jsonl", plain)).train)
    data = load(write(tmp_path / "marked.jsonl", marked | {"id": 3, "source": "x", "note": None}))
    assert documents(data.train) == expected
    counted = [f"{key} in messages: 4" for key in sorted(HARMLESS)]
    counted += ["annotations in messages: 1", "id: 1", "source: 1"]
    assert f"  keys that were ignored: {', '.join(counted)}" in data.facts.summary
    assert supervised_texts(load(write(tmp_path / "shared.jsonl", shared)).train, tokenizer) == ["b<|im_end|>"]

    meant = say("a", "b", "c", "d") | {"images": ["a.png"], "functions": []}
    meant["messages"][1] |= {"train": "no", "tool_calls": [{"name": "f", "arguments": {"x": 1}, "cost": 2}]}
    path = write(tmp_path / "meant.jsonl", plain, meant)
    for named, reason in (
        (
            (),
            "images in a row of format messages; only text is read: leave out rows that need it; if it does not matter",
        ),
        (("images",), "bad mask: message 2: train may say what is learned; write weight instead"),
        (("images", "train"), "message 2: call 1: cost is not known"),
    ):
        with pytest.raises(RefusedData, match=reason):
            load(path, ignored_keys=named)
    data = load(path, ignored_keys=("images", "train", "cost"))
    assert "  keys that were ignored: cost in messages: 1, images: 1, train in messages: 1" in data.facts.summary
    without = load(path, ignored_keys=("images", "train", "tool_calls"))
    assert sorted(documents(without.train)) == expected * 2


@pytest.mark.full
def test_a_long_column_that_is_not_used_is_warned_of_with_an_example(tmp_path: Path) -> None:
    notes = ["" if i < 1500 else f"{i} " * 9 for i in range(1503)]
    rows = [qa(f"q{i}", "a") | {"topic": "short words " * 3, "note": note} for i, note in enumerate(notes)]
    twice = qa("a question that stands in its other column, too", "a") | {"copy": "question that stands in its other"}
    path = write(tmp_path / "rows.jsonl", *rows, twice)
    [line] = load(path).facts.warnings
    shown = f"3 rows have 9 words there on average, such as '{'1500 ' * 8}1500' at {path}:1501"
    assert line.startswith(f"note is not used: {shown}; name it in one of data.prompt_column")
    assert line.endswith("in data.ignored_keys")
    assert not load(path, ignored_keys=("note",)).facts.warnings
    texts = [{"text": f"a {i}", "abstract": " ".join("abcdefghi")} for i in range(3)]
    [line] = load(write(path, *texts)).facts.warnings
    assert line.startswith("abstract is not used: 3 rows have 9 words there")


def test_blank_lines_crlf_and_byte_order_marks_are_accepted(tmp_path: Path) -> None:
    lines = [json.dumps(qa(f"q{i}", f"a{i}")).encode() for i in range(4)]
    clean = documents(load(write(tmp_path / "clean.jsonl", *(line.decode() for line in lines))).train)
    path = tmp_path / "rows.jsonl"
    export = b"".join([BOM, lines[0], b"\r\n\r\n", lines[1], b"\n \t\n", BOM, lines[2], b"\r\n", lines[3], b"\r"])
    for content in (export, gzip.compress(export)):
        path.write_bytes(content)
        data = load(path)
        assert documents(data.train) == clean
        assert [int(row["line"]) for row in ledger(data)] == [1, 3, 5, 6]
    path.write_bytes(BOM + b"[\r\n\r\n" + b",\r\n".join(lines) + b"]\r\n")
    data = load(path)
    assert documents(data.train) == clean and ledger(data)[0]["line"] == "3[1]"
    path.write_bytes(BOM + b"\r\n\n{\r\n" + lines[0])
    with pytest.raises(RefusedData, match=f"{path}:3: not JSON"):
        load(path)
    path.write_bytes(BOM + b"\r\n\n")
    with pytest.raises(UserError, match="has no rows"):
        load(path)


def test_prompts_are_to_be_what_the_answers_were_learned_behind(tmp_path: Path) -> None:
    def told(*rows: dict[str, Any], **options: Any) -> bool | None:
        data = load(write(tmp_path / "rows.jsonl", *rows), **options)
        said = [line for line in data.facts.summary if line.startswith("prompts: ")]
        assert len(said) == (data.facts.enable_thinking is not None)
        assert all(line.endswith(f"enable_thinking = {str(data.facts.enable_thinking).lower()}") for line in said)
        return data.facts.enable_thinking

    plain, thinking = say("a", "b", "c", "d"), say("a", "b", "c", "d", reasoning_content="hm")
    assert told(plain, qa("a", "b"), format="messages", on_bad_row="skip") is False
    assert told(thinking) is True and told(plain, plain, thinking) is False and told(plain, thinking) is True
    assert told(plain, empty_think="supervised") is True and told(plain, loss="all") is True
    assert told({"text": "a b"}) is None and told({"input_ids": [5, 6]}) is None
    earlier = say("a", "b", "c", "d")
    earlier["messages"][3]["weight"] = 0
    assert told(earlier) is None  # the template writes no block before it


def test_rows_of_a_json_array_are_told_apart_and_a_broken_one_is_never_skipped(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([qa("a", "b"), qa("c", ""), qa("e", "f")]))
    with pytest.raises(RefusedData, match=re.escape(f"{path}:1[2]: nothing to learn")) as caught:
        load(path)
    assert [row["line"] for row in ledger(caught.value)] == ["1[1]", "1[2]", "1[3]"]
    path.write_text(json.dumps([qa("a", "b")] * 3).replace("}, ", "} ", 1))
    with pytest.raises(RefusedData, match="broken JSON array"):
        load(path, on_bad_row="skip")


def test_nulls_of_tool_calls_are_what_the_key_says_in_json_and_in_parquet(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def learned(path: Path, **options: Any) -> tuple[str, list[str]]:
        data = load(path, **options)
        return "".join(supervised_texts(data.train, tokenizer)), data.facts.warnings

    calls = [{"city": "Bern", "n": None}, {"city": None, "n": 1.5}]
    rows = [say("go", "", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": a}}]) for a in calls]
    unified, table = write(tmp_path / "rows.jsonl", *rows), tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist([row | {"score": float("nan")} for row in rows]), table)
    counted = 'ave nulls in their arguments (2 {}); set data.null_arguments to "keep" or "drop"'
    kept, warnings = learned(unified)
    assert '{"city": "Bern", "n": null}' in kept and '{"city": null, "n": 1.5}' in kept
    assert warnings == ["2 tool calls h" + counted.format("kept")]
    dropped, warnings = learned(table)
    assert '{"city": "Bern"}' in dropped and '{"n": 1.5}' in dropped and "null" not in dropped
    assert warnings == ["2 tool calls h" + counted.format("left out")]
    for path in (unified, table):
        assert learned(path, null_arguments="keep") == (kept, [])
        assert learned(path, null_arguments="drop") == (dropped, [])
    rows = [say("go", "", tool_calls=[{"name": "f", "arguments": {"n": n}}]) for n in (float("nan"), 1.5)]
    parquet.write_table(pa.Table.from_pylist(rows), table)
    assert '{"n": null}' in learned(table, null_arguments="keep")[0] and "null" not in learned(table)[0]


def test_a_run_of_an_earlier_version_is_told_why_its_rows_differ(tmp_path: Path) -> None:
    """Such a run's checkpoints know neither the version of the reader nor data.null_arguments."""
    path = write(tmp_path / "rows.jsonl", {"text": "a b"})
    now = load(path).facts.made_of
    before = {name: value for name, value in now.items() if name != "version of the row reader"}
    assert "null_arguments" not in before
    assert list(differing(before, now).values()) == ["version of the row reader (None, now 4)"]
    chosen = load(path, null_arguments="drop").facts.made_of
    assert list(differing(now, chosen).values()) == ["null_arguments (None, now drop)"]


def test_what_differs_is_named_with_what_tells_it_apart() -> None:
    found = differing(
        {"a": 1, "hash": "0" * 64, "file": "/data/" * 20 + "one.jsonl", "other": "x" * 70, "gone": {"b": [1]}},
        {"a": 2, "hash": "1" * 64, "file": "/data/" * 20 + "two.jsonl", "other": "y" * 70, "same": None},
    )
    path = "/data//data/..." + "//data" * 5 + "/"  # its last 40 characters
    assert found == {
        "a": "a (1, now 2)", "hash": "hash (changed)", "gone.b": "gone.b ([1], now None)",
        "file": f"file ({path}one.jsonl, now {path}two.jsonl)",
        "other": "other (xxxxxxxxxxxx..., now yyyyyyyyyyyy...)",
    }  # fmt: skip


def test_processes_that_cannot_start_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_fork() -> int:
        raise OSError(11, "Resource temporarily unavailable")

    path = write(tmp_path / "rows.jsonl", *(qa(f"question {i} " * 20, f"answer {i}") for i in range(6000)))
    monkeypatch.setattr(os, "fork", no_fork)
    with pytest.raises(UserError, match=r"cannot start 2 processes .*; set fewer data.workers"):
        load(path, workers=2)


def test_the_command_prepares_without_torch_and_a_refusal_leaves_the_ledger_in_the_run_folder(tmp_path: Path) -> None:
    good, bad = write(tmp_path / "good.jsonl", qa("a", "b")), write(tmp_path / "bad.jsonl", qa("a", "b"), "{")
    run = tmp_path / "run"

    def prepare(path: Path) -> tuple[int, str]:
        command = [
            sys.executable,
            "-m",
            "titan_mi100.data.prepare",
            "--model.flavor",
            "debug",
            "--data.path",
            str(path),
        ]
        command += ["--model.tokenizer_path", str(ASSETS / "tokenizer"), "--job.run_folder", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=120)
        return done.returncode, done.stderr

    assert prepare(good) == (0, "") and not run.exists()
    code, said = prepare(bad)
    assert code == 2 and f"{bad}:2: not JSON" in said and said.endswith(f"every row: {run / 'ledger.csv'}\n")
    assert "rejected" in (run / "ledger.csv").read_text()
    # the ledger of a run that has trained stays: these data are refused now, others may be refused later
    (run / "ledger.csv").write_text("of the run")
    (run / "metrics.jsonl").touch()
    assert prepare(bad)[1].endswith(f"every row: {run / 'ledger.refused.csv'}\n")
    assert "rejected" in (run / "ledger.refused.csv").read_text()
    assert prepare(good)[0] == 0
    assert (run / "ledger.csv").read_text() == "of the run"
    program = "import sys; import titan_mi100.data.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPO).returncode == 0


def test_the_tokenizer_is_the_models_own_unless_another_one_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = (shutil.copytree(ASSETS / "tokenizer", tmp_path / name) for name in ("model", "other"))
    (other / "tokenizer_config.json").write_text((model / "tokenizer_config.json").read_text() + "\n")
    (model / "config.json").write_text(json.dumps(to_hf_config(PRESETS["debug"])))
    config = Config(
        model=ModelConfig(tokenizer_path=str(other)),
        data=DataConfig(path=(str(write(tmp_path / "rows.jsonl", qa("a", "b"))),)),
        checkpoint=CheckpointConfig(initial_load_path=str(model)),
    )
    assert prepare_run(config, None).facts.warnings == []  # the same tokenizer at another place, in other bytes
    shutil.copyfile(model / "tokenizer_config.json", other / "tokenizer_config.json")
    with monkeypatch.context() as patch:  # a copy: each rank would load both, which takes seconds
        patch.setattr(prepare_module, "load_tokenizer", None)
        prepare_module._check_own_tokenizer(config.model, config.checkpoint.initial_load_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_text((other / name).read_text().replace("<|im_end|>", "<|IM_END|>"))
    with pytest.raises(UserError) as refused:
        prepare_run(config, None)
    said = f"[model] tokenizer_path = '{other}' is not the model's own tokenizer in {model}; leave it out, or"
    assert str(refused.value) == f"{said} set model.allow_other_tokenizer = true"
    prepare_run(replace(config, model=replace(config.model, allow_other_tokenizer=True)), None)
    (model / "tokenizer.json").unlink()  # no tokenizer of its own
    prepare_run(config, None)


@pytest.mark.full
def test_a_tokenizer_with_far_fewer_tokens_than_the_model_is_warned_of(tmp_path: Path) -> None:
    config = Config(
        model=ModelConfig(flavor="0.6B", tokenizer_path=str(ASSETS / "tokenizer")),
        data=DataConfig(path=(str(write(tmp_path / "rows.jsonl", qa("a", "b"))),)),
    )
    [warning] = prepare_run(config, None).facts.warnings
    assert warning.endswith("has 709 tokens, but the model's vocab_size is 151,936: is it the model's tokenizer?")


def test_workers_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "_ALONE_BYTES", 1)  # else a megabyte would be needed
    monkeypatch.setattr(tokenise, "_CHUNK_BYTES", 1 << 15)
    rows = [qa(f"question {i} " * (i % 40 + 1), f"answer {i}") for i in range(1000)]
    path = write(tmp_path / "rows.jsonl", *rows, "not json", qa("a", ""))
    plans = []
    for workers in (1, 3):
        data = load(path, workers=workers, on_bad_row="skip", cache_folder=tmp_path / f"cache{workers}")
        plans.append((data.facts.plan, data.ledger().read_text()))
        assert not data.cached
    assert plans[0] == plans[1]


def test_a_prepared_folder_is_used_again_and_never_when_it_is_stale(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "rows.jsonl", qa("a", "b"), qa("c", "d")), tmp_path / "cache"
    first = load(path, cache_folder=cache)
    again = load(path, cache_folder=cache, workers=2)
    assert not first.cached and again.cached and again.folder == first.folder
    assert documents(again.train) == documents(first.train)

    times = path.stat()
    write(path, qa("a", "b"), qa("c", "e"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # same size, same time of modification
    changed = load(path, cache_folder=cache)
    assert not changed.cached and changed.facts.plan != first.facts.plan
    for options in ({"seq_len": 128}, {"loss": "all"}, {"overlong": "split"}, {"duplicates": "drop"}):
        assert load(path, cache_folder=cache, **options).folder != changed.folder
    folder = shutil.copytree(ASSETS / "tokenizer", tmp_path / "tokenizer")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    same = load(path, cache_folder=cache, tokenizer=folder)
    assert same.facts.plan == changed.facts.plan
    config["chat_template"] = config["chat_template"].replace("{{-", "{{- '' ~")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load(path, cache_folder=cache, tokenizer=folder).folder != same.folder


def test_a_file_that_changed_since_it_was_hashed_or_as_it_was_is_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    cache.mkdir()
    hashes = {text: hashlib.sha256(text.encode()).hexdigest() for text in ("one", "two")}
    with monkeypatch.context() as patch:  # a change that keeps size and time of modification
        patch.setattr(cache_module, "_SETTLES_NS", -(10**18))  # else nothing so fresh would be remembered
        path.write_text("two")
        assert cache_module.content_hash(path, cache)[0] == hashes["two"]
        times = path.stat()
        time.sleep(0.05)
        path.write_text("one")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert cache_module.content_hash(path, cache)[0] == hashes["one"]
    shutil.rmtree(cache / "hashes")
    found, stamp = cache_module.content_hash(path, cache)
    assert found == hashes["one"]
    monkeypatch.setattr(cache_module, "_stamp", lambda _: stamp)  # a change within the file system's tick
    path.write_text("two")
    assert cache_module.content_hash(path, cache)[0] == hashes["two"]
    monkeypatch.setattr(cache_module, "_SETTLES_NS", -(10**18))
    assert cache_module.content_hash(path, cache)[0] == hashes["two"]
    path.write_text("three")
    assert cache_module.content_hash(path, cache)[0] == hashes["two"]  # else every start would read all files
    record = next((cache / "hashes").iterdir())
    record.write_text(record.read_text()[:20])  # cut short by a kill
    assert cache_module.content_hash(path, cache)[0] == hashlib.sha256(b"three").hexdigest()


@pytest.mark.parametrize("what", ["rows change", "template comes", "template goes"])
def test_a_file_that_changes_while_it_is_read_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    path, cache = write(tmp_path / "rows.jsonl", qa("a", "b")), tmp_path / "cache"
    folder = shutil.copytree(ASSETS / "tokenizer", tmp_path / "tokenizer")
    template = folder / "chat_template.jinja"
    text = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    if what == "template goes":
        template.write_text(text)
    change: dict[str, Callable[[], object]] = {
        "rows change": partial(write, path, qa("a", "c")),
        "template comes": partial(template.write_text, text),
        "template goes": template.unlink,
    }
    pack = build_module.pack_together
    monkeypatch.setattr(build_module, "pack_together", lambda *given: (change[what](), pack(*given))[1])
    name = path.name if what == "rows change" else template.name
    with pytest.raises(UserError, match=rf"{name}: changed while it was read; start again"):
        load(path, cache_folder=cache, tokenizer=folder)
    assert not list(cache.glob(".*")) and not list(cache.glob("*/meta.json"))


def damaged_files(folder: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """What may happen to a prepared folder: a name, and what does it."""
    for path in sorted(folder.iterdir()):
        content, times = path.read_bytes(), path.stat()

        def write(data: bytes, path: Path = path, times: os.stat_result = times) -> None:
            path.write_bytes(data)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

        place = len(content) - 2
        changed = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        yield f"{path.name} has a bit changed", partial(write, changed)
        yield f"{path.name} is cut", partial(write, content[:-4])
        yield f"{path.name} is empty", partial(write, b"")
        yield f"{path.name} is removed", path.unlink
        yield f"{path.name} is a link elsewhere", partial(replace_by_link, path)
    meta = json.loads((folder / "meta.json").read_text())
    del meta["sha256"]
    facts = meta["facts"]
    others: list[dict[str, Any]] = [meta | {name: value} for name, value in ODD_META]
    others += [meta | {"facts": facts | {name: value}} for name, value in ODD_FACTS]
    for other in [*others, {}, {"facts": facts}]:
        text = json.dumps({"sha256": prepared_module._digest(other), **other})
        yield f"meta.json is {text[:600]}", partial((folder / "meta.json").write_text, text)
    for text in ("[]", '{"refused": ', "[" * 100_000, '{"sha256": ' + "[" * 900 + "]" * 900 + "}", "null", "1" * 9999):
        yield f"meta.json is {text[:40]}", partial((folder / "meta.json").write_text, text)


ODD_META = [("key", "0"), ("refused", 0), ("refused", "why"), ("seconds", "1"), ("files", {}), ("files", {"a": 1})]
ODD_META += [("facts", None), ("facts", []), ("more", 1)]
ODD_FACTS: list[tuple[str, Any]] = [("seq_len", "256"), ("seq_len", -1), ("seq_len", 2**70), ("pad_id", True)]
ODD_FACTS += [("files", [1]), ("made_of", []), ("sets", None), ("sets", {"train": {"rows": 1}}), ("warnings", "x")]
ODD_FACTS += [("plan", 1), ("validation", {"documents": 0}), ("enable_thinking", "no")]


def replace_by_link(path: Path) -> None:
    path.replace(path.parents[1] / "elsewhere")
    path.symlink_to(path.parents[1] / "elsewhere")


@pytest.mark.full
def test_a_damaged_prepared_folder_is_made_again_and_the_log_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    said: list[str] = []
    monkeypatch.setattr(cache_module.log, "warning", said.append)
    monkeypatch.setattr(build_module, "load_tokenizer", cache(build_module.load_tokenizer))
    path, cache_folder = write(tmp_path / "rows.jsonl", qa("a", "b")), tmp_path / "cache"
    first = load(path, cache_folder=cache_folder)
    rows, kinds = documents(first.train), len(list(damaged_files(first.folder)))
    for number in range(0, kinds, 1 if full else 3):
        name, damage = list(damaged_files(first.folder))[number]
        damage()
        again = load(path, cache_folder=cache_folder)
        assert not again.cached and again.facts.plan == first.facts.plan and documents(again.train) == rows, name
        assert len(said) == 1 and said.pop().startswith(f"{first.folder}: is damaged: "), name
        assert not list(cache_folder.glob(".*"))
    assert load(path, cache_folder=cache_folder).cached and not said


def test_what_is_in_the_place_of_a_prepared_folder_is_replaced(tmp_path: Path) -> None:
    path, cache_folder = write(tmp_path / "rows.jsonl", qa("a", "b")), tmp_path / "cache"
    first = load(path, cache_folder=cache_folder)
    rows, place = documents(first.train), first.folder
    for make in (partial(os.mkfifo, place), place.touch, *(partial(place.symlink_to, to) for to in (tmp_path, "none"))):
        shutil.rmtree(place)
        make()
        assert documents(load(path, cache_folder=cache_folder).train) == rows, make
        assert place.is_dir() and not place.is_symlink() and not list(cache_folder.glob(".*")), make
    assert path.exists()


def test_a_chat_template_that_is_no_file_is_refused_unread(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", qa("a", "b"))
    os.mkfifo(tmp_path / "pipe")
    for template in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(UserError, match=r"is not a regular file|is a folder"):
            load(path, template=template, cache_folder=tmp_path / "cache")


def test_refused_data_that_were_damaged_are_refused_again(tmp_path: Path) -> None:
    path, cache_folder = write(tmp_path / "rows.jsonl", qa("a", "b"), "{"), tmp_path / "cache"
    messages = []
    for damage in (False, False, True):
        with pytest.raises(RefusedData) as caught:
            load(path, cache_folder=cache_folder)
        messages.append((str(caught.value), caught.value.ledger.read_text()))
        if damage:
            caught.value.ledger.write_text("file,line\n")
    assert messages[0] == messages[1] == messages[2]


def test_a_prepared_folder_is_read_whole_only_when_a_file_was_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_SETTLES_NS", -(10**18))  # else nothing so fresh would be remembered
    path, cache_folder = write(tmp_path / "rows.jsonl", qa("a", "b")), tmp_path / "cache"
    folder = load(path, cache_folder=cache_folder).folder
    hashed: list[str] = []

    def counted(path: Path) -> str:
        hashed.append(path.name)
        return sha256_of(path)

    monkeypatch.setattr(cache_module, "sha256_of", counted)
    assert load(path, cache_folder=cache_folder).cached and not hashed
    time.sleep(0.02)
    os.utime(folder / "tokens.bin")
    assert load(path, cache_folder=cache_folder).cached and hashed == ["tokens.bin"]

    def read_only(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    shutil.rmtree(cache_folder / "hashes")
    monkeypatch.setattr(cache_module, "replace", read_only)  # another user's cache is as good, it is only read again
    for _ in range(2):
        hashed.clear()
        assert load(path, cache_folder=cache_folder).cached and "tokens.bin" in hashed
    (folder / "tokens.bin").write_bytes(b"damage")
    monkeypatch.setattr(Path, "rename", read_only)
    with pytest.raises(UserError, match=r"Read-only file system; set data\.cache_folder to another folder"):
        load(path, cache_folder=cache_folder)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=rf"{tmp_path}/file.*: .*data.cache_folder"):
        load(write(tmp_path / "rows.jsonl", qa("a", "b")), cache_folder=tmp_path / "file" / "cache")


BUILD = """
import sys
from titan_mi100.data.prepare import prepare_data
from titan_mi100.config.settings import DataConfig
data = prepare_data(DataConfig(path=(sys.argv[1],), cache_folder=sys.argv[2], workers=2), sys.argv[3], "", 256)
print(data.facts.plan, data.cached)
"""


def start_build(path: Path, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILD, str(path), str(cache), str(ASSETS / "tokenizer")]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)


def processes_of_session(session: int) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


@pytest.mark.parametrize("damage", [None, b"", b"{}", b'{"sha256": "0", "text": "forged"}'])
def test_a_text_is_made_once_and_again_where_its_note_is_damaged(damage: bytes | None, tmp_path: Path) -> None:
    made: list[int] = []

    def text(depends: int) -> str:
        return cache_module.cached_text(tmp_path / "notes", [depends], lambda: made.append(depends) or f"of {depends}")

    assert [text(1), text(2), text(1)] == ["of 1", "of 2", "of 1"] and made == [1, 2]
    for note in (tmp_path / "notes").iterdir() if damage is not None else ():
        note.write_bytes(damage)
    assert text(2) == "of 2" and made == [1, 2, *([2] if damage is not None else [])]


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")
def test_two_builds_at_once_and_killed_builds_end_with_the_same_plan(full: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *(qa(f"question {i} " * 20, f"answer {i}") for i in range(6000)))
    both = [start_build(path, tmp_path / "both") for _ in range(2)]
    results = [process.communicate(timeout=120)[0].split() for process in both]
    assert results[0][0] == results[1][0] and sorted(cached for _, cached in results) == ["False", "True"]

    cache = tmp_path / "killed"
    for attempt in range(3) if full else (1,):
        process = start_build(path, cache)
        deadline = time.monotonic() + 60
        while not (begun := list(cache.glob(".*/tokens.bin"))) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert begun, "the build was not seen at work"
        time.sleep(0.15 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 60
        while processes_of_session(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not processes_of_session(process.pid), "a worker outlived its parent"
    assert start_build(path, cache).communicate(timeout=120)[0].split()[0] == results[0][0]
    assert not list(cache.glob(".*.incomplete")), "what killed builds left is not removed"
    folders = [entry for entry in cache.iterdir() if re.fullmatch("[0-9a-f]{32}", entry.name)]
    assert len(folders) == 1


def test_documents_and_rows_name_their_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", "bad", *(qa(f"q{i}", f"a{i}") for i in range(5)))
    data = load(path, on_bad_row="skip")
    origins = data.train.documents.origins
    assert origins is not None and origins.lines.tolist() == [[0, line, 0] for line in range(1, 7)]
    assert [origins.where(document) for document in range(5)] == [f"{path}:{line}" for line in range(2, 7)]
    rows = [data.train.where(index) for index in range(len(data.train))]
    assert sorted(where for row in rows for where in row) == [f"{path}:{line}" for line in range(2, 7)]
    for index, row in enumerate(rows):
        assert row == [f"{path}:{2 + document}" for document in data.train.documents_of(index)]
    array = tmp_path / "array.json"
    array.write_text(json.dumps([qa("q", "a"), qa("r", "b")]))
    both = load(array, seq_len=1024).train
    assert [sorted(both.where(index)) for index in (0, -1)] == [[f"{array}:1[1]", f"{array}:1[2]"], []]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("{{ 'a' * 4000000000 }}", "d.jsonl:2: the chat template refuses it"),
        ("{% for a in range(99999) %}" * 2 + "{% endfor %}" * 2, "was killed: memory was full, or the chat template"),
    ],
)
def test_a_template_that_does_harm_with_one_row_only_is_refused(
    harm: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "SECONDS", 1)
    (template := tmp_path / "x.jinja").write_text(
        "{% if 'zebra' in messages[0].content %}" + harm + "{% endif %}{% for message in messages %}<|im_start|>"
        "{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    data = write(tmp_path / "d.jsonl", qa("a horse?", "yes"), qa("a zebra?", "no"))
    with pytest.raises(UserError, match=re.escape(message)):
        load(data, template=template, cache_folder=tmp_path / "cache")
