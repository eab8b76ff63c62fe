"""The data of a run: all files read, checked, tokenised and packed into one plan (`make`), kept for the next start.

`python -m titan_mi100.data.prepare` with the arguments of a run does that much of it, without torch.
"""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titan_mi100.config.load import config_from_command_line, resolve_run_folder
from titan_mi100.config.settings import Config, DataConfig
from titan_mi100.data.cache import ready_folder
from titan_mi100.data.dataset import Documents, PackedDataset
from titan_mi100.data.facts import Facts, is_complete, read_meta
from titan_mi100.data.files import expand
from titan_mi100.data.make import make_folder
from titan_mi100.data.origins import Origins
from titan_mi100.data.packing import Packing
from titan_mi100.data.request import Request
from titan_mi100.errors import UserError
from titan_mi100.files.durable import FolderLock
from titan_mi100.logging import setup_logging


@dataclass(frozen=True)
class Prepared:
    """A prepared folder, opened."""

    folder: Path
    train: PackedDataset
    validation: PackedDataset | None
    facts: Facts
    cached: bool  # it was there

    def ledger(self) -> Path:
        return self.folder / "ledger.csv"


class RefusedData(UserError):
    """The files hold rows that cannot be trained on. `ledger` lists every row."""

    def __init__(self, message: str, ledger: Path) -> None:
        super().__init__(message)
        self.ledger = ledger


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
    if data.facts.n_vocab > (size := config.spec().vocab_size):
        raise UserError(
            f"{path}: has {data.facts.n_vocab:,} tokens, more than the model's vocab_size = {size:,}; use the "
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
    request = Request(config, patterns, tokenizer_path, chat_template, seq_len)
    cache = _cache_folder(config)

    def make(aside: Path) -> None:
        make_folder(aside, request, request.made_of(before[1]))
        if request.depends_on(cache) != before:
            raise UserError("a data or tokenizer file changed while it was read; start again")

    try:
        cache.mkdir(parents=True, exist_ok=True)
        before = request.depends_on(cache)
        folder = cache / before[0]
        cached = ready_folder(folder, is_complete, make, patience)
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


def _open(folder: Path, cached: bool) -> Prepared:
    facts, refusal = read_meta(folder)
    if facts is None:
        raise RefusedData(refusal, folder / "ledger.csv")
    origins = Origins(facts.files, _load(folder / "lines.npy"), _load(folder / "document_lines.npy"))
    values = np.memmap(folder / "tokens.bin", np.uint32, mode="r")
    documents = Documents(values, _load(folder / "documents.npy"), origins)

    def open_set(name: str) -> PackedDataset:
        packing = Packing(_load(folder / f"{name}_starts.npy"), _load(folder / f"{name}_documents.npy"))
        return PackedDataset(documents, packing, facts.seq_len, facts.pad_id)

    validation = open_set("validation") if facts.validation else None
    return Prepared(folder, open_set("train"), validation, facts, cached)


def _load(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)


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
