"""The child process that measures one part of a certificate: it calls a function and writes the result to a file."""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from titan_mi100.errors import UserError
from titan_mi100.files import durable
from titan_mi100.files.pool import end_with_parent
from titan_mi100.tools.certificate.form import MEASURED, UNAVAILABLE
from titan_mi100.tools.measure.children import tidy


def main() -> None:
    """Run the task of sys.argv[3]: [function, arguments, result file, parent's process id] as JSON."""
    target, arguments, path, parent = json.loads(sys.argv[3])
    end_with_parent(parent)
    answer = _answer(target, arguments)
    durable.replace(Path(path), json.dumps(answer))
    sys.stderr.flush()
    # Skip the interpreter's teardown: jobs of several processes sometimes abort there, and a broken library can hang.
    os._exit(0)


def _answer(target: str, arguments: dict[str, Any]) -> tuple[str, str, Any]:
    module, name = target.split(":")
    try:
        return MEASURED, "", getattr(importlib.import_module(module), name)(**arguments)
    except UserError as error:
        return UNAVAILABLE, tidy(str(error)), None
    except Exception as error:
        status = "out of memory" if _is_out_of_memory(error) else "failed"
        return status, tidy(f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"), None


def _is_out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:  # do not import torch, which takes seconds, for a part that did not use it
        return isinstance(error, MemoryError)
    from titan_mi100.run.forecast import is_out_of_memory

    return is_out_of_memory(error)
