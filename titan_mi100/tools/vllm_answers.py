"""A teacher's folder from what vLLM says: `prompt_logprobs` of the rows' token ids, checked position by position."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from titan_mi100.config.settings import Config
from titan_mi100.data.answer_store import About, AnswerStore, tokens_hash
from titan_mi100.data.files import read_records
from titan_mi100.data.formats import parse_record
from titan_mi100.data.prepare import prepare_run
from titan_mi100.data.prepared import DocumentTable, PackedDataset
from titan_mi100.data.strict_json import BadRecord
from titan_mi100.errors import UserError
from titan_mi100.log import ByteProgress, log

_DOCUMENTS_OF_A_PART = 4096
_OTHER = "name another folder with --out, or delete this one"
_KEYS = ("prompt_token_ids", "prompt_logprobs")


def _sets(config: Config) -> tuple[list[PackedDataset], str]:
    data = prepare_run(config, None)
    sets = [source.rows for source in (*data.sources, *data.validation)]
    return [rows for rows in sets if isinstance(rows, PackedDataset)], data.facts.tokenizer


def write_ids(config: Config, path: Path) -> None:
    """A line {"prompt_token_ids": [...]} for each document, in order."""
    [first, *_], _ = _sets(config)
    table = first.documents
    with path.open("w", encoding="utf-8") as file:
        for number in range(len(table.starts) - 1):
            file.write(json.dumps({"prompt_token_ids": (table[number] >> 1).tolist()}) + "\n")
    log.info(f"{path}: {len(table.starts) - 1:,} documents; ask vLLM for prompt_logprobs of each")


def read_answers(config: Config, path: Path, out: Path, k: int) -> None:
    """Read a line {"prompt_token_ids": [...], "prompt_logprobs": [null, {ID: {"logprob": x}}, ...]} per document.

    Raises:
        UserError: a line is not of its document, or has fewer than k ids, or log probabilities that are none.
    """
    sets, tokenizer = _sets(config)
    table, lines = sets[0].documents, _lines(path)
    count, shape = len(table.starts) - 1, (sets[0].seq_len, k, "vllm")
    about = About("teacher", f"vLLM: {path.name}", tokens_hash(sets), tokenizer, count, 0, *shape)
    parts = -(-count // _DOCUMENTS_OF_A_PART)
    store = AnswerStore(out, replace(about, rows=parts * about.part_rows), _OTHER)
    if store.parts:
        raise UserError(f"{out}: holds a teacher's answers already; {_OTHER}")
    store.begin()
    with ByteProgress("reading vLLM's answers", count) as progress:
        for part in range(parts):
            numbers = range(part * _DOCUMENTS_OF_A_PART, min((part + 1) * _DOCUMENTS_OF_A_PART, count))
            found = [_next_document(lines, table, number, k, path) for number in numbers]
            arrays: dict[str, np.ndarray] = {
                "documents": np.array(numbers, np.int64),
                "tokens": np.array([len(ids) for ids, _ in found], np.int64),
                "ids": np.concatenate([ids for ids, _ in found]),
                "log_p": np.concatenate([log_p for _, log_p in found]),
            }
            store.write(part, arrays)
            progress.advance(len(numbers))
    if extra := next(lines, None):
        raise UserError(f"{extra[0]}: a line more than the data have documents; is it of other data? delete {out}")
    log.info(f"{out}: the answers to {count:,} documents")


def _next_document(
    lines: Iterator[tuple[str, dict[str, Any]]], table: DocumentTable, number: int, k: int, path: Path
) -> tuple[np.ndarray, np.ndarray]:
    """The ids and log p of a document's learned tokens, (t, k) each."""
    where, line = next(lines, (str(path), None))
    if line is None:
        count = len(table.starts) - 1
        raise UserError(f"{where}: has {number:,} lines, the data have {count:,} documents; ask for the others, too")
    found = _document(where, line, table, number)
    if short := next((len(ids) for ids, _ in found if len(ids) < k), 0):
        raise UserError(f"{where}: a token has {short} ids; ask vLLM for prompt_logprobs = {k}, or set --top_k {short}")
    arrays = np.array([ids[:k] for ids, _ in found], np.int32), np.array([p[:k] for _, p in found], np.float32)
    return arrays[0].reshape(-1, k), arrays[1].reshape(-1, k)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for record in read_records(str(path)):
        where = f"{path}:{record.number}"
        try:
            line = parse_record(record)
        except BadRecord as bad:
            raise UserError(f"{where}: {bad}") from None
        if missing := [key for key in _KEYS if not isinstance(line.get(key), list)]:
            raise UserError(f"{where}: {missing[0]} must be a list; ask vLLM for prompt_logprobs with token ids")
        yield where, line


def _document(
    where: str, line: dict[str, Any], table: DocumentTable, number: int
) -> list[tuple[list[int], list[float]]]:
    """The ids and log p for each learned token of a document, the likeliest first."""
    values = table[number]
    ids, learned = (values >> 1).tolist(), (values & 1).astype(bool).tolist()
    given, answers = line["prompt_token_ids"], line["prompt_logprobs"]
    if given != ids:
        place = next((i for i, pair in enumerate(zip(given, ids, strict=False)) if pair[0] != pair[1]), None)
        what = f"{len(given)} ids, the document has {len(ids)}" if place is None else f"id {place} is {given[place]!r}"
        raise UserError(f"{where}: prompt_token_ids are not those of document {number}: {what}; is it of other data?")
    if len(answers) != len(ids):
        raise UserError(f"{where}: prompt_logprobs has {len(answers)} entries for {len(ids)} ids")
    found = []
    for place in (place for place in range(1, len(ids)) if learned[place]):
        try:
            pairs = [(int(token), float(entry["logprob"])) for token, entry in answers[place].items()]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UserError(f"{where}: prompt_logprobs[{place}] must be ID: {{logprob: x}}") from None
        if ids[place] not in dict(pairs):
            what = f"prompt_logprobs[{place}] lacks the id {ids[place]} that stands there"
            raise UserError(f"{where}: {what}: the positions are not those of the ids")
        # vLLM adds the token itself to the likeliest ones: without it as many ids as everywhere
        pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        if any(not -1e4 < log_p <= 1e-3 for _, log_p in pairs):
            raise UserError(f"{where}: prompt_logprobs[{place}] has a log probability above 0 or not finite")
        found.append(([token for token, _ in pairs], [min(log_p, 0.0) for _, log_p in pairs]))
    return found
