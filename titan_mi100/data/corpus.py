"""A corpus: tokenised documents in shards, made by `prepare_corpus`, of any size. Its rows are read where they lie.

A shard is a file of uint32 values, `2 * id + first`: `first` marks a document's first token, so a row is read without
an index. Row r of a shard holds its tokens from r * seq_len on; all are predicted but a document's first and the row's.
So a row takes no bytes beside its own: with 1,024 tokens or a multiple whole pages.

| file | |
|---|---|
| plan.json | settings and input files, cut into units: a shard is made of each |
| shards/000/000123.bin | the values of a shard |
| shards/000/000123.origins.npy | of each document its first token and its line, (documents, 2) int64 |
| shards/000/000123.json | counts and hashes, written when the shard is complete |
| corpus.json | the same of all shards, written when all are complete |
| ledger.csv, bad_rows.csv | for people: counts of each file; rows that were left out |
"""

import functools
import hashlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan_mi100.config.assets import CORPUS
from titan_mi100.config.layout import IGNORE
from titan_mi100.data.prepared import PADDING_DOCUMENT, PADDING_ROW, Row
from titan_mi100.errors import UserError
from titan_mi100.files.plain import parse_object, read_plain
from titan_mi100.files.schema import checked

FORMAT = 1
VALUE = np.dtype("<u4")
LARGEST_MANIFEST = 2**30  # bytes; of 60,000 shards: 20 MB
_WINDOW = 2**16  # rows that are shuffled among themselves; those of a window are read from a few shards
_FILE = 32  # bit of an origin from which on it is the file's number
_OPEN = 64  # shards that are mapped at a time


@dataclass(frozen=True)
class Shard:
    """A complete shard, as its .json and corpus.json say."""

    tokens: int
    documents: int
    lines: int  # of input that were read for it
    text_bytes: int  # UTF-8 bytes of its documents
    bad: dict[str, int]  # rows that were left out, by kind
    sha256: dict[str, str]  # of its files, by suffix


@dataclass(frozen=True)
class Unit:
    """What a shard is made of: whole files, or the lines of one file that begin in a span of bytes."""

    first: int  # number of the file
    stop: int  # number of the file after the last
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Corpus:
    """corpus.json. What there is of each shard is a list of numbers: of 60,000 shards they are read in no time."""

    format: int
    key: str  # hash of the plan
    content: str  # hash of the shards' hashes
    tokenizer: str  # fingerprint
    n_vocab: int
    pad_id: int
    bos: str
    eos: str
    files: list[str]
    first_files: list[int]  # of each shard's unit
    tokens: list[int]
    documents: list[int]
    lines: list[int]


def read_corpus(folder: Path) -> tuple[Corpus, str]:
    """What corpus.json says, and its SHA-256. Raises UserError: it is missing, or not what prepare_corpus wrote."""
    remedy = "finish python -m titan_mi100.prepare_corpus, or copy the folder again"
    path = folder / CORPUS
    try:
        content = read_plain(path, LARGEST_MANIFEST)
        corpus: Corpus = checked(parse_object(content, path, remedy), Corpus)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; {remedy}") from None
    except ValueError as error:
        raise UserError(str(error) if isinstance(error, UserError) else f"{path}: {error}; {remedy}") from None
    columns = (corpus.first_files, corpus.tokens, corpus.documents, corpus.lines)
    if corpus.format != FORMAT or len({*map(len, columns)}) != 1 or not any(corpus.tokens):
        raise UserError(f"{path}: is no corpus of this version, or an empty one; prepare it again")
    return corpus, hashlib.sha256(content).hexdigest()


def shard_path(folder: Path, number: int, suffix: str) -> Path:
    """A file of a shard; a thousand shards share a folder."""
    return folder / "shards" / f"{number // 1000:03}" / f"{number:06}.{suffix}"


def lines_before(first_files: Sequence[int], lines: Sequence[int], number: int) -> int:
    """Lines of a shard's file before those of the shard. Args: by shard: its first file; lines that were read."""
    count = 0
    for i in range(number - 1, -1, -1):
        if first_files[i] != first_files[number]:
            break
        count += lines[i]
    return count


def origin(file: int, line: int) -> int:
    """Both as one number; the line counts from the shard's first."""
    return file << _FILE | line


class CorpusRows:
    """Consecutive rows of a corpus, in the order of its shards; a shard's last row is filled up with padding.

    Args:
        rows: the numbers of the first and of the row after the last; see `split`.
        concatenated: documents of a row see each other, as in a classic stream; else a piece of a document at a row's
            edge is a document of its own.
    """

    def __init__(self, folder: Path, corpus: Corpus, seq_len: int, rows: range, concatenated: bool) -> None:
        self.folder, self.corpus, self.seq_len, self.concatenated = folder, corpus, seq_len, concatenated
        self._rows = rows
        per_shard = -(-np.array(corpus.tokens, dtype=np.int64) // seq_len)
        self._starts = np.concatenate(([0], np.cumsum(per_shard)))  # (shards + 1,): each one's first row
        edges = np.clip(self._starts, rows.start, rows.stop) - rows.start
        self._sizes = np.diff(edges)  # of each shard the rows that belong to these
        self._own_starts = edges[:-1]
        # Of a step a rank reads rows of few epochs and windows; threads share what was worked out.
        self._shards_of = functools.lru_cache(2)(self._shuffle_shards)
        self._window_of = functools.lru_cache(4)(self._shuffle_window)
        self._values_of = functools.lru_cache(_OPEN)(self._map)

    @staticmethod
    def split(corpus: Corpus, seq_len: int, validation: float) -> tuple[range, range]:
        """The numbers of the rows to train on, and of the first ones, to validate on: this share of them, at least one
        unless it is 0.
        """
        rows = sum(-(-tokens // seq_len) for tokens in corpus.tokens)
        held_out = -int(-validation * rows // 1)
        return range(held_out, rows), range(held_out)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def tokens(self) -> int:
        """Real tokens in these rows."""
        if not len(self):
            return 0
        first, last = (int(np.searchsorted(self._starts, n, "right")) - 1 for n in (self._rows[0], self._rows[-1]))
        whole = sum(self.corpus.tokens[first : last + 1])
        before = (self._rows.start - int(self._starts[first])) * self.seq_len
        behind = self.corpus.tokens[last] - (self._rows.stop - int(self._starts[last])) * self.seq_len
        return whole - before - max(0, behind)

    def shuffled(self, seed: tuple[int, ...], epoch: int, place: int) -> int:
        """The row at this place of an epoch: shards in random order, then rows at random within windows of them.

        Only a window is ever in memory, not the order of all rows.
        """
        order, ends = self._shards_of(seed, epoch)
        window, within = divmod(place, _WINDOW)
        at = window * _WINDOW + int(self._window_of(seed, epoch, window)[within])
        position = int(np.searchsorted(ends, at, "right"))
        shard = int(order[position])
        return int(self._own_starts[shard]) + at - int(ends[position] - self._sizes[shard])

    def row(self, index: int) -> Row:
        """Row number `index`, or PADDING_ROW."""
        size = self.seq_len
        input_ids = np.full(size, self.corpus.pad_id, dtype=np.int64)
        labels = np.full(size, IGNORE, dtype=np.int64)
        positions = np.arange(size, dtype=np.int64)
        document_ids = np.full(size, PADDING_DOCUMENT, dtype=np.int64)
        if index == PADDING_ROW:
            return Row(input_ids, labels, positions, document_ids)
        shard, start = self._place(index)
        values = self._values_of(shard)(start)
        real = len(values)
        ids, first = (values >> 1).astype(np.int64), (values & 1).astype(bool)
        input_ids[:real] = ids
        labels[: real - 1] = ids[1:]
        if self.concatenated:
            document_ids[:real] = 0
        else:
            labels[: real - 1][first[1:]] = IGNORE
            first[0] = True
            document_ids[:real] = np.cumsum(first) - 1
            positions[:real] -= np.flatnonzero(first)[document_ids[:real]]
        positions[real:] -= real
        return Row(input_ids, labels, positions, document_ids)

    def where(self, index: int) -> list[str]:
        """`file:line` of the documents in a row, each once; of a text file its name. None of PADDING_ROW."""
        if index == PADDING_ROW:
            return []
        shard, start = self._place(index)
        origins = np.load(shard_path(self.folder, shard, "origins.npy"), mmap_mode="r", allow_pickle=False)
        first = max(0, int(np.searchsorted(origins[:, 0], start, "right")) - 1)
        stop = int(np.searchsorted(origins[:, 0], start + self.seq_len, "left"))
        lines = origins[first:stop, 1].tolist()
        files, before = self.corpus.files, lines_before(self.corpus.first_files, self.corpus.lines, shard)
        return list(dict.fromkeys(f"{files[line >> _FILE]}:{before + line % (1 << _FILE)}" for line in lines))

    def _place(self, index: int) -> tuple[int, int]:
        """The shard of a row, and its first token there."""
        number = self._rows[index]
        shard = int(np.searchsorted(self._starts, number, "right")) - 1
        return shard, (number - int(self._starts[shard])) * self.seq_len

    def _map(self, shard: int) -> Callable[[int], np.ndarray]:
        """A function that gives a row's values, (up to seq_len,) uint32, from the place of its first token."""
        path = shard_path(self.folder, shard, "bin")
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise OSError(f"{path}: cannot be read: {error}; copy the corpus again") from None  # maybe on one rank only
        if len(mapped) != self.corpus.tokens[shard] * VALUE.itemsize:
            raise OSError(f"{path}: is not as long as {CORPUS} says; copy the corpus again")
        values = np.frombuffer(mapped, VALUE)
        # Rows are read at random: the system is not to read ahead by itself, but a whole row at once.
        mapped.madvise(mmap.MADV_RANDOM)

        def read(start: int) -> np.ndarray:
            begin, end = start * VALUE.itemsize, min((start + self.seq_len) * VALUE.itemsize, len(mapped))
            page = begin - begin % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_WILLNEED, page, end - page)
            return values[start : start + self.seq_len]

        return read

    def _shuffle_shards(self, seed: tuple[int, ...], epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The order of the shards in an epoch, and where each ends, in rows."""
        order = _random(*seed, epoch).permutation(len(self._sizes))
        return order, np.cumsum(self._sizes[order])

    def _shuffle_window(self, seed: tuple[int, ...], epoch: int, window: int) -> np.ndarray:
        return _random(*seed, epoch, window).permutation(min(_WINDOW, len(self) - window * _WINDOW))


def _random(*seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
