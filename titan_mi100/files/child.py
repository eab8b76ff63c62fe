"""Parses untrusted files in a child process with limits on memory and CPU time, so that no file can exhaust this one.

The child runs a function of this package and returns JSON. It does not import torch, whose address space alone is 4 GB.
The first question starts it; it serves all further ones, until `end` is called or its parent ends.
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
from titan_mi100.files.isolated import command

_SERVE = "files.child:serve"
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")  # each thread takes memory
_PATIENCE = 300  # seconds to wait for an answer; the CPU limit does not end a read that hangs in the file system
# Memory limit in bytes: a base, plus so much per byte of the file. A .metadata of 19 MB needs 0.2 GB.
_MEMORY, _MEMORY_PER_BYTE = 1 << 30, 16
SECONDS, _BYTES_PER_SECOND = 5, 1 << 20  # limit on CPU time: a base, plus a second per so many bytes
_LARGEST_ANSWER = 1 << 27  # bytes
TOO_MUCH = "needs more memory or time than a real file of its size"
_HARM = "it is damaged, or was made to do harm"

_lock = threading.Lock()
_process: subprocess.Popen[bytes] | None = None
_limited = False  # whether `limit` was called in this process (the child, or a tokenising worker)
# Bytes granted by `raise_limits` since `limit` was called; CPU seconds and memory of the process at that time.
_granted, _began, _held = 0, 0, 0


def call_in_child(function: str, path: Path, *arguments: Any) -> Any:
    """Run a function of this package in the child process.

    Args:
        function: module below this package, and name: `files.tables:read_torch`. It is called with the path as a str,
            and the arguments.
        path: the file or folder to look into.
        arguments: JSON values, as is the function's result.

    Returns:
        The function's result.

    Raises:
        UserError: from the function; or it exceeded a limit on memory or time.
    """
    with _lock:
        process = _started()
        try:
            answer = json.loads(_exchange(process, json.dumps([function, str(path), *arguments]).encode()))
        except (OSError, ValueError):  # the child was killed by a limit, in the middle of its answer
            end()
            raise UserError(f"{path}: {TOO_MUCH}; {_HARM}") from None
        except BaseException:  # interrupted (Ctrl-C): end the child, or the next question would read this answer
            end()
            raise
        if answer["full"]:  # the next question gets a fresh child
            end()
    if answer["refused"]:
        raise UserError(answer["refused"])
    return answer["found"]


def _started() -> subprocess.Popen[bytes]:
    """The child process; started if there is none."""
    global _process
    if _process is None or _process.poll() is not None:
        end()
        _process = subprocess.Popen(
            command(_SERVE, with_site=False),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # pyarrow's own pools reserve 1 GiB at once, all that a question may use
            env={**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), "ARROW_DEFAULT_MEMORY_POOL": "system"},
        )
    return _process


def _exchange(process: subprocess.Popen[bytes], question: bytes) -> bytes:
    """Send one line and receive one line. Raises OSError: no complete answer came."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(question + b"\n")
    process.stdin.flush()
    ready, answer, left = select.poll(), bytearray(), _PATIENCE
    ready.register(process.stdout, select.POLLIN)
    while not answer.endswith(b"\n"):
        # Polled second by second, because a clock would also count the time in which the job is suspended.
        while not ready.poll(1000) and left:
            left -= 1
        block = os.read(process.stdout.fileno(), 1 << 20) if left else b""
        answer += block
        if not block or len(answer) > _LARGEST_ANSWER:
            raise OSError("no answer")
    return bytes(answer)


def end() -> None:
    """End the child process, if there is one."""
    global _process
    if _process is not None:
        _process.kill()
        _process.communicate()
    _process = None


def _forget_child() -> None:
    """After a fork, in the new process: forget the child, which belongs to the parent."""
    global _process, _lock
    _process, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_child)


def serve() -> None:
    """The main loop of the child process: read questions from stdin, write answers to stdout, one line each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that prints of libraries do not mix with the answers
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # a job's signals reach all its processes; the parent handles them
    for question in sys.stdin:
        answers.write(_answer(*json.loads(question)) + "\n")
        answers.flush()


def _answer(function: str, path: str, *arguments: Any) -> str:
    limit()
    answer, refused = None, ""
    module, name = function.split(":")
    try:
        answer = json.dumps(getattr(importlib.import_module(f"titan_mi100.{module}"), name)(path, *arguments))
    except UserError as error:
        refused = str(error)
    except MemoryError:
        refused = f"{path}: {TOO_MUCH}; {_HARM}"
    except Exception as error:
        refused = f"{path}: cannot be read: {error!r}; {_HARM}"
    # Memory that libraries keep reduces what the next question may use, so a child that keeps much is replaced.
    full = _memory(1) > _most_memory() / 4
    return f'{{"found": {answer or "null"}, "refused": {json.dumps(refused)}, "full": {json.dumps(full)}}}'


def _memory(field: int) -> int:
    """Memory of this process in bytes. Args: field: index in /proc/self/statm; 1: resident set, 5: data segment.

    ru_maxrss is of no use here: after a fork it begins with the parent's value.
    """
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[field]) * resource.getpagesize()
    return 0  # not Linux


def _most_memory() -> int:
    """The memory limit of the current question, in bytes."""
    return _MEMORY + _MEMORY_PER_BYTE * _granted


def limit() -> None:
    """Limit the memory and CPU time of this process from now on; `raise_limits` raises the limits."""
    global _limited, _granted, _began, _held
    _limited, _granted, _began, _held = True, 0, int(time.process_time()), _memory(5)
    raise_limits(0)


def raise_limits(size: int) -> None:
    """Raise the limits by what parsing `size` bytes may need. Does nothing in a process without limits."""
    global _granted
    if not _limited:
        return
    _granted += size
    seconds = SECONDS + _granted // _BYTES_PER_SECOND
    for kind, most in ((resource.RLIMIT_DATA, _held + _most_memory()), (resource.RLIMIT_CPU, _began + seconds)):
        with suppress(ValueError, OSError):  # the hard limit is lower, and holds anyway
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
