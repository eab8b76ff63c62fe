"""Durable files: synced writes, what commands write, atomic folders, hashes, and the lock that gives a folder to one
run only.
"""

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

from titan_mi100.errors import UserError
from titan_mi100.log import log

_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
_BLOCK = 1 << 20
_INCOMPLETE = ".incomplete"  # suffix of a folder that is being written
LOCK = ".lock"  # name of the lock file in a run folder
_PATIENCE = 60  # seconds to wait for a lock; workers of a killed launcher end within half of that


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the device (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno in _NO_FOLDER_SYNC):  # some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def write_synced(path: Path, text: str, mode: str = "wb") -> None:
    """Write a file and flush it to the device. Args: mode: "ab": append to it."""
    with path.open(mode) as file:
        file.write(text.encode())
        file.flush()
        if not is_stream(path):
            os.fsync(file.fileno())


def replace(path: Path, content: str | bytes, is_synced: bool = False) -> None:
    """Write a file atomically: readers see the old content or the new one, never a part. A link is replaced, and not
    followed. Args: is_synced: flush the file and its folder to the device.
    """
    with _replacing(path) as aside:
        with aside.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        aside.replace(path)
    if is_synced:
        sync(path.parent)


def copy(source: Path, target: Path) -> None:
    """Copy a file atomically. Not synced."""
    with _replacing(target) as aside:
        shutil.copyfile(source, aside)
        aside.replace(target)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary name for a file that takes the place of `path`; it is removed after an error."""
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        yield aside
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def is_stream(path: Path) -> bool:
    """Whether it is a pipe or a device, also behind a link such as /dev/stdout: it is written to as it is."""
    try:
        kind = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(kind) or stat.S_ISCHR(kind)


def check_output(path: Path, option: str, is_ours: Callable[[bytes], bool] = lambda start: False) -> None:
    """Refuse to write over what a command has not written itself: a mistyped option could name the data.

    Args:
        option: it names another file.
        is_ours: whether a file that begins so may be replaced.

    Raises:
        UserError: the last part of the path is a link, a folder, or a file that is not ours.
    """
    try:
        if is_stream(path) or not os.path.lexists(path):
            return
        if path.is_symlink() or not path.is_file():
            problem = "is a link" if path.is_symlink() else "is no regular file"
        else:
            with path.open("rb") as file:
                problem = "" if is_ours(file.read(4096)) else "exists already, and is not overwritten"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if problem:
        raise UserError(f"{path}: {problem}; name another file with {option}")


def write_output(
    path: Path, content: Iterable[str], option: str, is_ours: Callable[[bytes], bool] = lambda start: False
) -> None:
    """Write a file that a command's option names: atomically, and only what `check_output` accepts.

    Args:
        content: texts, one after the other. Others: see check_output.

    Raises:
        UserError: it is refused, or cannot be written.
    """
    check_output(path, option, is_ours)
    try:
        with nullcontext(path) if is_stream(path) else _replacing(path) as target:
            with target.open("wb") as file:
                file.writelines(text.encode(errors="backslashreplace") for text in content)
            if target != path:
                check_output(path, option, is_ours)  # again: another process may have made it meanwhile
                target.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); name another file with {option}") from None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hash_of(path, hashlib.sha256())


def hash_of(path: Path, digest: Any) -> str:
    """A file's hash, in hexadecimal. Args: digest: of hashlib; it may have a beginning already."""
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


class HashingStream:
    """A file opened for writing that computes the SHA-256 and size of what is written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._digest, self.size = file, hashlib.sha256(), 0
        # The first error of a write, kept because torch.save raises a less precise one instead.
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        # Hashing and writing both release the GIL, so they run in parallel. Starting a thread pays for large writes
        # only.
        hashing = threading.Thread(target=self._digest.update, args=(data,)) if len(data) > _BLOCK else None
        if hashing is not None:
            hashing.start()
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        finally:
            if hashing is not None:
                hashing.join()
        if hashing is None:
            self._digest.update(data)
        self.size += written
        return written

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        """Does nothing: torch's writers close the stream they are given, but the file is closed where it was opened."""


def probe(folder: Path, option: str = "job.run_folder") -> None:
    """Try every operation that a checkpoint needs of the file system: write, sync, rename, remove.

    Raises:
        UserError: an operation failed.
    """
    first, second = (folder / f".probe-{uuid.uuid4().hex}{end}" for end in ("", "-renamed"))
    try:
        write_synced(first, "can this folder be written to?")
        first.rename(second)
        sync(folder)
        second.unlink()
    except OSError as error:
        for left in (first, second):
            with suppress(OSError):
                left.unlink(missing_ok=True)
        remedy = "free some space" if error.errno == errno.ENOSPC else "make it writable"
        raise UserError(
            f"{folder}: cannot be written to ({error.strerror}); {remedy}, or name another {option}"
        ) from None


@contextmanager
def atomic_output_folder(final: Path, nbytes: int = 0) -> Iterator[Path]:
    """Yield a temporary folder. It is renamed to `final` at the end, or removed if an exception is raised.

    Args:
        nbytes: bytes that will be written, approximately.

    Raises:
        UserError: `final` exists and is not empty, it cannot be made, or the disk has too little free space.
    """
    if final.is_symlink() or (final.exists() and not (final.is_dir() and not any(final.iterdir()))):
        raise UserError(f"{final}: exists already, and is not overwritten; remove it, or name another folder")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        # With the host's name, because locks may not work across nodes: only this host's leftovers are removed.
        prefix = f".{final.name}.{socket.gethostname()}."
        for left in final.parent.glob(f"{glob.escape(prefix)}*{_INCOMPLETE}"):
            _remove_if_abandoned(left)
        if (free := shutil.disk_usage(final.parent).free) < nbytes:
            raise OSError(errno.ENOSPC, f"needs {nbytes / 1e6:,.1f} MB, {free / 1e6:,.1f} MB are free")
        aside = final.with_name(f"{prefix}{uuid.uuid4().hex[:12]}{_INCOMPLETE}")
        aside.mkdir()
    except OSError as error:
        raise UserError(f"{final}: cannot be written ({error.strerror}); name another folder") from None
    lock = os.open(aside, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield aside
        sync(aside)  # before the rename: a crash must not leave a final name with missing files
        try:
            aside.rename(final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise UserError(f"{final}: another process has written it in the meantime; nothing was changed") from None
        sync(final.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def remove_any(path: Path) -> None:
    """Remove a file or folder of any type. Raises OSError. rmtree alone would open a pipe, and wait forever."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_if_abandoned(aside: Path) -> None:
    """Remove a temporary folder unless its writer is alive, which then holds the lock on it."""
    if aside.is_symlink() or not aside.is_dir():
        remove_any(aside)
        return
    lock = os.open(aside, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(aside, ignore_errors=True)
    os.close(lock)


class FolderLock:
    """An exclusive lock on a run folder. The system releases it when the process ends, even by SIGKILL.

    Attributes:
        nonce: a random text in the lock file. Other nodes compare it, to find out whether they see the same folder.
    """

    def __init__(self, folder: Path, patience: float = _PATIENCE, option: str = "job.run_folder") -> None:
        """Acquire the lock.

        Args:
            patience: seconds to wait for the process that holds it, which may be about to end.
            option: names the folder, for messages.

        Raises:
            UserError: another process holds it; the folder cannot be written to; or a file in it is a link, so that
                writing would change a file elsewhere.
        """
        self.nonce, self._option = uuid.uuid4().hex, option
        record = {"host": socket.gethostname(), "pid": os.getpid(), "nonce": self.nonce}
        try:
            # Links to folders are allowed: users put checkpoints on a larger disk that way.
            if odd := [p for p in folder.iterdir() if not p.is_dir() and (p.is_symlink() or not p.is_file())]:
                raise UserError(f"{odd[0]}: is a link or not a regular file, and would be written to; remove it")
            self._file = (folder / LOCK).open("a+", encoding="utf-8")  # closing it would release the lock
            self._take(folder, patience)
            self._file.truncate(0)
            self._file.write(json.dumps(record))
            self._file.flush()
        except OSError as error:
            text = f"{folder / LOCK}: cannot be written to ({error.strerror}); fix that, or name another {option}"
            raise UserError(text) from None

    def _take(self, folder: Path, patience: float) -> None:
        until, is_logged = time.monotonic() + patience, False
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    return log.warning(f"{folder}: cannot be locked; do not start two runs with this folder")
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
            holder = self._holder()
            if time.monotonic() > until:
                raise UserError(
                    f"{folder}: is used by another run ({holder}); wait for it or end it, or name another "
                    f"{self._option}"
                )
            if not is_logged:
                log.info(f"{folder} is used by another run ({holder}); waiting for up to {patience:.0f} s")
                is_logged = True
            time.sleep(0.2)

    def _holder(self) -> str:
        try:
            self._file.seek(0)
            record = json.loads(self._file.read(_BLOCK))
            return f"process {record['pid']} on {record['host']}"
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return "process unknown"
