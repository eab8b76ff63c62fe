"""The report that `inspect_data` shows, as JSON values: packed rows token by token, and the whole set in numbers.

Rows come from the `PackedDataset` that training reads. A token is supervised if it is the label of the position before
it.
"""

import argparse
import codecs
import csv
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from titan_mi100.config.layout import IGNORE
from titan_mi100.config.settings import Config
from titan_mi100.data.encode import OVERLONG
from titan_mi100.data.packing import PADDING_DOCUMENT, Origins, PackedDataset
from titan_mi100.data.prepare import prepare_run
from titan_mi100.data.prepared import Prepared, RefusedData, SetFacts
from titan_mi100.errors import UserError
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.load import load_tokenizer

_SAMPLE_TOKENS = 1 << 22  # of a larger set only every k-th document is examined, to bound time and memory
_PAGE_TOKENS = 1 << 15  # in the rows that a page shows by default
_FIRST = 5  # examples of each status in the ledger
_PICTURED, COLUMNS = 24, 240  # rows in the packing picture, and columns per row
_EXCERPT = 60  # tokens from each end of an odd document
_MARKS = {"\n": "↵", "\t": "⇥"}
_OURS = set("↵⇥⟨⟩⟦⟧")  # the views use these as marks, so in the data they are shown as ⟨U+...⟩


# --- what is read ---


@dataclass(frozen=True)
class _Set:
    """The training or validation set, its counts, and where its documents come from."""

    data: Prepared
    name: str
    dataset: PackedDataset
    counts: SetFacts
    tokenizer: Tokenizer
    origins: Origins

    def rows_with(self, documents: Sequence[int] | np.ndarray) -> list[int]:
        """The packed rows that hold any of these documents; none if they are in the other set."""
        places = np.flatnonzero(np.isin(self.dataset.packing.documents, documents))
        return np.unique(np.searchsorted(self.dataset.packing.starts, places, side="right") - 1).tolist()


def make_report(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """What `inspect_data` shows.

    Args:
        options: row, where, validation and html of its command line.

    Raises:
        UserError: an option names what is not there, or the data are refused.
    """
    name, seq_len = "validation" if options.validation else "train", config.training.seq_len
    try:
        data = prepare_run(config, None)
    except RefusedData as refused:
        if not options.where:
            raise
        lines = _ledger_lines(refused.ledger, options.where)  # the reason for this line is what was asked for
        raise UserError("\n".join(f"{line['where']}: {line['status']}: {line['reason']}" for line in lines)) from None
    dataset = data.validation if options.validation else data.train
    counts = data.facts.validation if options.validation else data.facts.train
    if dataset is None or counts is None:
        raise UserError("--validation: there is no such set; set data.validation_path or data.validation_fraction")
    assert dataset.documents.origins is not None
    shown = _Set(data, name, dataset, counts, load_tokenizer(config.tokenizer_path()), dataset.documents.origins)
    report: dict[str, Any] = {"set": name, "seq_len": seq_len, **asdict(shown.counts)}
    rows, chosen = _numbers(options.row, len(dataset)), bool(options.row or options.where)
    if options.where:
        report["where"] = _ledger_lines(data.ledger(), options.where)
        for line in report["where"]:
            line["rows"] = shown.rows_with(np.flatnonzero(shown.origins.document_lines == line.pop("number")))
            rows += line["rows"]
            found = f"in {line['set'] or 'no set'}; rows of {name}: {', '.join(map(str, line['rows'])) or 'none'}"
            line["says"] = f"{line['where']}: {line['status']}; {line['reason'] and line['reason'] + '; '}{found}"
    if options.html or not chosen:
        report |= _summary(config, shown)
    if not chosen:
        odd = sorted({entry["row"] for entry in report["oddest"]} - {0})
        rows = [0, *odd[: _PAGE_TOKENS // seq_len - 1]] if options.html else [0]
    report["shown"] = [_row(shown, row) for row in dict.fromkeys(rows)]
    return report


def _numbers(text: str, rows: int) -> list[int]:
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        if not (match := re.fullmatch("([0-9]+)(?:-([0-9]+))?", part)):
            raise UserError(f"--row {text}: {part!r} is not a row's number or a range such as 3-5")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < rows:
            raise UserError(f"--row {part}: the rows are 0 to {rows - 1:,}")
        numbers += range(first, last + 1)
    return numbers


def _ledger_lines(ledger: Path, where: str) -> list[dict[str, Any]]:
    """The ledger's entries for the input line `FILE:LINE`; several if a file is read twice."""
    file, _, line = where.rpartition(":")
    if not (file and line[:1].isdecimal()):
        raise UserError(f"--where {where}: expected FILE:LINE, such as train.jsonl:12 (of an array train.json:1[12])")
    found, files = [], set()
    with ledger.open(encoding="utf-8", newline="") as lines:
        for number, entry in enumerate(csv.DictReader(lines)):
            files.add(entry["file"])
            if entry["line"] == line and entry["file"].endswith((os.path.abspath(file), f"/{file}")):
                kept = {name: entry[name] for name in ("status", "set", "reason")}
                found.append({"number": number, "where": f"{entry['file']}:{line}", **kept})
    if not found:
        raise UserError(f"--where {where}: no such line was read from {', '.join(sorted(files))}")
    return found


# --- tokens ---


def _row(shown: _Set, index: int) -> dict[str, Any]:
    """A packed row as training reads it, with lists of one value per token."""
    row = shown.dataset.row(index)
    supervised = np.concatenate(([False], row.labels[:-1] != IGNORE))
    assert (row.labels[:-1] == row.input_ids[1:])[supervised[1:]].all() and row.labels[-1] == IGNORE
    documents, texts = [], []
    for place, number in enumerate(shown.dataset.documents_of(index)):
        inside = row.document_ids == place
        ids = row.input_ids[inside].tolist()
        texts += token_texts(shown.tokenizer, ids)
        text = b"".join(shown.tokenizer.token_bytes(token_id) for token_id in ids).decode("utf-8", "replace")
        count = {"tokens": len(ids), "supervised": int(supervised[inside].sum())}
        documents.append({"where": shown.origins.where(number), **count, "text": text})
    padding = int((row.document_ids == PADDING_DOCUMENT).sum())
    return {
        "row": index,
        "documents": documents,
        "padding": padding,
        "id": row.input_ids.tolist(),
        "text": texts + ["⟨padding⟩"] * padding,
        "document": row.document_ids.tolist(),
        "position": row.positions.tolist(),
        "supervised": supervised.tolist(),
    }


def documents_in(row: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any], range]]:
    """The documents of a shown row: place in the row, facts, and the range of their tokens."""
    start = 0
    for place, document in enumerate(row["documents"]):
        yield place, document, range(start, start := start + document["tokens"])


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token of a document as readable text: a space is a space, other invisible characters are ↵, ⇥ or ⟨U+00A0⟩.

    A token with a part of a character is shown as bytes, ⟨F0 9F⟩, and the last part with the character: ⟨98 80⟩→😀.
    """
    decoder, texts = codecs.getincrementaldecoder("utf-8")("replace"), []
    for token_id in ids:
        spelled = tokenizer.token_bytes(token_id)
        pending = decoder.getstate()[0]
        character = decoder.decode(spelled)[:1]
        completed = f"→{visible(character)}" if pending and character not in ("", "\ufffd") else ""
        texts.append(_readable(spelled) + completed)
    return texts


def _readable(spelled: bytes) -> str:
    try:
        return visible(spelled.decode())
    except UnicodeDecodeError as error:
        stop = error.end
        while stop < len(spelled) and spelled[stop] & 0xC0 == 0x80:  # the rest of a character that began before
            stop += 1
        part = spelled[error.start : stop].hex(" ").upper()
        return visible(spelled[: error.start].decode()) + f"⟨{part}⟩" + _readable(spelled[stop:])


def visible(text: str) -> str:
    """The text without invisible characters (except spaces) and without control characters of a terminal."""
    if text.isprintable() and not _OURS.intersection(text):
        return text
    plain = (char.isprintable() and char not in _OURS for char in text)
    return "".join(c if ok else _MARKS.get(c, f"⟨U+{ord(c):04X}⟩") for c, ok in zip(text, plain, strict=True))


# --- the whole set ---


@dataclass(frozen=True)
class _Sample:
    """Every step-th document of the set, end to end."""

    step: int
    documents: np.ndarray  # (documents,): their numbers in the set
    edges: np.ndarray  # (documents + 1,): document i is ids[edges[i]:edges[i + 1]]
    ids: np.ndarray  # (tokens,) int64
    supervised: np.ndarray  # (tokens,) bool

    def lengths(self) -> np.ndarray:
        """(documents,): tokens of each document."""
        return np.diff(self.edges)

    def shares(self) -> np.ndarray:
        """(documents,): supervised share of each document."""
        return _sums(self.supervised, self.edges) / self.lengths()

    def starts_of(self, pattern: Sequence[int]) -> np.ndarray:
        """The positions in `ids` where this sequence of ids begins."""
        size = max(len(self.ids) - len(pattern) + 1, 0) if len(pattern) else 0  # some tokenizers drop some texts
        found = np.ones(size, dtype=bool)
        for offset, token_id in enumerate(pattern):
            found &= self.ids[offset : offset + size] == token_id
        return np.flatnonzero(found)


def _sums(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Sums of values[edges[i]:edges[i + 1]]."""
    return np.diff(np.concatenate(([0], np.cumsum(values, dtype=np.int64)))[edges])


def _sample(dataset: PackedDataset) -> _Sample:
    documents = np.flatnonzero(np.bincount(dataset.packing.documents))  # np.unique is slow on millions
    starts = dataset.documents.starts
    step = max(1, -(-int((starts[documents + 1] - starts[documents]).sum()) // _SAMPLE_TOKENS))
    documents = documents[::step]
    lengths = starts[documents + 1] - starts[documents]
    edges = np.concatenate(([0], np.cumsum(lengths)))
    values = dataset.documents.values[np.repeat(starts[documents] - edges[:-1], lengths) + np.arange(edges[-1])]
    supervised = (values & 1).astype(bool)
    supervised[edges[:-1]] = False  # no token before it could predict it
    return _Sample(step, documents, edges, (values >> 1).astype(np.int64), supervised)


def _summary(config: Config, shown: _Set) -> dict[str, Any]:
    data, sample, seq_len = shown.data, _sample(shown.dataset), config.training.seq_len
    statuses, overlong, unrolled = _read_ledger(data.ledger())
    template = config.model.chat_template or "the tokenizer's own"
    lengths = np.diff(shown.dataset.documents.starts)[shown.dataset.packing.documents]
    pictured = np.linspace(0, len(shown.dataset) - 1, _PICTURED).round().astype(int).tolist()
    rows_of = {name: status["rows"] for name, status in statuses.items()}
    effects = {
        **_supervision(shown, sample, unrolled),
        "overlong": f"rows longer than {seq_len:,} tokens: {len(overlong):,}",
        "duplicates": f"rows that repeat an earlier one: {rows_of.get('duplicate', 0):,}",
        "on_bad_row": f"rows rejected: {rows_of.get('rejected', 0):,}",
    }
    return {
        "read": data.facts.summary,
        "warnings": data.facts.warnings,
        "from": {"tokenizer": config.tokenizer_path(), "chat template": template, "prepared": str(data.folder)},
        "options": [{"option": k, "value": getattr(config.data, k), "effect": effect} for k, effect in effects.items()],
        "ledger": {"path": str(data.ledger()), "statuses": statuses},
        "lengths": _lengths(lengths, overlong, seq_len),
        "shares": _shares(sample.shares()),
        "packing": [_picture(shown.dataset, row) for row in dict.fromkeys(pictured)],
        "oddest": _oddest(shown, sample),
        "sampled": sample.step,
    }


def _read_ledger(path: Path) -> tuple[dict[str, dict[str, Any]], np.ndarray, int]:
    """Rows and first reasons per status; the lengths of rows that did not fit; the number of unrolled rows."""
    statuses: dict[str, dict[str, Any]] = {}
    overlong: list[int] = []
    unrolled = 0
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            status = statuses.setdefault(line["status"], {"rows": 0, "first": []})
            status["rows"] += 1
            if line["reason"]:
                if len(status["first"]) < _FIRST:
                    status["first"].append({"where": f"{line['file']}:{line['line']}", "reason": line["reason"]})
                if OVERLONG in line["reason"]:
                    overlong.append(int(line["tokens"]))
                unrolled += line["reason"].startswith("unrolled")
    return statuses, np.array(overlong, dtype=np.int64), unrolled


def _supervision(shown: _Set, sample: _Sample, unrolled: int) -> dict[str, str]:
    """The options that decide what is supervised -> what each of them did, in numbers."""
    encode, counts = shown.tokenizer.encode, shown.counts
    header = encode("<|im_start|>assistant")
    answers = sample.starts_of(header) + len(header) + 1  # + 1: the line break
    answers = answers[(answers < len(sample.ids)) & ~np.isin(answers, sample.edges)]  # without turns cut off there
    empty = np.isin(answers, sample.starts_of(encode("<think>\n\n</think>")))
    thinking = np.isin(answers, sample.starts_of(encode("<think>"))) & ~empty

    def turns(kind: str, chosen: np.ndarray) -> str:
        supervised = int(sample.supervised[answers[chosen]].sum())
        return f"{kind}: {supervised:,} supervised, {np.count_nonzero(chosen) - supervised:,} masked"

    share = f"({counts.supervised / counts.tokens:.1%})"
    return {
        "loss": f"tokens supervised: {counts.supervised:,} of {counts.tokens:,} {share}",
        "empty_think": turns("empty think blocks", empty),
        "earlier_thinking": f"{turns('turns with reasoning', thinking)}; "
        f"{turns('without a think block', ~thinking & ~empty)}; rows unrolled: {unrolled:,}",
    }


def _lengths(lengths: np.ndarray, overlong: np.ndarray, seq_len: int) -> list[dict[str, int]]:
    """16 bins up to seq_len for the documents; beyond it, bins of doubling width for the rows that did not fit."""
    edges = np.unique(np.linspace(0, seq_len, 17).round().astype(np.int64)).tolist()
    while overlong.size and edges[-1] < overlong.max():
        edges.append(2 * edges[-1])
    counts = [np.histogram(values - 0.5, edges)[0].tolist() for values in (lengths, overlong)]
    bins = zip([edge + 1 for edge in edges[:-1]], edges[1:], *counts, strict=True)
    return [{"from": low, "to": high, "documents": fit, "overlong": over} for low, high, fit, over in bins]


def _shares(shares: np.ndarray) -> list[dict[str, int]]:
    counts = np.histogram(shares, np.linspace(0, 1, 11))[0].tolist()
    return [{"from": 10 * i, "to": 10 * i + 10, "documents": n, "overlong": 0} for i, n in enumerate(counts)]


def _picture(dataset: PackedDataset, index: int) -> dict[str, Any]:
    """A row sampled at `COLUMNS` positions, as runs of (columns, document or -1, supervised)."""
    row = dataset.row(index)
    columns = np.arange(COLUMNS) * dataset.seq_len // COLUMNS
    supervised = np.concatenate(([False], row.labels[:-1] != IGNORE))
    pairs = zip(row.document_ids[columns].tolist(), supervised[columns].tolist(), strict=True)
    runs = [[len(list(group)), *pair] for pair, group in groupby(pairs)]
    real = int((row.document_ids != PADDING_DOCUMENT).sum())
    counts = {"documents": len(dataset.documents_of(index)), "tokens": real, "supervised": int(supervised.sum())}
    return {"row": index, **counts, "runs": runs}


# --- odd documents ---


def _oddest(shown: _Set, sample: _Sample) -> list[dict[str, Any]]:
    """For each kind of oddity the document with the highest score, if that is not 0."""
    lengths, shares, edges = sample.lengths(), sample.shares(), sample.edges
    unended = _supervised_after_end(sample, shown.tokenizer.eos_token_id)
    repeated = _repeated_pairs(sample, shown.data.facts.n_vocab)
    characters, damaged = _characters_and_damage(sample, shown.tokenizer)
    with_such = "documents with such: {:,}".format
    scores_of = {
        "longest: {:,.0f} tokens": lengths,
        "shortest: {:,.0f} tokens": -lengths,
        "least supervised: {:.1%}": -shares,
        "most supervised: {:.1%}": shares,
        f"no end token after its last {{:,.0f}} supervised; {with_such(np.count_nonzero(unended))}": unended,
        f"damaged: {{:,.0f}} times U+FFFD; {with_such(np.count_nonzero(damaged))}": damaged,
        "most tokens per character: {:.2f}": lengths / characters.clip(1),
        "most repetitive: {:.0%} of its pairs of tokens came before": repeated / lengths,
    }
    kinds_of: dict[int, list[str]] = {}  # one document may be the oddest of several kinds
    for kind, scores in scores_of.items():
        place = int(np.argmax(scores))
        if scores[place]:
            kinds_of.setdefault(place, []).append(kind.format(abs(scores[place])))
    odd = []
    for place, kinds in kinds_of.items():
        number, inside = int(sample.documents[place]), slice(edges[place], edges[place + 1])
        excerpt = _excerpt(shown.tokenizer, sample.ids[inside].tolist(), sample.supervised[inside].tolist())
        where, row = shown.origins.where(number), shown.rows_with([number])[0]
        odd.append({"kinds": kinds, "where": where, "row": row, "excerpt": excerpt})
    return odd


def _supervised_after_end(sample: _Sample, end_id: int) -> np.ndarray:
    """(documents,): supervised tokens after the last supervised end token. One is the template's line break, so 0."""
    is_end = sample.supervised & (sample.ids == end_id)
    after_end = np.where(is_end, np.arange(1, len(is_end) + 1), 0)
    after_last = np.maximum(np.maximum.reduceat(after_end, sample.edges[:-1]), sample.edges[:-1])
    so_far = np.concatenate(([0], np.cumsum(sample.supervised)))
    count = so_far[sample.edges[1:]] - so_far[after_last]
    return np.where(count > 1, count, 0)


def _characters_and_damage(sample: _Sample, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """(documents,) each: characters, and replacement characters U+FFFD, which mostly come from a wrong decoding."""
    spelled = {
        token_id: tokenizer.token_bytes(token_id) for token_id in np.flatnonzero(np.bincount(sample.ids)).tolist()
    }
    pieces = [spelled[token_id] for token_id in sample.ids.tolist()]
    text = np.frombuffer(b"".join(pieces) + b"  ", np.uint8)  # room for the comparison of three bytes
    edges = np.concatenate(([0], np.cumsum([len(piece) for piece in pieces])))[sample.edges]
    begins = (text & 0xC0) != 0x80  # all other bytes of UTF-8 continue a character
    damage = (text[:-2] == 0xEF) & (text[1:-1] == 0xBF) & (text[2:] == 0xBD)
    return _sums(begins, edges), _sums(damage, edges)


def _repeated_pairs(sample: _Sample, n_vocab: int) -> np.ndarray:
    """(documents,): tokens that are not the first of a pair of neighbours that is new in the document."""
    document = np.repeat(np.arange(len(sample.documents)), sample.lengths())
    pairs = np.sort((document[1:] * n_vocab + sample.ids[:-1]) * n_vocab + sample.ids[1:])
    new = pairs[np.diff(pairs, prepend=-1) > 0] // n_vocab**2  # the documents of the distinct pairs
    return sample.lengths() - np.bincount(new, minlength=len(sample.documents))


def _excerpt(tokenizer: Tokenizer, ids: list[int], supervised: list[bool]) -> list[tuple[str, bool]]:
    """Beginning and end of a document: (text, supervised)."""
    tokens = list(zip(token_texts(tokenizer, ids), supervised, strict=True))
    left_out = [(f" … {len(tokens) - 2 * _EXCERPT:,} tokens … ", False)]
    return tokens if len(tokens) <= 2 * _EXCERPT else tokens[:_EXCERPT] + left_out + tokens[-_EXCERPT:]
