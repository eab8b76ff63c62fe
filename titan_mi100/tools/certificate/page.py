"""A certificate as a Markdown page. Imports no torch."""

import statistics
from collections.abc import Iterable, Sequence

from titan_mi100.tools.certificate.form import Certificate, Machine, Steps
from titan_mi100.tools.certificate.verdicts import FAIL, PASS, all_pass

_MARKS = {PASS: "pass", FAIL: "**FAIL**"}
_TITLES = {
    "attention": "Attention, each backend against fp64",
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


def page(certificate: Certificate) -> str:
    """The certificate in Markdown, without the raw samples."""
    machine = certificate.machine
    verdict = "all passed" if all_pass(certificate.verdicts) else "NOT all passed"
    lines = [f"# Certificate: {_cell(machine.device)}", "", f"**{verdict}.** Made {certificate.made}.", ""]
    lines += _table(("what", "found"), _facts(machine))
    for kind, title in _TITLES.items():
        rows = [
            (one.of.partition("/")[2] or one.of, _MARKS.get(one.verdict, one.verdict), one.said)
            for one in certificate.verdicts
            if one.of.split("/")[0] == kind
        ]
        if rows:
            lines += ["", f"## {title}", "", *_table(("part", "verdict", "found"), rows)]
        if kind == "steps" and rows:
            lines += ["", *_results(certificate)]
    lines += ["", "certificate.json has every sample."]
    return "\n".join(lines) + "\n"


def _facts(machine: Machine) -> list[tuple[str, str]]:
    memory = f", {machine.memory / 2**30:.1f} GiB each" if machine.memory else ""
    what = "cards" if machine.memory else "processes"
    return [
        ("device", f"{machine.device}; {machine.cards} {what}{memory}"),
        ("architecture", f"{machine.arch}, {machine.compute_units} compute units"),
        ("driver", machine.driver or "none found"),
        ("torch", f"{machine.torch}, {machine.runtime or 'for CPUs only'}"),
        ("triton", machine.triton or "none"),
        ("Python", machine.python),
        ("titan_mi100", f"{machine.version} {machine.commit}".strip()),
    ]


def _results(certificate: Certificate) -> list[str]:
    steps = [part.found for part in certificate.parts if isinstance(part.found, Steps)]
    if not steps:
        return ["No training step was measured."]
    is_card = certificate.machine.memory > 0
    return [*_table(_HEADER, [_row(found, is_card) for found in steps]), "", _legend(certificate.machine, steps[0])]


def _row(found: Steps, is_card: bool) -> tuple[str, ...]:
    seconds = statistics.median(found.seconds)
    planned = f"{1000 * found.plan.seconds:,.0f}" if found.plan.seconds else "n/a"
    memory = f"{found.plan.least / 2**30:.2f} to {found.plan.most / 2**30:.2f}" if is_card else "n/a"
    bf16 = "yes" if found.dtype == "bfloat16" else f"no ({found.dtype})"
    return (
        found.model, found.layout, str(found.ranks), str(found.batch), f"{1000 * seconds:,.0f}",
        f"{found.tokens / seconds:,.0f}", f"{found.peak_memory_gib:.2f}", found.checkpointing, bf16, str(found.ga),
        f"{max(found.comm_ms):,.0f}", planned, memory,
    )  # fmt: skip


def _legend(machine: Machine, first: Steps) -> str:
    held = "reserved by the allocator" if machine.memory else "resident in the process"
    return (
        f"Rows of {first.seq} tokens, {_cell(machine.device)}. N: processes, one per device. m: rows per data-parallel "
        f"rank and forward. GA: forwards of a step. step_ms: median of {len(first.seconds)}. peak_mem: GiB of the rank "
        f"that held most, {held}. ckpt: activations that are computed again in backward. comm_ms: time in collectives "
        "per step, of the rank with most, waiting for others included, from profiled steps. planned_ms, planned_mem: "
        "the plan's, by the data sheet; n/a: unknown device, or a CPU."
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(_cell(cell) for cell in row) + " |" for row in cells]


def _cell(text: str) -> str:
    """Escape a text for a table cell: it can come from a stranger's machine and must not add columns or HTML."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
