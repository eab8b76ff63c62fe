"""Weighted mixtures: which source each row is from, which row of it, and what happens when one ends or all change."""

import json
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from conftest import ASSETS
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_mi100.config.layout import Batch
from titan_mi100.config.settings import DataConfig, SourceConfig
from titan_mi100.data.loader import RowStream
from titan_mi100.data.mixture import Mixture, Segment, consumed_at
from titan_mi100.data.mixture_schedule import LONGEST_PERIOD, RowSchedule, shares_of
from titan_mi100.data.prepare import open_sources, prepare_data
from titan_mi100.data.prepared import PADDING_ROW, SetFacts, SourceRows
from titan_mi100.errors import UserError
from titan_mi100.files.schema import validated
from titan_mi100.open_run.rows import last_step
from titan_mi100.run.progress import Progress
from titan_mi100.workshop.made_up import random_rows


def off(order: np.ndarray, shares: list[int]) -> float:
    """How far a source ever is from its share, in rows."""
    n = np.arange(1, len(order) + 1)
    return max(float(np.abs(np.cumsum(order == i) - n * (s / sum(shares))).max()) for i, s in enumerate(shares))


def test_each_source_is_within_one_row_of_its_share_in_every_beginning_of_a_gigatoken() -> None:
    """Six sources by documents of up to 500,000 tokens, a gigatoken in rows of 8,192."""
    random, weights = np.random.default_rng(0), (0.40, 0.44, 0.03, 0.02, 0.10, 0.01)
    lengths = [np.minimum(random.lognormal(mu, 1.6, 20_000), 500_000).mean() for mu in (6, 6.5, 7, 5, 8, 9)]
    assert max(lengths) > 5 * min(lengths)
    wanted = np.array([w * length for w, length in zip(weights, lengths, strict=True)])
    shares = shares_of(wanted.tolist())
    schedule, rows = RowSchedule(shares, seed=3), 10**9 // 8192
    order = np.array([schedule.source(place) for place in range(rows)])
    assert off(order, shares) < 1
    exact = wanted / wanted.sum()
    assert np.abs(np.array(shares) / sum(shares) - exact).max() < 1 / LONGEST_PERIOD
    documents = np.array([(order == i).sum() * 8192 / length for i, length in enumerate(lengths)])
    assert documents / documents.sum() == pytest.approx(weights, abs=2e-4)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 400), min_size=1, max_size=9), st.integers(0, 9))
def test_a_schedule_never_leaves_its_shares_and_counts_itself(numbers: list[int], seed: int) -> None:
    shares = shares_of(numbers)
    schedule, period = RowSchedule(shares, seed), sum(shares)
    order = np.array([schedule.source(place) for place in range(2 * period)])
    assert off(order, shares) < 1
    assert (order[:period] == order[period:]).all()
    for source in range(len(shares)):
        places = np.flatnonzero(order == source).tolist()
        assert [RowSchedule(shares, seed).place_of(source, i) for i in (0, len(places) - 1)] == [places[0], places[-1]]
        assert [schedule.count(source, place) for place in places] == list(range(len(places)))


def test_decimal_weights_are_exact_and_others_rounded_with_at_least_one_row() -> None:
    assert shares_of([0.4, 0.44, 0.03, 0.02, 0.1, 0.01]) == [40, 44, 3, 2, 10, 1]
    assert shares_of([3, 1]) == [3, 1]
    rounded = shares_of([1 / 3, 1e-12, 0.7])
    assert sum(rounded) == LONGEST_PERIOD and rounded[1] == 1


def source(name: str, rows: int, weight: float = 0.0, epochs: float = 1.0, documents: int = 1) -> SourceRows:
    made = random_rows(rows, 8, 50, 0.5, seed=rows)
    return SourceRows(name, made, SetFacts(documents, 8 * rows, 1, 1, rows), f"{name}'s content", weight, epochs)


def read(mixture: Mixture, start: int, stop: int) -> list[tuple[str, int]]:
    found = [mixture.find(number) for number in range(start, stop)]
    return [("", index) if index == PADDING_ROW else (of.name, index) for of, index in found]


def test_every_epoch_of_a_source_reads_each_of_its_rows_once_in_another_order() -> None:
    mixture = Mixture([source("a", 30, 0.75), source("b", 50, 0.25)], 1, "repeat")
    rows = read(mixture, 0, 400)
    of_a = [index for name, index in rows if name == "a"]
    epochs = [of_a[i : i + 30] for i in range(0, 300, 30)]
    assert all(sorted(epoch) == list(range(30)) for epoch in epochs) and len({*map(tuple, epochs)}) == 10
    assert read(Mixture([source("b", 50, 0.25), source("a", 30, 0.75)], 1, "repeat"), 0, 400) == rows
    assert read(Mixture([source("a", 30, 0.75), source("b", 50, 0.25)], 2, "repeat"), 0, 400) != rows
    assert mixture.end == 200  # b gives one row of four, and is the last to be through


@pytest.mark.parametrize(
    ("how", "weights", "counts", "end"),
    [
        ("repeat", (0.5, 0.5), {"a": 100, "b": 100}, 200),
        ("drop", (0.5, 0.5), {"a": 20, "b": 100}, 120),
        ("stop", (0.5, 0.5), {"a": 20, "b": 20, "": 0}, 40),
        ("stop", (0.0, 0.0), {"a": 20, "b": 100, "": 0}, 120),  # without weights all end together
    ],
)
def test_what_happens_when_a_source_is_exhausted(
    how: str, weights: tuple[float, float], counts: dict[str, int], end: int
) -> None:
    mixture = Mixture([source("a", 10, weights[0], 2.0), source("b", 100, weights[1])], 5, how)
    assert abs(mixture.end - end) <= 4
    rows = read(mixture, 0, mixture.end + 8)
    found = Counter(name for name, _ in rows[: mixture.end])
    assert all(abs(found[name] - count) <= 3 for name, count in counts.items())
    if how != "repeat":
        assert rows[mixture.end :] == [("", PADDING_ROW)] * 8
        assert max(Counter(index for name, index in rows if name == "a").values()) == 2
    if how == "drop":
        assert found["a"] == 20
        assert sorted(index for name, index in rows if name == "b") == list(range(100))


def test_shares_hold_after_a_source_has_dropped_out() -> None:
    names = {"a": (10, 0.5), "b": (1000, 0.3), "c": (1000, 0.2)}
    mixture = Mixture([source(n, rows, w) for n, (rows, w) in names.items()], 5, "drop")
    rows = [name for name, _ in read(mixture, 0, 500)]
    last = max(place for place, name in enumerate(rows) if name == "a") + 1
    after = np.array([name == "b" for name in rows[last:]])
    assert np.abs(np.cumsum(after) - 0.6 * np.arange(1, len(after) + 1)).max() < 1


def test_weights_in_documents_are_converted_by_the_mean_length() -> None:
    long, short = source("long", 100, 1.0, documents=10), source("short", 100, 1.0, documents=40)
    order = Counter(name for name, _ in read(Mixture([long, short], 0, "repeat", in_documents=True), 0, 100))
    assert order == {"long": 80, "short": 20}


def test_a_changed_mixture_goes_on_with_the_rows_that_were_not_read() -> None:
    """A segment is stored as JSON; sources keep what they have given, new ones begin, and one that left comes back."""
    first = Mixture([source("a", 100, 0.5), source("b", 100, 0.5)], 1, "repeat")
    before = read(first, 0, 60)
    stored = validated(json.loads(json.dumps([asdict(s) for s in first.segments])), list[Segment])
    second = Mixture([source("a", 100, 0.2), source("c", 100, 0.8)], 1, "repeat", segments=stored, first_row=60)
    between = read(second, 60, 110)
    third = Mixture(
        [source("a", 100, 0.5), source("b", 100, 0.5)], 1, "repeat", segments=second.segments, first_row=110
    )
    after = read(third, 110, 110 + 2 * 60)
    of_a = [index for name, index in before + between + after if name == "a"]
    assert sorted(of_a) == list(range(100))  # 30, 10 and 60
    assert Counter(name for name, _ in between) == {"a": 10, "c": 40}
    assert [(s.first_row, len(s.shares)) for s in third.segments] == [(0, 2), (60, 2), (110, 2)]
    same = Mixture([source("a", 100, 0.5), source("b", 100, 0.5)], 1, "repeat", segments=stored, first_row=60)
    assert same.segments == stored and read(same, 60, 90) == read(first, 60, 90)
    assert second.fingerprint != first.fingerprint == third.fingerprint


def test_a_source_that_left_and_comes_back_is_read_from_where_it_was_left() -> None:
    first = Mixture([source("a", 100, 0.5), source("b", 100, 0.5)], 1, "repeat")
    of_b = [index for name, index in read(first, 0, 60) if name == "b"]
    second = Mixture([source("a", 100)], 1, "repeat", segments=first.segments, first_row=60)
    third = Mixture([source("a", 100, 0.5), source("b", 100, 0.5)], 1, "repeat", segments=second.segments, first_row=80)
    of_b += [index for name, index in read(third, 80, 80 + 140) if name == "b"]
    assert sorted(of_b) == list(range(100))


def test_more_epochs_go_on_where_a_source_had_dropped_out() -> None:
    sources = [source("a", 10, 0.5), source("b", 40, 0.5)]
    one = Mixture(sources, 1, "drop")
    before = read(one, 0, one.end)
    two = Mixture(sources, 1, "drop", epochs=2, segments=one.segments, first_row=one.end)
    rows = Counter(row for row in before + read(two, one.end, two.end) if row[0])
    assert rows == {**{("a", i): 2 for i in range(10)}, **{("b", i): 2 for i in range(40)}}
    assert consumed_at(two.segments[-1], 1, two.end) == {"a a's content": 20, "b b's content": 80}


@pytest.mark.parametrize(
    ("epochs", "factor", "rows"), [(0.29, 1, 29), (0.57, 1, 57), (1.1, 3, 330), (0.001, 1, 1), (1e-05, 1, 1)]
)
def test_decimal_epochs_are_exact(epochs: float, factor: int, rows: int) -> None:
    for weight in (0.0, 0.5):
        sources = [replace(source("a", 100, weight), epochs=epochs), source("b", 7, weight)]
        mixture = Mixture(sources, 1, "drop", epochs=factor)
        assert mixture.segments[0].rows["a a's content"] == rows
        assert sum(name == "a" for name, _ in read(mixture, 0, mixture.end)) == rows


def test_a_run_of_a_version_that_rounded_epochs_goes_on_with_its_rows() -> None:
    sources = [replace(source("a", 100), epochs=0.29), source("b", 72)]
    first = Mixture([replace(sources[0], epochs=0.28), sources[1]], 1, "drop")  # what 0.29 was until then
    again = Mixture(sources, 1, "drop", segments=first.segments, first_row=10)
    assert again.segments == first.segments and again.end == 100 and again.fingerprint == first.fingerprint
    assert read(again, 10, 100) == read(first, 10, 100)
    more = Mixture([replace(sources[0], epochs=0.3), sources[1]], 1, "drop", segments=first.segments, first_row=10)
    assert len(more.segments) == 2 and more.segments[-1].rows["a a's content"] == 30


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_any_split_over_ranks_reads_the_same_rows(ranks: int) -> None:
    mixture = Mixture([source("a", 30, 0.7), source("b", 30, 0.3)], 1, "repeat")
    streams = [RowStream(mixture, Batch(1, 8 // ranks, ranks), rank) for rank in range(ranks)]
    numbers = [n for stream in streams for n in stream.row_numbers(16, range(8 // ranks))]
    assert sorted(numbers) == list(range(16, 24))


def test_a_segment_that_begins_when_all_has_been_read_is_empty_until_there_is_more() -> None:
    sources = [source("a", 10, 0.5), source("b", 10, 0.5)]
    first = Mixture(sources, 1, "drop")
    second = Mixture(sources, 1, "stop", segments=first.segments, first_row=first.end)
    assert second.end == first.end and read(second, 20, 22) == [("", PADDING_ROW)] * 2
    more = [*sources, source("c", 10, 0.5)]
    third = Mixture(more, 1, "drop", segments=second.segments, first_row=second.end)
    assert sorted(read(third, 20, third.end)) == [("c", i) for i in range(10)]


def test_threads_that_read_at_once_find_the_same_rows() -> None:
    """Blocks of a schedule with a long period are worked out as rows are read."""
    sources = [source("a", 100, 1 / 3), source("b", 100, 0.123456789), source("c", 100, 0.7)]
    numbers = range(0, 40_000, 61)
    expected = read(Mixture(sources, 1, "repeat"), 0, 40_000)[::61]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(3):
            mixture = Mixture(sources, 1, "repeat")
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(mixture.find, numbers))
            assert [(of.name, index) for of, index in found] == expected
    finally:
        sys.setswitchinterval(before)


def test_names_are_given_around_those_that_are_chosen() -> None:
    config = DataConfig(source=(SourceConfig(("x/a",)), SourceConfig(("y/b",), "a"), SourceConfig(())))
    assert [s.name for s in config.sources] == ["a-2", "a", "source"]


def test_how_often_sources_are_read_is_said_and_extremes_are_refused() -> None:
    mixture = Mixture([source("a", 1, 0.5), source("b", 1000, 0.5)], 1, "repeat")
    said, warnings = mixture.describe(100)
    assert said[0].startswith("source a: 50.0000% of the rows; 1 row, read 50.00 times")
    assert len(warnings) == 1 and warnings[0].endswith("the model will memorise it")
    with pytest.raises(UserError, match="the limit is 1,000 times: lower its weight"):
        mixture.describe(4000)


@pytest.mark.parametrize(
    ("how", "steps", "last"), [("stop", 30, 5), ("drop", 30, 10), ("repeat", 30, 30), ("stop", 3, 3)]
)
def test_a_run_ends_where_its_data_do(how: str, steps: int, last: int, caplog: pytest.LogCaptureFixture) -> None:
    """Steps of padding would move the weights by what AdamW remembers."""
    mixture = Mixture([source("a", 10, 0.5), source("b", 30, 0.5)], 1, how)
    assert last_step(steps, -1, Progress(), mixture, Batch(4, 1, 1)) == last
    assert (f"the data end with step {last}" in caplog.text) == (last < steps)


def test_paths_with_weights_or_repeats_are_short_for_sources(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "q", "answer": "a"}\n' * 9)
    paths = tuple(str(tmp_path / f"{name}.jsonl") for name in "ab")
    config = DataConfig(path=paths, repeats=(1.0, 2.5), validation_fraction=0.0)
    assert [(s.name, s.weight, s.epochs) for s in config.sources] == [("a", 0, 1.0), ("b", 0, 2.5)]
    assert [s.weight for s in DataConfig(path=paths, weights=(3.0, 1.0)).sources] == [3.0, 1.0]
    tables = (SourceConfig(paths[:1], "x", 0.5), SourceConfig(paths[1:], "", 0.5, 2.0, "columns"))
    for settings_ in (config, DataConfig(source=tables)):
        tokenizer = str(ASSETS / "tokenizer")
        files = prepare_data(settings_, tokenizer, "", 64)
        data = open_sources(settings_, files, files.facts.tokenizer, 64)
        assert [(s.name, s.counts.documents) for s in data.sources] == [(s.name, 9) for s in settings_.sources]
        assert {data.sources[1].rows.where(0)[0].split(":")[0]} == {paths[1]}
