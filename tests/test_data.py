"""From JSONL to packed rows: nothing lost, nothing invented, the right tokens supervised, the order pure."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ASSETS, SHARED_DATA, random_documents
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_mi100.chat_template import ChatTemplate
from titan_mi100.config import DataConfig
from titan_mi100.data.loader import RowStream, build_loader, row_at, rows_per_epoch, validation_batches
from titan_mi100.data.packing import pack_rows
from titan_mi100.data.sft import PackedDataset, SFTData, load_sft
from titan_mi100.errors import UserError
from titan_mi100.layout import Batch
from titan_mi100.loss import IGNORE
from titan_mi100.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(ASSETS / "tokenizer")


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.from_folder(ASSETS / "tokenizer")


def load(path: Path, seq_len: int = 256, **options: object) -> SFTData:
    folder = ASSETS / "tokenizer"
    config = DataConfig(path=str(path), **options)  # type: ignore[arg-type]
    return load_sft(config, Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder), seq_len)


def supervised_texts(dataset: PackedDataset, tokenizer: Tokenizer) -> list[str]:
    """The decoded labels of each document of each row."""
    texts = []
    for index in range(len(dataset)):
        row = dataset.row(index)
        for number in range(row.document_ids.max() + 1):
            labels = row.labels[row.document_ids == number]
            texts.append(tokenizer.decode(labels[labels != IGNORE].tolist()))
    return texts


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 60))
def test_packing_keeps_every_document_once_and_overfills_no_row(lengths: list[int], capacity: int) -> None:
    rows = pack_rows(lengths, capacity)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= capacity for row in rows)
    lower_bound = -(-sum(lengths) // capacity)
    assert len(rows) <= 11 / 9 * lower_bound * 2 + 1  # the optimum is at most twice the bound
    assert pack_rows(lengths, capacity) == rows


def test_packing_takes_the_fullest_row_that_fits() -> None:
    assert pack_rows([6, 5, 4, 3], 10) == [[0, 2], [1, 3]]
    assert pack_rows([7, 6, 3, 3, 1], 10) == [[0, 2], [1, 3, 4]]
    with pytest.raises(ValueError, match="document 1 has 11 tokens"):
        pack_rows([1, 11], 10)


def test_rows_hold_the_documents_with_restarting_positions_and_shifted_labels() -> None:
    documents = random_documents(100, [5, 3, 4], supervised_share=0.5)
    dataset = PackedDataset(documents, seq_len=10, pad_id=99)
    row = dataset.row(0)
    first, second = documents[0], documents[2]
    assert row.input_ids.tolist() == [*first[0], *second[0], 99]
    assert row.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0]
    assert row.document_ids.tolist() == [0] * 5 + [1] * 4 + [-1]
    expected = []
    for ids, supervised in (first, second):
        expected += [int(ids[i]) if supervised[i] else IGNORE for i in range(1, len(ids))] + [IGNORE]
    assert row.labels.tolist() == [*expected, IGNORE]
    padding = dataset.row(-1)
    assert (padding.labels == IGNORE).all() and (padding.document_ids == -1).all()


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the real data is not beside this checkout")
def test_supervised_tokens_of_gsm8k_are_exactly_the_answers_and_the_end_token() -> None:
    folder = SHARED_DATA / "qwen3_tokenizer"
    tokenizer, template = Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)
    path = SHARED_DATA / "gsm8k" / "train.jsonl"
    data = load_sft(DataConfig(path=str(path)), tokenizer, template, 1024)
    answers = [json.loads(line)["answer"] + "<|im_end|>" for line in path.open(encoding="utf-8")]
    assert sorted(supervised_texts(data.train, tokenizer)) == sorted(answers)


def test_supervised_tokens_of_both_formats_are_exactly_the_answers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [json.loads(line) for line in (ASSETS / "arithmetic.jsonl").open(encoding="utf-8")]
    answers = sorted(row["answer"] + "<|im_end|>" for row in rows)
    assert sorted(supervised_texts(load(ASSETS / "arithmetic.jsonl").train, tokenizer)) == answers
    path = tmp_path / "messages.jsonl"
    with path.open("w") as file:
        for row in rows:
            messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            file.write(json.dumps({"messages": messages}) + "\n\n")
    assert sorted(supervised_texts(load(path).train, tokenizer)) == answers
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_text("".join(json.dumps({"f": r["question"], "g": r["answer"], "h": 1}) + "\n" for r in rows))
    named = load(renamed, prompt_column="f", response_column="g")
    assert sorted(supervised_texts(named.train, tokenizer)) == answers


def test_each_assistant_turn_is_supervised_with_its_end_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "chat.jsonl"
    roles = ("system", "user", "assistant", "user", "assistant")
    contents = ("be kind", "one", "ONE", "ONE", "\u0065\u0301 two")  # the last is not in NFC
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    path.write_text(json.dumps({"messages": messages}) + "\n")
    assert supervised_texts(load(path).train, tokenizer) == ["ONE<|im_end|>\u00e9 two<|im_end|>"]


BAD_ROWS = {
    '{"question": "a", "answer": "b"': "not JSON",
    '{"question": "a", "answer": NaN}': "not JSON: NaN",
    '["question", "answer"]': "must be a JSON object, is a list",
    '{"question": "a"}': "has no column 'answer'",
    '{"question": "a", "answer": 3}': "answer must be a text, is a number",
    '{"question": null, "answer": "b"}': "question must be a text, is null",
    '{"question": "a", "answer": "  "}': "answer is empty",
    '{"question": "a", "question": "a", "answer": "b"}': "key 'question' stands twice",
    '{"question": "\\ud800", "answer": "b"}': "half of a surrogate pair",
    "[" * 100_000: "nested too deeply",
}


def test_every_bad_row_is_named_with_file_line_and_reason(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    good = '{"question": "a", "answer": "b"}'
    path.write_text("\n".join(line for bad in BAD_ROWS for line in (good, bad)) + "\n")
    with pytest.raises(UserError) as caught:
        load(path)
    found = str(caught.value).splitlines()
    assert len(found) == len(BAD_ROWS)
    for number, (line, reason) in enumerate(zip(found, BAD_ROWS.values(), strict=True)):
        assert line.startswith(f"{path}:{2 * number + 2}: ") and reason in line


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (None, "has no list `messages`"),
        ([], "has no list `messages`"),
        (["hello"], "message 1 must be an object, is a text"),
        ([{"role": "user"}], "message 1: content must be a text, is null"),
        ([{"role": "robot", "content": "a"}], "message 1 has role 'robot'"),
        ([{"role": "user", "content": "a"}], "has no assistant message with text"),
        ([{"role": "assistant", "content": "a", "tool_calls": []}], "message 1 has tool_calls"),
    ],
)
def test_bad_messages_are_named(messages: object, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(UserError) as caught:
        load(path, format="messages")
    assert str(caught.value).startswith(f"{path}:1: ") and reason in str(caught.value)


def test_a_thousand_bad_rows_are_counted_not_listed(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "a"}\n' * 1000)
    with pytest.raises(UserError) as caught:
        load(path, prompt_column="question", response_column="answer")
    assert len(str(caught.value).splitlines()) == 21 and "and 980 more bad rows" in str(caught.value)


def test_unknown_columns_and_unreadable_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"frage": "a", "antwort": "b"}\n')
    with pytest.raises(UserError, match="antwort, frage; expected `messages`, or name two columns"):
        load(path)
    path.write_bytes(b'{"question": "a", "answer": "\xff"}\n')
    with pytest.raises(UserError, match=r"rows.jsonl:1: not UTF-8 \(byte 30\)"):
        load(path, prompt_column="question", response_column="answer")
    path.write_text("\n")
    with pytest.raises(UserError, match="no line is a JSON object"):
        load(path)


def test_overlong_conversations_are_dropped_and_said_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"question": "a", "answer": "b"}, {"question": "a", "answer": "bcd " * 200}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = load(path, seq_len=64)
    assert "dropped 1 conversations of more than seq_len = 64 tokens" in data.summary[0]
    assert f"{path}:2" in data.summary[0]
    with pytest.raises(UserError, match=rf"{path}:2: has \d+ tokens"):
        load(path, seq_len=64, overlong="error")
    with pytest.raises(UserError, match="nothing is left to train on; dropped 2"):
        load(path, seq_len=4)


def test_duplicates_never_straddle_the_validation_split(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "twice.jsonl"
    lines = (ASSETS / "arithmetic.jsonl").read_text(encoding="utf-8")
    path.write_text(lines + lines)
    data = load(path, validation_fraction=0.3)
    assert data.validation is not None
    train, held_out = (supervised_texts(part, tokenizer) for part in (data.train, data.validation))
    assert len(train) + len(held_out) == 1200
    assert 0.2 < len(held_out) / 1200 < 0.4
    assert all(held_out.count(text) % 2 == 0 for text in held_out)


def stream_rows(dataset: PackedDataset, batch: Batch, steps: int, seed: int, start: int = 0) -> list[list[int]]:
    """First tokens of the rows of each step, over all ranks, sorted within the step."""
    streams = []
    for rank in range(batch.dp_degree):
        stream = RowStream(dataset, batch, rank, seed)
        stream.load_state_dict({"rows_consumed": start})
        streams.append(iter(build_loader(stream)))
    found = []
    for _ in range(steps):
        step = [next(s)["input_ids"][:, 0].tolist() for _ in range(batch.gradient_accumulation_steps) for s in streams]
        found.append(sorted(token for microbatch in step for token in microbatch))
    return found


def test_every_split_of_a_global_batch_reads_the_same_rows_in_the_same_order() -> None:
    dataset = PackedDataset([(np.array([i, 0], dtype=np.int32), np.array([1, 1], bool)) for i in range(21)], 2, 99)
    expected = stream_rows(dataset, Batch(8, 1, 1), steps=7, seed=3)
    for local, accumulation, ranks in ((4, 2, 1), (1, 8, 1), (4, 1, 2), (1, 2, 4), (2, 1, 4)):
        assert stream_rows(dataset, Batch(local, accumulation, ranks), steps=7, seed=3) == expected
    assert stream_rows(dataset, Batch(2, 2, 2), steps=2, seed=3, start=5 * 8) == expected[5:]
    for epoch in range(2):  # 21 rows and 3 of padding
        rows = sorted(token for step in expected[3 * epoch : 3 * epoch + 3] for token in step)
        assert rows == [*range(21), 99, 99, 99]
    assert expected[:3] != expected[3:6]
    assert stream_rows(dataset, Batch(8, 1, 1), steps=7, seed=4) != expected


def test_the_loaders_state_is_the_row_count_and_restores_it() -> None:
    dataset = PackedDataset(random_documents(50, [8] * 30), 8, 0)
    batch = Batch(2, 2, 2)
    stream = RowStream(dataset, batch, 1, seed=5)
    loader = build_loader(stream)
    iterator = iter(loader)
    for _ in range(6):
        next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["dataset_state"] == {"rows_consumed": 24}
    expected = [next(iterator) for _ in range(5)]
    again = build_loader(RowStream(dataset, batch, 1, seed=5))
    again.load_state_dict(state)
    for microbatch, old in zip(iter(again), expected, strict=False):
        assert all(torch.equal(microbatch[name], old[name]) for name in old)


def test_row_at_is_a_pure_function_of_seed_and_number() -> None:
    assert rows_per_epoch(10, 4) == 12
    order = [row_at(number, 10, 4, seed=1) for number in range(12)]
    assert sorted(order) == [-1, -1, *range(10)] and order[10:] == [-1, -1]
    assert [row_at(number, 10, 4, seed=1) for number in reversed(range(12))] == order[::-1]


def test_validation_gives_every_rank_as_many_microbatches_and_every_row_once() -> None:
    documents = [(np.array([i, 0], dtype=np.int32), np.array([True, True])) for i in range(7)]
    dataset = PackedDataset(documents, seq_len=2, pad_id=99)
    ranks = [list(validation_batches(dataset, Batch(2, 1, 3), rank)) for rank in range(3)]
    assert [len(batches) for batches in ranks] == [2, 2, 2]
    tokens = [t for batches in ranks for batch in batches for t in batch["input_ids"][:, 0].tolist()]
    assert sorted(tokens) == [*range(7), *[99] * 5]
