"""Write the tables of docs/COMING_FROM.md from titan_mi100/config/other_trainers.txt.

    python scripts/coming_from.py

Each table stands between `<!-- table: TRAINER -->` and `<!-- end -->`. A test compares page and tables.
"""

import re
from pathlib import Path

from titan_mi100.config.other_trainers import Entry, entries, our_keys

PAGE = Path(__file__).resolve().parents[1] / "docs" / "COMING_FROM.md"
_MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def table(trainer: str) -> str:
    rows = [_row(entry) for entry in entries() if entry.trainer == trainer]
    if not rows:
        raise ValueError(f"{PAGE}: {trainer} has no options in other_trainers.txt")
    return "\n".join(["| option | here | note |", "|---|---|---|", *rows, ""])


def _row(entry: Entry) -> str:
    names = ", ".join(f"`{name}`" for name in entry.names)
    here = [f"`{entry.key}`"] if entry.key else []
    for setting in dict.fromkeys(entry.settings.values()):
        values = ", ".join(f"`{value}`" for value, given in entry.settings.items() if given == setting)
        here.append(f"{values}: `{setting}`" if setting else f"{values}: leave it out")
    if not entry.exists:
        here.append("does not exist here" if not here else "else it does not exist here")
    note = re.sub(r"[a-z_]+\.[a-z_0-9]+", lambda name: f"`{name[0]}`" if name[0] in our_keys() else name[0], entry.note)
    return f"| {names} | {'<br>'.join(here) or 'see the note'} | {note} |"


def with_tables(page: str) -> str:
    """The page with each table as other_trainers.txt has it."""
    return _MARKED.sub(lambda found: f"{found[1]}{table(found[2])}{found[3]}", page)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
