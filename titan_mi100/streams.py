"""The standard streams as a command finds and leaves them: closed, without a reader, on a full disk."""

import fcntl
import os
import sys
from contextlib import suppress


def open_streams() -> None:
    """Let closed streams (`>&-`) lead nowhere: their numbers would go to the next files that are opened."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        with suppress(OSError):
            is_read = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            if not (number and is_read):  # a shell may have its script in the place of a closed output
                continue
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
        os.set_inheritable(number, True)  # where the system gave out the number itself
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def flush_output() -> str:
    """Let go out what was printed; why it cannot, or "". Python's own attempt at its end would be a traceback."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # `| head` has seen enough
            return f"standard output: {error.strerror}"
    return ""
