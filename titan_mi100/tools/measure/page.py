"""A certificate as a Markdown page. Imports no torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from titan_mi100.tools.measure.parts import FAIL, Certificate, measured

_TITLES = {
    "attention": "Attention, each backend against explicit scores in higher precision",
    "gemm": "Matrix products of the model's shapes",
    "bandwidth": "Memory bandwidth of one device",
    "collective": "Collectives and point-to-point",
    "parity": "The same losses in other layouts",
    "steps": "Training steps, and the plan beside them",
    "conclusion": "What follows from it",
}
_HEADER = (
    "model", "layout", "N", "m", "step_ms", "toks/s", "peak_mem", "ckpt", "bf16", "GA", "comm_ms", "planned_ms",
    "planned_mem",
)  # fmt: skip
_LEGEND = (
    "N: processes, one per device. m: rows per data-parallel rank and forward. GA: forwards of a step. step_ms: "
    "median. peak_mem: GiB of the rank that held most, on a card reserved by the allocator. ckpt: activations that are "
    "computed again in backward. comm_ms: time in collectives per step, of the rank with most, waiting for others "
    "included, from profiled steps. planned_ms, planned_mem: by the data sheet; n/a: unknown device, or a CPU."
)


def page(certificate: Certificate) -> str:
    """The certificate in Markdown, without the raw samples."""
    machine, verdict = certificate.machine, "all passed" if certificate.all_pass else "NOT all passed"
    lines = [f"# Certificate: {_cell(machine.device)}", "", f"**{verdict}.** Made {certificate.made}.", ""]
    lines += _table(("what", "found"), [(key, str(value)) for key, value in vars(machine).items() if value])
    for kind, title in _TITLES.items():
        parts = [part for part in (*certificate.parts, *certificate.conclusions) if part.kind == kind]
        rows = [
            (part.name.partition("/")[2], "**FAIL**" if part.verdict == FAIL else part.verdict, part.said)
            for part in parts
        ]
        if rows:
            lines += ["", f"## {title}", "", *_table(("part", "verdict", "found"), rows)]
        if steps := measured(parts, "steps"):
            cells = [_row(found, machine.memory > 0) for found in steps]
            lines += ["", *_table(_HEADER, cells), "", f"Rows of {steps[0]['seq']} tokens. {_LEGEND}"]
    return "\n".join([*lines, "", "certificate.json has every sample."]) + "\n"


def _row(found: Mapping[str, Any], is_card: bool) -> tuple[str, ...]:
    plan, ms = found["plan"], found["ms"]
    return (
        found["model"], found["layout"], str(found["ranks"]), str(found["batch"]), f"{ms:,.0f}",
        f"{1000 * found['tokens'] / ms:,.0f}", f"{found['peak_memory_gib']:.2f}", found["checkpointing"],
        "yes" if found["dtype"] == "bfloat16" else f"no ({found['dtype']})", str(found["ga"]),
        f"{max(found['comm_ms']):,.0f}", f"{1000 * plan['seconds']:,.0f}" if plan["seconds"] else "n/a",
        f"{plan['least'] / 2**30:.2f} to {plan['most'] / 2**30:.2f}" if is_card else "n/a",
    )  # fmt: skip


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in cells]


def _cell(text: str) -> str:
    """Escape a text for a table cell: it can come from a library's error message and must not add columns or HTML."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
