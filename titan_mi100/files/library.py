"""Builds objects of transformers in the child process first: one number in a small file can make them take any memory.

In a config.json, num_labels = 1e9 makes 10^9 names of classes.
"""

import importlib
import os
from pathlib import Path

from titan_mi100.errors import UserError
from titan_mi100.files.child import TOO_MUCH, call_in_child, limit, raise_limits

_IMPORTS = 128 << 20  # the limits are raised as for so many bytes: the imports take seconds, with torch's 0.8 GB
# So many bytes more for building one object: seconds enough that what grows meets the limit on memory first, whose
# error names the file, also on a slow machine.
_BUILD = 32 << 20
_CLASSES = {"config.json": "AutoConfig", "generation_config.json": "GenerationConfig"}
_CLASSES |= {"tokenizer.json": "AutoTokenizer"}


def try_library(folder: Path, *files: str) -> str:
    """Let transformers read files of a folder (none named: all), within limits on memory and time. Takes seconds.

    Returns:
        What transformers objects to; "": nothing. The caller may load the folder then, which gives the same error.

    Raises:
        UserError: a file makes it exceed the limits.
    """
    return str(call_in_child("files.library:build", folder, files or list(_CLASSES)))


def build(folder: str, files: list[str]) -> str:
    """The child's part of `try_library`."""
    raise_limits(_IMPORTS)
    library = importlib.import_module("transformers")
    kinds = {f"{folder}/{name}": getattr(library, _CLASSES[name]) for name in files}
    limit()  # again, so that what was imported does not count
    for file, kind in kinds.items():
        try:
            if os.path.exists(file):
                raise_limits(os.path.getsize(file) + _BUILD)
                kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except MemoryError:
            raise UserError(f"{file}: {TOO_MUCH} in transformers; get it again from a source that you trust") from None
        except Exception as error:  # the library raises errors of all types
            return f"{file}: transformers refuses it: {error}"
    return ""
