"""Makes the standard streams safe: closed at the start, a closed pipe or a full disk at the end."""

import fcntl
import os
import sys
from contextlib import suppress


def open_streams() -> None:
    """Connect closed standard streams (`>&-`) to /dev/null.

    Otherwise the next files that are opened would get the numbers 0 to 2, and prints would go into them.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        with suppress(OSError):
            is_read = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            # A shell may have opened its script under the number of a closed output: that is open for reading only.
            if not (number and is_read):
                continue
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
        os.set_inheritable(number, True)  # if os.open returned `number` itself, dup2 did nothing
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def flush_output() -> str:
    """Flush both outputs before Python does at its exit: an error there prints a traceback, or makes the exit code 120.

    Returns:
        The error message of standard output; "": no error, or the reader has closed the pipe, as `| head` does.
    """
    message = ""
    for stream in (sys.stderr, sys.stdout):
        try:
            stream.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # Python's own flush then succeeds
            if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                message = f"standard output: {error.strerror}"
    return message
