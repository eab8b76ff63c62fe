"""A prepared folder: its facts (`meta.json`, written last) and its packed rows, opened.

| file | |
|---|---|
| tokens.bin | uint32 values of all documents, end to end |
| documents.npy | where each begins |
| lines.npy, document_lines.npy | the `Origins` of the documents |
| SET_starts.npy, SET_documents.npy | the `Packing` of each set |
| ledger.csv, meta.json | for people and programs |
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan_mi100.data.packing import Documents, Origins, PackedDataset, Packing
from titan_mi100.errors import UserError
from titan_mi100.files.durable import replace

_META = "meta.json"


@dataclass(frozen=True)
class SetFacts:
    """Counts of one set, per epoch: a document that an epoch reads twice counts twice."""

    documents: int
    tokens: int
    supervised: int  # tokens with a loss
    supervised_bytes: int  # UTF-8 bytes that these spell
    rows: int

    def supervised_share(self, seq_len: int) -> float:
        """The share of all positions, padding included, that have a loss."""
        return self.supervised / (self.rows * seq_len)


@dataclass(frozen=True)
class Facts:
    """What a run needs to know of its prepared data, besides the rows."""

    seq_len: int
    pad_id: int
    n_vocab: int  # of the tokenizer
    tokenizer: str  # fingerprint
    fingerprint: str  # of the training rows
    plan: str  # fingerprint of all rows, to train and to validate on
    files: list[str]
    made_of: dict[str, Any]  # settings and hashes of the files that the rows follow from, by name
    train: SetFacts
    validation: SetFacts | None
    summary: list[str]  # lines for the log
    warnings: list[str]


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
    """The files hold records that cannot be trained on. `ledger` lists every record."""

    def __init__(self, message: str, ledger: Path) -> None:
        super().__init__(message)
        self.ledger = ledger


def write_meta(folder: Path, facts: Facts | None, refusal: str, seconds: float) -> None:
    """Write `meta.json`, after all other files of the folder, whose sizes it holds.

    Args:
        facts: None where the data are refused.
        refusal: why; "" where there are facts.
        seconds: that the preparation took.
    """
    assert (facts is None) == bool(refusal)
    sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    meta = {"refused": refusal, "seconds": seconds, "sizes": sizes, "facts": facts and asdict(facts)}
    replace(folder / _META, json.dumps(meta, indent=1))


def is_complete(folder: Path) -> bool:
    """Whether all files of the folder are there in their size. Raises PermissionError."""
    try:
        sizes = _read_meta(folder)["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError):
        return False


def open_prepared(folder: Path, cached: bool) -> Prepared:
    """The content of a complete folder. Raises RefusedData if it only says why the data are refused."""
    meta = _read_meta(folder)
    if meta["refused"]:
        raise RefusedData(meta["refused"], folder / "ledger.csv")
    sets = {name: SetFacts(**counts) for name in ("train", "validation") if (counts := meta["facts"][name])}
    facts = Facts(**{**meta["facts"], **sets})
    origins = Origins(facts.files, _load(folder / "lines.npy"), _load(folder / "document_lines.npy"))
    values = np.memmap(folder / "tokens.bin", np.uint32, mode="r")
    documents = Documents(values, _load(folder / "documents.npy"), origins)
    opened = {}
    for name in sets:
        packing = Packing(_load(folder / f"{name}_starts.npy"), _load(folder / f"{name}_documents.npy"))
        opened[name] = PackedDataset(documents, packing, facts.seq_len, facts.pad_id)
    return Prepared(folder, opened["train"], opened.get("validation"), facts, cached)


def _load(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _read_meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / _META).read_text(encoding="utf-8"))
