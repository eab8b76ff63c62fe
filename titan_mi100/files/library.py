"""Builds objects of transformers in the child process first: one number in a small file can make them take any memory.

In a config.json, num_labels = 1e9 makes 10^9 names of classes.
"""

from collections.abc import Sequence
from pathlib import Path

from titan_mi100.errors import UserError
from titan_mi100.files.child import TOO_MUCH, call_in_child, limit, raise_limits

_IMPORTS = 128 << 20  # the limits are raised as for so many bytes: the imports take seconds, with torch's 0.8 GB
_FILES = {"AutoConfig": "config.json", "GenerationConfig": "generation_config.json", "AutoTokenizer": "tokenizer.json"}


def try_library(folder: Path, classes: Sequence[str] = tuple(_FILES)) -> list[str]:
    """Build the classes of transformers from a folder, within limits on memory and time. Takes some seconds.

    Returns:
        What transformers objects to, one text each. The caller may load the folder then, which gives the same error.

    Raises:
        UserError: a file makes it exceed the limits.
    """
    found: list[str] = call_in_child("files.library:build", folder, list(classes))
    return found


def build(folder: str, classes: list[str]) -> list[str]:
    """The child's part of `try_library`."""
    raise_limits(_IMPORTS)
    import transformers

    kinds = {name: getattr(transformers, name) for name in classes}
    limit()  # again, so that what was imported does not count
    raise_limits(sum(file.stat().st_size for file in Path(folder).iterdir() if file.suffix in (".json", ".txt")))
    problems = []
    for name, kind in kinds.items():
        file = Path(folder) / _FILES[name]
        try:
            if file.exists():
                kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except MemoryError:
            raise UserError(f"{file}: {TOO_MUCH} in transformers; get it again from a source that you trust") from None
        except Exception as error:  # the library raises errors of all types
            problems.append(f"{file}: transformers refuses it: {error}")
    return problems
