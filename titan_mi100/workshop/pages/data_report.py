"""What the data page shows, as JSON values: of each set its lengths, how its rows are filled, and some documents."""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from titan_mi100.config.settings import Config
from titan_mi100.data.encode import OVERLONG
from titan_mi100.data.files import RecordReader
from titan_mi100.data.formats import parse_record
from titan_mi100.data.mixture import Mixture
from titan_mi100.data.prepared import PackedDataset, Prepared, SourceRows
from titan_mi100.data.samples import Group, read_group
from titan_mi100.data.strict_json import BadRecord
from titan_mi100.text.load import load_tokenizer
from titan_mi100.tools.prepared.report import about, asked_rows, choose_source, open_data, read_ledger, shown_row
from titan_mi100.tools.score import summarise
from titan_mi100.workshop.pages.reasons import explain

_RIGHT, _MOST_ANSWERS = 0.5, 5  # a score above it is right; the best and the worst answers that are shown
_PICTURED = 24  # rows in the packing picture
# on a page: sources of a mixture, documents of a set, and tokens of all rows together
_MOST_SETS, _MOST_DOCUMENTS, MOST_TOKENS = 8, 30, 16_384


def page_report(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """Make the report. Args: as of tools.prepared.report.make_report, which raises the same.

    Returns:
        See `open_data`; `set`: its name; `sets`: of the chosen source, or of the first ones of a mixture, see
        `_of_set`, each with its `share` of a run's rows (0: it is no mixture); `sets_left_out`: how many sources;
        `scores`: of sampled answers, else None.
    """
    prepared, origin = open_data(config, options.where)
    sources, shares = prepared.validation if options.validation else prepared.sources, dict[str, float]()
    if config.data.is_mixture:
        mixture = Mixture(prepared.sources, 0, config.data.on_exhausted, config.data.weights_in == "documents")
        shares = dict(mixture.segments[-1].shares)
    packed = [source for source in sources if isinstance(source.rows, PackedDataset)]
    if options.source or options.row or options.where or len(sources) == 1 or not packed:
        packed = [choose_source(sources, options.source)]
    sets = [
        {
            **_of_set(config, options, prepared, source),
            "share": shares.get(source.identity, 0) / sum(shares.values() or [1]),
        }
        for source in packed[:_MOST_SETS]
    ]
    name = "validation" if options.validation else "train"
    about_sets = {"set": sets[0]["set"] if len(sets) == 1 else name, "sets_left_out": len(packed[_MOST_SETS:])}
    groups = _groups(prepared.facts.files) if config.objective.name == "policy" else None
    scores = groups and summarise(groups, {}, _RIGHT, _MOST_ANSWERS)
    return {**origin, **about_sets, "sets": sets, "scores": scores}


def _groups(files: Iterable[str]) -> Iterator[Group]:
    for record in (record for path in files for record in RecordReader(path)):
        with suppress(BadRecord):  # which the ledger names
            yield read_group(parse_record(record))


def _of_set(config: Config, options: argparse.Namespace, data: Prepared, source: SourceRows) -> dict[str, Any]:
    """One set: see `about` and `_summary`; `where`: ledger lines of --where; `wanted`: documents in the rows that were
    asked for; `shown`: documents, see `_documents`, with the kinds of their tokens.
    """
    rows, lines = asked_rows(options, data, source)
    dataset, tokenizer = source.rows, load_tokenizer(config.tokenizer_path())
    assert isinstance(dataset, PackedDataset)
    asked_for = sum(len(dataset.documents_of(row)) for row in rows)
    if not options.row and not options.where:  # the longest documents are in the first rows, the shortest in the last
        rows = list(dict.fromkeys([0, len(dataset) // 2, len(dataset) - 1]))
    rows = rows[: min(_MOST_DOCUMENTS, max(1, MOST_TOKENS // dataset.seq_len))]
    of_each = max(2, _MOST_DOCUMENTS // len(rows or [0]) // 2 * 2)  # even: both answers of a pair
    asked = {line["where"] for line in lines}
    documents = [
        document
        for row in rows
        for document in sorted(
            _documents(shown_row(data, source, tokenizer, row), dataset), key=lambda each: each["where"] not in asked
        )[:of_each]
    ][:_MOST_DOCUMENTS]
    kinds = explain(config, data.facts, tokenizer, dataset.documents, [each["number"] for each in documents])
    return {
        **about(data, source, options.validation),
        **_summary(data, dataset),
        "where": lines,
        "wanted": asked_for,
        "shown": [{**each, "kinds": kinds.get(each["number"])} for each in documents],
    }


def _documents(row: dict[str, Any], dataset: PackedDataset) -> Iterator[dict[str, Any]]:
    """The documents of a row, each with its number in the set and (text, id, position, supervised) of its tokens."""
    start, numbers = 0, dataset.documents_of(row["row"]).tolist()
    for index, (number, document) in enumerate(zip(numbers, row["documents"], strict=True)):
        inside = slice(start, start := start + document["tokens"])
        tokens = list(zip(*(row[name][inside] for name in ("text", "id", "position", "supervised")), strict=True))
        yield {**document, "row": row["row"], "place": index, "number": number, "each": tokens}


def _summary(data: Prepared, dataset: PackedDataset) -> dict[str, Any]:
    """The whole set: lengths of its documents and of rows that did not fit, packing."""
    overlong = [int(line["tokens"]) for line in read_ledger(data.ledger()) if OVERLONG in line["reason"]]
    lengths = np.diff(dataset.documents.starts)[dataset.packing.documents]
    # 16 bins up to seq_len; beyond it, bins of doubling width for rows that did not fit.
    edges = np.unique(np.linspace(0, dataset.seq_len, 17).round().astype(int)).tolist()
    while edges[-1] < max(overlong, default=0):
        edges.append(2 * edges[-1])
    # a bin includes its upper edge but not its lower one; all values are integers
    counts = [np.histogram(each, np.array(edges) + 0.5)[0].tolist() for each in (lengths, overlong)]
    pictured = np.linspace(0, len(dataset) - 1, _PICTURED).round().astype(int).tolist()
    return {
        "lengths": {"to": edges[1:], "documents": counts[0], "overlong": counts[1]},
        "packing": [_picture(dataset, row) for row in dict.fromkeys(pictured)],
    }


def _picture(dataset: PackedDataset, index: int) -> dict[str, Any]:
    """Where a row's documents end, and where spans of supervised tokens begin and end, in 1/1000 of the row."""
    lengths = [len(dataset.documents[number]) for number in dataset.documents_of(index)]
    ends = np.unique(np.cumsum(lengths) * 1000 // dataset.seq_len).tolist()
    learned = np.pad(dataset.row(index).supervised()[np.arange(1000) * dataset.seq_len // 1000], 1)
    edges = np.flatnonzero(learned[1:] != learned[:-1]).tolist()
    return {"row": index, "documents": len(lengths), "ends": ends, "learned": edges}
