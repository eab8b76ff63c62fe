"""The columns of all tables about steps: `sweep`, `report` of several runs, metrics.jsonl. Imports no torch."""

from collections.abc import Mapping, Sequence

# What a step is made of; docs/TRAIN.md explains the short forms.
SETTINGS = ("layout", "N", "B_micro", "GA", "T_eff", "ckpt", "dtype")
# What is measured: column -> key in metrics.jsonl and in a sweep's rows.jsonl, factor, digits after the point
FIGURES: Mapping[str, tuple[str, float, int]] = {
    "step_ms": ("step_ms", 1, 0),
    "comm_ms": ("comm_ms", 1, 0),
    "exposed_ms": ("comm_exposed_ms", 1, 0),
    "toks/s": ("tokens_per_second", 1, 0),
    "peak GiB": ("peak_memory_gib", 1, 2),
    "peak GB": ("peak_memory_gib", 2**30 / 1e9, 2),
    "MFU": ("mfu", 100, 1),
}


def figures(measured: Mapping[str, float | None]) -> dict[str, str]:
    """The cells of a row, by column. Args: measured: by the keys of FIGURES; None: n/a, a key that is absent: ""."""
    cells = {}
    for column, (key, factor, digits) in FIGURES.items():
        figure = measured.get(key)
        digits = 1 if column.endswith("_ms") and figure is not None and figure < 100 else digits
        number = "n/a" if figure is None else f"{figure * factor:,.{digits}f}" + "%" * (column == "MFU")
        cells[column] = number if key in measured else ""
    return cells


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns are padded, so that a terminal shows a table, too."""
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in (header, *body)]
    # a long reason, in the first column of figures, may run over those that are empty beside it
    widths = [max(3, *(len(line[column]) for line in lines if len(line[column]) < 24)) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
