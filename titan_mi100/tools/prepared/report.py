"""Makes the report of `inspect_data` as JSON values: packed rows token by token, and where they come from.

Rows come from the same `PackedDataset` that training reads. A token is supervised if it is the label of the position
before it.
"""

import argparse
import csv
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from titan_mi100.config.settings import Config
from titan_mi100.data.answers import PAIRS
from titan_mi100.data.prepare import prepare_run
from titan_mi100.data.prepared import PackedDataset, Prepared, RefusedData, SourceRows
from titan_mi100.errors import UserError
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.load import load_tokenizer
from titan_mi100.wording import some

_MARKS = {"\n": "↵", "\t": "⇥"}
_VIEW_MARKS = set("↵⇥⟨⟩⟦⟧")  # marks of the views; the same characters in the data are shown as ⟨U+...⟩


def make_report(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """Make the report of `inspect_data`.

    Args:
        config: the run's config; its data are prepared if they are not yet.
        options: row, where, source and validation of the command line.

    Returns:
        JSON values: see `about`, and without --row and --where `open_data`; `where`: ledger lines of --where; `shown`:
        rows, see `shown_row`.

    Raises:
        UserError: an option names something that does not exist, or the data are refused.
    """
    prepared, origin = open_data(config, options.where)
    source = choose_source(prepared.validation if options.validation else prepared.sources, options.source)
    rows, lines = asked_rows(options, prepared, source)
    report, tokenizer = about(prepared, source, options.validation), load_tokenizer(config.tokenizer_path())
    if not (options.row or options.where):
        rows, report = [0], report | origin
    return {**report, "where": lines, "shown": [shown_row(prepared, source, tokenizer, row) for row in rows]}


def open_data(config: Config, where: str) -> tuple[Prepared, dict[str, Any]]:
    """A run's data; and the log's lines about them (`read`, `warnings`), and what they were made with (`from`).

    Args:
        where: a line of the input; if the data are refused, the message is about it.
    """
    template = config.model.chat_template or "the tokenizer's own"
    try:
        prepared = prepare_run(config, None)
        origin = {"tokenizer": config.tokenizer_path(), "chat template": template, "prepared": str(prepared.folder)}
        return prepared, {"read": prepared.facts.summary, "warnings": prepared.facts.warnings, "from": origin}
    except RefusedData as refused:
        lines = _ledger_lines(refused.ledger, where) if where else []
        reasons = [f"{line['where']}: {line['status']}: {line['reason']}" for line in lines]
        raise UserError("\n".join(reasons or [str(refused), f"every row: {refused.ledger}"])) from None


def about(data: Prepared, source: SourceRows, is_validation: bool) -> dict[str, Any]:
    """A set's name and counts."""
    name = "validation" if is_validation else "train"
    name += f" of {source.name}" if source.name not in ("train", "validation") else ""
    return {"set": name, "source": source.name, "seq_len": data.facts.seq_len, **asdict(source.counts)}


def choose_source(sources: Sequence[SourceRows], name: str) -> SourceRows:
    """The source that --source names, or the only one. Raises UserError: there is no such source."""
    if not sources:
        raise UserError("--validation: there is no such set; set data.validation_path or data.validation_fraction")
    names = ", ".join(source.name for source in sources)
    matching = [source for source in sources if source.name == name or not name]
    if len(matching) != 1:
        raise UserError(f"there are several sources; name one of them with --source: {names}")
    return matching[0]


def asked_rows(
    options: argparse.Namespace, data: Prepared, source: SourceRows
) -> tuple[list[int], list[dict[str, Any]]]:
    """The rows that --row and --where ask for, each once; and the ledger's lines of --where."""
    dataset, lines = source.rows, list[dict[str, Any]]()
    rows = _numbers(options.row, len(dataset))
    if not isinstance(dataset, PackedDataset):
        if options.where or options.html or not options.row:
            problem = "is a corpus; only single rows can be shown, with --row N; for totals see its ledger.csv"
            raise UserError(f"--source {source.name}: {problem}")
    elif options.where:
        assert dataset.documents.origins is not None
        for line in _ledger_lines(data.ledger(), options.where):
            documents = np.flatnonzero(dataset.documents.origins.document_lines == line.pop("number"))
            # places: positions in the packing's concatenated rows; `starts` then tells the row of each position
            places = np.flatnonzero(np.isin(dataset.packing.documents, documents))
            own = np.unique(np.searchsorted(dataset.packing.starts, places, side="right") - 1).tolist()
            location = f"in {line['set'] or 'no set'}; its rows: {', '.join(map(str, own)) or 'none'}"
            says = f"{line['where']}: {line['status']}; {line['reason'] and line['reason'] + '; '}{location}"
            lines.append({**line, "rows": own, "says": says})
            rows += own
    return list(dict.fromkeys(rows)), lines


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
    for number, row in enumerate(read_ledger(ledger)):
        files.add(row["file"])
        if row["line"] == line and row["file"].endswith((os.path.abspath(file), f"/{file}")):
            kept = {name: row[name] for name in ("status", "set", "reason")}
            matches.append({"number": number, "where": f"{row['file']}:{line}", **kept})
    if not matches:
        raise UserError(f"--where {where}: no such line was read; the files are {', '.join(sorted(files))}")
    return matches


def read_ledger(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def shown_row(data: Prepared, source: SourceRows, tokenizer: Tokenizer, index: int) -> dict[str, Any]:
    """A packed row as training reads it: its documents, and lists with one value per token.

    If documents are concatenated (a classic token stream), the row is one document with several origins.
    """
    rows = source.rows
    row, origins = rows.row(index), rows.where(index)
    if isinstance(rows, PackedDataset) and rows.documents.origins is not None:  # one for each document
        origins = list(map(rows.documents.origins.where, rows.documents_of(index)))
    inside = [(ids.tolist(), learned) for ids, learned in row.documents()]
    documents, texts = [], []
    for number, (ids, learned) in enumerate(inside):
        texts += token_texts(tokenizer, ids)
        count = {"tokens": len(ids), "supervised": int(learned.sum())}
        where = origins[number] if len(inside) == len(origins) else some(origins, 3)
        role = ("chosen", "rejected")[number % 2] if data.facts.answers == PAIRS else ""
        documents.append({"where": where, "role": role, **count, "text": tokenizer.decode(ids)})
    padding = int(row.padding().sum())
    return {
        "row": index,
        "documents": documents,
        "padding": padding,
        "text": texts + ["⟨padding⟩"] * padding,
        **row.shown(),
    }


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token as readable text. The bytes of a token that holds a part of a character are shown as \\xf0\\x9f."""
    return [visible(tokenizer.token_bytes(token_id).decode(errors="backslashreplace")) for token_id in ids]


def visible(text: str) -> str:
    """The text with invisible and control characters (except spaces) replaced by marks such as ↵ or ⟨U+001B⟩."""
    hidden = {char for char in text if not char.isprintable() or char in _VIEW_MARKS}
    return text.translate({ord(char): _MARKS.get(char, f"⟨U+{ord(char):04X}⟩") for char in hidden})
