"""A run's checkpoint folders as files: seal, verify, list, rename, remove. Imports no torch.

`step-N` appears by a rename, after everything in it has been synced. `manifest.json` lists every file with its size and
SHA-256; `manifest.sha256` holds the manifest's own hash, in the format of sha256sum. A folder without them, or with
other content than they say, is not a checkpoint.

A file `step-N.suspect` beside the folder says why its weights may be ruined. A suspect checkpoint is kept, does not
count in retention, and is resumed from only on request.
"""

import hashlib
import json
import re
import shutil
import uuid
from pathlib import Path
from typing import Any, TypedDict

from titan_mi100.errors import UserError
from titan_mi100.files.durable import remove_any, sha256_of, sync, write_synced
from titan_mi100.files.plain import LARGEST_CONFIG, is_plain_name, read_plain
from titan_mi100.files.schema import UnknownKeyError, validated
from titan_mi100.log import log
from titan_mi100.wording import shortened


class _FileEntry(TypedDict):
    bytes: int
    sha256: str


class _Sealed(TypedDict):
    format: int
    step: int
    files: dict[str, _FileEntry]


class _Fingerprints(TypedDict, total=False):
    """Properties of a run that must not change on resume."""

    model: dict[str, Any]
    tokenizer: str
    data: str
    seed: int
    global_batch_size: int
    lora: dict[str, Any]
    base: str
    objective: dict[str, Any]
    draft_head: dict[str, Any]


class _Attention(TypedDict):
    name: str
    why: str
    arch: str
    launch: str


class _HeadOfBefore(TypedDict):
    block_elements: int
    kept_elements: int


class _Head(_HeadOfBefore, total=False):
    multiple: int


class _Chosen(TypedDict, total=False):
    """Choices that a run makes once and keeps on resume, because they determine the order of floating-point sums."""

    attention: _Attention
    head: _Head
    stages: list[int]  # layers of each
    fused: list[str]  # kinds of fused kernels


class _Optimizer(TypedDict):
    state: str
    master: str


class _OfSomeAdapters(TypedDict, total=False):
    base_model_name_or_path: str
    expert_rank: int
    expert_alpha: float
    scaling: str
    token_ids: list[int]


class _Adapter(_OfSomeAdapters):
    rank: int
    alpha: float
    dropout: float
    target_modules: list[str]
    base: str


class _HeadAlone(TypedDict):
    base: str


class _Manifest(_Sealed, total=False):
    """The keys of a manifest. A converter's manifest lacks those that describe a run."""

    torch: str
    processes: int
    layout: dict[str, int]
    data: dict[str, Any]
    rows: int
    optimizer: _Optimizer
    fingerprints: _Fingerprints
    chosen: _Chosen
    lora: _Adapter
    draft_head: _HeadAlone  # the checkpoint holds a draft head alone


FORMAT = 1
BEST = "best"  # name of a symbolic link to the checkpoint with the lowest validation loss
MANIFEST, MANIFEST_HASH = "manifest.json", "manifest.sha256"
_NAME = re.compile(r"step-\d+")
Written = dict[str, tuple[int, str]]  # file name -> size and SHA-256 of what was written


class DamagedError(Exception):
    """A checkpoint's content differs from what was sealed. The message names the file."""


def list_checkpoints(folder: Path, suspect: bool = False) -> list[Path]:
    """The folders `step-N`, intact or not, the lowest step first.

    Args:
        suspect: list only the suspect ones; otherwise only the others.
    """
    return [path for path in all_checkpoints(folder) if _suspicion(path).exists() == suspect]


def all_checkpoints(folder: Path) -> list[Path]:
    """All folders `step-N`, intact or not, suspect or not, the lowest step first."""
    return [path for path in _named(folder) if path.is_dir() and not path.is_symlink()]


def blocking_entries(folder: Path) -> list[Path]:
    """Links and files that have a checkpoint's name. They are never read, and a save of that step would fail."""
    return [path for path in _named(folder) if path.is_symlink() or not path.is_dir()]


def _named(folder: Path) -> list[Path]:
    return sorted((path for path in folder.glob("step-*") if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def mark_suspect(path: Path, why: str) -> None:
    """Mark a checkpoint as suspect. Works before the folder exists, so that it never appears without its mark."""
    write_synced(_suspicion(path), why + "\n")
    sync(path.parent)


def unmark_suspect(path: Path) -> None:
    _suspicion(path).unlink(missing_ok=True)


def _suspicion(path: Path) -> Path:
    return path.with_name(f"{path.name}.suspect")


def begin(folder: Path, step: int) -> Path:
    """Make a temporary folder for the files of a step."""
    unmark_suspect(folder / f"step-{step}")  # a mark may be left of a checkpoint that the user removed
    aside = folder / f".step-{step}.{uuid.uuid4().hex[:12]}.incomplete"
    aside.mkdir()
    return aside


def seal(aside: Path, written: Written, record: dict[str, Any]) -> Path:
    """Write the manifest into a folder of synced files, and rename the folder to `step-N`. Returns the new path.

    Args:
        aside: the temporary folder, see `begin`.
        written: all its files.
        record: the manifest's other keys; includes `step`.
    """
    # The manifest is written last and synced before the rename. So a folder named step-N always has its manifest, and
    # the manifest never describes files that did not reach the disk.
    final = aside.with_name(f"step-{record['step']}")
    write_manifest(aside, written, record)
    if final.exists():
        raise FileExistsError(f"{final} exists already, and is never overwritten")
    aside.rename(final)
    sync(aside.parent)
    return final


def write_manifest(aside: Path, written: Written, record: dict[str, Any]) -> None:
    """Write the manifest and its hash. Args: see `seal`."""
    files = {name: {"bytes": size, "sha256": sha256} for name, (size, sha256) in sorted(written.items())}
    text = json.dumps({"format": FORMAT, **record, "files": files}, indent=1)
    write_synced(aside / MANIFEST, text)
    # In sha256sum's format, so that a person can check it: sha256sum -c manifest.sha256
    write_synced(aside / MANIFEST_HASH, _hash_line(text.encode()))
    sync(aside)


def _hash_line(content: bytes) -> str:
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n"


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the manifest and compare it with its hash.

    Raises:
        DamagedError: it is missing, or not as it was written.
        UserError: it is as it was written, but this version does not know its format or keys: nothing is damaged.
        OSError: it cannot be read, so nothing is known about its content.
    """
    try:
        content = {name: read_plain(_regular_file(path / name), LARGEST_CONFIG) for name in (MANIFEST, MANIFEST_HASH)}
        if content[MANIFEST_HASH] != _hash_line(content[MANIFEST]).encode():
            raise DamagedError(f"{path / MANIFEST}: has changed since it was written (see its hash in {MANIFEST_HASH})")
        manifest = json.loads(content[MANIFEST])
        if isinstance(manifest, dict) and manifest.get("format", FORMAT) != FORMAT:
            raise UnknownKeyError(f"format = {shortened(repr(manifest['format']))} is not {FORMAT}")
        validated(manifest, _Manifest)
        # A folder named step-N must hold step N. A copy under another name, or a converter's output (step 0), may have
        # any name.
        expected = step_of(path) if _NAME.fullmatch(path.name) and manifest["step"] else manifest["step"]
        plain = all(map(is_plain_name, manifest["files"]))
        if manifest["step"] != expected or not plain:
            raise ValueError("it has another step, or names files outside the folder")
    except UnknownKeyError as error:
        raise UserError(
            f"{path / MANIFEST}: is intact, but {error}: another version of titan_mi100 has written it. It is left as "
            "it is; use that version, or another checkpoint (a run resumes from step N with --checkpoint.load_step N)"
        ) from None
    except (ValueError, RecursionError) as error:
        problem = f"is not the manifest of {path.name} in format {FORMAT}: {error}"
        raise DamagedError(f"{path / MANIFEST}: {problem}") from None
    return manifest


def _regular_file(file: Path) -> Path:
    """Return the path. Raises DamagedError: it is missing, a link, or not a regular file."""
    if file.is_symlink() or not file.is_file():
        raise DamagedError(f"{file}: is missing, or not a regular file")
    return file


def check_file(path: Path, name: str, entry: dict[str, Any]) -> None:
    """Compare one file of a checkpoint with its entry in the manifest: first the size, then the hash.

    Raises:
        DamagedError, OSError: as read_manifest.
    """
    file = _regular_file(path / name)
    if (size := file.stat().st_size) != entry["bytes"]:
        raise DamagedError(f"{file}: has {size:,} bytes, {entry['bytes']:,} were written")
    digest = sha256_of(file)
    if digest != entry["sha256"]:
        raise DamagedError(f"{file}: has changed: SHA-256 is {digest[:12]}..., was {entry['sha256'][:12]}...")


def verify(path: Path, share: int = 0, shares: int = 1) -> dict[str, Any]:
    """Verify a checkpoint's files. Returns its manifest.

    Args:
        share, shares: verify only every `shares`-th file, beginning with number `share`, in the order of their size, so
            that ranks verify about as many bytes each.

    Raises:
        DamagedError, UserError, OSError: as read_manifest.
    """
    manifest = read_manifest(path)
    by_size = sorted(manifest["files"].items(), key=lambda item: (-item[1]["bytes"], item[0]))
    for name, recorded in by_size[share::shares]:
        check_file(path, name, recorded)
    return manifest


def set_aside(path: Path, why: str) -> Path:
    """Rename a checkpoint, so that the run ignores it. Returns its new path.

    Args:
        why: prefix of the new name: `damaged` or `later`.
    """
    aside = path.with_name(f"{why}-{path.name}-{uuid.uuid4().hex[:6]}")
    path.rename(aside)
    unmark_suspect(path)  # the marks belong to the name, which a later save will use again
    _unmark_best(path)
    sync(path.parent)
    return aside


def _unmark_best(path: Path) -> None:
    best = path.with_name(BEST)
    if best.is_symlink() and best.readlink() == Path(path.name):
        best.unlink()


def mark_best(path: Path) -> None:
    """Point the symbolic link `best` to this checkpoint. The rename replaces an existing link atomically."""
    aside = path.with_name(f".{BEST}.tmp")
    aside.unlink(missing_ok=True)
    aside.symlink_to(path.name)
    aside.replace(path.with_name(BEST))


def damaged(folder: Path) -> list[Path]:
    """The checkpoints that were renamed because of damage."""
    return sorted(folder.glob("damaged-step-*"))


class Retention:
    """Keeps the newest intact checkpoints and removes older ones. Damaged ones do not count as kept."""

    def __init__(self, folder: Path, keep_latest_k: int) -> None:
        """
        Args:
            folder: the folder of the checkpoints.
            keep_latest_k: intact checkpoints to keep; 0: all.
        """
        self._folder, self._keep = folder, keep_latest_k
        self._verified: dict[Path, list[tuple[str, int, int]]] = {}

    def note(self, path: Path) -> None:
        """Remember that this checkpoint has just been sealed or verified, so that it is not read again."""
        self._verified[path] = _stamps(path)

    def remove_old(self, keep_also: Path | None = None) -> None:
        """Remove checkpoints older than the newest `keep_latest_k` intact ones.

        Suspect ones stay, and so does the one before each of them: it may be the last one with sound weights.

        Args:
            keep_also: the best checkpoint.
        """
        # Checkpoints are verified from the newest on, and only until enough intact ones are found; a damaged one does
        # not count, so an older intact one is kept in its place.
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
        """Whether a checkpoint is intact. It is read once; afterwards, unchanged sizes and ctimes are enough."""
        try:
            if self._verified.get(path) != _stamps(path):
                verify(path)
                self.note(path)
        except (DamagedError, UserError, OSError):
            return False
        return True


def _stamps(path: Path) -> list[tuple[str, int, int]]:
    # ctime, not mtime: cp -p and touch can set the latter
    files = [(file.name, file.stat()) for file in sorted(path.iterdir())]
    return [(name, status.st_size, status.st_ctime_ns) for name, status in files]


def remove(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a kill in between leaves no half-removed `step-N`."""
    gone = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.removed")
    _unmark_best(path)  # a link to it would dangle
    path.rename(gone)
    sync(path.parent)
    shutil.rmtree(gone)


def clear(folder: Path) -> None:
    """Remove leftovers of killed saves and removals. Call it only with the run folder's lock."""
    for left in (*folder.glob(".step-*.incomplete"), *folder.glob(".step-*.removed")):
        try:
            remove_any(left)
        except OSError as error:
            log.warning(f"{left}: is a leftover of an earlier start, and cannot be removed: {error.strerror}")
