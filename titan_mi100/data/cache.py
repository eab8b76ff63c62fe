"""Folders of prepared data: each named by a hash of all that it depends on, made once, whole or not there.

A folder is written aside, synced and renamed, so what is there is complete. The lock only spares
others the same work: where a file system has no locks, or only within a node, two builders write the same twice.
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
from titan_mi100.files.durable import atomic_output_folder, remove_left, replace, sha256_of, sync
from titan_mi100.files.plain import parse_object, read_plain
from titan_mi100.logging import log

Stamp = tuple[str, list[int]]  # a file's SHA-256, and what the file system said of it then
T = TypeVar("T")
_SETTLES_NS = 2_000_000_000  # a file changed so shortly before it was hashed may have changed again with the same time
_LARGEST_NOTE = 4096  # bytes


class DamagedFolder(UserError):
    """A prepared folder that is not there, or not what was written."""


def content_hash(path: Path, cache: Path) -> Stamp:
    """SHA-256 of a file, remembered for as long as the file system says that nothing touched the file.

    The time of the last status change cannot be set by `touch` or `cp -p`, unlike that of the last modification.

    Raises:
        UserError: the file changes meanwhile.
        OSError: it cannot be read.
    """
    known = cache / "hashes" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]}.json"
    now = _stamp(path)
    with suppress(OSError, ValueError, KeyError):  # not hashed yet, or the note is damaged
        remembered = parse_object(read_plain(known, _LARGEST_NOTE), known, "")
        if remembered["stamp"] == now and remembered["settled"] is True and isinstance(remembered["sha256"], str):
            return remembered["sha256"], now
    started = time.time_ns()
    digest = sha256_of(path)
    if _stamp(path) != now:
        raise UserError(f"{path}: changes while it is read; start again when it is complete")
    note = {"stamp": now, "settled": started - now[3] > _SETTLES_NS, "sha256": digest}
    with suppress(OSError):  # a cache that this user may only read: hashed again next time
        known.parent.mkdir(exist_ok=True)
        replace(known, json.dumps(note))
    return digest, now


def _stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def remembered(folder: Path, depends: list[Any], make: Callable[[], str]) -> str:
    """A text that follows from JSON values: the one that is kept in the folder under their hash, or a new one."""
    note = folder / hashlib.sha256(json.dumps(depends).encode()).hexdigest()
    with suppress(OSError):
        return note.read_text(encoding="utf-8")
    found = make()
    with suppress(OSError):  # a cache that this user may only read
        folder.mkdir(parents=True, exist_ok=True)
        replace(note, found)
    return found


def ready_folder(
    folder: Path, open_folder: Callable[[Path], T], make: Callable[[Path], None], patience: float
) -> tuple[T, bool]:
    """Open `folder`; if it is not there or damaged, make it first, or wait for another process that does.

    Args:
        folder: named by a hash of what it depends on.
        open_folder: raises DamagedFolder unless the folder is what was written.
        make: writes all files into the folder that it is given.
        patience: seconds to leave the work to another process that may be about to begin it.

    Returns:
        What `open_folder` does, and whether the folder was there already.

    Raises:
        UserError: of `make`; a process that waited for another's failing attempt raises the same.
    """
    with suppress(DamagedFolder):
        return open_folder(folder), True
    until = time.monotonic() + patience
    while time.monotonic() < until and not folder.is_dir() and not list(folder.parent.glob(f".{folder.name}.*")):
        time.sleep(0.02)
    with folder.with_name(f"{folder.name}.lock").open("a+", encoding="utf-8", errors="replace") as lock:
        waited = _take_turn(lock.fileno())
        try:
            return open_folder(folder), True
        except DamagedFolder as error:
            damage = error
        lock.seek(0)
        if waited and (failed := lock.read()):
            raise UserError(failed)
        lock.truncate(0)
        if os.path.lexists(folder):
            log.warning(f"{damage}; it is prepared again")
        _remove(folder)
        try:
            with atomic_output_folder(folder) as aside:
                make(aside)
                for path in aside.iterdir():
                    sync(path)
        except UserError as error:
            with suppress(DamagedFolder):  # without locks another builder may have been faster
                return open_folder(folder), False
            lock.write(str(error))
            raise
        return open_folder(folder), False


def _remove(folder: Path) -> None:
    """Rename it first: it is gone at once, also where NFS keeps files that another run has mapped."""
    with suppress(FileNotFoundError):
        folder.rename(folder.with_name(f".{folder.name}.damaged.{uuid.uuid4().hex}"))
    for left in folder.parent.glob(f".{folder.name}.damaged.*"):
        with suppress(OSError):
            remove_left(left)


def _take_turn(lock: int) -> bool:
    """Take the lock, which goes with the process, however that ends. Returns whether another process had it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            return False  # this file system has no locks
    log.info("another process is preparing the same data; waiting for it")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return True
