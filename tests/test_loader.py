"""Rows as the ranks get them: whole documents, shifted labels, and an order that is a pure function."""

import errno
import sys
from typing import Any

import numpy as np
import pytest
import torch
from conftest import random_documents
from packed_rows import packed

from titan_mi100.config.layout import IGNORE, Batch
from titan_mi100.data.loader import RowStream, ShuffledEpochs, validation_batches
from titan_mi100.data.prepared import PackedDataset
from titan_mi100.data.rows import Row
from titan_mi100.errors import UserError
from titan_mi100.workshop.made_up import random_rows


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


def one_token_rows(rows: int) -> PackedDataset:
    """Row i is the token i and another; a row of padding is 99."""
    return packed([(np.array([i, 0], dtype=np.int32), np.array([1, 1], bool)) for i in range(rows)], 2, 99)


def stream_of(dataset: PackedDataset, batch: Batch, rank: int, seed: int) -> RowStream:
    return RowStream(ShuffledEpochs(dataset, seed, batch.global_batch_size), batch, rank, with_padding=True)


def stream_rows(dataset: PackedDataset, batch: Batch, steps: int, seed: int, start: int = 0) -> list[list[int]]:
    """First tokens of the rows of each step, over all ranks, sorted within the step."""
    streams = [stream_of(dataset, batch, rank, seed) for rank in range(batch.dp_degree)]
    found = []
    for first_row in range(start, start + steps * batch.global_batch_size, batch.global_batch_size):
        step = [microbatch["input_ids"][:, 0].tolist() for stream in streams for microbatch in stream.step(first_row)]
        found.append(sorted(token for microbatch in step for token in microbatch))
    return found


def test_every_split_of_a_global_batch_reads_the_same_rows_in_the_same_order() -> None:
    dataset = one_token_rows(21)
    expected = stream_rows(dataset, Batch(8, 1, 1), steps=7, seed=3)
    for local, accumulation, ranks in ((4, 2, 1), (1, 8, 1), (4, 1, 2), (1, 2, 4), (2, 1, 4)):
        assert stream_rows(dataset, Batch(local, accumulation, ranks), steps=7, seed=3) == expected
    assert stream_rows(dataset, Batch(2, 2, 2), steps=2, seed=3, start=5 * 8) == expected[5:]
    for epoch in range(2):  # 21 rows and 3 of padding
        rows = sorted(token for step in expected[3 * epoch : 3 * epoch + 3] for token in step)
        assert rows == [*range(21), 99, 99, 99]
    assert expected[:3] != expected[3:6]
    assert stream_rows(dataset, Batch(8, 1, 1), steps=7, seed=4) != expected


def test_a_step_is_a_pure_function_of_its_first_row_and_names_its_rows() -> None:
    dataset, batch = one_token_rows(21), Batch(2, 3, 2)
    stream = stream_of(dataset, batch, 1, seed=5)
    other = stream_of(dataset, batch, 1, seed=5)
    steps = [other.step(12 * number) for number in range(4)]  # over the end of an epoch, where rows are padding
    for number in (2, 0, 3, 1, 1):  # ahead, back, again
        step = stream.step(12 * number)
        for microbatch, expected in zip(step, steps[number], strict=True):
            assert all(torch.equal(microbatch[name], expected[name]) for name in expected)
        for chosen in ([0, 1, 2], [1], []):
            first_tokens = [int(ids[0]) for m in chosen for ids in step[m]["input_ids"]]
            numbers = stream.row_numbers(12 * number, chosen)
            assert first_tokens == [int(stream.source.row(number).input_ids[0]) for number in numbers]


def test_another_global_batch_resumes_at_the_same_place_of_the_same_epoch() -> None:
    dataset = one_token_rows(21)
    for steps in range(6):
        consumed = ShuffledEpochs(dataset, 3, 5).resume_at(8 * steps, rows=21, global_batch_size=8)
        before = stream_rows(dataset, Batch(8, 1, 1), steps, seed=3)
        after = stream_rows(dataset, Batch(5, 1, 1), 10, seed=3, start=consumed)
        rows = [token for step in [*before, *after] for token in step if token != 99]
        assert sorted(rows[:21]) == sorted(rows[21:42]) == list(range(21))


def test_a_smaller_set_resumes_at_the_end_of_the_epoch_that_was_read_beyond_it() -> None:
    source = ShuffledEpochs(one_token_rows(9), 3, 4)  # epochs of 12 row numbers
    places = [source.resume_at(consumed, rows=21, global_batch_size=8) for consumed in (0, 8, 16, 24, 40)]
    assert places == [0, 8, 9, 12, 21]


def test_the_order_is_a_pure_function_of_seed_and_number_and_stays_as_it_was() -> None:
    source = ShuffledEpochs(one_token_rows(10), 1, 4)
    assert source.rows_per_epoch == 12
    # A run that was begun by an older version resumes in this order.
    order = [8, 4, 7, 0, 1, 2, 5, 9, 6, 3, -1, -1, 7, 2, 4, 6, 1, 0, 3, 5, 9, 8, -1, -1]
    assert [source.index(number) for number in range(24)] == order
    assert [source.index(number) for number in reversed(range(24))] == order[::-1]
    assert (whole := ShuffledEpochs(one_token_rows(12), 1, 4)).rows_per_epoch == whole.end == 12


class Counting:
    """The least that is a row source: a stream without epochs and shuffling."""

    fingerprint, rows_per_epoch = "counting", None

    def row(self, number: int) -> Row:
        return one_token_rows(1).row(0)._replace(input_ids=np.array([number, 0]))

    def is_padding(self, number: int) -> bool:
        return False

    def where(self, number: int) -> list[str]:
        return [f"numbers:{number}"]


def test_a_stream_without_epochs_is_a_row_source() -> None:
    source: Any = Counting()
    streams = [RowStream(source, Batch(1, 2, 2), rank) for rank in range(2)]
    tokens = [[m["input_ids"][:, 0].tolist() for m in stream.step(400)] for stream in streams]
    assert tokens == [[[400], [402]], [[401], [403]]]


def test_microbatches_that_are_padding_on_all_ranks_are_left_out_by_all() -> None:
    dataset, batch = one_token_rows(11), Batch(1, 4, 2)  # 2 steps an epoch, the last with 3 rows and 5 of padding
    source = ShuffledEpochs(dataset, 1, batch.global_batch_size)
    streams = [RowStream(source, batch, rank) for rank in range(2)]
    assert [[stream.numbers(first) for stream in streams] for first in (0, 8, 16, 24)] == [
        *([[0, 1, 2, 3]] * 2, [[0, 1]] * 2, [[0, 1, 2, 3]] * 2, [[0, 1]] * 2)
    ]
    for stream in streams:
        every = RowStream(source, batch, stream.dp_rank, with_padding=True)
        next_step, all_steps = stream.ahead(8, pinned=False), every.ahead(8, pinned=False)
        for first, count in ((8, 2), (16, 4), (24, 2), (32, 4)):
            ids = [m["input_ids"].tolist() for m in next_step()]
            assert ids == [m["input_ids"].tolist() for m in stream.step(first)] and len(ids) == count
            whole = [m["input_ids"].tolist() for m in all_steps()]
            assert whole[:count] == ids and len(whole) == 4
    # A batch size that changed in an epoch: its padding is at the beginning of a step, in front of the next epoch.
    assert RowStream(source, batch, 0).numbers(11) == [2, 3]


def test_what_is_read_ahead_follows_the_epochs() -> None:
    """Nine rows in steps of four: the last step of an epoch has one microbatch."""
    rows = random_rows(9, 16, 100, supervised_share=0.5)
    next_step = RowStream(ShuffledEpochs(rows, 1, 4), Batch(1, 4, 1), 0).ahead(0, pinned=False)
    assert [len(next_step()) for _ in range(6)] == [4, 4, 1, 4, 4, 1]


def test_validation_gives_every_rank_as_many_microbatches_and_every_row_once() -> None:
    documents = [(np.array([i, 0], dtype=np.int32), np.array([True, True])) for i in range(7)]
    dataset = packed(documents, seq_len=2, pad_id=99)
    ranks = [list(validation_batches(dataset, Batch(2, 1, 3), rank)) for rank in range(3)]
    assert [len(batches) for batches in ranks] == [2, 2, 2]
    tokens = [t for batches in ranks for batch in batches for t in batch["input_ids"][:, 0].tolist()]
    assert sorted(tokens) == [*range(7), *[99] * 5]


def test_what_fails_in_the_reading_threads_is_raised_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    import multiprocessing.synchronize as synchronize

    class Broken(Counting):
        def row(self, number: int) -> object:
            raise LookupError(f"row {number} is gone")

    stream = RowStream(Broken(), Batch(1, 1, 1), 0)
    with pytest.raises(LookupError, match="row 5 is gone"):
        stream.ahead(5, pinned=False)()

    def no_space(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(synchronize.SemLock, "__init__", no_space)  # as with a full /dev/shm
    with pytest.raises(UserError, match=r"^/dev/shm: No space left on device; .* --shm-size"):
        stream.ahead(5, pinned=False)()
    monkeypatch.setitem(sys.modules, "torchdata", None)
    with pytest.raises(ImportError, match="torchdata"):
        stream.ahead(5, pinned=False)()


def test_random_rows_are_full_and_supervised_as_asked() -> None:
    data = random_rows(24, 1024, 768, supervised_share=0.3)
    rows = [data.row(number) for number in range(len(data))]
    assert len(rows) == 24 and all((row.document_ids >= 0).all() for row in rows)
    lengths = np.concatenate([np.bincount(row.document_ids) for row in rows])
    assert 150 < lengths.mean() < 450 and lengths.max() < 500
    share = np.mean([row.labels != IGNORE for row in rows])
    assert share == pytest.approx(0.3, abs=0.02)
    assert len({row.input_ids.tobytes() for row in rows}) == 24 and max(row.input_ids.max() for row in rows) == 767
