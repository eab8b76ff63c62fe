"""What a model thinks of the documents of prepared data: a folder of parts, each sealed when it is written.

| file | content |
|---|---|
| store.json | what it was made of; `About` |
| part-00012-HASH.safetensors | a part; HASH begins its SHA-256. Arrays: |
| documents, tokens | (d,) int64: numbers of documents of the prepared data, and the learned tokens of each |
| sums | (d,) float64: of a reference: sum of log p over the document's learned tokens |
| ids, log_p | (t, k) int32, float32: of a teacher: the k likeliest ids for each learned token, and their log p, at |
| | temperature 1, the likeliest first; t is the sum of `tokens` |

Imports no torch.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from titan_mi100.config.layout import IGNORE
from titan_mi100.data.answers import TEACHER_IDS, TEACHER_LOG_P
from titan_mi100.data.cache import content_hash
from titan_mi100.data.prepared import PackedDataset
from titan_mi100.data.rows import Row
from titan_mi100.errors import UserError
from titan_mi100.files.durable import replace, sha256_of, sync
from titan_mi100.files.plain import plain_path, read_checked

STORE = "store.json"
_PART = re.compile(r"part-(\d{5})-([0-9a-f]{16})\.safetensors")
_ROWS_OF_A_PART = 512  # in every layout alike

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class About:
    """What a store was made of. The layout and the kernel change values by rounding only."""

    kind: str  # "reference" or "teacher"
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

    @property
    def part_rows(self) -> int:
        return _ROWS_OF_A_PART

    @property
    def parts(self) -> int:
        return -(-self.rows // self.part_rows)


_WORDS = {
    "tokenizer": "another tokenizer", "tokens": "other rows, or other settings of [data]", "weights": "other weights",
    "documents": "other rows", "rows": "other rows", "seq_len": "another seq_len", "k": "another top_k",
    "dtype": "another dtype", "kind": "for another purpose",
}  # fmt: skip


class AnswerStore:
    """Opens a store, or begins it. `parts` are the paths of those that are complete, by number."""

    def __init__(self, folder: Path, about: About, remedy: str, only: Sequence[str] = tuple(_WORDS)) -> None:
        """Args: about: what is wanted. remedy: if it differs. only: the fields of `About` that must not.

        Raises:
            UserError: the folder is a store of something else, or cannot be read.
        """
        self.folder, self.remedy = folder, remedy
        if (folder / STORE).exists():
            self.about = read_checked(folder / STORE, About, remedy)
            if wrong := [name for name in _WORDS if name in only and getattr(self.about, name) != getattr(about, name)]:
                raise UserError(f"{folder}: was made of {_WORDS[wrong[0]]}; {remedy}")
        else:
            self.about = about
        self.parts = dict[int, Path]()
        for path in sorted(folder.glob("part-*.safetensors")):
            if found := _PART.fullmatch(path.name):
                self.parts[int(found[1])] = path

    def begin(self) -> None:
        """Write what it is made of. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace(self.folder / STORE, json.dumps(asdict(self.about), indent=1))

    @property
    def is_complete(self) -> bool:
        return len(self.parts) == self.about.parts

    def write(self, number: int, arrays: Arrays) -> None:
        """Seal a part: its name, with its hash, appears when all of it is on the disk. Raises OSError."""
        from safetensors.numpy import save  # not save_file, whose error is no OSError

        aside = self.folder / f".part-{number:05}"
        aside.write_bytes(save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))
        sync(aside)
        path = self.folder / f"part-{number:05}-{sha256_of(aside)[:16]}.safetensors"
        aside.rename(path)
        sync(self.folder)
        self.parts[number] = path

    def verify(self, cache: Path | None = None) -> None:
        """Compare every part with its hash. Args: cache: see cache.content_hash; None: hash them again.

        Raises:
            UserError: a part is damaged.
        """
        for path in self.parts.values():
            digest = sha256_of(plain_path(path)) if cache is None else content_hash(plain_path(path), cache)[0]
            if digest[:16] != _PART.fullmatch(path.name)[2]:  # type: ignore[index]
                raise UserError(f"{path}: is damaged; delete it, and start again: it is made anew")

    def load(self, number: int) -> Arrays:
        from safetensors.numpy import load_file

        return load_file(self.parts[number])  # type: ignore[no-any-return]

    def sums(self) -> np.ndarray:
        """(documents,) fp64; NaN of a document that is in no row."""
        found = np.full(self.about.documents, np.nan)
        for arrays in map(self.load, self.parts):
            found[arrays["documents"]] = arrays["sums"]
        return found


class Teacher:
    """A complete store's distributions, read when a row needs them."""

    def __init__(self, store: AnswerStore) -> None:
        from safetensors import safe_open

        self._files = [safe_open(path, framework="np") for path in store.parts.values()]
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
        found: np.ndarray = np.zeros(len(row.labels), dtype=values.dtype)
        found[: len(documents)] = values[documents]
        return found

    return column


def by_token(teacher: Teacher, name: str, k: int, dtype: type) -> Column:
    """A teacher's arrays at the tokens that predict the learned ones, (seq_len, k)."""

    def column(documents: np.ndarray, row: Row) -> np.ndarray:
        found: np.ndarray = np.zeros((len(row.labels), k), dtype=dtype)
        learned = np.flatnonzero(row.labels != IGNORE)
        if len(learned):
            found[learned] = np.concatenate([teacher.read(name, number) for number in documents.tolist()])
        return found

    return column


def teacher_columns(store: AnswerStore, sets: Iterable[PackedDataset]) -> dict[str, Column]:
    """Raises UserError: a document of a row is not in the store."""
    teacher, k = Teacher(store), store.about.k
    if lacking := sum(teacher.lacks(rows.packing.documents) for rows in sets):
        what = f"has nothing about {lacking:,} documents of the rows, which other settings of [data] left out"
        raise UserError(f"{store.folder}: {what}; {store.remedy}")
    return {
        TEACHER_IDS: by_token(teacher, "ids", k, np.int32),
        TEACHER_LOG_P: by_token(teacher, "log_p", k, np.float32),
    }


def tokens_hash(tables: Iterable[PackedDataset]) -> str:
    """A hash of the tokens of prepared data and of which are learned. Args: tables: its sets; they share documents."""
    digest = hashlib.sha256()
    [documents, *_] = [rows.documents for rows in tables]
    digest.update(np.ascontiguousarray(documents.starts).tobytes())
    for start in range(0, len(documents.values), 1 << 24):
        digest.update(np.ascontiguousarray(documents.values[start : start + (1 << 24)]).tobytes())
    return digest.hexdigest()
