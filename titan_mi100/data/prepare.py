"""The data of a run: all files read, checked, tokenised and packed into one plan, kept for the next start.

`python -m titan_mi100.data.prepare` with the arguments of a run does that much of it, without torch.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from titan_mi100.chat_template import ChatTemplate
from titan_mi100.config import config_from_command_line, resolve_run_folder
from titan_mi100.data.cache import Stamp, content_hash, ready_folder
from titan_mi100.data.dataset import Documents, PackedDataset
from titan_mi100.data.files import expand, file_size
from titan_mi100.data.ledger import Ledger, label
from titan_mi100.data.packing import Packing, pack_rows
from titan_mi100.data.rows import Format, choose_format
from titan_mi100.data.sft import DUPLICATE, Encoder
from titan_mi100.data.tokenise import Chunk, Source, tokenise
from titan_mi100.durable import FolderLock, replace
from titan_mi100.errors import UserError
from titan_mi100.logging import ByteProgress, log, setup_logging
from titan_mi100.settings import Config, DataConfig
from titan_mi100.text.base import Tokenizer
from titan_mi100.text.load import load_tokenizer, tokenizer_files

_PACKAGE = Path(__file__).parents[1]
_CODE = ("data/[!.]*.py", "text/[!.]*.py", "chat_template.py", "traced.py")
# What decides the contents of a prepared folder, besides its input. Hashed when it is loaded: it may be edited later.
_CODE_HASH = hashlib.sha256(
    b"".join(file.read_bytes() for pattern in _CODE for file in sorted(_PACKAGE.glob(pattern)))
).hexdigest()
_LIBRARIES = ("tiktoken", "sentencepiece", "jinja2", "tokenizers")  # the last is an extra
_MANY_DOCUMENTS = 100_000  # packing them may take a while: said
_MANY_REPEATS, _TOO_MANY_REPEATS = 10, 1000  # of a path in an epoch: warned of, refused


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

    def where(self, document: int) -> str:
        """The file:line that a document is from."""
        rows, document_rows = _load(self.folder / "rows.npy"), _load(self.folder / "document_rows.npy")
        file, line, element = rows[document_rows[document]].tolist()
        return f"{self.facts['files'][file]}:{label(line, element)}"


class RefusedData(UserError):
    """The files hold rows that cannot be trained on. `ledger` lists every row."""

    def __init__(self, message: str, ledger: Path) -> None:
        super().__init__(message)
        self.ledger = ledger


@dataclass(frozen=True)
class _Request:
    """What is to be prepared."""

    config: DataConfig
    patterns: list[list[str]]  # the files of each path, then of each validation path
    tokenizer_path: str
    chat_template: str
    seq_len: int

    def files(self) -> list[str]:
        return [file for files in self.patterns for file in files]

    def n_train_files(self) -> int:
        return sum(len(files) for files in self.patterns[: len(self.config.path)])

    def depends_on(self, cache: Path) -> tuple[str, list[Stamp]]:
        """A hash of all that the folder depends on: contents, names (which the ledger shows), options, code; and the
        state of the files."""
        settings = tokenizer_files(self.tokenizer_path) + ([Path(self.chat_template)] if self.chat_template else [])
        stamps = [content_hash(file, cache) for file in [*map(Path, self.files()), *settings]]
        options = asdict(self.config) | {"cache_folder": "", "workers": 0}
        depends = {
            "hashes": [sha256 for sha256, _ in stamps],
            "names": [self.patterns, [file.name for file in settings]],
            "code": [_CODE_HASH, *map(_version, _LIBRARIES), sys.version_info[:2]],  # Unicode's tables
            "options": options,
            "seq_len": self.seq_len,
        }
        return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:32], stamps

    def made_of(self, stamps: list[Stamp]) -> dict[str, Any]:
        """What the training rows follow from, by name, for whoever asks why they are others now."""
        names = [*self.files(), *map(str, tokenizer_files(self.tokenizer_path))]
        names += [self.chat_template] if self.chat_template else []
        hashes = {f"file {name}": sha256 for name, (sha256, _) in zip(names, stamps, strict=True)}
        return {**asdict(self.config), "cache_folder": "", "workers": 0, "seq_len": self.seq_len, **hashes}


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def prepare_run(config: Config, folder: Path | None, patience: float = 0) -> Prepared:
    """`prepare_data` for a run, checked against its model.

    Args:
        folder: the run's, where a copy of the ledger goes, if it is there or the data are refused; None: another rank
            of the run sees to that.
        patience: as for `prepare_data`.

    Raises:
        UserError: as `prepare_data`, or the tokenizer has more tokens than the model.
    """
    path = config.tokenizer_path()
    try:
        data = prepare_data(config.data, path, config.model.chat_template, config.training.seq_len, patience)
    except RefusedData as error:
        if folder is None:
            raise
        folder.mkdir(parents=True, exist_ok=True)
        _copy(error.ledger, folder)
        raise UserError(f"{error}\nevery row: {folder / 'ledger.csv'}") from None
    if data.facts["n_vocab"] > (size := config.spec().vocab_size):
        raise UserError(
            f"{path}: has {data.facts['n_vocab']:,} tokens, more than the model's vocab_size = {size:,}; use the "
            "model's own tokenizer"
        )
    if folder is not None and folder.is_dir():
        _copy(data.ledger(), folder)
    return data


def _copy(ledger: Path, folder: Path) -> None:
    try:
        shutil.copyfile(ledger, folder / "ledger.csv")
    except OSError as error:
        raise UserError(f"{folder / 'ledger.csv'}: cannot be written: {error.strerror}") from None


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
    request = _Request(config, patterns, tokenizer_path, chat_template, seq_len)
    cache = _cache_folder(config)

    def make(aside: Path) -> None:
        _fill(aside, request, request.made_of(before[1]))
        if request.depends_on(cache) != before:
            raise UserError("a data or tokenizer file changed while it was read; start again")

    try:
        cache.mkdir(parents=True, exist_ok=True)
        before = request.depends_on(cache)
        folder = cache / before[0]
        cached = ready_folder(folder, _is_whole, make, patience)
        return _open(folder, cached)
    except OSError as error:
        where = error.filename or cache
        raise UserError(f"{where}: {error.strerror or error}; name another place in data.cache_folder") from error


def _cache_folder(config: DataConfig) -> Path:
    if config.cache_folder:
        return Path(config.cache_folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "titan_mi100"
    except RuntimeError:
        raise UserError("there is no home folder to keep prepared data in; set data.cache_folder") from None


def _is_whole(folder: Path) -> bool:
    try:
        facts = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in facts["sizes"].items())
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError):
        return False


def _open(folder: Path, cached: bool) -> Prepared:
    facts = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    if facts["refused"]:
        raise RefusedData(facts["refused"], folder / "ledger.csv")
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


# --- making it ---


def _fill(folder: Path, request: _Request, made_of: dict[str, Any]) -> None:
    """Make all files of a prepared folder."""
    started = time.perf_counter()
    config, seq_len = request.config, request.seq_len
    tokenizer = load_tokenizer(request.tokenizer_path)
    columns = (config.prompt_column, config.response_column, config.system_column, config.text_column)
    sources = [Source(file, choose_format(file, config.format, *columns), file_size(file)) for file in request.files()]
    template = None
    if any(source.format.name not in ("text", "tokens") for source in sources):
        template = ChatTemplate.from_folder(request.tokenizer_path, request.chat_template, tokenizer.eos_token)
        if template.is_dated:
            raise UserError(
                "the chat template writes the date (strftime_now), so rows would change from day to day; put a copy "
                "with a fixed date into model.chat_template"
            )
    encoder = Encoder(tokenizer, template, config, seq_len)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ledger, digest, lengths = Ledger(sources), hashlib.sha256(), [np.zeros(1, dtype=np.int64)]
    token_sizes, spelled = _token_sizes(tokenizer), [np.zeros(0, dtype=np.int64)]
    with (
        (folder / "tokens.bin").open("wb") as out,
        ByteProgress("preparing data", sum(source.bytes for source in sources)) as progress,
    ):
        for chunk in tokenise(sources, encoder, config.workers or cores or 1, progress.advance):
            ledger.add(chunk)
            lengths.append(chunk.lengths)
            spelled.append(_supervised_bytes(chunk, token_sizes))
            values = chunk.values.tobytes()
            out.write(values)
            if chunk.file < request.n_train_files():
                digest.update(values)
    ledger.close()
    starts = np.cumsum(np.concatenate(lengths))
    document_rows = np.repeat(np.arange(len(ledger.documents)), ledger.documents)
    mixture = _mix(ledger, np.bincount(document_rows, np.diff(starts), len(ledger.documents)), request)

    facts: dict[str, Any] = {"seq_len": seq_len, "pad_id": tokenizer.pad_token_id, "n_vocab": tokenizer.n_vocab}
    facts |= {
        "tokenizer": tokenizer.fingerprint,
        "sets": {},
        "files": request.files(),
        "summary": [],
        "made_of": made_of,
    }
    facts["refused"] = ledger.refusal(config) or _nothing_left(request, ledger, mixture.times)
    if not facts["refused"]:
        digest.update(f"{seq_len} {tokenizer.pad_token_id}".encode())
        for name, times in mixture.times.items():
            documents = _copies(times[document_rows])
            if len(documents) > _MANY_DOCUMENTS:
                log.info(f"packing {len(documents):,} documents into rows of {seq_len:,} tokens")
            packing = pack_rows(np.diff(starts)[documents], seq_len)
            packing = Packing(packing.starts, documents[packing.documents])
            np.save(folder / f"{name}_starts.npy", packing.starts)
            np.save(folder / f"{name}_documents.npy", packing.documents)
            digest.update(packing.starts.tobytes() + packing.documents.tobytes())
            if name == "train":
                facts["fingerprint"] = digest.hexdigest()
            supervised_bytes = np.concatenate(spelled) @ times[document_rows]
            facts["sets"][name] = _count(packing, starts, ledger.supervised @ times, supervised_bytes)
        facts["plan"] = digest.hexdigest()
        np.save(folder / "documents.npy", starts)
        np.save(folder / "document_rows.npy", document_rows)
        np.save(folder / "rows.npy", np.column_stack([ledger.files, ledger.numbers]))
        facts["summary"] = [*_read_as(sources), *ledger.summary(), *mixture.said]
        facts["summary"] += [f"{name}: {_describe(count, seq_len)}" for name, count in facts["sets"].items()]
        facts["warnings"] = [*ledger.warnings(config), *mixture.warnings]
    ledger.write(folder / "ledger.csv")
    facts["seconds"] = round(time.perf_counter() - started, 3)
    facts["sizes"] = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    replace(folder / "meta.json", json.dumps(facts, indent=1))


@dataclass(frozen=True)
class _Mixture:
    times: dict[str, np.ndarray]  # set -> (rows,) int64: how often an epoch reads each row's documents
    said: list[str]
    warnings: list[str]


def _mix(ledger: Ledger, row_tokens: np.ndarray, request: _Request) -> _Mixture:
    """Which rows are trained on and how often, which validate. Notes it in the ledger.

    Args:
        row_tokens: (rows,) tokens of each row's documents.
    """
    config = request.config
    usable = ledger.documents > 0
    if config.duplicates == "drop":
        usable &= ledger.statuses != DUPLICATE
    share = int(config.validation_fraction * 2**64)
    # By the content, so that duplicates go the same way.
    held_out = (ledger.files >= request.n_train_files()) | (ledger.hashes[:, 0] < np.uint64(share) if share else False)
    ledger.sets[usable & ~held_out] = 1
    ledger.sets[usable & held_out] = 2
    times = {"train": (ledger.sets == 1).astype(np.int64)}
    if config.validation_path or config.validation_fraction:
        times["validation"] = (ledger.sets == 2).astype(np.int64)
    mixture = _Mixture(times, [], [])
    if not (config.weights or config.repeats):
        return mixture
    files_of_patterns = [len(files) for files in request.patterns]
    pattern = np.repeat(np.arange(len(files_of_patterns)), files_of_patterns)[ledger.files]
    tokens = np.bincount(pattern, row_tokens * times["train"], len(files_of_patterns))[: len(config.path)]
    repeats = config.repeats or _repeats_for(config.weights, tokens)
    for number, (path, repeat) in enumerate(zip(config.path, repeats, strict=True)):
        said = f"{path}: {int(tokens[number]):,} tokens, read {repeat:,.2f} times an epoch"
        mixture.said.append(said)
        if repeat > _TOO_MANY_REPEATS:
            raise UserError(f"{said}; more than {_TOO_MANY_REPEATS:,} times: lower its weight, or set data.repeats")
        if repeat > _MANY_REPEATS:
            mixture.warnings.append(f"{said}: the model will know it by heart")
        rows = np.flatnonzero((pattern == number) & (ledger.sets == 1))
        whole, part = divmod(repeat, 1.0)
        times["train"][rows] = int(whole)
        # A part of a repeat: the rows whose content's hashes are lowest, the same ones in every run.
        once_more = rows[np.argsort(ledger.hashes[rows, 1], kind="stable")][: round(part * len(rows))]
        times["train"][once_more] += 1
    ledger.sets[(ledger.sets == 1) & (times["train"] == 0)] = 0
    return mixture


def _repeats_for(weights: Sequence[float], tokens: np.ndarray) -> tuple[float, ...]:
    """Repeats that give each path its share of the tokens; the most abundant one for its weight is read once."""
    wanted = np.array(weights) / np.maximum(tokens, 1)
    return tuple((wanted / wanted[tokens > 0].min(initial=np.inf)).tolist())


def _copies(times: np.ndarray) -> np.ndarray:
    """Each number as often as it is wanted, all first copies before any second: so rows rarely hold one twice."""
    numbers = np.repeat(np.arange(len(times)), times)
    copy = np.arange(len(numbers)) - np.repeat(np.cumsum(times) - times, times)
    return numbers[np.argsort(copy, kind="stable")]


def _nothing_left(request: _Request, ledger: Ledger, sets: dict[str, np.ndarray]) -> str:
    config = request.config
    if not sets["train"].any():
        lines = [f"{', '.join(config.path)}: nothing is left to train on", *ledger.summary()]
        if config.overlong == "drop" and (longest := int(ledger.tokens.max())) > request.seq_len:
            lines.append(f"the longest row has {longest:,} tokens: raise training.seq_len, or set data.overlong")
        return "\n".join(lines)
    if "validation" in sets and not sets["validation"].any():
        return (
            f"{', '.join(config.validation_path or config.path)}: no row is left to validate on; "
            "raise [data] validation_fraction, or leave validation out"
        )
    return ""


def _token_sizes(tokenizer: Tokenizer) -> np.ndarray:
    """Bytes that each token spells, (n_vocab,) int64: none of one that ends a turn or a text, or does not exist."""
    sizes = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    for token in range(tokenizer.n_vocab):
        if token not in (tokenizer.eos_token_id, tokenizer.pad_token_id):
            with suppress(UserError):  # ids need not be without gaps
                sizes[token] = len(tokenizer.token_bytes(token))
    return sizes


def _supervised_bytes(chunk: Chunk, token_sizes: np.ndarray) -> np.ndarray:
    """Bytes that the supervised tokens of each document spell, (documents,) int64."""
    starts = np.cumsum(chunk.lengths) - chunk.lengths
    sizes = np.where(chunk.values & 1, token_sizes[chunk.values >> 1], 0)
    sizes[starts] = 0  # nothing stands before a document's first token, so it has no loss
    return np.add.reduceat(sizes, starts) if len(starts) else sizes


def _count(packing: Packing, starts: np.ndarray, supervised: int, supervised_bytes: int) -> dict[str, int]:
    return {
        "documents": len(packing.documents),
        "tokens": int(np.diff(starts)[packing.documents].sum()),
        "supervised": int(supervised),
        "supervised_bytes": int(supervised_bytes),
        "rows": len(packing.starts) - 1,
    }


def _read_as(sources: Sequence[Source]) -> list[str]:
    """Which format each file has, a line for each format."""
    by_format: dict[str, list[str]] = {}
    for source in sources:
        by_format.setdefault(_in_words(source.format), []).append(source.path)
    more = {form: f" and {len(files) - 1:,} more files" if len(files) > 1 else "" for form, files in by_format.items()}
    return [f"{files[0]}{more[form]}: format {form}" for form, files in by_format.items()]


def _in_words(form: Format) -> str:
    return f"{form.name} ({form.description})"


def _describe(count: dict[str, int], seq_len: int) -> str:
    return (
        f"{count['documents']:,} documents, {count['tokens']:,} tokens, {count['supervised']:,} supervised, "
        f"in {count['rows']:,} rows of {seq_len} ({count['tokens'] / (count['rows'] * seq_len):.1%} real)"
    )


def main() -> int:
    config = config_from_command_line(for_this_job=False)
    setup_logging(0)
    folder = resolve_run_folder(config)
    try:
        lock = FolderLock(folder) if folder.is_dir() else None  # another run's ledger is not to be overwritten
        prepare_run(config, folder)
        del lock
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
