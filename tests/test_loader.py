"""Rows as the ranks get them: whole documents, shifted labels, and an order that is a pure function."""

import json

import numpy as np
import torch
from conftest import packed, random_documents

from titan_mi100.data.dataset import PackedDataset
from titan_mi100.data.loader import RowStream, renumber, row_at, rows_per_epoch, validation_batches
from titan_mi100.layout import IGNORE, Batch


def test_rows_hold_the_documents_with_restarting_positions_and_shifted_labels() -> None:
    documents = random_documents(100, [5, 3, 4], supervised_share=0.5)
    dataset = packed(documents, seq_len=10, pad_id=99)
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


def stream_rows(dataset: PackedDataset, batch: Batch, steps: int, seed: int, start: int = 0) -> list[list[int]]:
    """First tokens of the rows of each step, over all ranks, sorted within the step."""
    streams = []
    for rank in range(batch.dp_degree):
        stream = RowStream(dataset, batch, rank, seed)
        stream.load_state_dict({"rows_consumed": start})
        streams.append(iter(stream))
    found = []
    for _ in range(steps):
        step = [next(s)["input_ids"][:, 0].tolist() for _ in range(batch.gradient_accumulation_steps) for s in streams]
        found.append(sorted(token for microbatch in step for token in microbatch))
    return found


def test_every_split_of_a_global_batch_reads_the_same_rows_in_the_same_order() -> None:
    dataset = packed([(np.array([i, 0], dtype=np.int32), np.array([1, 1], bool)) for i in range(21)], 2, 99)
    expected = stream_rows(dataset, Batch(8, 1, 1), steps=7, seed=3)
    for local, accumulation, ranks in ((4, 2, 1), (1, 8, 1), (4, 1, 2), (1, 2, 4), (2, 1, 4)):
        assert stream_rows(dataset, Batch(local, accumulation, ranks), steps=7, seed=3) == expected
    assert stream_rows(dataset, Batch(2, 2, 2), steps=2, seed=3, start=5 * 8) == expected[5:]
    for epoch in range(2):  # 21 rows and 3 of padding
        rows = sorted(token for step in expected[3 * epoch : 3 * epoch + 3] for token in step)
        assert rows == [*range(21), 99, 99, 99]
    assert expected[:3] != expected[3:6]
    assert stream_rows(dataset, Batch(8, 1, 1), steps=7, seed=4) != expected


def test_the_streams_state_is_the_row_count_and_restores_it() -> None:
    dataset = packed(random_documents(50, [8] * 30), 8, 0)
    batch = Batch(2, 2, 2)
    stream = RowStream(dataset, batch, 1, seed=5)
    iterator = iter(stream)
    for _ in range(6):
        next(iterator)
    state = json.loads(json.dumps(stream.state_dict()))
    assert state == {"rows_consumed": 24}
    expected = [next(iterator) for _ in range(5)]
    again = RowStream(dataset, batch, 1, seed=5)
    again.load_state_dict(state)
    for microbatch, old in zip(iter(again), expected, strict=False):
        assert all(torch.equal(microbatch[name], old[name]) for name in old)


def test_a_stream_names_the_rows_of_its_last_step() -> None:
    dataset = packed([(np.array([i, 0], dtype=np.int32), np.array([1, 1], bool)) for i in range(21)], 2, 99)
    batch = Batch(2, 3, 2)
    stream = RowStream(dataset, batch, 1, seed=5)
    iterator = iter(stream)
    for _ in range(4):  # over the end of an epoch, where rows are padding
        step = [next(iterator) for _ in range(3)]
        for chosen in ([0, 1, 2], [1], []):
            first_tokens = [int(ids[0]) for m in chosen for ids in step[m]["input_ids"]]
            assert first_tokens == [
                99 if row < 0 else int(dataset.row(row).input_ids[0]) for row in stream.rows_of_last_step(chosen)
            ]


def test_another_global_batch_goes_on_at_the_same_place_of_the_same_epoch() -> None:
    dataset = packed([(np.array([i, 0], dtype=np.int32), np.array([1, 1], bool)) for i in range(21)], 2, 99)
    for steps in range(6):
        consumed = renumber(8 * steps, before=(21, 8), now=(21, 5))
        before = stream_rows(dataset, Batch(8, 1, 1), steps, seed=3)
        after = stream_rows(dataset, Batch(5, 1, 1), 10, seed=3, start=consumed)
        rows = [token for step in [*before, *after] for token in step if token != 99]
        assert sorted(rows[:21]) == sorted(rows[21:42]) == list(range(21))


def test_row_at_is_a_pure_function_of_seed_and_number() -> None:
    assert rows_per_epoch(10, 4) == 12
    order = [row_at(number, 10, 4, seed=1) for number in range(12)]
    assert sorted(order) == [-1, -1, *range(10)] and order[10:] == [-1, -1]
    assert [row_at(number, 10, 4, seed=1) for number in reversed(range(12))] == order[::-1]


def test_validation_gives_every_rank_as_many_microbatches_and_every_row_once() -> None:
    documents = [(np.array([i, 0], dtype=np.int32), np.array([True, True])) for i in range(7)]
    dataset = packed(documents, seq_len=2, pad_id=99)
    ranks = [list(validation_batches(dataset, Batch(2, 1, 3), rank)) for rank in range(3)]
    assert [len(batches) for batches in ranks] == [2, 2, 2]
    tokens = [t for batches in ranks for batch in batches for t in batch["input_ids"][:, 0].tolist()]
    assert sorted(tokens) == [*range(7), *[99] * 5]
