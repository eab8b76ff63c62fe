"""The report that `inspect_data` shows: packed rows token by token, and the whole set in numbers, as JSON values.

Rows come from the `PackedDataset` that training reads. A token is supervised if it is the label of the position before
it.
"""

import argparse
import codecs
import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_mi100.data.dataset import PADDING_DOCUMENT, PackedDataset
from titan_mi100.data.ledger import label
from titan_mi100.data.prepare import Prepared, RefusedData, prepare_run
from titan_mi100.data.sft import OVERLONG
from titan_mi100.errors import UserError
from titan_mi100.layout import IGNORE
from titan_mi100.settings import Config
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.load import load_tokenizer

_SAMPLE_TOKENS = 1 << 22  # of a larger set every k-th document is looked into, so that time and memory stay bounded
_PAGE_TOKENS = 1 << 15  # in the rows that are shown unasked
_FIRST = 5  # examples of each status in the ledger
_PICTURED, COLUMNS = 24, 240  # rows of the packing picture, and into how many columns a row is drawn
_EXCERPT = 60  # tokens from each end of an odd document
_MARKS = {"\n": "↵", "\t": "⇥"}
_OURS = set("↵⇥⟨⟩⟦⟧")  # what the views write themselves; in the data they are shown by their number


# --- what is read ---


@dataclass(frozen=True)
class _Set:
    """The training or validation set, and where its documents come from."""

    data: Prepared
    name: str
    dataset: PackedDataset
    tokenizer: Tokenizer
    document_rows: np.ndarray  # (documents,): the line of the ledger that a document is from
    rows: np.ndarray  # (lines of the ledger, 3): file, line, element of an array

    def where(self, document: int) -> str:
        file, line, element = self.rows[self.document_rows[document]].tolist()
        return f"{self.data.facts['files'][file]}:{label(line, element)}"

    def rows_with(self, documents: Sequence[int] | np.ndarray) -> list[int]:
        """The packed rows that hold any of them; none, where those are in the other set."""
        places = np.flatnonzero(np.isin(self.dataset.packing.documents, documents))
        return np.unique(np.searchsorted(self.dataset.packing.starts, places, side="right") - 1).tolist()


def make_report(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """What `inspect_data` shows.

    Args:
        options: row, where, validation and html of its command line.

    Raises:
        UserError: an option names what is not there, or the data are refused.
    """
    path, seq_len = config.tokenizer_path(), config.training.seq_len
    name = "validation" if options.validation else "train"
    try:
        data = prepare_run(config, None)
    except RefusedData as refused:
        if not options.where:
            raise
        lines = _ledger_lines(refused.ledger, options.where)  # its own line's reason is what was asked for
        raise UserError("\n".join(f"{line['where']}: {line['status']}: {line['reason']}" for line in lines)) from None
    dataset = data.validation if options.validation else data.train
    if dataset is None:
        raise UserError("--validation: there is no such set; set data.validation_path or data.validation_fraction")
    origin = [np.load(data.folder / f"{kind}.npy", mmap_mode="r") for kind in ("document_rows", "rows")]
    shown = _Set(data, name, dataset, load_tokenizer(path), *origin)
    report: dict[str, Any] = {"set": name, "seq_len": seq_len, **data.facts["sets"][name]}
    rows, chosen = _numbers(options.row, len(dataset)), bool(options.row or options.where)
    if options.where:
        report["where"] = _ledger_lines(data.ledger(), options.where)
        for line in report["where"]:
            line["rows"] = shown.rows_with(np.flatnonzero(shown.document_rows == line.pop("number")))
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
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise UserError(f"--row {text}: {part!r} is not a row's number or a range such as 3-5")
        if not int(first) <= int(last or first) < rows:
            raise UserError(f"--row {part}: the rows are 0 to {rows - 1:,}")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def _ledger_lines(ledger: Path, where: str) -> list[dict[str, Any]]:
    """What became of the input line `FILE:LINE`; several where a file is read twice."""
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
    """A packed row as training gets it; columns of one value per token."""
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
        documents.append({"where": shown.where(number), **count, "text": text})
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


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token of a document as readable text: a space is a space, other invisible characters are ↵, ⇥ or ⟨U+00A0⟩.

    Parts of a character are bytes, ⟨F0 9F⟩, and the last one says which: ⟨98 80⟩→😀.
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
    """The text with nothing invisible in it but spaces, and nothing that a terminal would obey."""
    if text.isprintable() and not _OURS.intersection(text):
        return text
    plain = (char.isprintable() and char not in _OURS for char in text)
    return "".join(c if ok else _MARKS.get(c, f"⟨U+{ord(c):04X}⟩") for c, ok in zip(text, plain, strict=True))


# --- the whole set ---


class _Sample(NamedTuple):
    """Documents of the set, end to end; document i is `ids[first[i]:first[i + 1]]`."""

    documents: np.ndarray  # their numbers
    first: np.ndarray  # (documents + 1,)
    ids: np.ndarray  # (tokens,) int64
    supervised: np.ndarray  # (tokens,) bool
    step: int  # every step-th document of the set

    def sums(self, values: np.ndarray) -> np.ndarray:
        """The sum over each document of one value per token."""
        return np.add.reduceat(values, self.first[:-1], dtype=np.float64)

    def starts_of(self, pattern: Sequence[int]) -> np.ndarray:
        """Where these ids stand one after another."""
        size = max(len(self.ids) - len(pattern) + 1, 0) if len(pattern) else 0  # some tokenizers drop some texts
        found = np.ones(size, dtype=bool)
        for offset, token_id in enumerate(pattern):
            found &= self.ids[offset : offset + size] == token_id
        return np.flatnonzero(found)


def _sample(dataset: PackedDataset) -> _Sample:
    documents = np.flatnonzero(np.bincount(dataset.packing.documents))  # np.unique is slow on millions
    starts = dataset.documents.starts
    step = max(1, -(-int((starts[documents + 1] - starts[documents]).sum()) // _SAMPLE_TOKENS))
    documents = documents[::step]
    lengths = starts[documents + 1] - starts[documents]
    first = np.concatenate(([0], np.cumsum(lengths)))
    values = dataset.documents.values[np.repeat(starts[documents] - first[:-1], lengths) + np.arange(first[-1])]
    supervised = (values & 1).astype(bool)
    supervised[first[:-1]] = False  # nothing comes before it that could predict it
    return _Sample(documents, first, (values >> 1).astype(np.int64), supervised, step)


def _summary(config: Config, shown: _Set) -> dict[str, Any]:
    data, sample = shown.data, _sample(shown.dataset)
    statuses, overlong, unrolled = _read_ledger(data.ledger())
    rows_of = {name: status["rows"] for name, status in statuses.items()}
    template = config.model.chat_template or "the tokenizer's own"
    lengths = np.diff(shown.dataset.documents.starts)[shown.dataset.packing.documents]
    shares = sample.sums(sample.supervised) / np.diff(sample.first)
    spread = np.linspace(0, len(shown.dataset) - 1, _PICTURED)
    return {
        "read": data.facts["summary"],
        "warnings": data.facts["warnings"],
        "from": {"tokenizer": config.tokenizer_path(), "chat template": template, "prepared": str(data.folder)},
        "options": _options(config, shown, sample, rows_of, len(overlong), unrolled),
        "ledger": {"path": str(data.ledger()), "statuses": statuses},
        "lengths": _lengths(lengths, overlong, config.training.seq_len),
        "shares": _shares(shares),
        "packing": [_bar(shown.dataset, row) for row in sorted(set(spread.round().astype(int).tolist()))],
        "oddest": _oddest(shown, sample),
        "sampled": sample.step,
    }


def _read_ledger(path: Path) -> tuple[dict[str, dict[str, Any]], np.ndarray, int]:
    """Per status how many rows and the first with a reason; lengths of rows that did not fit; how many are unrolled."""
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


def _options(
    config: Config, shown: _Set, sample: _Sample, rows_of: dict[str, int], overlong: int, unrolled: int
) -> list[dict[str, str]]:
    """The options that decide what is supervised, and what each did, in numbers."""
    encode, counts, data = shown.tokenizer.encode, shown.data.facts["sets"][shown.name], config.data
    behind = sample.starts_of(encode("<|im_start|>assistant")) + len(encode("<|im_start|>assistant")) + 1
    behind = behind[(behind < len(sample.ids)) & ~np.isin(behind, sample.first)]  # else the turn was cut off
    empty = np.isin(behind, sample.starts_of(encode("<think>\n\n</think>")))
    thinking = np.isin(behind, sample.starts_of(encode("<think>"))) & ~empty

    def turns(what: str, chosen: np.ndarray) -> str:
        supervised = int(sample.supervised[behind[chosen]].sum())
        return f"{what}: {supervised:,} supervised, {np.count_nonzero(chosen) - supervised:,} masked"

    share = f"({counts['supervised'] / counts['tokens']:.1%})"
    effects = {
        "loss": f"tokens supervised: {counts['supervised']:,} of {counts['tokens']:,} {share}",
        "empty_think": turns("empty think blocks", empty),
        "earlier_thinking": f"{turns('turns with reasoning', thinking)}; "
        f"{turns('without a think block', ~thinking & ~empty)}; rows unrolled: {unrolled:,}",
        "overlong": f"rows longer than {config.training.seq_len:,} tokens: {overlong:,}",
        "duplicates": f"rows that repeat an earlier one: {rows_of.get('duplicate', 0):,}",
        "on_bad_row": f"rows rejected: {rows_of.get('rejected', 0):,}",
    }
    return [{"option": name, "value": getattr(data, name), "effect": effect} for name, effect in effects.items()]


def _lengths(lengths: np.ndarray, overlong: np.ndarray, seq_len: int) -> list[dict[str, int]]:
    """16 bins up to seq_len for the documents, and doubling beyond it for the rows that did not fit, as they were."""
    edges = np.unique(np.linspace(0, seq_len, 17).round().astype(np.int64)).tolist()
    while overlong.size and edges[-1] < overlong.max():
        edges.append(2 * edges[-1])
    counts = [np.histogram(values - 0.5, edges)[0].tolist() for values in (lengths, overlong)]
    bins = zip([edge + 1 for edge in edges[:-1]], edges[1:], *counts, strict=True)
    return [{"from": low, "to": high, "documents": fit, "overlong": over} for low, high, fit, over in bins]


def _shares(shares: np.ndarray) -> list[dict[str, int]]:
    counts = np.histogram(shares, np.linspace(0, 1, 11))[0].tolist()
    return [{"from": 10 * i, "to": 10 * i + 10, "documents": n, "overlong": 0} for i, n in enumerate(counts)]


def _bar(dataset: PackedDataset, index: int) -> dict[str, Any]:
    """A row drawn into columns, as runs of (columns, document or -1, supervised)."""
    row = dataset.row(index)
    columns = np.arange(COLUMNS) * dataset.seq_len // COLUMNS
    supervised = np.concatenate(([False], row.labels[:-1] != IGNORE))
    pairs = zip(row.document_ids[columns].tolist(), supervised[columns].tolist(), strict=True)
    runs = [[len(list(group)), *pair] for pair, group in groupby(pairs)]
    real = int((row.document_ids != PADDING_DOCUMENT).sum())
    counts = {"documents": len(dataset.documents_of(index)), "tokens": real, "supervised": int(supervised.sum())}
    return {"row": index, **counts, "runs": runs}


def _oddest(shown: _Set, sample: _Sample) -> list[dict[str, Any]]:
    """For each kind of oddity the document that has most of it, if any has."""
    lengths, spells = np.diff(sample.first), [b""] * shown.data.facts["n_vocab"]
    for token_id in np.flatnonzero(np.bincount(sample.ids)).tolist():
        spells[token_id] = shown.tokenizer.token_bytes(token_id)
    continuation = bytes(range(0x80, 0xC0))
    characters = np.array([len(spelled.translate(None, continuation)) for spelled in spells])
    replacement = np.array(["\ufffd".encode() in spelled for spelled in spells])
    shares = sample.sums(sample.supervised) / lengths
    damage = replacement[sample.ids]
    damage[sample.starts_of(shown.tokenizer.encode("\ufffd"))] = True  # where it takes several tokens
    damaged = sample.sums(damage)

    so_far = np.concatenate(([0], np.cumsum(sample.supervised)))
    is_end = sample.supervised & (sample.ids == shown.tokenizer.eos_token_id)
    behind_end = np.maximum.reduceat(np.where(is_end, np.arange(1, len(is_end) + 1), 0), sample.first[:-1])
    endless = so_far[sample.first[1:]] - so_far[np.maximum(behind_end, sample.first[:-1])]
    endless = np.where(endless > 1, endless, 0)  # one may be the line break that the template writes behind it

    document, size = np.repeat(np.arange(len(lengths)), lengths), len(spells)
    pairs = np.sort((document[1:] * size + sample.ids[:-1]) * size + sample.ids[1:])
    distinct = pairs[np.diff(pairs, prepend=-1) > 0] // size**2
    repeated = 1 - np.bincount(distinct, minlength=len(lengths)) / lengths
    kinds: list[tuple[str, np.ndarray]] = [
        ("longest: {:,.0f} tokens", lengths),
        ("shortest: {:,.0f} tokens", -lengths),
        ("least supervised: {:.1%}", -shares),
        ("most supervised: {:.1%}", shares),
        (
            f"no end token behind its last {{:,.0f}} supervised; documents with such: {np.count_nonzero(endless):,}",
            endless,
        ),
        (f"damaged: {{:,.0f}} times U+FFFD; documents with such: {np.count_nonzero(damaged):,}", damaged),
        ("most tokens per character: {:.2f}", lengths / sample.sums(characters[sample.ids]).clip(1)),
        ("most repetitive: {:.0%} of its pairs of tokens came before", repeated),
    ]
    found: dict[int, dict[str, Any]] = {}
    for kind, scores in kinds:
        place = int(np.argmax(scores))
        if scores[place] and place not in found:
            number, excerpt = int(sample.documents[place]), _excerpt(shown.tokenizer, sample, place)
            found[place] = {
                "kinds": [],
                "where": shown.where(number),
                "row": shown.rows_with([number])[0],
                "excerpt": excerpt,
            }
        if scores[place]:
            found[place]["kinds"].append(kind.format(abs(scores[place])))
    return list(found.values())


def _excerpt(tokenizer: Tokenizer, sample: _Sample, place: int) -> list[tuple[str, bool]]:
    """Beginning and end of a document: (text, supervised)."""
    inside = slice(sample.first[place], sample.first[place + 1])
    texts = token_texts(tokenizer, sample.ids[inside].tolist())
    tokens = list(zip(texts, sample.supervised[inside].tolist(), strict=True))
    left_out = [(f" … {len(tokens) - 2 * _EXCERPT:,} tokens … ", False)]
    return tokens if len(tokens) <= 2 * _EXCERPT else tokens[:_EXCERPT] + left_out + tokens[-_EXCERPT:]
