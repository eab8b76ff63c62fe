"""What is known of prepared data: the one writer and the one reader of `meta.json`."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titan_mi100.files.durable import replace

_FILE = "meta.json"


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
    replace(folder / _FILE, json.dumps(meta, indent=1))


def is_complete(folder: Path) -> bool:
    """Whether all files of the folder are there in their size. Raises PermissionError."""
    try:
        sizes = _read(folder)["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError):
        return False


def read_meta(folder: Path) -> tuple[Facts | None, str]:
    """The facts; or None, and why the data are refused."""
    meta = _read(folder)
    facts = meta["facts"]
    if facts is None:
        return None, meta["refused"]
    validation = SetFacts(**facts["validation"]) if facts["validation"] else None
    return Facts(**{**facts, "train": SetFacts(**facts["train"]), "validation": validation}), ""


def _read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / _FILE).read_text(encoding="utf-8"))
