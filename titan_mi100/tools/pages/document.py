"""The frame and the style of our HTML pages: one file each, light and dark, no network. Imports no torch."""

import os
from html import escape
from pathlib import Path

from titan_mi100.errors import UserError
from titan_mi100.files.plain import open_plain
from titan_mi100.wording import printable


def text(value: object) -> str:
    """Escape a text for HTML: markup, control characters and characters that change the text direction."""
    return escape(printable(str(value)))


def html_document(title: str, body: str) -> str:
    """A complete HTML page in one file, with style.css. Its content security policy allows no script and no network.

    Args:
        title: plain text.
        body: HTML; every text in it must be escaped by `text`.
    """
    style = Path(__file__).with_name("style.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{style}</style>\n"
    )
    return f"{head}{body}</html>\n"


def check_place(path: Path, title: str, option: str) -> None:
    """Refuse to write a page over a file that is none: a mistyped option could name the data.

    Args:
        title: how the page's title begins.
        option: it names another file.

    Raises:
        UserError: the file is no page with such a title, or cannot be read.
    """
    if not os.path.lexists(path):
        return
    try:
        with open_plain(path) as file:
            start = file.read(4096)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name another file with {option}") from None
    except UserError as error:
        raise UserError(f"{error}; or name another file with {option}") from None
    if not start.startswith(b"<!DOCTYPE html>") or f"<title>{title}".encode() not in start:
        raise UserError(f"{path}: exists already and is no page of this command; name another file with {option}")
