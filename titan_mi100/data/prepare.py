"""The data of a run: all files read, checked, tokenised and packed into one plan (`make`), kept for the next start.

`python -m titan_mi100.data.prepare` with the arguments of a run does that much of it, without torch.
"""

import os
import shutil
import sys
from pathlib import Path

from titan_mi100.cli import exit_code
from titan_mi100.config.load import config_from_command_line, resolve_run_folder
from titan_mi100.config.settings import Config, DataConfig
from titan_mi100.data.cache import ready_folder
from titan_mi100.data.files import expand
from titan_mi100.data.make import Request, make_folder
from titan_mi100.data.prepared import Prepared, RefusedData, is_complete, open_prepared
from titan_mi100.errors import UserError
from titan_mi100.files.durable import FolderLock
from titan_mi100.logging import setup_logging


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
        RefusedData: bad records, or nothing to train on; the same again until a file or a setting changes.
        UserError: a file cannot be read, or the cache not be written.
    """
    patterns = expand((*config.path, *config.validation_path))
    request = Request(config, patterns, tokenizer_path, chat_template, seq_len)
    cache = _cache_folder(config)

    def make(aside: Path) -> None:
        make_folder(aside, request, before.made_of)
        if request.inputs(cache) != before:
            raise UserError("a data or tokenizer file changed while it was read; start again")

    try:
        cache.mkdir(parents=True, exist_ok=True)
        before = request.inputs(cache)
        folder = cache / before.key
        cached = ready_folder(folder, is_complete, make, patience)
        return open_prepared(folder, cached)
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


def main() -> int:
    config = config_from_command_line(for_this_job=False)
    setup_logging(0)
    return exit_code(lambda: _prepare(config))


def _prepare(config: Config) -> None:
    folder = resolve_run_folder(config)
    lock = FolderLock(folder) if folder.is_dir() else None  # another run's ledger is not to be overwritten
    prepare_run(config, folder)
    del lock


if __name__ == "__main__":
    sys.exit(main())
