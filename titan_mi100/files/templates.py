"""The chat templates that lie in files of their own beside a tokenizer's. Imports no torch."""

import io
import os
from pathlib import Path

from titan_mi100.errors import UserError
from titan_mi100.files.plain import LARGEST_CONFIG, read_plain

TEMPLATE = "chat_template.jinja"
_NAMED = "additional_chat_templates"


def template_files(folder: Path) -> dict[str, Path]:
    """Those of a folder, by the names that `transformers` gives them. Where there are any, it ignores what
    tokenizer_config.json says. Raises UserError: a link leads elsewhere."""
    default = {"default": folder / TEMPLATE} if os.path.lexists(folder / TEMPLATE) else {}
    if (named := folder / _NAMED).is_symlink():
        raise UserError(f"{named}: is a link; copy the folder itself there (cp -rL)")
    return default | {file.stem: file for file in sorted(named.glob("*.jinja"))}


def read_template(file: Path) -> str:
    """The text, with line ends as `transformers` reads them. Raises UserError: it cannot be read."""
    try:
        text = read_plain(file, LARGEST_CONFIG).decode("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read ({error!r}); copy the checkpoint's tokenizer files") from None
    return io.StringIO(text, newline=None).read()
