"""Synthetic rows in memory, in the form of prepared data. Benchmarks and tests open runs with them."""

import hashlib
from pathlib import Path

import numpy as np

from titan_mi100.data.packing import Packing
from titan_mi100.data.prepared import DataFacts, DocumentTable, PackedDataset, Prepared, SetFacts, SourceRows

_LENGTHS = (100, 500)  # shortest and longest random document in tokens; a document may be cut at the end of a row


def random_rows(rows: int, seq_len: int, vocabulary: int, supervised_share: float, seed: int = 7) -> PackedDataset:
    """Full rows of documents of random tokens, each token supervised with the given probability."""
    random, tokens = np.random.default_rng(seed), rows * seq_len
    encoded = 2 * random.integers(0, vocabulary, tokens, dtype=np.uint32) + (random.random(tokens) < supervised_share)
    ends = np.arange(0, tokens + 1, seq_len)  # where rows end; the last document of a row ends there too
    cuts = np.cumsum(random.integers(*_LENGTHS, tokens // _LENGTHS[0]))
    starts = np.union1d(ends, cuts[cuts < tokens])
    packing = Packing(np.searchsorted(starts, ends), np.arange(len(starts) - 1))
    return PackedDataset(DocumentTable(encoded.astype(np.uint32), starts), packing, seq_len, pad_id=0)


def made_up(train: PackedDataset, validation: PackedDataset | None = None) -> Prepared:
    """Wrap rows as the result that `prepare_run` would return for them."""
    digest = hashlib.sha256()
    for rows in (train, validation):
        if rows is not None:
            digest.update(rows.documents.values.tobytes() + rows.packing.documents.tobytes())
    fingerprint = digest.hexdigest()
    named = [(name, rows) for name, rows in (("train", train), ("validation", validation)) if rows is not None]
    sets = [SourceRows(name, rows, _count(rows), fingerprint) for name, rows in named]
    counts = {source.name: source.counts for source in sets}
    facts = DataFacts(train.seq_len, train.pad_id, 0, "none", [fingerprint], fingerprint, [], {}, counts, [], [])
    return Prepared(Path(), sets[:1], sets[1:], facts, cached=True)


def _count(rows: PackedDataset) -> SetFacts:
    supervised = tokens = 0
    for row in map(rows.row, range(len(rows))):
        supervised += int(row.supervised().sum())
        tokens += int((~row.padding()).sum())
    return SetFacts(len(rows.packing.documents), tokens, supervised, supervised_bytes=0, rows=len(rows))
