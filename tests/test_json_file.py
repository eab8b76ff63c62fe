"""JSON objects in files: one reader, one form of message."""

import os
from pathlib import Path

import pytest

from titan_mi100.errors import UserError
from titan_mi100.files.plain import parse_object, read_object


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"ü": [1, null]}', encoding="utf-8")
    assert read_object(tmp_path / "x.json", "do something") == {"ü": [1, None]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "cannot be read as JSON: "),
        (b'{"a": "\xff"}', "cannot be read as JSON: "),
        (b"[" * 99999, "cannot be read as JSON: "),
        (b"[1]", "must hold one JSON object, not a list"),
        (b"null", "must hold one JSON object, not a NoneType"),
        (b" " * 101, "is larger than 100 bytes"),
        (None, "no such file"),
    ],
)
def test_anything_else_is_a_message_with_file_and_remedy(content: bytes | None, said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_object(file, "do something", largest=100 if content and len(content) < 200 else 1 << 20)
    message = str(caught.value)
    assert message.startswith(f"{file}: {said}")
    assert message.endswith("; do something") or "is larger than" in message
    assert "\n" not in message


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "."):
        with pytest.raises(UserError, match="is not a regular file"):
            read_object(tmp_path / name, "do something")


def test_content_from_elsewhere_is_named_too() -> None:
    assert parse_object(b"{}", "config.json", "correct it") == {}
    with pytest.raises(UserError, match=r"^config.json: cannot be read as JSON: .*; correct it$"):
        parse_object(b"{,}", "config.json", "correct it")
