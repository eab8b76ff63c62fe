"""A certificate as a Markdown page. Imports no torch."""

from collections.abc import Iterable, Sequence

from titan_mi100.workshop.measure.parts import CERTIFICATE, FAIL, PASS, Header, Part, measured, summary


def page(header: Header, parts: Sequence[Part]) -> str:
    """The certificate in Markdown, without the raw samples."""
    machine = header.machine
    lines = [f"# Certificate: {_cell(machine.device)}", "", f"**{_cell(summary(parts))}.** Made {header.made}.", ""]
    lines += _table(("what", "found"), [(key, str(value)) for key, value in vars(machine).items() if value])
    for kind in dict.fromkeys(part.kind for part in parts):
        steps = [measurement["row"] for measurement in measured(parts, kind) if "row" in measurement]
        rows = [
            (part.name.partition("/")[2], "**FAIL**" if part.verdict == FAIL else part.verdict, part.said)
            for part in parts
            if part.kind == kind and not (steps and part.verdict == PASS)
        ]
        lines += ["", f"## {kind}"]
        lines += ["", *_table([*steps[0]], [[*row.values()] for row in steps])] if steps else []
        lines += ["", *_table(("part", "verdict", "found"), rows)] if rows else []
    lines += ["", f"{CERTIFICATE} has every sample; docs/DOCTOR.md explains the parts and the columns.", ""]
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in cells]


def _cell(text: str) -> str:
    """Escape a text for a table cell: it can come from a library's error message and must not add columns or HTML."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
