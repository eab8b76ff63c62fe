"""How a command of ours starts and ends: its words go to the log, its errors are one message and an exit code."""

import errno
import os
import signal
import sys
from collections.abc import Callable

from titan_mi100.errors import UserError
from titan_mi100.logging import log, setup_logging
from titan_mi100.wording import with_level


def exit_code(program: Callable[[], object]) -> int:
    """Run a command whose output is what it prints; what a user caused is one message and code 2."""
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files can be any bytes
    try:
        return _code_of(program, lambda text: print(with_level("ERROR", text), file=sys.stderr))
    except OSError as error:
        print(with_level("ERROR", f"{error.filename or 'standard output'}: {error.strerror}"), file=sys.stderr)
        return 2


def run(main: Callable[[], object], afterwards: str = "nothing was left behind") -> None:
    """Run it; exits if it fails: 1 failed, 2 the user's input, 130 interrupted.

    Args:
        afterwards: how things stand when it has failed.
    """
    setup_logging(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what is half done is cleared away
    try:
        code = _code_of(main, log.error)
    except (RuntimeError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        interrupted, remedy = _was_interrupted(error), "; free some space" if full else ""
        log.error("interrupted" if interrupted else f"{error}{remedy}; {afterwards}")
        code = 130 if interrupted else 1
    if code:
        sys.exit(code)


def _code_of(program: Callable[[], object], say: Callable[[object], None]) -> int:
    try:
        program()
        sys.stdout.flush()
    except UserError as error:
        say(error)
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:  # `| head` has seen enough; what is still buffered must not raise at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _was_interrupted(error: BaseException) -> bool:
    """A Ctrl-C inside of torch.save comes out as what its writer makes of it."""
    cause = error.__context__
    return cause is not None and (isinstance(cause, KeyboardInterrupt) or _was_interrupted(cause))
