"""A Python process of its own that runs a function of this package: it may crash, hang or be killed."""

import json
import signal
import sys
from pathlib import Path

_CODE = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); module, _, name = sys.argv[2].partition(':'); "
    "getattr(importlib.import_module('titan_mi100.' + module), name)()"
)


def command(function: str, *arguments: str, with_site: bool = True) -> list[str]:
    """The command line of a process that calls a function without arguments, such as `attention.trial:main`.

    Python runs isolated (-I), so that no file of the current folder is imported in place of a module.

    Args:
        arguments: the function finds them in sys.argv[3:].
        with_site: also read .pth files; without, nothing but this package and the libraries is imported.
    """
    where = json.dumps([str(Path(__file__).parents[2]), *filter(None, sys.path)])
    return [sys.executable, "-I", *([] if with_site else ["-S"]), "-c", _CODE, where, function, *arguments]


def ended(code: int) -> str:
    """How a process has ended, in words. Args: code: as subprocess gives it."""
    names = {number.value: number.name for number in signal.Signals}
    return f"exit code {code}" if code >= 0 else names.get(-code, f"signal {-code}")
