"""Loads a tokenizer: with tiktoken if it gives the same ids, otherwise with the library that the files are for."""

import os
from contextlib import suppress
from pathlib import Path

from titan_mi100.errors import UserError
from titan_mi100.files.child import call_in_child, raise_limits
from titan_mi100.files.plain import LARGEST_TABLE, plain_path, read_object
from titan_mi100.files.templates import template_file
from titan_mi100.text.agreement import check_agreement
from titan_mi100.text.base import Tokenizer, TokenizerConfig
from titan_mi100.text.bpe import class_like, read_bpe
from titan_mi100.text.other import HfTokenizer, SentencePieceTokenizer, check_definition

_SENTENCEPIECE = ".model"
_TRIED = "Hello, this is a text of 1 line: 2 + 2 = 4.\n" * 400  # 18 kB: long enough to notice quadratic time


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Load the tokenizer of a folder or a file. Its kind is detected by name and content.

    Args:
        path: an HF folder with `tokenizer.json`; or a folder with exactly one sentencepiece `.model` file instead; or
            such a file. A `tokenizer_config.json` beside it is read, too.

    Raises:
        UserError: there is no tokenizer, a file is malformed, or no engine here supports it.
    """
    # First in the child process with limits: a hostile tokenizer.json can take endless time or memory.
    call_in_child("text.load:try_tokenizer", Path(path))
    return _load(Path(path))


def try_tokenizer(path: str) -> None:
    """Runs in the child process, with limits on time and memory: load the tokenizer and encode some text."""
    raise_limits(sum(file.stat().st_size for file in tokenizer_files(path) if file.suffix != ".jinja"))
    tokenizer = _load(Path(path))
    with suppress(UserError):  # the vocabulary may lack these characters, which is no reason to refuse it
        tokenizer.encode(_TRIED)


def _load(path: Path) -> Tokenizer:
    file = _definition_file(path)
    config_file = file.with_name("tokenizer_config.json")
    needed = file.suffix != _SENTENCEPIECE or os.path.lexists(config_file)
    content = read_object(config_file, "copy the checkpoint's tokenizer files there") if needed else {}
    config = TokenizerConfig(config_file, content)
    try:
        if file.suffix == _SENTENCEPIECE:
            return SentencePieceTokenizer(file, config)
        definition = read_object(file, "download it again", LARGEST_TABLE)
        exact = read_bpe(definition, config)  # None: tiktoken would give other ids
        check_definition(file, definition, exact is not None)
        tokenizer = exact or HfTokenizer(file, definition, config)
        merges = exact or not definition["model"].get("ignore_merges")
        check_agreement(config, definition, class_like(definition) if merges else "")
        return tokenizer
    except (UserError, MemoryError):
        raise
    except Exception as error:  # the libraries have no exception class of their own
        problem = f"is missing or malformed ({type(error).__name__}: {error})"
        raise UserError(f"{file}, or {config_file}: {problem}; download it again") from error


def tokenizer_files(path: str | Path) -> list[Path]:
    """The files that determine the result of `load_tokenizer(path)` and the chat template there. No file is read.

    Returns:
        The existing ones: first the file that defines the tokenizer, then `tokenizer_config.json` and the template.

    Raises:
        UserError: there is no tokenizer; or a file is a link out of the folder, or larger than any real one.
    """
    file = _definition_file(Path(path))
    config = file.with_name("tokenizer_config.json")
    files = [file, *[config] * os.path.lexists(config)]
    files += [template] if (template := template_file(file.parent)) else []
    # The caller hashes these files: a link must not lead elsewhere, and hashing must not take hours.
    if odd := [file for file in files if plain_path(file).stat().st_size > LARGEST_TABLE]:
        raise UserError(f"{odd[0]}: is larger than {LARGEST_TABLE:,} bytes; no real file is; download it again")
    return files


def _definition_file(path: Path) -> Path:
    """The file that defines the tokenizer.

    If `path` is a sentencepiece model, that file. In a folder: tokenizer.json, else its only model.
    """
    if path.is_file() and path.suffix == _SENTENCEPIECE:
        return path
    if os.path.lexists(path / "tokenizer.json"):
        return path / "tokenizer.json"
    files = sorted(file for file in path.glob("*") if file.suffix == _SENTENCEPIECE and not file.is_dir())
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "no tokenizer"
        problem = f"has {names}" if path.exists() else "no such file or folder"
        raise UserError(f"{path}: {problem}; name a folder with tokenizer.json, or a sentencepiece .model file")
    return files[0]
