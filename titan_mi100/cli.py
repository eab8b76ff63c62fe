"""How a command starts and ends: every error becomes one message and an exit code."""

import argparse
import errno
import os
import shutil
import signal
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Collection
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NoReturn

from titan_mi100.errors import UserError, is_out_of_memory, memory_limit
from titan_mi100.log import log, setup_logging
from titan_mi100.streams import flush_output, open_streams
from titan_mi100.wording import command_name, shortened, with_level

WIDTH = 100  # columns of a help text
_LIBRARIES = ("torch", "triton", "torchdata", "numpy", "tokenizers", "tiktoken", "safetensors", "tensorboard")


def say(message: object) -> None:
    try:
        print(with_level("ERROR", message), file=sys.stderr, flush=True)
    except OSError:  # the reader of stderr is gone, or the disk is full
        flush_output()


def versions() -> str:
    """What `--version` prints: this package, Python, and the libraries that a bug report needs."""
    lines = [
        f"titan_mi100 {import_module('titan_mi100').__version__} in {Path(__file__).parent}",
        f"Python {sys.version.split()[0]}",
    ]
    lines += [f"{name} {version_of(name) or 'is not installed'}" for name in _LIBRARIES]
    return "\n".join(lines)


def example_of(command: str) -> str:
    """The end of a command's help. Args: command: such as "titan-mi100 generate"; another has none."""
    lines = Path(__file__).with_name("config").joinpath("examples.txt").read_text().splitlines()
    return "".join(f"\nexample:\n  {line}\n" for line in lines if line.startswith(f"{command} "))


def version_of(library: str) -> str:
    """A library's version; "": it is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return ""


class Parser(argparse.ArgumentParser):
    """argparse with --version, with help of at most 100 columns, and without two of its habits.

    Abbreviated options are refused, and so is an option that is given twice: argparse would take the last one silently.
    """

    def __init__(self, **options: Any) -> None:
        options["prog"] = command_name(options.get("prog", "")) or None  # None: argparse derives one
        super().__init__(**options, allow_abbrev=False)
        self.register("action", None, _Once)  # the action of an option that names none
        self.add_argument(
            "--version", action=_Version, nargs=0, help="print the versions of this package and its libraries"
        )

    def error(self, message: str) -> NoReturn:
        say(f"{message}; {self.prog} --help lists the options")
        self.exit(2)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if (problem := flush_output()) and not status:  # of --help; some commands read their options before they `run`
            say(problem)
            status = 2
        super().exit(status, message)

    def format_help(self) -> str:
        return super().format_help() + example_of(self.prog)

    def check_used(self, options: argparse.Namespace, why: str, used: Collection[str]) -> None:
        """Refuse options that were given and are not among those that are used. Raises UserError."""
        for name, value in vars(options).items():
            if name not in used and value != self.get_default(name):
                raise UserError(f"--{name} has no effect with {why}; leave it out")

    def _get_formatter(self) -> argparse.HelpFormatter:
        width = min(shutil.get_terminal_size().columns, WIDTH)
        return self.formatter_class(prog=self.prog, width=width)  # type: ignore[call-arg]  # typeshed knows prog only


def reflowed(text: str, width: int = WIDTH) -> str:
    """Help text with paragraphs of at most `width` columns. One with indented lines is left as it is."""
    return "\n\n".join(
        text if "\n " in f"\n{text}" else textwrap.fill(text, width, break_on_hyphens=False)
        for text in text.split("\n\n")
    )


class RawHelp(argparse.RawDescriptionHelpFormatter):
    """For descriptions and epilogs of several paragraphs."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return reflowed(text, width)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser._print_message(f"{versions()}\n", sys.stdout)
        parser.exit()


class _Once(argparse._StoreAction):
    _is_given = False

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if self._is_given:
            parser.error(f"{option_string} is given twice; keep one of them")
        self._is_given = True
        super().__call__(parser, namespace, values, option_string)


def exit_code(program: Callable[[], object], say: Callable[[object], None] = say) -> int:
    """Run a command that prints its results; returns its exit code.

    A user's mistake gives one message and code 2, too little memory code 6. Any other error gives one line and code 1.
    """
    open_streams()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # file names can be any bytes
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
        code = 6 if is_out_of_memory(error) else 1
    if (problem := flush_output()) and not code:
        say(problem)
        code = 2
    return code


def run(main: Callable[[], object]) -> None:
    """Run a command that logs; exits if it fails: 1 error, 2 the user's mistake, 130 interrupted."""
    open_streams()
    setup_logging(0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` blocks clean up
    try:
        code = _code_of(main, log.error)
    except Exception as error:
        code, number, no_memory = _asked_to_end(error), getattr(error, "errno", 0), is_out_of_memory(error)
        if code in (0, 130):  # SIGTERM is not answered
            is_known = isinstance(error, RuntimeError | OSError) and not no_memory
            remedy = "; free some space" * (number in (errno.ENOSPC, errno.EDQUOT))
            message = f"{error}{remedy}; nothing was left behind" if is_known else message_of(error)
            log.error("interrupted" if code else message)
        code = code or (6 if no_memory else 2 if number == errno.ENAMETOOLONG else 1)
    flush_output()
    if code:
        sys.exit(code)


def message_of(error: BaseException, file: Path | None = None) -> str:
    """A user's mistake: its message. Any other error: one line that names the file with the traceback.

    Args:
        file: the traceback is appended to it; None: a new temporary file.
    """
    if isinstance(error, UserError):
        return str(error)
    if is_out_of_memory(error):
        reason = shortened(" ".join(str(error).split()) or type(error).__name__, 200)
        if limit := memory_limit():
            return f"out of memory, which is limited to {limit >> 20} MiB here; raise the limit: ulimit -v ({reason})"
        return f"out of memory; use a machine with more, or end other programs ({reason})"
    text = "".join(traceback.format_exception(error))
    try:
        number, name = (None, file) if file else tempfile.mkstemp(prefix="titan_mi100-", suffix=".log")
        with open(number or name, "a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
    except OSError:  # no file can be written: show the traceback itself
        return text
    summary = f"{type(error).__name__}: {shortened(' '.join(str(error).split()), 300)}"
    return f"unexpected error, {summary}; the traceback is in {name}"


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


def _asked_to_end(error: BaseException) -> int:
    """The exit code of the signal that caused the error: torch.save turns a Ctrl-C or a SIGTERM into an error of its
    own; 0: there was none.
    """
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return int(error.code or 0) if isinstance(error, SystemExit) else 130
    return _asked_to_end(error.__context__) if error.__context__ else 0
