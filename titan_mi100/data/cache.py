"""Folders of prepared data. Each is named by a hash of everything it depends on, and is built once.

A folder is written under a temporary name, synced and then renamed, so a folder that exists is complete. The lock only
avoids duplicate work. Without it (some network file systems, or several nodes) two processes build identical content.
"""

import errno
import fcntl
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from titan_mi100.errors import UserError
from titan_mi100.files.durable import atomic_output_folder, remove_any, replace, sha256_of, sync
from titan_mi100.files.plain import parse_object, read_plain
from titan_mi100.log import log

Stamp = tuple[str, list[int]]  # a file's SHA-256, and its `_stat_stamp` at that time
T = TypeVar("T")
# If a file changed less than this before it was hashed, a second change may get the same timestamp: some file systems
# store times in steps of up to two seconds. Such a hash is not reused.
_SETTLES_NS = 2_000_000_000
_LARGEST_NOTE = 4096  # bytes of a remembered hash; a longer file was not written by us


class DamagedFolder(UserError):
    """A prepared folder that is missing, or whose content differs from what was written."""


def content_hash(path: Path, cache: Path) -> Stamp:
    """SHA-256 of a file. The hash is kept in `cache` and reused until the file system reports a change of the file.

    The status change time (ctime) is compared too, because `touch` and `cp -p` can set the modification time.

    Args:
        path: the file.
        cache: folder that keeps the hashes, in its subfolder `hashes`; it may be read-only.

    Returns:
        The hash in hexadecimal, and the file system's numbers that it belongs to.

    Raises:
        UserError: the file changes while it is hashed.
        OSError: the file cannot be read.
    """
    now, started = _stamp(path), time.time_ns()

    def digest() -> str:
        found = sha256_of(path)
        if _stamp(path) != now:
            raise UserError(f"{path}: changes while it is read; start again when it is complete")
        return found

    is_settled = started - now[3] > _SETTLES_NS  # now[3] is the ctime
    return cached_text(cache / "hashes", [str(path.resolve()), now], digest) if is_settled else digest(), now


def _stamp(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def cached_text(folder: Path, depends: list[Any], make: Callable[[], str]) -> str:
    """A text that depends only on JSON values. It is read from `folder`, or made and stored there.

    Args:
        folder: one file per text; it may be read-only.
        depends: everything that the text depends on; the hash of these values is the file's name.
        make: computes the text.
    """
    note = folder / hashlib.sha256(json.dumps(depends).encode()).hexdigest()
    with suppress(OSError, ValueError, KeyError):  # not stored yet, or its note is damaged
        stored = parse_object(read_plain(note, _LARGEST_NOTE), note, "")
        if stored["sha256"] == hashlib.sha256(stored["text"].encode()).hexdigest():
            return stored["text"]
    text = make()
    with suppress(OSError):  # a read-only cache
        folder.mkdir(parents=True, exist_ok=True)
        replace(note, json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}))
    return text


def open_or_build_folder(
    folder: Path, open_folder: Callable[[Path], T], make: Callable[[Path], None]
) -> tuple[T, bool]:
    """Open `folder`. If it is missing or damaged, build it first, or wait until another process has built it.

    Args:
        folder: named by a hash of what it depends on.
        open_folder: opens it; raises DamagedFolder if the content differs from what was written.
        make: writes all files into the temporary folder that it is given.

    Returns:
        The result of `open_folder`, and whether this process found the folder already built.

    Raises:
        UserError: from `make`. A process that waited for another's failed attempt raises that one's message.
    """
    with suppress(DamagedFolder):  # the fast path takes no lock
        return open_folder(folder), True
    with folder.with_name(f"{folder.name}.lock").open("a+", encoding="utf-8", errors="replace") as lock:
        waited = _acquire_lock(lock.fileno())
        try:  # once more: another process may have built it before this one got the lock
            return open_folder(folder), True
        except DamagedFolder as error:
            damage = error
        # The lock file holds the message of the last failed build. Only a process that waited for that build may
        # repeat it; a later start tries again, because the files may have been corrected.
        lock.seek(0)
        if waited and (failed := lock.read()):
            raise UserError(failed)
        lock.truncate(0)
        if os.path.lexists(folder):
            log.warning(f"{damage}; the data are prepared again")
        _remove(folder)
        try:
            with atomic_output_folder(folder) as aside:
                make(aside)
                for path in aside.iterdir():
                    sync(path)
        except UserError as error:
            with suppress(DamagedFolder):  # without locks, another process may have built it first
                return open_folder(folder), False
            lock.write(str(error))
            raise
        return open_folder(folder), False


def _remove(folder: Path) -> None:
    """Remove a damaged folder. It is renamed first, so that its name is free at once.

    NFS keeps files that another run has mapped, so the removal itself may be incomplete; the next call tries again.
    """
    with suppress(FileNotFoundError):
        folder.rename(folder.with_name(f".{folder.name}.damaged.{uuid.uuid4().hex}"))
    for left in folder.parent.glob(f".{folder.name}.damaged.*"):
        with suppress(OSError):
            remove_any(left)


def _acquire_lock(lock: int) -> bool:
    """Acquire the lock; the system releases it when the process ends. Returns whether another process held it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return False  # this file system has no locks: build without one
    log.info("another process is preparing the same data; waiting for it")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return True
