"""Makes the report of `inspect_data` as JSON values: packed rows token by token, and a summary of the whole set.

Rows come from the same `PackedDataset` that training reads. A token is supervised if it is the label of the position
before it.
"""

import argparse
import csv
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from titan_mi100.config.settings import Config
from titan_mi100.data.answers import PAIRS
from titan_mi100.data.encode import OVERLONG
from titan_mi100.data.mixture import Mixture
from titan_mi100.data.prepare import prepare_run
from titan_mi100.data.prepared import (
    Origins,
    PackedDataset,
    Prepared,
    RefusedData,
    RowSet,
    SetFacts,
    SourceRows,
    total,
)
from titan_mi100.errors import UserError
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.load import load_tokenizer
from titan_mi100.tools.prepared.reasons import explain
from titan_mi100.tools.prepared.texts import token_texts
from titan_mi100.wording import some

_FIRST = 5  # examples shown for each status of the ledger
_PICTURED, _COLUMNS = 24, 80  # rows in the packing picture, and columns per row
# on a page: sources of a mixture, documents of a set, and tokens of all rows together
_MOST_SETS, _MOST_DOCUMENTS, MOST_TOKENS = 8, 30, 16_384


# --- the command's options ---


@dataclass(frozen=True)
class _Set:
    """The training or validation set, its counts, and where its documents come from."""

    data: Prepared
    dataset: PackedDataset
    counts: SetFacts
    tokenizer: Tokenizer
    origins: Origins

    def rows_with(self, documents: Sequence[int] | np.ndarray) -> list[int]:
        """The packed rows that hold any of these documents, ascending. Documents of other sets are in none."""
        # places: positions in the packing's concatenated rows; `starts` then tells the row of each position
        places = np.flatnonzero(np.isin(self.dataset.packing.documents, documents))
        return np.unique(np.searchsorted(self.dataset.packing.starts, places, side="right") - 1).tolist()


def make_report(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """Make the report of `inspect_data`.

    Args:
        config: the run's config; its data are prepared if they are not yet.
        options: row, where, source, validation and html of the command line.

    Returns:
        JSON values of one set, see `_of_set`. For a page also the sources of a mixture; and if none is chosen, `sets`
        with a report of each of the first ones.

    Raises:
        UserError: an option names something that does not exist, or the data are refused.
    """
    try:
        prepared = prepare_run(config, None)
    except RefusedData as refused:
        # Refused data have no rows to show, but --where can still tell the reason for one line.
        lines = _ledger_lines(refused.ledger, options.where) if options.where else []
        reasons = [f"{line['where']}: {line['status']}: {line['reason']}" for line in lines]
        raise UserError("\n".join(reasons or [str(refused), f"every row: {refused.ledger}"])) from None
    sources = prepared.validation if options.validation else prepared.sources
    packed = [source for source in sources if isinstance(source.rows, PackedDataset)]
    tokenizer = load_tokenizer(config.tokenizer_path())
    of_set = partial(_of_set, config, options, prepared, tokenizer)
    if not options.html or options.source or options.row or options.where or len(sources) == 1 or not packed:
        report = of_set(_choose_source(sources, options.source))
    else:
        report = {"set": "validation" if options.validation else "train", "sets_left_out": len(packed[_MOST_SETS:])}
        report |= {"seq_len": config.training.seq_len, **asdict(total([source.counts for source in sources]))}
        report["sets"] = list(map(of_set, packed[:_MOST_SETS]))
    return {**report, "sources": _sources(config, prepared, sources)} if options.html else report


def _of_set(
    config: Config, options: argparse.Namespace, data: Prepared, tokenizer: Tokenizer, source: SourceRows
) -> dict[str, Any]:
    """The report of one source's set.

    Returns:
        The set's name and counts; `where`: ledger lines of --where; the summary, see `_summary`, if it is wanted;
        `shown`: rows, see `_row`; for a page documents, see `_documents`.
    """
    name, seq_len = "validation" if options.validation else "train", config.training.seq_len
    dataset, counts = source.rows, source.counts
    name += f" of {source.name}" if config.data.is_mixture else ""
    if not isinstance(dataset, PackedDataset):
        if options.where or options.html or not options.row:
            problem = "is a corpus; only single rows can be shown, with --row N; for totals see its ledger.csv"
            raise UserError(f"--source {source.name}: {problem}")
        rows = _numbers(options.row, len(dataset))
        of_rows = [_row(dataset, tokenizer, dataset.where(row), row) for row in dict.fromkeys(rows)]
        return {"set": name, "seq_len": seq_len, **asdict(counts), "shown": of_rows}
    assert dataset.documents.origins is not None
    shown = _Set(data, dataset, counts, tokenizer, dataset.documents.origins)
    report: dict[str, Any] = {"set": name, "source": source.name, "seq_len": seq_len, **asdict(counts)}
    rows = _numbers(options.row, len(dataset))
    if options.where:
        report["where"] = _ledger_lines(data.ledger(), options.where)
        for line in report["where"]:
            line["rows"] = shown.rows_with(np.flatnonzero(shown.origins.document_lines == line.pop("number")))
            rows += line["rows"]
            location = f"in {line['set'] or 'no set'}; rows of {name}: {', '.join(map(str, line['rows'])) or 'none'}"
            line["says"] = f"{line['where']}: {line['status']}; {line['reason'] and line['reason'] + '; '}{location}"
    elif not options.row:
        # of a page three rows: the longest documents are in the first ones, the shortest in the last ones
        rows = [0, len(dataset) // 2, len(dataset) - 1] if options.html else [0]
    if options.html or not (options.row or options.where):
        report |= _summary(config, shown)
    is_paired, rows = data.facts.answers == PAIRS, list(dict.fromkeys(rows))
    most = min(_MOST_DOCUMENTS, max(1, MOST_TOKENS // seq_len)) if options.html else len(rows)
    report["shown"] = [
        _row(dataset, tokenizer, list(map(shown.origins.where, dataset.documents_of(row))), row, is_paired)
        for row in rows[:most]
    ]
    if options.html:
        lines = {line["where"] for line in report.get("where", [])}
        of_each = max(2, _MOST_DOCUMENTS // len(rows[:most] or [0]) // 2 * 2)  # even: both answers of a pair
        inside = [
            document
            for row in report.pop("shown")
            for document in sorted(_documents(row, dataset), key=lambda each: each["where"] not in lines)[:of_each]
        ][:_MOST_DOCUMENTS]
        kinds = explain(config, data.facts, tokenizer, dataset.documents, [each["number"] for each in inside])
        report["wanted"] = sum(len(dataset.documents_of(row)) for row in rows) if options.row or options.where else 0
        report["shown"] = [{**each, "kinds": kinds.get(each["number"])} for each in inside]
    return report


def _documents(row: dict[str, Any], dataset: PackedDataset) -> Iterator[dict[str, Any]]:
    """The documents of a row, each with its number in the set and (text, id, position, supervised) of its tokens."""
    start, numbers = 0, dataset.documents_of(row["row"]).tolist()
    for index, (number, document) in enumerate(zip(numbers, row["documents"], strict=True)):
        inside = slice(start, start := start + document["tokens"])
        tokens = list(zip(*(row[name][inside] for name in ("text", "id", "position", "supervised")), strict=True))
        own = {key: document[key] for key in ("where", "role", "tokens", "supervised")}
        yield {**own, "row": row["row"], "place": index, "number": number, "each": tokens}


def _sources(config: Config, data: Prepared, sources: Sequence[SourceRows]) -> list[dict[str, Any]]:
    """The sources of a mixture: their counts and their share of a run's rows; none if there is no mixture."""
    if not config.data.is_mixture:
        return []
    mixture = Mixture(data.sources, 0, config.data.on_exhausted, config.data.weights_in == "documents")
    shares = mixture.segments[-1].shares
    every = sum(shares.values())
    return [
        {"name": source.name, **asdict(source.counts), "share": shares.get(source.identity, 0) / every}
        for source in sources
    ]


def _choose_source(sources: Sequence[SourceRows], name: str) -> SourceRows:
    """The source that --source names, or the only one. Raises UserError: there is no such source."""
    if not sources:
        raise UserError("--validation: there is no such set; set data.validation_path or data.validation_fraction")
    names = ", ".join(source.name for source in sources)
    matching = [source for source in sources if source.name == name or not name]
    if len(matching) != 1:
        raise UserError(f"there are several sources; name one of them with --source: {names}")
    return matching[0]


def _numbers(text: str, rows: int) -> list[int]:
    """The row numbers of --row, such as "0,3-5". Args: rows: number of rows. Raises UserError: no number or range."""
    numbers: list[int] = []
    for part in text.split(",") if text else ():
        if not (match := re.fullmatch("([0-9]+)(?:-([0-9]+))?", part)):
            raise UserError(f"--row {text}: {part!r} is not a row number or a range such as 3-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < rows:
            raise UserError(f"--row {part}: rows are numbered 0 to {rows - 1:,}")
        numbers += range(first, last + 1)
    return numbers


def _ledger_lines(ledger: Path, where: str) -> list[dict[str, Any]]:
    """The ledger's entries for the input line `FILE:LINE`; several if a file is read twice."""
    file, _, line = where.rpartition(":")
    if not (file and line[:1].isdecimal()):
        raise UserError(f"--where {where}: expected FILE:LINE, such as train.jsonl:12 (in an array train.json:1[12])")
    matches, files = [], set()
    for number, row in enumerate(_read_ledger(ledger)):
        files.add(row["file"])
        if row["line"] == line and row["file"].endswith((os.path.abspath(file), f"/{file}")):
            kept = {name: row[name] for name in ("status", "set", "reason")}
            matches.append({"number": number, "where": f"{row['file']}:{line}", **kept})
    if not matches:
        raise UserError(f"--where {where}: no such line was read; the files are {', '.join(sorted(files))}")
    return matches


def _read_ledger(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


# --- tokens ---


def _row(
    rows: RowSet, tokenizer: Tokenizer, origins: Sequence[str], index: int, is_paired: bool = False
) -> dict[str, Any]:
    """A packed row as training reads it: its documents, and lists with one value per token.

    Args:
        origins: `file:line` of its documents, from left to right. If documents are concatenated (a classic token
            stream), the row is one document with several origins.
    """
    row = rows.row(index)
    inside = [(ids.tolist(), learned) for ids, learned in row.documents()]
    documents, texts = [], []
    for number, (ids, learned) in enumerate(inside):
        texts += token_texts(tokenizer, ids)
        count = {"tokens": len(ids), "supervised": int(learned.sum())}
        where = origins[number] if len(inside) == len(origins) else some(origins, 3)
        role = ("chosen", "rejected")[number % 2] if is_paired else ""
        documents.append({"where": where, "role": role, **count, "text": tokenizer.decode(ids)})
    padding = int(row.padding().sum())
    return {
        "row": index,
        "documents": documents,
        "padding": padding,
        "text": texts + ["⟨padding⟩"] * padding,
        **row.shown(),
    }


# --- the whole set ---


def _summary(config: Config, shown: _Set) -> dict[str, Any]:
    """The summary of the whole set: log lines, ledger, lengths of its documents, packing."""
    prepared, seq_len = shown.data, config.training.seq_len
    statuses, overlong = _ledger_summary(prepared.ledger())
    template = config.model.chat_template or "the tokenizer's own"
    lengths = np.diff(shown.dataset.documents.starts)[shown.dataset.packing.documents]
    # 16 bins up to seq_len; beyond it, bins of doubling width for rows that did not fit.
    edges = np.unique(np.linspace(0, seq_len, 17).round().astype(int)).tolist()
    while edges[-1] < max(overlong, default=0):
        edges.append(2 * edges[-1])
    pictured = np.linspace(0, len(shown.dataset) - 1, _PICTURED).round().astype(int).tolist()
    return {
        "read": prepared.facts.summary,
        "warnings": prepared.facts.warnings,
        "from": {"tokenizer": config.tokenizer_path(), "chat template": template, "prepared": str(prepared.folder)},
        "ledger": {"path": str(prepared.ledger()), "statuses": statuses},
        "lengths": _bins(edges, lengths, overlong),
        "packing": [_picture(shown.dataset, row) for row in dict.fromkeys(pictured)],
    }


def _ledger_summary(path: Path) -> tuple[dict[str, dict[str, Any]], list[int]]:
    """Read the ledger: rows and first reasons per status; lengths of rows that did not fit."""
    statuses: dict[str, dict[str, Any]] = {}
    overlong: list[int] = []
    for line in _read_ledger(path):
        status, reason = statuses.setdefault(line["status"], {"rows": 0, "first": []}), line["reason"]
        status["rows"] += 1
        if reason and len(status["first"]) < _FIRST:
            status["first"].append({"where": f"{line['file']}:{line['line']}", "reason": reason})
        if OVERLONG in reason:
            overlong.append(int(line["tokens"]))
    return statuses, overlong


def _bins(edges: list[int], documents: np.ndarray, overlong: list[int]) -> list[dict[str, int]]:
    """Counts per bin. A bin includes its upper edge but not its lower one; all values are integers."""
    counts = [np.histogram(lengths, np.array(edges) + 0.5)[0].tolist() for lengths in (documents, overlong)]
    bins = zip([edge + 1 for edge in edges[:-1]], edges[1:], *counts, strict=True)
    return [{"from": low, "to": high, "documents": fit, "overlong": over} for low, high, fit, over in bins]


def _picture(dataset: PackedDataset, index: int) -> dict[str, Any]:
    """A row as a line of `_COLUMNS` characters, each for one sampled position: █ supervised, ░ not, · padding.

    For the page: where its documents end, and where spans of supervised tokens begin and end, in 1/1000 of the row.
    """
    row = dataset.row(index)
    kinds = np.where(row.padding(), 2, row.supervised())
    picture = "".join("░█·"[kind] for kind in kinds[np.arange(_COLUMNS) * dataset.seq_len // _COLUMNS])
    lengths = [len(dataset.documents[number]) for number in dataset.documents_of(index)]
    ends = np.unique(np.cumsum(lengths) * 1000 // dataset.seq_len).tolist()
    learned = np.pad(kinds[np.arange(1000) * dataset.seq_len // 1000] == 1, 1)
    edges = np.flatnonzero(learned[1:] != learned[:-1]).tolist()
    return {"row": index, "documents": len(lengths), "picture": picture, "ends": ends, "learned": edges}
