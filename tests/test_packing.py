"""The plan: nothing lost, no row overfilled, hardly a token of padding."""

import json

import numpy as np
import pytest
from conftest import SHARED_DATA, examples
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_mi100.data.packing import Packing, pack_rows


def rows_of(packing: Packing) -> list[list[int]]:
    return [packing.documents[a:b].tolist() for a, b in zip(packing.starts, packing.starts[1:], strict=False)]


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 60))
def test_every_document_stands_once_and_no_row_is_overfilled(lengths: list[int], capacity: int) -> None:
    rows = rows_of(pack_rows(np.array(lengths), capacity))
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= capacity for row in rows)
    assert rows_of(pack_rows(np.array(lengths), capacity)) == rows


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=9), st.integers(12, 20))
def test_each_row_is_filled_as_well_as_the_documents_that_were_left_allow(lengths: list[int], capacity: int) -> None:
    """Against trying every subset."""
    left = set(range(len(lengths)))
    for row in rows_of(pack_rows(np.array(lengths), capacity)):
        longest = max(lengths[i] for i in left)
        assert lengths[row[0]] == longest
        others = left - {row[0]}
        sums = {0}
        for i in others:
            sums |= {s + lengths[i] for s in sums if s + lengths[i] <= capacity - longest}
        assert sum(lengths[i] for i in row) == longest + max(sums)
        left -= set(row)
    assert not left


def test_many_lengths_and_many_of_each(full: bool) -> None:
    random = np.random.default_rng(0)
    lengths = np.minimum(random.lognormal(6.0, 1.0, 100_000 if full else 20_000).astype(int) + 1, 8192)
    packing = pack_rows(lengths, 8192)
    assert np.array_equal(np.sort(packing.documents), np.arange(len(lengths)))
    filled = np.add.reduceat(lengths[packing.documents], packing.starts[:-1])
    assert filled.max() <= 8192 and filled.mean() / 8192 > 0.999


def test_documents_that_fit_in_no_row_are_refused() -> None:
    assert rows_of(pack_rows(np.array([6, 5, 4, 3]), 10)) == [[0, 2], [1, 3]]
    assert rows_of(pack_rows(np.array([], dtype=int), 10)) == []
    for lengths in ([1, 11], [1, 0]):
        with pytest.raises(ValueError, match=f"document 1 has {lengths[1]} tokens; a row takes 1 to 10"):
            pack_rows(np.array(lengths), 10)


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the real data is not beside this checkout")
def test_gsm8k_fills_its_rows() -> None:
    """Texts' lengths in characters / 3 stand for tokens here; test_prepare.py packs the real tokens."""
    lines = (SHARED_DATA / "gsm8k" / "train.jsonl").open(encoding="utf-8")
    lengths = np.array([sum(map(len, json.loads(line).values())) // 3 for line in lines])
    packing = pack_rows(lengths, 1024)
    assert lengths.sum() / ((len(packing.starts) - 1) * 1024) >= 0.995
