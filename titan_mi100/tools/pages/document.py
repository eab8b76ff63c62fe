"""The frame of our HTML pages: one file each, light and dark, no network. Imports no torch."""

import os
from html import escape
from pathlib import Path

from titan_mi100.errors import UserError
from titan_mi100.files.plain import open_plain
from titan_mi100.wording import printable

# Colours are CSS variables, so that a page follows the light or dark mode. The colours of curves are those of Okabe and
# Ito (2008), which are distinct with any colour vision; dark mode has lighter variants.
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --soft: #57606a; --line: #d0d7de; --card: #f6f8fa;
  --good: #1a7f37; --warn: #9a6700; --bad: #cf222e; --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b8528f;
  --c4: #a67c00; --c5: #2b93c9; --c6: #57606a }
@media (prefers-color-scheme: dark) { :root { --back: #0f1318; --text: #e6edf3; --soft: #9aa5b1; --line: #333b45;
  --card: #181e26; --good: #4cc36a; --warn: #dba83a; --bad: #ff7b72; --c0: #56b4e9; --c1: #f0883e; --c2: #2fc79a;
  --c3: #e39ac2; --c4: #e8c547; --c5: #9bd2f5; --c6: #aab4bf } }
body { background: var(--back); color: var(--text); max-width: 80em; margin: 2em auto; padding: 0 1em;
  overflow-wrap: anywhere }
"""


def text(value: object) -> str:
    """Escape a text for HTML: markup, control characters and characters that change the text direction."""
    return escape(printable(str(value)))


def html_document(title: str, style: str, body: str) -> str:
    """A complete HTML page in one file. Its content security policy allows no script and no network access.

    Args:
        title: plain text.
        style: CSS of this page; it follows the CSS of all pages.
        body: HTML; every text in it must be escaped by `text`.
    """
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = (
        f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{_STYLE}{style}</style>\n"
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
