"""What scripts/bench/sweep.py found, as Markdown, CSV and a plot, and the published figures that stand beside it."""

import csv
import io
import sys
from pathlib import Path
from typing import Any, NamedTuple


class Theirs(NamedTuple):
    step_ms: int
    comm_ms: int
    tokens_per_second: int
    memory_gb: float


# Published by users of DeepSpeed, not measured with this trainer: Qwen3-0.6B, rows of 1024, a pipeline of two MI100.
# (batch, GA, activation checkpointing, dtype)
PUBLISHED_ON, PUBLISHED_ROW = "MI100", {"processes": 2, "flavor": "0.6B", "seq": 1024}
PUBLISHED: dict[tuple[int, int, str, str], Theirs] = {
    (1, 1, "none", "float32"): Theirs(477, 226, 2239, 9.1),
    (1, 1, "full", "bfloat16"): Theirs(596, 294, 1790, 8.41),
    (4, 8, "full", "bfloat16"): Theirs(5998, 679, 5485, 13.6),
    (4, 8, "full", "float32"): Theirs(7184, 681, 4574, 17),
    (4, 8, "none", "float32"): Theirs(5404, 517, 6085, 27.3),
    (8, 1, "full", "bfloat16"): Theirs(2187, 988, 3775, 17.8),
    (8, 4, "full", "bfloat16"): Theirs(5669, 1004, 5800, 20.16),
    (8, 8, "full", "bfloat16"): Theirs(10418, 1094, 6303, 20.16),
    (8, 8, "full", "float32"): Theirs(14264, 1618, 5065, 28.35),
}
SETTINGS = ("layout", "processes", "batch", "ga", "checkpointing", "dtype")
THEIRS = ("published: step ms", "comm ms", "tok/s", "GB")
COUNTED = {
    "kernels": "the sum of the durations of NCCL's or RCCL's kernels, so that what runs at once counts twice; exposed "
    "is the time in which one of them runs and no other kernel does",
    "gloo": "the time in which any of gloo's operations is in flight, each from being posted to being done; exposed is "
    "what of it the rank computes nothing in",
}
MEMORY = {"kernels": "reserved by the allocator", "gloo": "resident in the process"}


def markdown(records: list[dict[str, Any]], with_published: bool = False) -> str:
    """The table under what it was made with, and over what was counted."""
    beside = with_published and comparable(records)
    header = ["layout", "N", "batch", "GA", "checkpointing", "dtype", "tokens/step", "step ms", "comm ms"]
    header += ["exposed ms", "tok/s", "GiB", "MFU", *(THEIRS if beside else ())]
    body = []
    for record in records:
        cells = [str(record["row"][name]) for name in SETTINGS] + _figures(record)
        body.append(cells + (_theirs(record["row"]) if beside else []))
    parts = [heading(records), _table(header, body), footer(records)]
    if with_published and not beside:
        where = f"2x {PUBLISHED_ON}, DeepSpeed, a pipeline of 2, Qwen3-0.6B, rows of 1024"
        parts += [
            f"Published figures, made on {where}: not the hardware or the model of the table above, so the two do not "
            "compare:",
            _table([*SETTINGS[2:], *THEIRS], [[*map(str, key), *_cells(value)] for key, value in PUBLISHED.items()]),
        ]
    elif beside:
        parts.append("The published columns: DeepSpeed, a pipeline of 2, on the same kind of GPU.")
    return "\n\n".join(parts) + "\n"


def comparable(records: list[dict[str, Any]]) -> bool:
    """Whether the rows ran on what the published ones ran on."""
    return all(
        record["machine"]["kind"] == PUBLISHED_ON and PUBLISHED_ROW.items() <= record["row"].items()
        for record in records
    )


def heading(records: list[dict[str, Any]]) -> str:
    row, dates = records[0]["row"], sorted({record["date"] for record in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return (
        f"Qwen3 {row['flavor']}, rows of {row['seq']} tokens, {row['supervised']:.0%} of them supervised. "
        f"{hardware(records)}, torch {records[0]['machine']['torch']}, {when}. "
        f"Medians of {row['steps']} steps after {row['warmup']}."
    )


def hardware(records: list[dict[str, Any]]) -> str:
    """The devices in words; the rows of one table ran on one machine."""
    counts = sorted({record["row"]["processes"] for record in records})
    return f"{' or '.join(map(str, counts))} processes, each on {records[0]['machine']['device']}"


def footer(records: list[dict[str, Any]]) -> str:
    how = "gloo" if records[0]["machine"]["device"].startswith("CPU") else "kernels"
    return (
        f"Batch: rows per data-parallel rank and forward. Step: without loading data. Comm: {COUNTED[how]}. Both per "
        "step, of the rank with most, from profiled steps after the timed ones, which profiling slows (the CSV has "
        "their time). They hold waiting for other ranks: in a pipeline's sends and receives also for the other stage "
        f"to compute (the bubble). GiB: of the rank that held most, {MEMORY[how]}. MFU: of the peak for the dtype, as "
        "docs/DESIGN.md counts it; n/a: hardware that hardware.py does not know."
    )


def _figures(record: dict[str, Any]) -> list[str]:
    if record["status"] != "ok":
        words = record["status"] + ("" if record["status"] == "out of memory" else f": {record['why']}")
        return ["", words.replace("|", "\\|").replace("\n", " "), "", "", "", "", ""]
    mfu = "n/a" if record["mfu"] is None else f"{record['mfu']:.1%}"
    return [
        f"{record['tokens_per_step']:,}",
        *(f"{record[name]:,.{1 if record[name] < 100 else 0}f}" for name in ("step_ms", "comm_ms", "comm_exposed_ms")),
        f"{record['tokens_per_second']:,.0f}",
        f"{record['peak_memory_gib']:.2f}",
        mfu,
    ]


def _theirs(row: dict[str, Any]) -> list[str]:
    return _cells(PUBLISHED[row["batch"], row["ga"], row["checkpointing"], row["dtype"]])


def _cells(theirs: Theirs) -> list[str]:
    return [f"{theirs.step_ms:,}", f"{theirs.comm_ms:,}", f"{theirs.tokens_per_second:,}", f"{theirs.memory_gb:g}"]


def _table(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


FIGURES = (
    *("tokens_per_step", "step_ms", "step_ms_min", "step_ms_q1", "step_ms_q3", "step_ms_max", "comm_ms"),
    *("comm_exposed_ms", "profiled_step_ms", "tokens_per_second", "peak_memory_gib", "mfu"),
)


def to_csv(records: list[dict[str, Any]]) -> str:
    """One line per row, everything in it; what was not measured is empty."""
    file = io.StringIO()
    names = [*records[0]["row"], "status", "why", *FIGURES, "device", "torch", "date"]
    writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({**record["machine"], **record["row"], **record})
    return file.getvalue()


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Tokens per second as bars and peak memory beside them, row by row; without matplotlib only say so."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError:
        print('no plot: matplotlib is missing; install it with pip install -e ".[bench]"', file=sys.stderr)
        return
    rows, places = [record["row"] for record in records], range(len(records))
    layouts = list(dict.fromkeys(row["layout"] for row in rows))
    figure = Figure(figsize=(12, 1.6 + 0.34 * len(records)), layout="constrained")
    speed, memory = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
    for place, (row, record) in enumerate(zip(rows, records, strict=True)):
        colour = colormaps["tab20"](layouts.index(row["layout"]) % 20)
        if record["status"] != "ok":
            speed.annotate(
                record["status"], (0, place), (6, 0), textcoords="offset points", va="center", style="italic"
            )
            continue
        rate, gib = record["tokens_per_second"], record["peak_memory_gib"]
        speed.barh(place, rate, color=colour)
        speed.annotate(f"{rate:,.0f}", (rate, place), (4, 0), textcoords="offset points", va="center")
        memory.hlines(place, 0, gib, color="0.8")
        memory.plot(gib, place, "D", color=colour)
        memory.annotate(f"{gib:.2f}", (gib, place), (8, 0), textcoords="offset points", va="center")
    speed.set_yticks(places, ["   ".join(_label(row)) for row in rows])
    speed.set_ylim(len(records) - 0.4, -0.6)  # the first row on top
    for axes, name in ((speed, "tokens/s"), (memory, "peak memory, GiB")):
        axes.set_xlabel(name)
        axes.set_xlim(0, axes.get_xlim()[1] * 1.2)  # room for the figures
        axes.spines[["top", "right"]].set_visible(False)
    row = rows[0]
    figure.suptitle(
        f"Qwen3 {row['flavor']}, rows of {row['seq']}, torch {records[0]['machine']['torch']}, {records[0]['date']}\n"
        f"{hardware(records)}",
        fontsize="medium",
    )
    figure.savefig(path, dpi=120)


def _label(row: dict[str, Any]) -> list[str]:
    size = f"{row['batch']} x GA {row['ga']}"
    checkpointing = [] if row["checkpointing"] == "none" else [f"ckpt {row['checkpointing']}"]
    return [f"{row['layout']} x{row['processes']}", size, *checkpointing, row["dtype"]]
