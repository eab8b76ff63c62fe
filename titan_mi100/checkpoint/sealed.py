"""A run's checkpoint folders as files: sealed by a manifest, verified, listed, set aside, removed. Imports no torch.

`step-N` appears by a rename, when everything in it has been synced. `manifest.json` names every file with its size and
SHA-256, and `manifest.sha256` holds the manifest's own, in the form of sha256sum. A folder without them, or that does
not hold what they say, is no checkpoint. A file `step-N.suspect` beside it says why its weights may be ruined: the
checkpoint is kept, but not counted, and a run resumes from it only when told to.
"""

import hashlib
import json
import re
import shutil
import uuid
from pathlib import Path
from typing import Any, TypedDict

from titan_mi100.files.durable import remove_left, sha256_of, sync, write_synced
from titan_mi100.files.plain import LARGEST_CONFIG, is_plain_name, read_plain
from titan_mi100.files.schema import checked
from titan_mi100.logging import log


class _FileEntry(TypedDict):
    bytes: int
    sha256: str


class _Sealed(TypedDict):
    format: int
    step: int
    files: dict[str, _FileEntry]


class _Fingerprints(TypedDict, total=False):
    model: dict[str, Any]
    tokenizer: str
    data: str
    seed: int
    global_batch_size: int
    lora: dict[str, Any]
    base: str


class _Attention(TypedDict):
    name: str
    why: str
    arch: str
    launch: str


class _Head(TypedDict):
    block_elements: int
    kept_elements: int


class _Chosen(TypedDict, total=False):
    """What a run measured or counted and then keeps, because it decides in which order numbers are added."""

    attention: _Attention
    head: _Head


class _Optimizer(TypedDict):
    state: str
    master: str


class _Adapter(TypedDict):
    rank: int
    alpha: float
    dropout: float
    target_modules: list[str]
    base: str


class _Manifest(_Sealed, total=False):
    """What a manifest may hold; a converter's lacks what is of a run."""

    torch: str
    processes: int
    layout: dict[str, int]
    data: dict[str, Any]
    rows: int
    optimizer: _Optimizer
    fingerprints: _Fingerprints
    chosen: _Chosen
    lora: _Adapter


FORMAT = 1
BEST = "best"  # the name of a link to the checkpoint with the lowest validation loss
MANIFEST, MANIFEST_HASH = "manifest.json", "manifest.sha256"
_NAME = re.compile(r"step-\d+")
Written = dict[str, tuple[int, str]]  # file -> size and SHA-256, as they were written


class DamagedError(Exception):
    """A folder is not the checkpoint that was sealed; the message names the file."""


def list_checkpoints(folder: Path, suspect: bool = False) -> list[Path]:
    """The folders `step-N`, intact or not, oldest first: those that are not suspect, or only those that are."""
    return [path for path in all_checkpoints(folder) if _suspicion(path).exists() == suspect]


def all_checkpoints(folder: Path) -> list[Path]:
    """The folders `step-N`, whatever is in them, oldest first."""
    return [path for path in _named(folder) if path.is_dir() and not path.is_symlink()]


def in_the_way(folder: Path) -> list[Path]:
    """What has a checkpoint's name and is a link, or no folder: never read, and a save there would fail."""
    return [path for path in _named(folder) if path.is_symlink() or not path.is_dir()]


def _named(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def mark_suspect(path: Path, why: str) -> None:
    """Keep a checkpoint, which is there already or about to be, out of what is counted and resumed from."""
    write_synced(_suspicion(path), why + "\n")
    sync(path.parent)


def unmark_suspect(path: Path) -> None:
    _suspicion(path).unlink(missing_ok=True)


def _suspicion(path: Path) -> Path:
    return path.with_name(f"{path.name}.suspect")


def begin(folder: Path, step: int) -> Path:
    """A fresh folder for the files of a step."""
    unmark_suspect(folder / f"step-{step}")  # of one that was removed by hand
    aside = folder / f".step-{step}.{uuid.uuid4().hex[:12]}.incomplete"
    aside.mkdir()
    return aside


def seal(aside: Path, written: Written, record: dict[str, Any]) -> Path:
    """Make a folder of written and synced files the checkpoint of its step; returns its path.

    Args:
        record: what else the manifest says; `step` among it.
    """
    final = aside.with_name(f"step-{record['step']}")
    write_manifest(aside, written, record)
    if final.exists():
        raise FileExistsError(f"{final} is there already, and is never overwritten")
    aside.rename(final)
    sync(aside.parent)
    return final


def write_manifest(aside: Path, written: Written, record: dict[str, Any]) -> None:
    """Write the manifest and its hash."""
    files = {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in sorted(written.items())}
    text = json.dumps({"format": FORMAT, **record, "files": files}, indent=1)
    write_synced(aside / MANIFEST, text)
    write_synced(aside / MANIFEST_HASH, _hash_line(text.encode()))
    sync(aside)


def _hash_line(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n"


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, if it is as it was written.

    Raises:
        DamagedError: it is not, or there is none.
        OSError: it may be, but it cannot be read.
    """
    try:
        content = {name: read_plain(_regular_file(path / name), LARGEST_CONFIG) for name in (MANIFEST, MANIFEST_HASH)}
        if content[MANIFEST_HASH] != _hash_line(content[MANIFEST]).encode():
            raise DamagedError(f"{path / MANIFEST}: is not what was written (its SHA-256 in {MANIFEST_HASH} differs)")
        manifest = json.loads(content[MANIFEST])
        checked(manifest, _Manifest)
        # a run's checkpoint is called by its step; elsewhere, and what a converter wrote (step 0), may have any name
        expected = step_of(path) if _NAME.fullmatch(path.name) and manifest["step"] else manifest["step"]
        plain = all(map(is_plain_name, manifest["files"]))
        if (manifest["format"], manifest["step"]) != (FORMAT, expected) or not plain:
            raise ValueError("another step or format, or names of files elsewhere")
    except (ValueError, RecursionError) as error:
        problem = f"is not the manifest of {path.name} in format {FORMAT}: {error}"
        raise DamagedError(f"{path / MANIFEST}: {problem}") from None
    return manifest


def _regular_file(file: Path) -> Path:
    """The path, if it is a regular file and no link."""
    if file.is_symlink() or not file.is_file():
        raise DamagedError(f"{file}: there is no such file")
    return file


def check_file(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Compare one of a checkpoint's files with the manifest's entry.

    Raises:
        DamagedError, OSError: as read_manifest.
    """
    file = _regular_file(path / name)
    if (size := file.stat().st_size) != entry["bytes"]:
        raise DamagedError(f"{file}: has {size:,} bytes, {entry['bytes']:,} were written")
    found = sha256_of(file)
    if found != entry["sha256"]:
        raise DamagedError(f"{file}: is not what was written: SHA-256 {found[:12]}..., was {entry['sha256'][:12]}...")


def verify(path: Path, share: int = 0, shares: int = 1) -> dict[str, Any]:
    """Check a checkpoint; returns its manifest.

    Args:
        share, shares: check only the content of every `shares`-th file, from this one, large ones dealt first.

    Raises:
        DamagedError, OSError: as read_manifest.
    """
    manifest = read_manifest(path)
    by_size = sorted(manifest["files"].items(), key=lambda item: (-item[1]["bytes"], item[0]))
    for name, entry in by_size[share::shares]:
        check_file(path, name, entry)
    return manifest


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint, so that it is none of the run's any more; returns its new path.

    Args:
        why: begins the new name: `damaged`, `later`.
    """
    aside = path.with_name(f"{why}-{path.name}-{uuid.uuid4().hex[:6]}")
    path.rename(aside)
    unmark_suspect(path)
    _unmark_best(path)
    sync(path.parent)
    return aside


def _unmark_best(path: Path) -> None:
    best = path.with_name(BEST)
    if best.is_symlink() and best.readlink() == Path(path.name):
        best.unlink()


def mark_best(path: Path) -> None:
    """Point the symbolic link `best` to this checkpoint."""
    aside = path.with_name(f".{BEST}.tmp")
    aside.unlink(missing_ok=True)
    aside.symlink_to(path.name)
    aside.replace(path.with_name(BEST))


def damaged(folder: Path) -> list[Path]:
    """What was set aside."""
    return sorted(folder.glob("damaged-step-*"))


class Retention:
    """Keeps the newest verified checkpoints and removes older ones. Damaged ones do not count as kept."""

    def __init__(self, folder: Path, keep_latest_k: int) -> None:
        """Remember what is kept where.

        Args:
            keep_latest_k: verified checkpoints to keep; 0: all.
        """
        self._folder, self._keep = folder, keep_latest_k
        self._verified: dict[Path, list[tuple[str, int, int]]] = {}

    def note(self, path: Path) -> None:
        """This checkpoint has just been sealed or verified."""
        self._verified[path] = _stamps(path)

    def remove_old(self, keep_also: Path | None = None) -> None:
        """Remove what is older than the newest verified ones. Suspect ones stay, and with each the one before it.

        Args:
            keep_also: the best one.
        """
        intact, newest_first = 0, list_checkpoints(self._folder)[::-1]
        keep = {keep_also}
        for suspect in list_checkpoints(self._folder, suspect=True):
            keep.add(next((path for path in newest_first if step_of(path) < step_of(suspect)), None))
        for path in newest_first if self._keep else []:
            if intact == self._keep:
                if path not in keep:
                    remove(path)
            elif self._is_intact(path):
                intact += 1

    def _is_intact(self, path: Path) -> bool:
        """Reads a checkpoint once to verify it; afterwards, unchanged sizes and times of change are enough."""
        try:
            if self._verified.get(path) != _stamps(path):
                verify(path)
                self.note(path)
        except (DamagedError, OSError):
            return False
        return True


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    found = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    return [(name, status.st_size, status.st_ctime_ns) for name, status in found]


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that a kill in between leaves none that looks intact."""
    gone = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.removed")
    _unmark_best(path)  # it is not kept as the best any more
    path.rename(gone)
    sync(path.parent)
    shutil.rmtree(gone)


def clear(folder: Path) -> None:
    """Remove what saves and removals left that were killed. Only for the run that has the folder's lock."""
    for left in (*folder.glob(".step-*.incomplete"), *folder.glob(".step-*.removed")):
        try:
            remove_left(left)
        except OSError as error:
            log.warning(f"{left}: a leftover of an earlier start, cannot be removed: {error.strerror}")
