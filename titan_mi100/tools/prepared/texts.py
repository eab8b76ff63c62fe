"""Tokens as readable text. Imports no torch."""

import codecs
from collections.abc import Sequence

from titan_mi100.text.base import Tokenizer

_MARKS = {"\n": "↵", "\t": "⇥"}
_VIEW_MARKS = set("↵⇥⟨⟩⟦⟧")  # marks of the views; the same characters in the data are shown as ⟨U+...⟩


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Each token of a document as readable text. Invisible characters other than spaces become ↵, ⇥ or ⟨U+00A0⟩.

    A token can hold a part of a character. Its bytes are shown, ⟨F0 9F⟩; the last part also shows the character:
    ⟨98 80⟩→😀.
    """
    decoder, texts = codecs.getincrementaldecoder("utf-8")("replace"), []
    for token_id in ids:
        spelled = tokenizer.token_bytes(token_id)
        pending = decoder.getstate()[0]  # bytes of an incomplete character from the tokens before
        character = decoder.decode(spelled)[:1]
        completed = f"→{visible(character)}" if pending and character not in ("", "\ufffd") else ""
        texts.append(_readable(spelled) + completed)
    return texts


def _readable(spelled: bytes) -> str:
    """The bytes of a token as readable text; bytes that are no complete character in hexadecimal."""
    try:
        return visible(spelled.decode())
    except UnicodeDecodeError as error:
        # Continuation bytes (0x80 to 0xBF) after the error belong to the same incomplete character.
        rest = spelled[error.end :].lstrip(bytes(range(0x80, 0xC0)))
        part = spelled[error.start : len(spelled) - len(rest)].hex(" ").upper()
        return visible(spelled[: error.start].decode()) + f"⟨{part}⟩" + _readable(rest)


def visible(text: str) -> str:
    """The text with invisible and control characters (except spaces) replaced by marks such as ↵ or ⟨U+001B⟩."""
    hidden = {char for char in text if not char.isprintable() or char in _VIEW_MARKS}
    return text.translate({ord(char): _MARKS.get(char, f"⟨U+{ord(char):04X}⟩") for char in hidden})
