"""A certificate as a Markdown page, and the board of many. Imports no torch."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from titan_mi100.files.durable import write_output
from titan_mi100.tools.measure.parts import CERTIFICATE, FAIL, PAGE, PASS, Header, Part, measured, read, summary

_BOARD = ("model", "method", "bf16", "N", "toks/s", "mfu")  # columns of the steps' table
_MARK = "<!-- made by: titan-mi100 certify --board certificates -->\n"  # the text above it is written by hand


def page(header: Header, parts: Sequence[Part]) -> str:
    """The certificate in Markdown, without the raw samples."""
    machine = header.machine
    lines = [f"# Certificate: {_cell(machine.device)}", "", f"**{_cell(summary(parts))}.** Made {header.made}.", ""]
    lines += _table(("what", "found"), [(key, str(value)) for key, value in vars(machine).items() if value])
    for kind in dict.fromkeys(part.kind for part in parts):
        steps = [found["row"] for found in measured(parts, kind) if "row" in found]
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


def write_board(folder: Path) -> None:
    """Write folder/README.md anew from the certificates in the folder: of each model and method the fastest step.

    Raises:
        UserError: a certificate cannot be read, or the page not written.
    """
    rows = []
    for path in sorted(folder.glob(f"*/{CERTIFICATE}")):
        header, parts = read(path)
        steps = sorted(measured(parts, "steps"), key=lambda found: float(found["tokens_per_second"]))
        fastest = {(found["row"]["model"], found["row"]["method"]): found["row"] for found in steps}
        machine, state = header.machine, " (unfinished)" * summary(parts).startswith("unfinished")
        link = f"[{header.made[:10]}]({path.parent.name}/{PAGE}){state}"
        cells = [[row[name] for name in _BOARD] for _, row in sorted(fastest.items())]
        rows += [(machine.device, *row, f"{machine.torch} {machine.runtime}".strip(), link) for row in cells]
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8").partition(_MARK)[0] if readme.exists() else ""
    table = _table(("card", *_BOARD, "torch, ROCm or CUDA", "made"), rows)
    write_output(readme, [f"{text}{_MARK}\n", "\n".join(table), "\n"], "--board", lambda start: True)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in cells]


def _cell(text: str) -> str:
    """Escape a text for a table cell: it can come from a library's error message and must not add columns or HTML."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
