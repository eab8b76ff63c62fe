"""What a model thinks of the documents of prepared data: a folder of parts, each sealed when it is written.

| file | content |
|---|---|
| store.json | what it was made of; `Identity` |
| part-00012-HASH.safetensors | a part, see files/parts.py. Metadata: its number, `Identity.digest`. Arrays: |
| documents, tokens | (d,) int64: numbers of documents of the prepared data, and the learned tokens of each |
| sums | (d,) float64: of a reference: sum of log p over the document's learned tokens |
| ids, log_p | (t, k) int32, float32: of a teacher: the k likeliest ids for each learned token, and their log p, at |
| | temperature 1, the likeliest first; t is the sum of `tokens`. Of sampled answers: k = 1, the learned tokens |

Writer and reader check every array against the documents (`Wanted.judge`). Imports no torch.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from titan_mi100.config.layout import IGNORE
from titan_mi100.data.answers import COLUMNS, TEACHER_IDS, TEACHER_LOG_P
from titan_mi100.data.cache import cached_text, content_hash
from titan_mi100.data.prepared import PackedDataset
from titan_mi100.data.rows import Row
from titan_mi100.errors import UserError
from titan_mi100.files.durable import sha256_of
from titan_mi100.files.parts import STORE, SealedParts
from titan_mi100.files.plain import read_checked, read_object
from titan_mi100.log import log

REFERENCE_SUMS, TEACHER, SAMPLED = "reference", "teacher", "sampler"  # kinds of stores
IMPORT = "import vLLM's answers into a new folder: titan-mi100 teach --from_vllm"
VLLM = "vllm"  # Identity.dtype of an import, whose parts have the documents in their order
FORMAT = 2  # of the folder; 1 had parts without metadata
_OF = "of"  # key of a part's metadata
_ROWS_OF_A_PART = 512  # in every layout alike
_DOCUMENTS_OF_A_PART = 4096  # of an import
ROUNDING = 1e-3  # of log p above 0 and of probabilities above 1, which other programs write
_AT_ONCE = 1 << 16  # documents, or tokens
_OF_SUMS, _OF_TEACHER = {"sums": "float64, 1"}, {"ids": "int32, 2", "log_p": "float32, 2"}  # dtype, dimensions
_LOW_MASS = 0.5  # of the kept ids, on average; a teacher with another tokenizer has next to nothing
_LOOKED_AT = 4  # parts

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Identity:
    """What a store was made of. The layout and the kernel change values by rounding only."""

    kind: str
    weights: str  # of the model
    tokens: str  # hash of the documents' tokens, and of which are learned
    tokenizer: str
    documents: int
    rows: int
    seq_len: int
    k: int  # ids per token; 0: none
    dtype: str
    attention: str = ""
    layout: str = ""
    packing: str = ""  # hash of which documents are in which row
    format: int = FORMAT

    @property
    def part_rows(self) -> int:
        """Rows of a part; of an import: documents."""
        return _DOCUMENTS_OF_A_PART if self.dtype == VLLM else _ROWS_OF_A_PART

    @property
    def parts(self) -> int:
        return -(-self.rows // self.part_rows)

    @property
    def digest(self) -> str:
        """Identifies the store in each of its parts."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


_WORDS = {
    "tokenizer": "another tokenizer", "tokens": "other rows, or other settings of [data]", "weights": "other weights",
    "documents": "other rows", "rows": "other rows", "seq_len": "another seq_len", "k": "another top_k",
    "dtype": "another dtype", "kind": "for another purpose", "packing": "rows that are packed otherwise",
}  # fmt: skip


class Wanted:
    """The rows that a store is about, as far as its arrays must fit them."""

    def __init__(self, sets: Sequence[PackedDataset], vocabulary: int) -> None:
        """Args: sets: share their documents. vocabulary: ids of the tokenizer; those behind are a head's padding."""
        self.sets, self.vocabulary = sets, vocabulary
        table = sets[0].documents
        self.count, learned = len(table.starts) - 1, [np.zeros(0, np.int64)]
        for first in range(0, self.count, _AT_ONCE):
            starts = table.starts[first : first + _AT_ONCE + 1] - table.starts[first]
            bits = (table.values[table.starts[first] :][: starts[-1]] & 1).astype(np.int64)
            bits[starts[:-1]] = 0  # nothing predicts the first token
            learned.append(np.add.reduceat(bits, starts[:-1]))
        self.learned = np.concatenate(learned)
        self.starts = np.cumsum(np.append(0, self.learned))  # of the values of learned tokens
        lengths = np.concatenate([np.diff(rows.packing.starts) for rows in sets])
        self._starts = np.cumsum(np.append(0, lengths))
        self._documents = np.concatenate([rows.packing.documents for rows in sets]).astype(np.int64)
        self.packing = hashlib.sha256(self._starts.tobytes() + self._documents.tobytes()).hexdigest()

    def about(
        self, weights: str, tokenizer: str, k: int, dtype: str, attention: str = "", layout: str = ""
    ) -> Identity:
        """Identify a store of these rows: with k ids per token a teacher's, with 0 a reference's sums."""
        rows, packing = (self.count, VLLM) if dtype == VLLM else (len(self._starts) - 1, self.packing)
        return Identity(
            TEACHER if k else REFERENCE_SUMS, weights, tokens_hash(self.sets), tokenizer, self.count, rows=rows,
            seq_len=self.sets[0].seq_len, k=k, dtype=dtype, attention=attention, layout=layout, packing=packing,
        )  # fmt: skip

    def documents(self, about: Identity, number: int) -> np.ndarray:
        """The documents of a part, in order."""
        first, last = (min(n * about.part_rows, about.rows) for n in (number, number + 1))
        if about.packing == VLLM:
            return np.arange(first, last)
        return self._documents[self._starts[first] : self._starts[last]]

    def judge(self, about: Identity, number: int, arrays: Arrays) -> str:
        """What is wrong with the arrays of a part; "": nothing."""
        actual = {name: f"{array.dtype}, {array.ndim}" for name, array in arrays.items()}
        expected = {"documents": "int64, 1", "tokens": "int64, 1"} | (_OF_TEACHER if about.k else _OF_SUMS)
        if actual != expected:
            return f"does not hold {', '.join(expected)} in their dtypes"
        documents, tokens = arrays["documents"], arrays["tokens"]
        if documents.size and not (documents.min() >= 0 and documents.max() < self.count):
            return f"names documents that are none of the {self.count:,}"
        if about.packing in (VLLM, self.packing) and not np.array_equal(documents, self.documents(about, number)):
            return "has documents that are not those of its rows"
        if not np.array_equal(tokens, self.learned[documents]):
            return "has other numbers of learned tokens than its documents"
        if not about.k:
            is_sound = len(arrays["sums"]) == len(documents) and _is_log(arrays["sums"])
            return "lacks a sum of log p, or has one above 0 or not finite" * (not is_sound)
        ids, log_p = arrays["ids"], arrays["log_p"]
        if not ids.shape == log_p.shape == (tokens.sum(), about.k):
            return f"has ids {ids.shape} and log_p {log_p.shape} for {tokens.sum():,} tokens and k = {about.k}"
        for first in range(0, len(ids), _AT_ONCE):
            part, own = ids[first : first + _AT_ONCE], log_p[first : first + _AT_ONCE]
            if not (part.min() >= 0 and part.max() < self.vocabulary):
                return f"has ids that are none of the tokenizer's {self.vocabulary:,}"
            if (np.diff(np.sort(part, 1), axis=1) == 0).any():
                return "has an id twice for one token"
            if not _is_log(own):
                return "has a log p above 0 or not finite"
            if (np.diff(own, axis=1) > 0).any():
                return "has ids of which the likeliest are not first"
            if (mass := _mass(own).max()) > 1 + ROUNDING:
                return f"has probabilities that sum to {mass:.4g} for one token"
        return ""


def _is_log(log_p: np.ndarray) -> bool:
    """Whether all can be logarithms of probabilities that are not zero."""
    return bool(np.isfinite(log_p).all() and (log_p <= ROUNDING).all())


def _mass(log_p: np.ndarray) -> np.ndarray:
    """The sum of the kept probabilities of each token, (t,) fp64."""
    return np.exp(log_p.astype(np.float64)).sum(1)  # type: ignore[no-any-return]


class LogprobStore(SealedParts):
    """Opens a store, or begins it."""

    about: Identity

    def __init__(self, folder: Path, about: Identity, remedy: str, only: Sequence[str] = tuple(_WORDS)) -> None:
        """Args: about: what is wanted. remedy: if it differs. only: the fields of `Identity` that must not.

        Raises:
            UserError: the folder is a store of something else, holds parts that are none of it, or cannot be read.
        """
        self.remedy, self._only = remedy, only
        super().__init__(folder, about, "safetensors")

    def read_about(self) -> Identity:
        path, expected = self.folder / STORE, self.about
        version = read_object(path, self.remedy).get("format", 1)
        if version != FORMAT:
            age = "a newer" if isinstance(version, int) and version > FORMAT else "an older"
            raise UserError(f"{path}: has {age} format than this version's, {FORMAT}; {self.remedy}")
        about: Identity = read_checked(path, Identity, self.remedy)
        kinds = (TEACHER, *[SAMPLED] * (about.k == 1)) if about.k else (REFERENCE_SUMS,)
        if about.k > 1 << 20 or about.kind not in kinds:
            raise UserError(f"{path}: kind = {about.kind!r} and k = {about.k} do not fit each other; {self.remedy}")
        if wrong := [name for name in _WORDS if name in self._only and getattr(about, name) != getattr(expected, name)]:
            raise UserError(f"{self.folder}: was made of {_WORDS[wrong[0]]}; {self.remedy}")
        return about

    def write(self, number: int, arrays: Arrays, wanted: Wanted) -> None:
        """Seal a part: its name, with its hash, appears when all of it is on the disk.

        Raises:
            UserError: the arrays are not what they must be, or cannot be written.
        """
        from safetensors.numpy import save  # not save_file, whose error is no OSError

        if problem := wanted.judge(self.about, number, arrays):
            remedy = "ask again, or compute with --training.mixed_precision_param float32"
            raise UserError(f"{self.folder}: part {number} is not written, as it {problem}; {remedy}")
        metadata = {_OF: self._mark(number)}  # a single one: safetensors writes several in any order
        content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()}, metadata)
        self.seal(number, content)

    def _mark(self, number: int) -> str:
        """What a part's metadata say."""
        return f"part {number} of {self.about.digest}"

    def verify(self, wanted: Wanted, cache: Path | None = None) -> None:
        """Compare every part with its hash, with the store and with the documents.

        Args:
            cache: remembers hashes and judgements of unchanged files; None: read them again.

        Raises:
            UserError: a part is damaged, of another store, or holds what cannot be.
        """
        again = "make it again: titan-mi100 teach" if self.about.kind == TEACHER else "start again: it is made anew"
        remedy = IMPORT if self.about.dtype == VLLM else f"delete it, and {again}"

        def hash_of(path: Path) -> str:
            return content_hash(path, cache)[0] if cache else sha256_of(path)

        for number, path in self.parts.items():
            digest = self.check_hash(number, remedy, hash_of)
            depends = [FORMAT, digest, number, self.about.digest, wanted.packing, wanted.vocabulary]
            judged = partial(self._judged, number, wanted)
            if problem := cached_text(cache / "answers", depends, judged) if cache else judged():
                raise UserError(f"{path}: {problem}; {remedy}")

    def _judged(self, number: int, wanted: Wanted) -> str:
        from safetensors import SafetensorError

        try:
            return wanted.judge(self.about, number, self.load(number))
        except UserError as error:
            return str(error)
        except (SafetensorError, OSError, TypeError, ValueError, KeyError) as error:  # such as a dtype that numpy lacks
            return f"cannot be read as a part ({type(error).__name__}: {error})"

    def load(self, number: int) -> Arrays:
        """Raises UserError: it is no part of this store with this number."""
        file = self.open(number)
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict

    def open(self, number: int) -> Any:
        """The part's file, see safetensors.safe_open. Raises as `load` does."""
        from safetensors import safe_open

        file = safe_open(self.parts[number], framework="np")
        if (file.metadata() or {}).get(_OF) != self._mark(number):
            raise UserError("was written for another folder or as another part")
        return file

    def warn_of_mass(self) -> None:
        """Warn of a teacher whose ids have little probability."""
        kept = [_mass(self.load(number)["log_p"]) for number in itertools.islice(self.parts, _LOOKED_AT)]
        mass = np.concatenate(kept).mean() if sum(map(len, kept)) else 1.0
        if mass < _LOW_MASS:
            problem = f"the {self.about.k} ids kept per token have {mass:.4f} of the teacher's probability"
            log.warning(f"teacher: {problem}: is it a model for these texts and ids? else raise --top_k")


def placed(parts: Iterable[Arrays], starts: np.ndarray) -> np.ndarray:
    """The sums of documents, or log p of their sampled tokens, as one fp64 array; NaN of a document that is in no row.

    Args:
        starts: (documents + 1,): where each document's values begin.
    """
    flat = np.full(starts[-1], np.nan)
    for arrays in parts:
        first, counts = starts[arrays["documents"]], np.diff(starts)[arrays["documents"]]
        index = np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        flat[index] = arrays["sums"] if "sums" in arrays else arrays["log_p"][:, 0]
    return flat


class Teacher:
    """A complete store's distributions, read when a row needs them."""

    def __init__(self, store: LogprobStore) -> None:
        self._files = [store.open(number) for number in store.parts]
        self._place = np.full((store.about.documents, 3), -1, dtype=np.int64)  # part, first token, number of tokens
        for part, file in enumerate(self._files):
            documents, tokens = file.get_tensor("documents"), file.get_tensor("tokens")
            first = np.cumsum(tokens) - tokens
            self._place[documents] = np.column_stack([np.full(len(documents), part), first, tokens])

    def lacks(self, documents: np.ndarray) -> int:
        """How many of these documents it has nothing about."""
        return int((self._place[documents, 0] < 0).sum())

    def read(self, name: str, document: int) -> np.ndarray:
        """`ids` or `log_p` of a document's learned tokens, (t, k)."""
        part, first, count = self._place[document].tolist()
        return self._files[part].get_slice(name)[first : first + count]  # type: ignore[no-any-return]


Column = Callable[[np.ndarray, Row], np.ndarray]  # (numbers of the row's documents, row) -> (seq_len, ...)


class WithColumns(PackedDataset):
    """Rows that have further arrays."""

    def __init__(self, rows: PackedDataset, columns: Mapping[str, Column]) -> None:
        """Args: columns: by name; the mapping may be filled later."""
        super().__init__(rows.documents, rows.packing, rows.seq_len, rows.pad_id)
        self._rows, self._columns = rows, columns

    def row(self, index: int) -> Row:
        row, documents = self._rows.row(index), self.documents_of(index)
        return row._replace(more={**row.more, **{name: make(documents, row) for name, make in self._columns.items()}})


def by_document(values: np.ndarray) -> Column:
    """Values of the row's documents, (seq_len,): of document d of the row at d."""

    def column(documents: np.ndarray, row: Row) -> np.ndarray:
        padded: np.ndarray = np.zeros(len(row.labels), dtype=values.dtype)
        padded[: len(documents)] = values[documents]
        return padded

    return column


class ByLearnedToken:
    """Values of the learned tokens, at the tokens that predict them, (seq_len,): the `Column` of a flat array.

    Attributes:
        values: of all documents, one after the other, each with those of its learned tokens.
        starts: (documents + 1,): where each document's begin.
    """

    def __init__(self, values: np.ndarray, starts: np.ndarray) -> None:
        self.values, self.starts = values, starts

    def __call__(self, documents: np.ndarray, row: Row) -> np.ndarray:
        own = [self.values[self.starts[number] : self.starts[number + 1]] for number in documents.tolist()]
        return _where_predicted(row, self.values[:0], own)


def _where_predicted(row: Row, empty: np.ndarray, own: Sequence[np.ndarray]) -> np.ndarray:
    """Values of the documents' learned tokens, at the tokens that predict them, (seq_len, ...). Args: empty: none."""
    padded: np.ndarray = np.zeros((len(row.labels), *empty.shape[1:]), dtype=empty.dtype)
    padded[row.labels != IGNORE] = np.concatenate([empty, *own])
    return padded


def teacher_columns(store: LogprobStore, sets: Iterable[PackedDataset]) -> dict[str, Column]:
    """A teacher's arrays, (seq_len, k). Raises UserError: a document of a row is not in the store."""
    teacher = Teacher(store)
    if lacking := sum(teacher.lacks(rows.packing.documents) for rows in sets):
        problem = f"has nothing about {lacking:,} documents of the rows, which other settings of [data] left out"
        raise UserError(f"{store.folder}: {problem}; {store.remedy}")

    def column(name: str, dtype: str) -> Column:
        empty = np.zeros((0, store.about.k), dtype)
        return lambda documents, row: _where_predicted(row, empty, [teacher.read(name, n) for n in documents.tolist()])

    return {TEACHER_IDS: column("ids", COLUMNS[TEACHER_IDS]), TEACHER_LOG_P: column("log_p", COLUMNS[TEACHER_LOG_P])}


def tokens_hash(tables: Iterable[PackedDataset]) -> str:
    """A hash of the tokens of prepared data and of which are learned. Args: tables: its sets; they share documents."""
    digest = hashlib.sha256()
    [documents, *_] = [rows.documents for rows in tables]
    digest.update(np.ascontiguousarray(documents.starts).tobytes())
    for start in range(0, len(documents.values), 1 << 24):
        digest.update(np.ascontiguousarray(documents.values[start : start + (1 << 24)]).tobytes())
    return digest.hexdigest()
