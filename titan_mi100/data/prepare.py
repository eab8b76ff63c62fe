"""Prepared data on disk: all files read, checked, tokenised and packed once, the result kept, and none that is stale.

A prepared folder is named by a hash of all that it depends on. It is written aside, synced and renamed: if it is there
it is complete, whoever wrote it. A lock only spares two processes the same work.
"""

import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

import titan_mi100
from titan_mi100.chat_template import ChatTemplate
from titan_mi100.data.dataset import Documents, PackedDataset
from titan_mi100.data.files import expand, file_size
from titan_mi100.data.ledger import Ledger
from titan_mi100.data.packing import Packing, pack_rows
from titan_mi100.data.rows import Format, choose_format
from titan_mi100.data.sft import DUPLICATE, Encoder
from titan_mi100.data.tokenise import Source, tokenise
from titan_mi100.errors import UserError
from titan_mi100.logging import log
from titan_mi100.settings import DataConfig
from titan_mi100.tokenizer import load_tokenizer, tokenizer_files

_CODE = (
    "data/*.py",
    "chat_template.py",
    "traced.py",
    "*tokenizer*.py",
    "rank_file.py",
)  # what decides the contents of a folder
_LIBRARIES = ("tiktoken", "sentencepiece", "jinja2")
_SETTLES_NS = 2_000_000_000  # a file changed so shortly before it was hashed may have changed again with the same time


@dataclass(frozen=True)
class Prepared:
    """A prepared folder, opened."""

    folder: Path
    train: PackedDataset
    validation: PackedDataset | None
    facts: dict[str, Any]  # of meta.json: tokenizer, n_vocab, fingerprint, summary ...
    cached: bool  # it was there

    def ledger(self) -> Path:
        return self.folder / "ledger.csv"


class RefusedData(UserError):
    """The files hold rows that cannot be trained on. `ledger` lists every row."""

    def __init__(self, message: str, ledger: Path) -> None:
        super().__init__(message)
        self.ledger = ledger


def prepare_data(
    config: DataConfig, tokenizer_path: str, chat_template: str, seq_len: int, patience: float = 0
) -> Prepared:
    """Open the prepared folder of these settings and files; make it first if it is not there.

    Args:
        tokenizer_path: HF folder or tokenizer file.
        chat_template: a Jinja file instead of the tokenizer's own template, or "".
        seq_len: tokens per row.
        patience: seconds to leave the work to another process that may be about to begin it.

    Raises:
        RefusedData: bad rows, or nothing to train on; the same again until a file or a setting changes.
        UserError: a file cannot be read, or the cache not be written.
    """
    patterns = expand((*config.path, *config.validation_path))
    cache = _cache_folder(config)
    with _writing(cache):
        cache.mkdir(parents=True, exist_ok=True)
        key = _key(config, patterns, tokenizer_path, chat_template, seq_len, cache)
        folder, cached = cache / key, True
        if not folder.is_dir():
            _wait_for_another(cache, key, patience)
            with _locked(cache / f"{key}.lock") as exclusive:
                if not folder.is_dir():
                    cached = False
                    with _aside(folder, exclusive) as aside:
                        _fill(aside, config, patterns, tokenizer_path, chat_template, seq_len)
                        if _key(config, patterns, tokenizer_path, chat_template, seq_len, cache) != key:
                            raise UserError("a data or tokenizer file changed while it was read; start again")
    return _open(folder, cached)


def _open(folder: Path, cached: bool) -> Prepared:
    facts = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    if facts["refused"]:
        raise RefusedData(facts["refused"], folder / "ledger.csv")
    for name, size in facts["sizes"].items():
        if (found := (folder / name).stat().st_size) != size:
            raise UserError(f"{folder / name}: has {found} bytes, not {size}; remove {folder}, it will be made again")
    documents = Documents(np.memmap(folder / "tokens.bin", np.uint32, mode="r"), _load(folder / "documents.npy"))
    sets = {
        name: PackedDataset(
            documents,
            Packing(_load(folder / f"{name}_starts.npy"), _load(folder / f"{name}_documents.npy")),
            facts["seq_len"],
            facts["pad_id"],
        )
        for name in facts["sets"]
    }
    return Prepared(folder, sets["train"], sets.get("validation"), facts, cached)


def _load(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)


# --- what a folder is named by ---


def _cache_folder(config: DataConfig) -> Path:
    if config.cache_folder:
        return Path(config.cache_folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "titan_mi100"


def _key(
    config: DataConfig,
    patterns: list[list[str]],
    tokenizer_path: str,
    chat_template: str,
    seq_len: int,
    cache: Path,
) -> str:
    """A hash of all that the prepared folder depends on: contents, names (which the ledger shows), options, code."""
    package = Path(titan_mi100.__file__).parent
    code = sorted(file for pattern in _CODE for file in package.glob(pattern))
    settings = tokenizer_files(tokenizer_path) + ([Path(chat_template)] if chat_template else [])
    options = {name: value for name, value in asdict(config).items() if name not in ("cache_folder", "workers")}
    depends = {
        "files": [[(file, _content_hash(Path(file), cache)) for file in files] for files in patterns],
        "tokenizer": [(file.name, _content_hash(file, cache)) for file in settings],
        "code": [hashlib.sha256(file.read_bytes()).hexdigest() for file in code],
        "libraries": [version(name) for name in _LIBRARIES] + [sys.version_info[:2]],  # Python brings Unicode's tables
        "options": options,
        "seq_len": seq_len,
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32]


def _content_hash(path: Path, cache: Path) -> str:
    """SHA-256 of a file, remembered for as long as the file system says that nothing touched the file.

    The time of the last status change cannot be set by `touch` or `cp -p`, unlike that of the last modification.
    """
    known = cache / "hashes" / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
    try:
        now = _stamp(path)
        try:
            remembered = json.loads(known.read_text(encoding="utf-8"))
            if remembered["stamp"] == now and remembered["settled"]:
                return remembered["sha256"]
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not hashed yet, or a record that a kill cut short: hash it
        started, digest = time.time_ns(), hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        if _stamp(path) != now:
            raise UserError(f"{path}: changes while it is read; start again when it is complete")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    record = {"stamp": now, "settled": started - now[3] > _SETTLES_NS, "sha256": digest.hexdigest()}
    known.parent.mkdir(exist_ok=True)
    _write_text(known, json.dumps(record))
    return digest.hexdigest()


def _stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


# --- one process makes it ---


@contextmanager
def _writing(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where = error.filename or cache
        raise UserError(f"{where}: {error.strerror}; name another place in data.cache_folder") from error


def _wait_for_another(cache: Path, key: str, patience: float) -> None:
    until = time.monotonic() + patience
    while time.monotonic() < until and not (cache / key).is_dir() and not list(cache.glob(f".{key}-*")):
        time.sleep(0.02)


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Waits for its turn; the lock goes with the process, however that ends. False: the file system has no locks."""
    import fcntl

    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("another process is preparing the same data; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True


@contextmanager
def _aside(folder: Path, exclusive: bool) -> Iterator[Path]:
    """A temporary folder beside `folder` that becomes it when all went well."""
    if exclusive:  # what a killed build left
        for left in folder.parent.glob(f".{folder.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield aside
        for path in (*aside.iterdir(), aside):
            _sync(path)
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process, on a file system without locks, was faster
                raise
        _sync(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fill(
    folder: Path,
    config: DataConfig,
    patterns: list[list[str]],
    tokenizer_path: str,
    chat_template: str,
    seq_len: int,
) -> None:
    """Make all files of a prepared folder."""
    started = time.perf_counter()
    tokenizer = load_tokenizer(tokenizer_path)
    files = [file for files in patterns for file in files]
    columns = (config.prompt_column, config.response_column, config.system_column, config.text_column)
    sources = [Source(file, choose_format(file, config.format, *columns), file_size(file)) for file in files]
    template = None
    if any(source.format.name not in ("text", "tokens") for source in sources):
        template = ChatTemplate.from_folder(tokenizer_path, chat_template, tokenizer.eos_token)
    encoder = Encoder(tokenizer, template, config, seq_len)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ledger, digest, lengths = Ledger(sources), hashlib.sha256(), [np.zeros(1, dtype=np.int64)]
    n_train_files = sum(len(files) for files in patterns[: len(config.path)])
    total = sum(source.bytes for source in sources)
    with (folder / "tokens.bin").open("wb") as out, _Progress(total) as progress:
        for batch in tokenise(sources, encoder, config.workers or cores or 1, progress.advance):
            ledger.add(batch)
            lengths.append(batch.lengths)
            out.write(batch.values.tobytes())
            if batch.file < n_train_files:
                digest.update(batch.values.tobytes())
    ledger.close()
    starts = np.cumsum(np.concatenate(lengths))
    document_rows = np.repeat(np.arange(len(ledger.documents)), ledger.documents)
    row_tokens = np.bincount(document_rows, np.diff(starts), len(ledger.documents))
    sets = _choose(ledger, row_tokens, config, [len(files) for files in patterns], n_train_files)

    facts: dict[str, Any] = {"seq_len": seq_len, "pad_id": tokenizer.pad_token_id, "n_vocab": tokenizer.n_vocab}
    facts |= {"tokenizer": tokenizer.fingerprint, "sets": {}, "files": files, "summary": []}
    facts["refused"] = ledger.refusal(config) or _nothing_left(config, ledger, sets)
    if not facts["refused"]:
        digest.update(f"{seq_len} {tokenizer.pad_token_id}".encode())
        for name, times in sets.items():
            documents = np.repeat(np.arange(len(document_rows)), times[document_rows])
            packing = pack_rows(np.diff(starts)[documents], seq_len)
            packing = Packing(packing.starts, documents[packing.documents])
            np.save(folder / f"{name}_starts.npy", packing.starts)
            np.save(folder / f"{name}_documents.npy", packing.documents)
            digest.update(packing.starts.tobytes() + packing.documents.tobytes())
            if name == "train":
                facts["fingerprint"] = digest.hexdigest()
            facts["sets"][name] = _count(packing, starts, ledger.supervised @ times, seq_len)
        facts["plan"] = digest.hexdigest()
        np.save(folder / "documents.npy", starts)
        np.save(folder / "document_rows.npy", document_rows)
        np.save(folder / "rows.npy", np.stack([ledger.files, ledger.numbers], axis=1))
        read = [f"{source.path}: format {_in_words(source.format)}" for source in sources]
        facts["summary"] = read[:20] + [f"... and {len(read) - 20:,} more files"] * (len(read) > 20)
        facts["summary"] += ledger.summary()
        facts["summary"] += [f"{name}: {_describe(count, seq_len)}" for name, count in facts["sets"].items()]
        facts["warnings"] = ledger.straddling()
    ledger.write(folder / "ledger.csv")
    facts["seconds"] = round(time.perf_counter() - started, 3)
    facts["sizes"] = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    _write_text(folder / "meta.json", json.dumps(facts, indent=1))


def _choose(
    ledger: Ledger,
    row_tokens: np.ndarray,
    config: DataConfig,
    files_of_patterns: Sequence[int],
    n_train_files: int,
) -> dict[str, np.ndarray]:
    """How often an epoch reads each row's documents, per set: (rows,) int64. Notes in the ledger where it is used."""
    usable = ledger.documents > 0
    if config.duplicates == "drop":
        usable &= ledger.statuses != DUPLICATE
    share = int(config.validation_fraction * 2**64)
    # By the content, so that duplicates go the same way.
    held_out = (ledger.files >= n_train_files) | (ledger.hashes[:, 0] < np.uint64(share) if share else False)
    ledger.sets[usable & ~held_out] = 1
    ledger.sets[usable & held_out] = 2
    chosen = {"train": (ledger.sets == 1).astype(np.int64)}
    if config.validation_path or config.validation_fraction:
        chosen["validation"] = (ledger.sets == 2).astype(np.int64)
    if config.weights or config.repeats:
        pattern = np.repeat(np.arange(len(files_of_patterns)), files_of_patterns)[ledger.files]
        repeats = config.repeats
        if config.weights:
            tokens = np.bincount(pattern, row_tokens * chosen["train"], len(files_of_patterns))[: len(config.path)]
            wanted = np.array(config.weights) / np.maximum(tokens, 1)
            repeats = tuple((wanted / wanted.min()).tolist())
        for number, repeat in enumerate(repeats):
            rows = np.flatnonzero((pattern == number) & (ledger.sets == 1))
            whole, part = divmod(repeat, 1.0)
            chosen["train"][rows] = int(whole)
            # A part of a repeat: the rows whose content's hashes are lowest, the same ones in every run.
            once_more = rows[np.argsort(ledger.hashes[rows, 1], kind="stable")][: round(part * len(rows))]
            chosen["train"][once_more] += 1
    return chosen


def _nothing_left(config: DataConfig, ledger: Ledger, sets: dict[str, np.ndarray]) -> str:
    if not sets["train"].any():
        return "; ".join([f"{', '.join(config.path)}: nothing is left to train on", *ledger.summary()])
    if "validation" in sets and not sets["validation"].any():
        return (
            f"{', '.join(config.validation_path or config.path)}: no row is left to validate on; "
            "raise [data] validation_fraction, or leave validation out"
        )
    return ""


def _count(packing: Packing, starts: np.ndarray, supervised: int, seq_len: int) -> dict[str, int]:
    rows = len(packing.starts) - 1
    tokens = int(np.diff(starts)[packing.documents].sum())
    return {"documents": len(packing.documents), "tokens": tokens, "supervised": int(supervised), "rows": rows}


def _in_words(form: Format) -> str:
    return form.name if form.description == form.name else f"{form.name} ({form.description})"


def _describe(count: dict[str, int], seq_len: int) -> str:
    return (
        f"{count['documents']:,} documents, {count['tokens']:,} tokens, {count['supervised']:,} supervised, "
        f"in {count['rows']:,} rows of {seq_len} ({count['tokens'] / (count['rows'] * seq_len):.1%} real)"
    )


class _Progress:
    """A bar on a terminal; in a log a line every 10 seconds, with the time that is left."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="preparing data", disable=not sys.stderr.isatty())
        self._started = self._said = time.monotonic()

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def advance(self, size: int) -> None:
        self._done += size
        self._bar.update(size)
        now = time.monotonic()
        if self._bar.disable and now - self._said > 10 and self._done:
            left = (now - self._started) * (self._total - self._done) / self._done
            log.info(f"preparing data: {self._done / max(self._total, 1):.0%}, {left:,.0f} s left")
            self._said = now


def _write_text(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
