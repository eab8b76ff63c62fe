"""Looks into files from strangers in a process with limits on memory and time, so that no file can exhaust this one.

What runs there is a function of this package, what it returns is JSON. The process imports no torch, whose address
space alone is 4 GB; it is started by the first question and serves all of them, until `end` or its parent's end.
"""

import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_mi100.errors import UserError

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from titan_mi100.files.child import serve; serve()"
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")  # each takes memory
_PATIENCE = 300  # seconds for an answer: the limit on CPU time does not count a file system that hangs
_MEMORY, _MEMORY_PER_BYTE = 1 << 30, 16  # of a .metadata of 19 MB: 0.2 GB
SECONDS, _BYTES_PER_SECOND = 5, 1 << 20  # of CPU time
_LARGEST_ANSWER = 1 << 27  # bytes
TOO_MUCH = "needs more memory or time than a real file of its size"
_HARM = "it is damaged, or was made to do harm"

_lock = threading.Lock()
_process: subprocess.Popen[bytes] | None = None
_limited = False  # this process is the child, or another one that `limit` was called in
_granted, _began, _held = 0, 0, 0  # since `limit`: bytes that were allowed for; and CPU seconds and memory then


def ask(function: str, path: Path, *arguments: Any) -> Any:
    """What a function of this package finds in files, in the child process.

    Args:
        function: its module below this package and its name, as `files.tables:read_torch`. It gets the path as a str,
            and the arguments.
        arguments: what JSON can hold, as what the function returns.

    Raises:
        UserError: the function's own; or reading took more memory or time than it may.
    """
    with _lock:
        process = _started()
        try:
            answer = json.loads(_exchange(process, json.dumps([function, str(path), *arguments]).encode()))
        except (OSError, ValueError):  # it ended before the end of its answer
            end()
            raise UserError(f"{path}: {TOO_MUCH}; {_HARM}") from None
        except BaseException:  # interrupted: the answer would be taken for the next one's
            end()
            raise
        if answer["full"]:
            end()
    if answer["refused"]:
        raise UserError(answer["refused"])
    return answer["found"]


def _started() -> subprocess.Popen[bytes]:
    global _process
    if _process is None or _process.poll() is not None:
        end()
        where = json.dumps([str(Path(__file__).parents[2]), *sys.path])
        _process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1")},
        )
    return _process


def _exchange(process: subprocess.Popen[bytes], question: bytes) -> bytes:
    """Send a line, receive a line."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(question + b"\n")
    process.stdin.flush()
    ready, answer, left = select.poll(), bytearray(), _PATIENCE
    ready.register(process.stdout, select.POLLIN)
    while not answer.endswith(b"\n"):
        while not ready.poll(1000) and left:  # second by second: while a job is suspended the clock runs on
            left -= 1
        block = os.read(process.stdout.fileno(), 1 << 20) if left else b""
        answer += block
        if not block or len(answer) > _LARGEST_ANSWER:
            raise OSError("no answer")
    return bytes(answer)


def end() -> None:
    """End the process, if there is one."""
    global _process
    if _process is not None:
        _process.kill()
        _process.communicate()
    _process = None


def _forget() -> None:
    """In a process that was forked: the child is its parent's."""
    global _process, _lock
    _process, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def serve() -> None:
    """Answer questions: what the child process does."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what libraries print is no answer
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # sent to all of a job; the parent decides
    for question in sys.stdin:
        answers.write(_answer(*json.loads(question)) + "\n")
        answers.flush()


def _answer(function: str, path: str, *arguments: Any) -> str:
    limit()
    found, refused = None, ""
    module, name = function.split(":")
    try:
        found = json.dumps(getattr(importlib.import_module(f"titan_mi100.{module}"), name)(path, *arguments))
    except UserError as error:
        refused = str(error)
    except MemoryError:
        refused = f"{path}: {TOO_MUCH}; {_HARM}"
    except Exception as error:
        refused = f"{path}: cannot be read: {error!r}; {_HARM}"
    full = _memory(1) > _most_memory() / 4  # what it keeps would be added to what the next question may take
    return f'{{"found": {found or "null"}, "refused": {json.dumps(refused)}, "full": {json.dumps(full)}}}'


def _memory(field: int) -> int:
    """Of this process, in bytes; 1: what is resident (ru_maxrss would begin with the parent's), 5: its data."""
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()
    return 0  # not Linux


def _most_memory() -> int:
    """Bytes that a question may take."""
    return _MEMORY + _MEMORY_PER_BYTE * _granted


def limit() -> None:
    """In a process that looks into files: from now on it may take little memory and time, and what `allow` adds."""
    global _limited, _granted, _began, _held
    _limited, _granted, _began, _held = True, 0, int(time.process_time()), _memory(5)
    allow(0)


def allow(size: int) -> None:
    """Raise the limits, if there are any, by what so many bytes may take."""
    global _granted
    if not _limited:
        return
    _granted += size
    seconds = SECONDS + _granted // _BYTES_PER_SECOND
    for kind, most in ((resource.RLIMIT_DATA, _held + _most_memory()), (resource.RLIMIT_CPU, _began + seconds)):
        with suppress(ValueError, OSError):  # the system's own limit is lower
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
