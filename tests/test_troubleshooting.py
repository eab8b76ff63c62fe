"""docs/TROUBLESHOOTING.md quotes what the program prints: each quoted message is one that the code has."""

import ast
import re
from pathlib import Path

REPO = Path(__file__).parents[1]
PAGE = REPO / "docs" / "TROUBLESHOOTING.md"


def _texts_of_the_code() -> str:
    """All texts in the package, those of an f-string without its fields, the shell scripts and the table of keys."""
    found = [path.read_text() for path in [*(REPO / "scripts").glob("*.sh"), REPO / "titan_mi100/data/columns.txt"]]
    for path in (REPO / "titan_mi100").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    return "\n".join(found)


def _quoted_messages(page: str) -> list[str]:
    """The code spans in the first column of the tables that have "printed" or "seen" there."""
    quoted, is_symptom = [], False
    for line in page.splitlines():
        first = line.split("|")[1].strip() if line.startswith("|") else ""
        is_symptom = bool(first) and (is_symptom or first in ("printed", "seen"))
        quoted += re.findall(r"`([^`]+)`", first) if is_symptom else []
    return quoted


def test_every_quoted_message_is_one_that_the_code_prints() -> None:
    texts, quoted = _texts_of_the_code(), _quoted_messages(PAGE.read_text(encoding="utf-8"))
    assert len(quoted) > 50
    missing = [
        f"{part!r} of {message!r}"
        for message in quoted
        for part in (piece.strip(" :;,()") for piece in message.split("..."))
        if len(part) > 2 and part not in texts
    ]
    assert not missing, "no message of the code says:\n" + "\n".join(missing)
