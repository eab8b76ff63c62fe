"""Finds the data files that a path or glob pattern of the config matches. Imports no torch."""

import functools
import glob
import os
import re
import stat
import time
from collections.abc import Iterator

from titan_mi100.errors import UserError, did_you_mean
from titan_mi100.files.plain import LFS_POINTER, lfs_problem
from titan_mi100.log import log
from titan_mi100.wording import some

_MOST_NAMES = 10_000  # most names in a folder that are compared with a missing name
_LARGE = 1 << 30  # bytes from which a file is looked at for holes
_MOST_ENTRIES, _MOST_SECONDS = 1_000_000, 30.0  # that a pattern may look at, and take


def matching_files(pattern: str) -> tuple[list[str], list[str]]:
    """The files of a path or a glob pattern (`**`: any folders, but no links), sorted by name; a line per problem."""
    literal = os.path.lexists(pattern) or not glob.has_magic(pattern)  # an existing file may be named data[1].jsonl
    try:
        links = list[str]()  # to folders, below **
        files = [pattern] if literal else sorted({f for f in _matches(pattern, links) if not os.path.isdir(f)})
        left = f"; ** follows no links: name the folders {some(sorted({*links}), 3)}" if links else ""
    except (UserError, RecursionError) as error:
        return [], [f"{pattern}: {error}"]
    problems = [f"{file}: {reason}" for file in files if (reason := unusable(file))]
    if files and left:
        _warn_once(f"{pattern}: matches {len(files):,} files{left}, if their files are wanted, too")
    return files, problems if files else [f"{pattern}: matches no file{left or nearby(pattern)}"]


@functools.cache
def _warn_once(text: str) -> None:
    log.warning(text)


def _matches(pattern: str, links: list[str]) -> Iterator[str]:
    """As glob.iglob, but `**` follows no links. Args: links: gets those to folders that it has not followed.

    Raises:
        UserError: there is too much to look at.
    """
    if os.path.basename(pattern) == "**":
        pattern = os.path.join(pattern, "*")
    before, *behind = re.split(r"(?<![^/])\*\*/", pattern, maxsplit=1)
    if not behind:
        yield from glob.iglob(pattern)
        return
    looked, end = 0, time.monotonic() + _MOST_SECONDS
    for root in glob.iglob(before) if before else [""]:
        for folder, below, names in os.walk(root or os.curdir):
            looked += len(below) + len(names)
            if looked > _MOST_ENTRIES or time.monotonic() > end:
                limit = f"more than {_MOST_ENTRIES:,} files and folders to look at, or {_MOST_SECONDS:.0f} seconds"
                raise UserError(f"{limit}; name a folder further down, or fewer *")
            below[:] = [name for name in below if not name.startswith(".")]
            links += [link for name in below if os.path.islink(link := os.path.join(folder, name))]
            here = folder if root else folder[2:]  # without ./
            yield from _matches(os.path.join(glob.escape(here), behind[0]), links)


def nearby(path: str) -> str:
    """The end of a message about a missing file: its folder is missing, or it holds a file with a similar name."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder) or not os.access(folder, os.X_OK):
        return "" if glob.has_magic(folder) else f"; {folder} is no folder, or may not be entered"
    try:
        names = sorted(set(os.listdir(folder)) - {os.path.basename(path)})[:_MOST_NAMES]  # a broken link is there
    except OSError:
        return ""
    beside = os.path.join(os.path.dirname(path), "")
    return did_you_mean(os.path.basename(path), names, beside, otherwise="", cutoff=0.8)


def unusable(path: str, kind: str = "*.jsonl") -> str:
    """Why the path cannot be read as a file; "" if it can. Args: kind: a pattern of such files, for the message."""
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        return f"cannot be read: {error.strerror}{nearby(path)}"
    except (OSError, ValueError) as error:  # ValueError: a NUL byte
        return f"cannot be read: {error.strerror if isinstance(error, OSError) else error}"
    if stat.S_ISDIR(status.st_mode):
        return f"is a folder; name its files, e.g. {os.path.join(path, kind)}"
    kernels = {os.stat(folder).st_dev for folder in ("/proc", "/sys") if os.path.ismount(folder)}
    if not stat.S_ISREG(status.st_mode) or status.st_dev in kernels:  # reading /proc/kmsg waits for the next message
        return "is not a regular file (a pipe?); it is read more than once, so write its content to disk first"
    if not os.access(path, os.R_OK):
        return "cannot be read: Permission denied"
    with open(path, "rb") as file:
        # a copy that did not end, or `truncate`; some file systems count no blocks, but those find no holes
        is_sparse = status.st_size > _LARGE and status.st_blocks * 512 < status.st_size // 100
        if is_sparse and os.lseek(file.fileno(), 0, os.SEEK_HOLE) < status.st_size:
            return f"has {status.st_size:,} bytes, of which nearly none is on the disk; copy or download it again"
        file.seek(0)
        return lfs_problem(path) if file.read(len(LFS_POINTER)) == LFS_POINTER else ""
