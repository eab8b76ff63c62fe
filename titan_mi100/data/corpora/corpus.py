"""A corpus of any size: tokenised documents in shards, made by `prepare_corpus`. Rows are read from mapped shards.

A shard is a file of uint32 values, `2 * id + first`. The bit `first` marks a document's first token, so no index is
needed to read a row. Row r of a shard holds its seq_len tokens from r * seq_len on. Every token is predicted, except
the first token of each document and of the row. A row of 1,024 tokens, or a multiple, fills whole memory pages.

| file | content |
|---|---|
| plan.json | settings and input files, cut into units; each unit becomes one shard. A run reads it only to name one |
| shards/000/000123.bin | the values of a shard |
| shards/000/000123.origins.npy | first token and input line of each document, (documents, 2) int64 |
| shards/000/000123.json | counts and hashes, written when the shard is complete |
| corpus.json | counts and hashes of all shards, written when all shards are complete |
| ledger.csv, bad_rows.csv | for people: counts per file; rows that were left out |
"""

import functools
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan_mi100.data.prepared import PADDING_ROW
from titan_mi100.data.rows import Row, packed_row
from titan_mi100.errors import UserError
from titan_mi100.files.durable import sha256_of
from titan_mi100.files.plain import read_object
from titan_mi100.files.schema import validated
from titan_mi100.text.assets import CORPUS, PLAN

FORMAT = 1  # version of the files; other versions are refused
VALUE = np.dtype("<u4")
LARGEST_MANIFEST = 2**30  # bytes; the manifest of 60,000 shards has 20 MB
# Rows of a shuffle window. A window's rows come from a few shards only, so few files are open at a time, and the order
# of a window fits into memory where the order of all rows of a corpus may not.
_WINDOW = 2**16
_FILE = 32  # an origin holds the file's number from this bit on, the line below
_OPEN = 64  # shards that are memory-mapped at a time


@dataclass(frozen=True)
class Shard:
    """The content of a complete shard's .json."""

    plan: str  # key of the plan that it was made by
    tokens: int
    documents: int
    lines: int  # input lines that were read for it
    text_bytes: int  # UTF-8 bytes of its documents
    bad: dict[str, int]  # kind of problem -> rows that were left out
    sha256: dict[str, str]  # file suffix -> hash


@dataclass(frozen=True)
class Unit:
    """The input of one shard: whole files, or the lines that begin in a byte range of one file."""

    first: int  # number of the first file
    stop: int  # number of the last file + 1
    span: tuple[int, int] | None = None  # bytes [start, stop) of the file; None: whole files


@dataclass(frozen=True)
class Corpus:
    """The content of corpus.json.

    Per-shard facts are lists of numbers, one entry per shard: parsing 60,000 objects would be slow.
    """

    format: int
    key: str  # hash of the plan
    content: str  # hash of the shards' hashes
    tokenizer: str  # fingerprint
    n_vocab: int
    pad_id: int
    bos: str
    eos: str
    first_files: list[int]  # per shard: number of its unit's first file
    tokens: list[int]  # per shard, as are the two below
    documents: list[int]
    lines: list[int]


def read_corpus(folder: Path) -> tuple[Corpus, str]:
    """Read corpus.json. Returns its content and its SHA-256.

    Raises:
        UserError: it is missing, or not as prepare_corpus wrote it.
    """
    remedy = "finish titan-mi100 prepare, or copy the folder again"
    path = folder / CORPUS
    manifest = read_object(path, remedy, LARGEST_MANIFEST)
    manifest.pop("files", None)  # older versions repeated the names that plan.json has
    try:
        corpus: Corpus = validated(manifest, Corpus)
    except ValueError as error:
        raise UserError(f"{path}: {error}; {remedy}") from None
    columns = (corpus.first_files, corpus.tokens, corpus.documents, corpus.lines)
    if corpus.format != FORMAT or len({*map(len, columns)}) != 1 or not any(corpus.tokens):
        raise UserError(f"{path}: was written by another version, or the corpus is empty; prepare it again")
    return corpus, sha256_of(path)


def shard_path(folder: Path, number: int, suffix: str) -> Path:
    """The path of a shard's file. A folder holds 1,000 shards: many file systems are slow with more entries."""
    return folder / "shards" / f"{number // 1000:03}" / f"{number:06}.{suffix}"


def lines_before(first_files: Sequence[int], lines: Sequence[int], number: int) -> int:
    """How many lines of its file come before a shard: lines in a shard are counted from the shard's first.

    Args:
        first_files: per shard: number of its first file.
        lines: per shard: lines that were read.
        number: the shard.
    """
    count = 0
    for i in range(number - 1, -1, -1):
        if first_files[i] != first_files[number]:
            break
        count += lines[i]
    return count


def origin(file: int, line: int) -> int:
    """File number and line as one integer. The line counts from 1 at the beginning of the shard's unit."""
    return file << _FILE | line


class CorpusRows:
    """A range of a corpus's rows, in the order of its shards. A `RowSet`. A shard's last row is padded.

    Args:
        seq_len: tokens per row.
        rows: the range of row numbers; see `split`.
        concatenated: attention crosses document boundaries, as in a classic token stream. Otherwise documents are
            isolated, and a piece of a document that was cut at a row's edge is a document of its own.
    """

    def __init__(self, folder: Path, corpus: Corpus, seq_len: int, rows: range, concatenated: bool) -> None:
        self.folder, self.corpus, self.seq_len, self.concatenated = folder, corpus, seq_len, concatenated
        self._rows = rows
        per_shard = -(-np.array(corpus.tokens, dtype=np.int64) // seq_len)
        self._starts = np.concatenate(([0], np.cumsum(per_shard)))  # (shards + 1,): each shard's first row
        edges = np.clip(self._starts, rows.start, rows.stop) - rows.start
        self._sizes = np.diff(edges)  # (shards,): each shard's rows inside the range
        self._own_starts = edges[:-1]  # (shards,): their first index in the range
        # The rows of one step belong to few epochs and windows, so small caches suffice; reader threads share them.
        self._shards_of = functools.lru_cache(2)(self._shuffle_shards)
        self._window_of = functools.lru_cache(4)(self._shuffle_window)
        self._values_of = functools.lru_cache(_OPEN)(self._map)

    @staticmethod
    def split(corpus: Corpus, seq_len: int, validation: float) -> tuple[range, range]:
        """Row ranges to train on and to validate on. The first rows are held out for validation.

        Args:
            validation: share of the rows to hold out; any share above 0 holds out at least one row.
        """
        rows = sum(-(-tokens // seq_len) for tokens in corpus.tokens)  # each shard's last row is padded
        held_out = -int(-validation * rows // 1)  # rounded up
        return range(held_out, rows), range(held_out)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def tokens(self) -> int:
        """Tokens in these rows, without padding."""
        if not len(self):
            return 0
        # All tokens of the first to the last shard, less those outside the range at both ends.
        first, last = (int(np.searchsorted(self._starts, n, "right")) - 1 for n in (self._rows[0], self._rows[-1]))
        total = sum(self.corpus.tokens[first : last + 1])
        before = (self._rows.start - int(self._starts[first])) * self.seq_len
        behind = self.corpus.tokens[last] - (self._rows.stop - int(self._starts[last])) * self.seq_len
        return total - before - max(0, behind)

    def shuffled(self, seed: tuple[int, ...], epoch: int, place: int) -> int:
        """The row at a place of an epoch: shards in random order, then rows shuffled within windows of that sequence.

        Memory holds the order of a few windows, never that of all rows.
        """
        order, ends = self._shards_of(seed, epoch)
        window, within = divmod(place, _WINDOW)
        at = window * _WINDOW + int(self._window_of(seed, epoch, window)[within])  # in the sequence of shuffled shards
        position = int(np.searchsorted(ends, at, "right"))  # which shard of the sequence holds it
        shard = int(order[position])
        return int(self._own_starts[shard]) + at - int(ends[position] - self._sizes[shard])

    def row(self, index: int) -> Row:
        """Row number `index`, or PADDING_ROW."""
        values = np.zeros(0, dtype=np.int64)
        if index != PADDING_ROW:
            shard, start = self._place(index)
            values = self._values_of(shard)(start)
        first = (values & 1).astype(bool) & (not self.concatenated)
        first[:1] = True  # the row may begin inside a document; that piece is a document of its own
        return packed_row(values >> 1, np.ones(len(values), dtype=bool), first, self.seq_len, self.corpus.pad_id)

    def where(self, index: int) -> list[str]:
        """`file:line` of the documents in a row, each once; `file:1` for a text file. PADDING_ROW has none."""
        if index == PADDING_ROW:
            return []
        shard, start = self._place(index)
        # origins[:, 0] is ascending. The row may begin inside a document, so that document's origin is before `start`.
        origins = np.load(shard_path(self.folder, shard, "origins.npy"), mmap_mode="r", allow_pickle=False)
        first = max(0, int(np.searchsorted(origins[:, 0], start, "right")) - 1)
        stop = int(np.searchsorted(origins[:, 0], start + self.seq_len, "left"))
        lines = origins[first:stop, 1].tolist()
        files, before = self._files, lines_before(self.corpus.first_files, self.corpus.lines, shard)
        places = [(line >> _FILE, before + line % (1 << _FILE)) for line in lines]
        return list(dict.fromkeys(f"{files[file] if files else f'input file {file}'}:{line}" for file, line in places))

    @functools.cached_property
    def _files(self) -> list[str]:
        """Names of the input files. There may be millions, so only a run that has to name one reads them."""
        with suppress(UserError, OSError, KeyError):
            plan = read_object(self.folder / PLAN, "copy the corpus again", LARGEST_MANIFEST)
            return list(plan["plan"]["files"])
        return []  # the corpus was copied without it; a training run must not end for a name in its log

    def _place(self, index: int) -> tuple[int, int]:
        """The shard of a row, and the position of the row's first token in the shard."""
        number = self._rows[index]
        shard = int(np.searchsorted(self._starts, number, "right")) - 1
        return shard, (number - int(self._starts[shard])) * self.seq_len

    def _map(self, shard: int) -> Callable[[int], np.ndarray]:
        """Map a shard into memory.

        Returns:
            A function from the position of a row's first token to the row's values, (up to seq_len,) uint32.

        Raises:
            OSError: the shard cannot be read. No UserError: this may happen on one rank only, in the middle of a run.
        """
        path = shard_path(self.folder, shard, "bin")
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise OSError(f"{path}: cannot be read: {error}; copy the corpus again") from None
        if len(mapped) != self.corpus.tokens[shard] * VALUE.itemsize:
            raise OSError(f"{path}: its length differs from that in {CORPUS}; copy the corpus again")
        values = np.frombuffer(mapped, VALUE)
        # Rows are read in random order. So the kernel's own read-ahead is turned off, and each row is requested as a
        # whole (WILLNEED) instead of one page fault after another.
        mapped.madvise(mmap.MADV_RANDOM)

        def read(start: int) -> np.ndarray:
            begin, end = start * VALUE.itemsize, min((start + self.seq_len) * VALUE.itemsize, len(mapped))
            page = begin - begin % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, page, end - page)
            return values[start : start + self.seq_len]

        return read

    def _shuffle_shards(self, seed: tuple[int, ...], epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the shards in an epoch, and the cumulated number of rows after each, both (shards,)."""
        order = _random(*seed, epoch).permutation(len(self._sizes))
        return order, np.cumsum(self._sizes[order])

    def _shuffle_window(self, seed: tuple[int, ...], epoch: int, window: int) -> np.ndarray:
        return _random(*seed, epoch, window).permutation(min(_WINDOW, len(self) - window * _WINDOW))


def _random(*seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
