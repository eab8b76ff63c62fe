"""A sweep's records as Markdown and CSV, and the published figures that stand beside them. Imports no torch."""

import csv
import io
from typing import Any

from titan_mi100.planning.cards import DEVICES
from titan_mi100.workshop.columns import FIGURES, SETTINGS, figures, markdown_table
from titan_mi100.workshop.sweep.published import CARD, FLAVOR, PUBLISHED, RANKS, SEQ_LEN

SUPERVISED = 0.5  # share of the tokens
Record = dict[str, Any]  # a row, what became of it, and what was measured

_ROW = ("layout", "processes", "batch", "ga", "tokens", "checkpointing", "dtype")  # Row's fields, as SETTINGS
COUNTED = {
    "kernels": "the time in which any of NCCL's or RCCL's kernels runs; exposed is what of it no other kernel runs in",
    "gloo": "the time in which any of gloo's operations is in flight, each from being posted to being done; exposed is "
    "what of it the rank computes nothing in",
}
MEMORY = {"kernels": "reserved by the allocator", "gloo": "resident in the process"}
_THEIRS = ("published: step_ms", "comm_ms", "toks/s", "GB")
_FURTHER = ("step_ms_min", "step_ms_q1", "step_ms_q3", "step_ms_max", "profiled_step_ms")  # only in the CSV


def settings_cells(row: Record) -> list[str]:
    """A row's cells of SETTINGS."""
    return [f"{row[name]:,}" if isinstance(row[name], int) else row[name] for name in _ROW]


def markdown(records: list[Record], with_published: bool = False) -> str:
    """The table under what it was made with, and over what was counted."""
    # whether the rows ran on what the published ones ran on
    same = {"processes": RANKS, "model": FLAVOR, "seq": SEQ_LEN}.items()
    on_theirs = all(r["machine"]["kind"] == DEVICES[CARD].name and same <= r["row"].items() for r in records)
    beside = with_published and on_theirs
    body = []
    for record in records:
        words = "" if record["status"] == "ok" else ": ".join(filter(None, (record["status"], record["why"])))
        cells = [words, *[""] * (len(FIGURES) - 1)] if words else [*figures(record).values()]
        theirs = _theirs(record["row"]) if beside else []
        body.append([*settings_cells(record["row"]), *cells, *theirs])
    parts = [heading(records), markdown_table([*SETTINGS, *FIGURES, *(_THEIRS if beside else ())], body)]
    parts.append(footer(records))
    if with_published:
        where = f"{RANKS} {DEVICES[CARD].name}, Qwen3-{FLAVOR} and rows of {SEQ_LEN:,}"
        apart = f"The published figures are of {where}: they do not compare with these rows."
        parts.append("The published columns: DeepSpeed, a pipeline of 2, on the same kind of GPU." if beside else apart)
    return "\n\n".join(parts) + "\n"


def heading(records: list[Record]) -> str:
    row, machine = records[0]["row"], records[0]["machine"]
    dates = sorted({record["date"] for record in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"{about(row)}, {SUPERVISED:.0%} of the tokens supervised. {row['processes']} processes, each on "
        f"{machine['device']}, torch {machine['torch']}, {when}. Medians of {row['steps']} steps after {row['warmup']}."
    )


def about(row: Record) -> str:
    settings = f"; {row['settings']}" if row["settings"] else ""
    return f"{row['model']}, random weights, rows of S = {row['seq']:,} random tokens{settings}"


def footer(records: list[Record]) -> str:
    how = "kernels" if records[0]["machine"]["memory"] else "gloo"
    gpipe = any(record["row"]["layout"].endswith("pp-gpipe") for record in records)
    return (
        "T_eff = S x B_micro x GA x data-parallel ranks. "
        + "pp-gpipe: the schedule is GPipe, as 1F1B needs a microbatch (GA) for each stage. " * gpipe
        + f"comm_ms: {COUNTED[how]}. Both per step, of the rank with most, from profiled steps after the timed ones, "
        "which profiling slows (the CSV has their time). They hold waiting for other ranks: in a pipeline's sends and "
        "receives also for the other stage to compute (the bubble). Peak: of the rank that held most, "
        f"{MEMORY[how]}. MFU: of the peak for the dtype, as docs/DESIGN.md counts it; n/a: not known."
    )


def _theirs(row: Record) -> list[str]:
    step = PUBLISHED.get((row["batch"], row["ga"], row["checkpointing"], row["dtype"]))
    return [f"{number:,}" for number in step] if step and row["layout"].startswith("pp") else [""] * len(_THEIRS)


def to_csv(records: list[Record]) -> str:
    """One line per row, everything in it; what was not measured is empty."""
    file, rest = io.StringIO(), ("model", "seq", "settings", "steps", "warmup")
    about = ("device", "torch", "date")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*SETTINGS, "status", "why", *FIGURES, *_FURTHER, *rest, *about])
    for record in records:
        row = record["row"]
        measured = [record[key] * factor if record.get(key) is not None else "" for key, factor, _ in FIGURES.values()]
        cells = [*(row[name] for name in _ROW), record["status"], record["why"], *measured]
        cells += [record.get(name, "") for name in _FURTHER] + [row[name] for name in rest]
        writer.writerow([*cells, *({**record["machine"], **record}[name] for name in about)])
    return file.getvalue()
