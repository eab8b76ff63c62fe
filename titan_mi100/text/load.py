"""Which engine runs a tokenizer's files: tiktoken where it gives the same ids, else the files' own library."""

from pathlib import Path

from titan_mi100.errors import UserError
from titan_mi100.files.plain import plain_path
from titan_mi100.text.base import Tokenizer, TokenizerConfig, laid_out
from titan_mi100.text.bpe import read_bpe, read_definition
from titan_mi100.text.other import HfTokenizer, SentencePieceTokenizer, is_rank_file, read_rank_file

_FILE_KINDS = (".tiktoken", ".model")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a folder or a file, told apart by name and content.

    Args:
        path: an HF folder, with `tokenizer.json` or with `vocab.json` and `merges.txt`; or a folder with exactly one
            `.tiktoken` or `.model` file instead; or such a file. A `.model` file is a sentencepiece model or, as
            Llama 3 has it, a tiktoken rank file. The `tokenizer_config.json` beside a file goes with it.

    Raises:
        UserError: there is no such tokenizer, a file of it is malformed, or no engine here can run it.
    """
    file = _definition_file(Path(path))
    config = TokenizerConfig.read(file.with_name("tokenizer_config.json"), needed=file.suffix not in _FILE_KINDS)
    with laid_out(file):
        if file.suffix == ".tiktoken" or (file.suffix == ".model" and is_rank_file(file)):
            return read_rank_file(file, config)
        if file.suffix == ".model":
            return SentencePieceTokenizer(file, config)
        definition = read_definition(file, config)
        return read_bpe(definition, config) or HfTokenizer(file, definition, config)


def tokenizer_files(path: str | Path) -> list[Path]:
    """The files whose content decides what `load_tokenizer(path)` and the chat template there do. None is read.

    Returns:
        Those that exist: what defines the tokenizer first, then `tokenizer_config.json` and `chat_template.jinja`.

    Raises:
        UserError: there is no tokenizer, or a file of it is a link out of the folder.
    """
    file = _definition_file(Path(path))
    names = [file.name, *(["merges.txt"] if file.name == "vocab.json" else [])]
    files = [file.with_name(name) for name in (*names, "tokenizer_config.json", "chat_template.jinja")]
    found = [file for file in files if file.is_file()]
    for file in found:
        plain_path(file)  # a link must not lead the hash of these files elsewhere
    return found


def _definition_file(path: Path) -> Path:
    """tokenizer.json, else vocab.json, else the only rank file or model of a folder; a rank file or model itself."""
    if path.is_file() and path.suffix in _FILE_KINDS:
        return path
    if not path.is_dir():
        what = "not a tokenizer" if path.is_file() else "no such file or folder"
        raise UserError(f"{path}: {what}; name a folder with tokenizer.json, or a .tiktoken or .model file")
    found = sorted(file for file in path.iterdir() if file.suffix in _FILE_KINDS and file.is_file())
    found = [path / name for name in ("tokenizer.json", "vocab.json") if (path / name).is_file()][:1] or found
    if len(found) != 1:
        several = f"has {', '.join(file.name for file in found)}; name one of these files instead"
        nothing = (
            "holds no tokenizer: no tokenizer.json, vocab.json with merges.txt, .tiktoken or .model file; copy the "
            "checkpoint's tokenizer files there"
        )
        raise UserError(f"{path}: {several if found else nothing}")
    return found[0]
