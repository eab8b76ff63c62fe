"""Opens a prepared folder: its packed rows (`PackedDataset`) and its facts (`meta.json`, written last).

A set holds what one source trains or validates on: `train` and `validation`; with several sources `train-0`, ...

| file | content |
|---|---|
| tokens.bin | uint32 values of all documents, concatenated |
| documents.npy | index of each document's first value |
| lines.npy, document_lines.npy | the `Origins` of the documents |
| labels.npy | preferences only: 1 (wanted) or -1 of each document |
| SET_starts.npy, SET_documents.npy | the `Packing` of each set |
| ledger.csv | the outcome of every input row, for people |
| meta.json | facts, and the hashes of all other files |
"""

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from titan_mi100.data.cache import DamagedFolder, content_hash
from titan_mi100.data.files import label
from titan_mi100.data.packing import Packing
from titan_mi100.data.rows import Row, packed_row
from titan_mi100.errors import UserError
from titan_mi100.files.durable import replace, sha256_of
from titan_mi100.files.plain import parse_object, plain_path, read_plain
from titan_mi100.files.schema import validated

PADDING_ROW = -1  # index of a row without documents; such rows fill the last step of an epoch

_META = "meta.json"


class Origins(NamedTuple):
    """Where documents come from in the input. Ledger lines count from 0, without the header."""

    files: Sequence[str]
    lines: np.ndarray  # (ledger lines, 3) int64: index of the file, line, element of a JSON array or 0
    document_lines: np.ndarray  # (documents,) int64: the ledger line of each document

    def where(self, document: int) -> str:
        """The document's `file:line`."""
        file, line, element = self.lines[self.document_lines[document]].tolist()
        return f"{self.files[file]}:{label(line, element)}"


@dataclass(frozen=True)
class DocumentTable:
    """Tokenised documents, concatenated: document d is `values[starts[d]:starts[d + 1]]`."""

    values: np.ndarray  # (tokens,) uint32, as made by encode.document_values
    starts: np.ndarray  # (documents + 1,) int64
    origins: Origins | None = None  # None: synthetic, for a test or a benchmark
    labels: np.ndarray | None = None  # (documents,) int8, of preferences

    def __getitem__(self, number: int) -> np.ndarray:
        return self.values[self.starts[number] : self.starts[number + 1]]


class RowSet(Protocol):
    """The rows of one source, indexed from 0."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row:
        """Row number `index`, or PADDING_ROW."""

    def where(self, index: int) -> list[str]:
        """`file:line` of the documents in a row, each once; empty for PADDING_ROW."""

    def shuffled(self, seed: tuple[int, ...], epoch: int, place: int) -> int:
        """The row at `place` (from 0) of an epoch. An epoch is a permutation of all rows."""


class PackedDataset:
    """A `RowSet`: the rows of a packing plan, built from their documents when they are read."""

    def __init__(self, documents: DocumentTable, packing: Packing, seq_len: int, pad_id: int) -> None:
        self.documents, self.packing = documents, packing
        self.seq_len, self.pad_id = seq_len, pad_id
        self._order_of = functools.lru_cache(2)(self._shuffle)  # two epochs: reading ahead crosses an epoch's end

    def shuffled(self, seed: tuple[int, ...], epoch: int, place: int) -> int:
        return int(self._order_of(seed, epoch)[place])

    def _shuffle(self, seed: tuple[int, ...], epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence((*seed, epoch)))).permutation(len(self))

    def __len__(self) -> int:
        return len(self.packing.starts) - 1

    def documents_of(self, index: int) -> np.ndarray:
        """The numbers of the documents in a row, from left to right; empty for PADDING_ROW."""
        start, stop = self.packing.starts[index : index + 2] if index >= 0 else (0, 0)
        return self.packing.documents[start:stop]

    def where(self, index: int) -> list[str]:
        """`file:line` of the documents in a row, each once; empty for PADDING_ROW."""
        assert self.documents.origins is not None
        return list(dict.fromkeys(map(self.documents.origins.where, self.documents_of(index).tolist())))

    def row(self, index: int) -> Row:
        """Build row `index`, or the row of padding for PADDING_ROW."""
        documents = [self.documents[number] for number in self.documents_of(index)]
        values = np.concatenate([np.zeros(0, dtype=np.uint32), *documents])
        first = np.zeros(len(values), dtype=bool)
        first[np.cumsum([0, *map(len, documents)])[:-1]] = True
        return packed_row(values >> 1, (values & 1).astype(bool), first, self.seq_len, self.pad_id)


@dataclass(frozen=True)
class SetFacts:
    """Counts of one set per epoch. A document that occurs twice in an epoch counts twice."""

    documents: int
    tokens: int
    supervised: int  # tokens with a loss
    supervised_bytes: int  # UTF-8 bytes of these tokens
    rows: int

    def supervised_share(self, seq_len: int) -> float:
        """The share of all positions, including padding, that have a loss."""
        return self.supervised / (self.rows * seq_len)


def total(counts: Collection[SetFacts]) -> SetFacts:
    """The sum of several sets' counts, field by field."""
    return SetFacts(*(sum(getattr(count, name) for count in counts) for name in SetFacts.__dataclass_fields__))


@dataclass(frozen=True)
class DataFacts:
    """What a run needs to know about its data, besides the rows."""

    seq_len: int
    pad_id: int
    n_vocab: int  # tokens of the tokenizer
    tokenizer: str  # fingerprint
    fingerprints: list[str]  # per source: hash of its training rows
    plan: str  # hash of all rows, for training and validation
    files: list[str]
    made_of: dict[str, Any]  # name -> setting or file hash; everything that the rows depend on
    sets: dict[str, SetFacts]  # name of the set -> counts; training sets come first
    summary: list[str]  # lines for the log
    warnings: list[str]
    # How prompts must set the template's variable, to match training. None: the data show neither.
    enable_thinking: bool | None = None
    variables: dict[str, Any] = field(default_factory=dict)  # others of the template that the settings name
    # Added to conversations without a system message; "": none is added. None: the data hold no conversations.
    system_prompt: str | None = None
    # The token that ends a turn, see `ChatTemplate.end_of_turn`, and its id; "": the data hold no conversations.
    end_of_turn: str = ""
    end_of_turn_id: int | None = None
    answers: str = ""  # see ObjectiveConfig.answers


@dataclass(frozen=True)
class SourceRows:
    """The rows of a source, for training or validation."""

    name: str
    rows: RowSet
    counts: SetFacts
    fingerprint: str = ""
    weight: float = 0.0  # share of the mixture's rows; 0: in proportion to its size
    epochs: float = 1.0  # how often it is read before it counts as exhausted

    @property
    def identity(self) -> str:
        """Identifies the source in a mixture: a source with the same name and content resumes where it was."""
        return f"{self.name} {self.fingerprint[:32]}"


@dataclass(frozen=True)
class Prepared:
    """The data of a run: prepared files, corpora, or synthetic rows."""

    folder: Path
    sources: list[SourceRows]
    validation: list[SourceRows]  # empty: no validation
    facts: DataFacts
    cached: bool = True  # whether the folder existed before

    def ledger(self) -> Path:
        return self.folder / "ledger.csv"

    @property
    def train(self) -> RowSet:
        """The rows of the only source; not for mixtures."""
        [source] = self.sources
        return source.rows

    @property
    def train_counts(self) -> SetFacts:
        return total([source.counts for source in self.sources])

    @property
    def validation_counts(self) -> SetFacts:
        """Counts of all validation sets. supervised_bytes is 0 if one is a corpus, whose bytes are not counted."""
        counts = total([source.counts for source in self.validation])
        known = all(source.counts.supervised_bytes for source in self.validation)
        return counts if known else SetFacts(**{**asdict(counts), "supervised_bytes": 0})


class RefusedData(UserError):
    """The files hold records that cannot be used for training. `ledger` is the CSV file that lists every record."""

    def __init__(self, message: str, ledger: Path) -> None:
        super().__init__(message)
        self.ledger = ledger


@dataclass(frozen=True)
class _Meta:
    key: str  # the folder's name
    refused: str  # why the data are refused; "" if there are facts
    seconds: float  # duration of the preparation
    files: dict[str, str]  # name -> SHA-256, of all other files in the folder
    facts: DataFacts | None  # None: refused


def write_meta(folder: Path, key: str, facts: DataFacts | None, refusal: str, seconds: float) -> None:
    """Write `meta.json`. Call it last, because it holds the hashes of all other files. Args: see `_Meta`."""
    assert (facts is None) == bool(refusal)
    files = {file.name: sha256_of(file) for file in sorted(folder.iterdir())}
    meta = asdict(_Meta(key, refusal, seconds, files, facts))
    replace(folder / _META, json.dumps({"sha256": _digest(meta), **meta}, indent=1))


def open_prepared(folder: Path, cache: Path) -> Prepared:
    """Open a prepared folder and compare all its files with their hashes.

    Args:
        cache: keeps the hashes of unchanged files, see `content_hash`.

    Raises:
        RefusedData: the folder holds only the reason why the data are refused.
        DamagedFolder: the folder or one of its files is missing or has changed.
        OSError: the folder cannot be read, so nothing is known about its content.
    """
    try:
        meta = _read_meta(folder)
        _verified_path(folder / "ledger.csv", meta, cache)
        if meta.facts is not None:
            return _open_files(folder, meta.facts, lambda name: _verified_path(folder / name, meta, cache))
    except (FileNotFoundError, NotADirectoryError, ValueError, EOFError, RecursionError) as error:
        raise DamagedFolder(f"{folder}: is damaged: {error}") from None
    raise RefusedData(meta.refused, folder / "ledger.csv")


def _open_files(folder: Path, facts: DataFacts, verified_path: Callable[[str], Path]) -> Prepared:
    """Memory-map the folder's arrays. Args: verified_path: checks a file by its name and returns its path."""

    def load(name: str) -> np.ndarray:
        return np.load(verified_path(f"{name}.npy"), mmap_mode="r", allow_pickle=False)

    def packed(name: str, fingerprint: str = "") -> SourceRows:
        packing = Packing(load(f"{name}_starts"), load(f"{name}_documents"))
        return SourceRows(name, PackedDataset(documents, packing, *shape), facts.sets[name], fingerprint)

    values, shape = np.memmap(verified_path("tokens.bin"), np.uint32, mode="r"), (facts.seq_len, facts.pad_id)
    labels = load("labels") if (folder / "labels.npy").exists() else None
    origins = Origins(facts.files, load("lines"), load("document_lines"))
    documents = DocumentTable(values, load("documents"), origins, labels)
    names, count = list(facts.sets), len(facts.fingerprints)
    train = list(map(packed, names[:count], facts.fingerprints))
    return Prepared(folder, train, list(map(packed, names[count:])), facts)


def _verified_path(path: Path, meta: _Meta, cache: Path) -> Path:
    """Return `path` if the file is as it was written. Raises OSError, ValueError: it is not."""
    if content_hash(plain_path(path), cache)[0] != meta.files.get(path.name):
        raise ValueError(f"{path.name} has changed")
    return path


def _read_meta(folder: Path) -> _Meta:
    """Read meta.json. Raises OSError, ValueError: it is missing, or not as it was written."""
    meta = parse_object(read_plain(folder / _META), _META, "")
    if meta.pop("sha256", "") != _digest(meta) or meta.get("key") != folder.name:
        raise ValueError(f"{_META} has changed")
    return validated(meta, _Meta, _META)  # type: ignore[no-any-return]


def _digest(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()
