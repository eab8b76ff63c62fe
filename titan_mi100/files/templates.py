"""Chat templates in files of their own, beside the tokenizer's files. Imports no torch."""

import io
import os
from pathlib import Path

from titan_mi100.errors import UserError
from titan_mi100.files.plain import LARGEST_CONFIG, read_plain

TEMPLATE = "chat_template.jinja"
_NAMED = "additional_chat_templates"


def template_files(folder: Path) -> dict[str, Path]:
    """The template files of a folder, by the names that `transformers` gives them.

    If there is one, `transformers` (and we) ignore the templates in tokenizer_config.json.

    Raises:
        UserError: the folder of additional templates is a link.
    """
    default = {"default": folder / TEMPLATE} if os.path.lexists(folder / TEMPLATE) else {}
    if (named := folder / _NAMED).is_symlink():
        raise UserError(f"{named}: is a link; copy the folder itself there (cp -rL)")
    return default | {file.stem: file for file in sorted(named.glob("*.jinja"))}


def read_template(file: Path) -> str:
    """Read a template; CRLF becomes LF, as in `transformers`. Raises UserError: it cannot be read."""
    try:
        text = read_plain(file, LARGEST_CONFIG).decode("utf-8")
    except (OSError, ValueError) as error:
        problem = f"byte {error.start + 1} is not UTF-8" if isinstance(error, UnicodeDecodeError) else repr(error)
        raise UserError(f"{file}: cannot be read ({problem}); copy the checkpoint's tokenizer files") from None
    return io.StringIO(text, newline=None).read()
