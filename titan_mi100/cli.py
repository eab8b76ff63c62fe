"""How a command of ours starts and ends: its words go to the log, its errors are one message and an exit code."""

import argparse
import errno
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_mi100.errors import UserError
from titan_mi100.logging import log, setup_logging
from titan_mi100.streams import flush_output, open_streams
from titan_mi100.wording import command_name, shortened, with_level


def say(message: object) -> None:
    with suppress(OSError):  # its reader is gone, or its disk is full
        print(with_level("ERROR", message), file=sys.stderr, flush=True)


class Parser(argparse.ArgumentParser):
    """Refuses an option that is given twice, of which argparse would drop the first without a word."""

    def __init__(self, **options: Any) -> None:
        options["prog"] = command_name(options.get("prog", "")) or None  # None: argparse makes one
        super().__init__(**options, allow_abbrev=False)
        self.register("action", None, _Once)  # the action of an option that names none


class _Once(argparse._StoreAction):
    _is_given = False

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self._is_given:
            parser.error(f"{option_string} is given twice; keep one of them")
        self._is_given = True
        super().__call__(parser, namespace, values, option_string)


def exit_code(program: Callable[[], object], say: Callable[[object], None] = say) -> int:
    """Run a command whose output is what it prints; returns the code that it returns, if any.

    What a user caused is one message and code 2, all else one line and code 1.
    """
    open_streams()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names of files can be any bytes
    try:
        os.getcwd()
        code = _code_of(program, say)
    except SystemExit as ended:  # argparse has printed its help, or what is wrong
        code = int(ended.code or 0)
    except OSError as error:
        unnamed = "the current folder" if error.errno == errno.ENOENT else "standard output"
        say(f"{error.filename or unnamed}: {error.strerror}")
        code = 2
    except Exception as error:
        say(message_of(error))
        code = 1
    if (problem := flush_output()) and not code:
        say(problem)
        code = 2
    return code


def run(main: Callable[[], object], afterwards: str = "nothing was left behind") -> None:
    """Run it; exits if it fails: 1 failed, 2 the user's input, 130 interrupted.

    Args:
        afterwards: how things stand when it has failed.
    """
    open_streams()
    setup_logging(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what is half done is cleared away
    try:
        code = _code_of(main, log.error)
    except (RuntimeError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        interrupted, remedy = _was_interrupted(error), "; free some space" if full else ""
        log.error("interrupted" if interrupted else f"{error}{remedy}; {afterwards}")
        code = 130 if interrupted else 2 if getattr(error, "errno", 0) == errno.ENAMETOOLONG else 1
    except Exception as error:
        log.error(message_of(error))
        code = 1
    flush_output()
    if code:
        sys.exit(code)


def message_of(error: Exception, file: Path | None = None) -> str:
    """The message of what a user caused; of all else one line that names the file with the traceback.

    Args:
        file: to add the traceback to; None: a new one in the folder for temporary files.
    """
    if isinstance(error, UserError):
        return str(error)
    text = "".join(traceback.format_exception(error))
    try:
        number, name = (None, file) if file else tempfile.mkstemp(prefix="titan_mi100-", suffix=".log")
        with open(number or name, "a", encoding="utf-8", errors="backslashreplace") as out:
            out.write(text)
    except OSError:  # a full disk must not hide why
        return text
    what = f"{type(error).__name__}: {shortened(' '.join(str(error).split()), 300)}"
    return f"unexpected error, {what}; the traceback is in {name}"


def _code_of(program: Callable[[], object], say: Callable[[object], None]) -> int:
    try:
        code = program()
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UserError as error:
        say(error)
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        return 0


def _was_interrupted(error: BaseException) -> bool:
    """A Ctrl-C inside of torch.save comes out as what its writer makes of it."""
    cause = error.__context__
    return cause is not None and (isinstance(cause, KeyboardInterrupt) or _was_interrupted(cause))
