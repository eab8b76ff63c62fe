"""What prepared data follow from: files, settings and code. Their hash names the prepared folder."""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.cache import Stamp, content_hash
from titan_mi100.text.load import tokenizer_files

_PACKAGE = Path(__file__).parents[1]
_CODE = ("data/[!.]*.py", "text/[!.]*.py")
# What decides the contents of a prepared folder, besides its input. Hashed when it is loaded: it may be edited later.
_CODE_HASH = hashlib.sha256(
    b"".join(file.read_bytes() for pattern in _CODE for file in sorted(_PACKAGE.glob(pattern)))
).hexdigest()
_LIBRARIES = ("tiktoken", "sentencepiece", "jinja2", "tokenizers")  # the last is an extra


@dataclass(frozen=True)
class Request:
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

    def path_of_file(self) -> np.ndarray:
        """(files,) the number of the pattern that each file is from."""
        return np.repeat(np.arange(len(self.patterns)), [len(files) for files in self.patterns])

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
    """ "" if it is not installed."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""
