"""The chat templates that lie in files of their own beside a tokenizer's. Imports no torch."""

import io
from pathlib import Path

from titan_mi100.errors import UserError
from titan_mi100.files.plain import LARGEST_CONFIG, read_plain

TEMPLATE = "chat_template.jinja"
_NAMED = "additional_chat_templates/*.jinja"


def template_files(folder: Path) -> dict[str, Path]:
    """Those of a folder, by the names that `transformers` gives them. Where there are any, it ignores what
    tokenizer_config.json says."""
    default = {"default": folder / TEMPLATE} if (folder / TEMPLATE).is_file() else {}
    return default | {file.stem: file for file in sorted(folder.glob(_NAMED))}


def read_template(file: Path) -> str:
    """The text, with line ends as `transformers` reads them. Raises UserError: it cannot be read."""
    try:
        text = read_plain(file, LARGEST_CONFIG).decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error!r}); copy the checkpoint's tokenizer files") from None
    return io.StringIO(text, newline=None).read()
