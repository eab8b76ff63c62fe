"""The frame and the style of our HTML pages: one file each, light and dark, no network. Imports no torch."""

from collections.abc import Callable
from html import escape
from pathlib import Path

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


def is_page(title: str) -> Callable[[bytes], bool]:
    """For durable.write_output: whether a file that begins so is a page of ours. Args: title: how its title begins."""
    return lambda start: start.startswith(b"<!DOCTYPE html>") and f"<title>{title}".encode() in start
