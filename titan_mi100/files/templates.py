"""The chat template in a file of its own, beside the tokenizer's files. Imports no torch."""

import io
import os
from pathlib import Path

from titan_mi100.errors import UserError
from titan_mi100.files.plain import LARGEST_CONFIG, read_plain

TEMPLATE = "chat_template.jinja"
_NAMED = "additional_chat_templates"


def template_file(folder: Path) -> Path | None:
    """The template file of a folder. Where there is one, `transformers` (and we) ignore that in tokenizer_config.json.

    Raises:
        UserError: there are several templates.
    """
    if os.path.lexists(several := folder / _NAMED):
        raise UserError(f"{several}: only one chat template is read, {TEMPLATE}; remove this folder")
    return folder / TEMPLATE if os.path.lexists(folder / TEMPLATE) else None


def read_template(file: Path) -> str:
    """Read a template; CRLF becomes LF, as in `transformers`. Raises UserError: it cannot be read."""
    try:
        text = read_plain(file, LARGEST_CONFIG).decode("utf-8")
    except (OSError, ValueError) as error:
        problem = f"byte {error.start + 1} is not UTF-8" if isinstance(error, UnicodeDecodeError) else repr(error)
        raise UserError(f"{file}: cannot be read ({problem}); copy the checkpoint's tokenizer files") from None
    return io.StringIO(text, newline=None).read()
