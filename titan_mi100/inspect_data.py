"""What really trains: any packed row token by token, and a picture of the whole set. `--help` lists the options.

There is one report, a dict of JSON values, and three views of it: the terminal, `--json` and `--html`. Its rows come
from the `PackedDataset` that training reads. A token is supervised if it is the label of the position before it.
"""

import argparse
import codecs
import csv
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from titan_mi100.config import help_text, load_config
from titan_mi100.data.dataset import PADDING_DOCUMENT, PackedDataset
from titan_mi100.data.ledger import label
from titan_mi100.data.prepare import Prepared, RefusedData, prepare_run
from titan_mi100.data.sft import OVERLONG
from titan_mi100.errors import UserError
from titan_mi100.inspect_page import page
from titan_mi100.layout import IGNORE
from titan_mi100.logging import setup_logging
from titan_mi100.settings import Config
from titan_mi100.tokenizer import Tokenizer, load_tokenizer

_SAMPLE_TOKENS = 1 << 22  # of a larger set every k-th document is looked into, so that time and memory stay bounded
_PAGE_TOKENS = 1 << 15  # in the rows that are shown unasked
_FIRST = 5  # examples of each status in the ledger
_PICTURED, _COLUMNS = 24, 240  # rows of the packing picture, and into how many columns a row is drawn
_EXCERPT = 60  # tokens from each end of an odd document
_MARKS = {"\n": "↵", "\t": "⇥"}
_OURS = set("↵⇥⟨⟩⟦⟧")  # what the views write themselves; in the data they are shown by their number


def main(argv: Sequence[str] | None = None) -> int:
    options, rest = _parser().parse_known_args(argv)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    setup_logging(0)
    try:
        config = load_config(rest, world_size=None)
        with redirect_stdout(sys.stderr):  # progress; what comes to stdout is the report alone
            report = _report(config, options)
        if options.html:
            print(f"{options.html}: {Path(options.html).write_bytes(page(report).encode()):,} bytes")
        elif options.json:
            json.dump(report, sys.stdout, ensure_ascii=False)
            print()
        else:
            auto = options.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
            for line in _lines(report, _Paint(auto or options.color == "always"), options.table):
                print(line)
        sys.stdout.flush()
    except RefusedData as refused:
        print(refused, f"every row: {refused.ledger}", sep="\n", file=sys.stderr)
        return 2
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head` has seen enough; what is still buffered must not raise at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"{error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m titan_mi100.inspect_data",
        usage="%(prog)s --job.config_file X.toml [--section.key value ...] [options]",
        description=__doc__.splitlines()[0],
        epilog="Settings, as for training: those of [data], [model] and training.seq_len count.\n\n"
        + help_text().partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--row", metavar="N", default="", help="packed rows to show, such as 0,7 or 3-5")
    parser.add_argument("--where", metavar="FILE:LINE", default="", help="show the rows that hold this line of input")
    parser.add_argument("--validation", action="store_true", help="the validation set instead of the training set")
    parser.add_argument("--table", action="store_true", help="a line per token: number, id, document, position, text")
    parser.add_argument("--html", metavar="PATH", default="", help="write one self-contained page")
    parser.add_argument("--json", action="store_true", help="for scripts: with --row or --where the rows alone")
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="NO_COLOR is heard, too")
    return parser


# --- what is read ---


@dataclass(frozen=True)
class _Set:
    """The training or validation set, and where its documents come from."""

    data: Prepared
    name: str
    dataset: PackedDataset
    tokenizer: Tokenizer
    document_rows: np.ndarray  # (documents,): the line of the ledger that a document is from
    rows: np.ndarray  # (lines of the ledger, 2): file, line

    def where(self, document: int) -> str:
        file, line, element = self.rows[self.document_rows[document]].tolist()
        return f"{self.data.facts['files'][file]}:{label(line, element)}"

    def rows_with(self, documents: Sequence[int] | np.ndarray) -> list[int]:
        """The packed rows that hold any of them; none, where those are in the other set."""
        places = np.flatnonzero(np.isin(self.dataset.packing.documents, documents))
        return np.unique(np.searchsorted(self.dataset.packing.starts, places, side="right") - 1).tolist()


def _report(config: Config, options: argparse.Namespace) -> dict[str, Any]:
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
    columns = np.arange(_COLUMNS) * dataset.seq_len // _COLUMNS
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


# --- the terminal ---


class _Paint:
    """How the terminal's view tells things apart, with color and without."""

    def __init__(self, color: bool) -> None:
        self._color = color

    def __call__(self, code: str, text: str) -> str:
        """Line by line: a pager forgets the color at a line's end."""
        if not self._color:
            return text
        return "\n".join(f"\033[{code}m{line}\033[0m" if line else "" for line in text.split("\n"))

    def heading(self, text: str) -> str:
        return "\n" + self("1", text)

    def running(self, tokens: Iterable[tuple[str, bool]]) -> str:
        parts = []
        for supervised, group in groupby(tokens, lambda token: token[1]):
            text = "".join(text for text, _ in group)
            parts.append(text if not supervised else self("32", text) if self._color else f"⟦{text}⟧")
        return "".join(parts)


def _lines(report: dict[str, Any], paint: _Paint, table: bool) -> Iterator[str]:
    if "read" in report:
        yield from _summary_lines(report, paint)
    yield from (line["says"] for line in report.get("where", []))
    for row in report["shown"]:
        real = len(row["id"]) - row["padding"]
        yield paint.heading(f"row {row['row']} of {report['set']}: {len(row['documents'])} documents, {real:,} tokens")
        yield "supervised: " + paint.running([("so", True)])
        start = 0
        for place, document in enumerate(row["documents"]):
            count = f"{document['tokens']:,} tokens, {document['supervised']:,} supervised"
            yield paint("1;36", f"── document {place}: {document['where']}: {count} ──")
            inside = range(start, start := start + document["tokens"])
            if not table:
                tokens = ((row["text"][i].replace("↵", "↵\n"), row["supervised"][i]) for i in inside)
                yield paint.running(tokens).removesuffix("\n")
                continue
            yield "   place       id   position  supervised  text"
            for i in inside:
                text, supervised = row["text"][i].replace(" ", "·"), row["supervised"][i]
                line = f"{i:>8} {row['id'][i]:>8} {row['position'][i]:>10}  {'yes' if supervised else '-':<10}  {text}"
                yield paint("32", line) if supervised else line
        if row["padding"]:
            yield paint("2", f"── padding: {row['padding']:,} tokens, id {row['id'][-1]} ──")


def _summary_lines(report: dict[str, Any], paint: _Paint) -> Iterator[str]:
    yield from report["read"]
    yield from (f"{name}: {value}" for name, value in report["from"].items())
    yield from (f"warning: {line}" for line in report["warnings"])
    if report["sampled"] > 1:
        yield f"what counts or compares tokens below looked at one document in {report['sampled']}"
    yield paint.heading("options, and what they do")
    for entry in report["options"]:
        effect = entry["effect"].replace("; ", "\n" + 30 * " ")
        yield f"  {entry['option'] + ' = ' + entry['value']:<27} {effect}"
    yield paint.heading(f"ledger: {report['ledger']['path']}")
    for status, rows in report["ledger"]["statuses"].items():
        yield f"  {status}: {rows['rows']:,}"
        yield from (f"    {visible(first['where'])}: {visible(first['reason'])}" for first in rows["first"])
    yield paint.heading("documents by length (x: rows that did not fit, as they were)")
    yield from _bar_lines(report["lengths"], report["seq_len"])
    yield paint.heading("documents by the percentage of them that is supervised")
    yield from _bar_lines(report["shares"], 0)
    yield paint.heading(f"packing: {len(report['packing'])} of {report['rows']:,} rows; █ supervised, ░ not, · padding")
    for row in report["packing"]:
        columns = "".join(("·" if doc < 0 else "█" if marked else "░") * width for width, doc, marked in row["runs"])
        yield f"  {row['row']:>9,} {columns[:: _COLUMNS // 80]} {row['documents']}"
    yield paint.heading("the oddest documents")
    for odd in report["oddest"]:
        yield f"  {'; '.join(odd['kinds'])}\n    row {odd['row']:,}, {odd['where']}"
        text = odd["excerpt"]
        parts = (text,) if len(text) <= 30 else (text[:20], text[-10:])
        yield "    " + " … ".join(map(paint.running, parts))


def _bar_lines(bins: list[dict[str, int]], seq_len: int) -> Iterator[str]:
    most = max(max(entry["documents"], entry["overlong"]) for entry in bins)
    for entry in bins:
        bar = "█" * -(-50 * entry["documents"] // most) + "x" * -(-50 * entry["overlong"] // most)
        end = "  ─ seq_len" if entry["to"] == seq_len else ""
        yield f"  {entry['from']:>7,}-{entry['to']:<7,} {entry['documents'] or entry['overlong']:>10,} {bar}{end}"


if __name__ == "__main__":
    sys.exit(main())
