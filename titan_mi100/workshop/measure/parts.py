"""The content of a certificate, which scripts/gpu_check writes: a part per measurement, with its verdict and numbers.

Imports no torch.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from titan_mi100.errors import UserError
from titan_mi100.files.schema import validated
from titan_mi100.run.machine import Machine
from titan_mi100.wording import some

FORMAT = 4  # raised with every change of the form, of a limit or of a verdict's text
CERTIFICATE, PAGE = "certificate.jsonl", "certificate.md"
PASS, FAIL, UNAVAILABLE, NOT_RUN = "pass", "fail", "unavailable", "not run"
# Order of preference: fp32 needs no master weights, bf16 no loss scale. The first that is slower than the fastest by at
# most _WIDER is recommended.
_IN_ORDER, _WIDER = ("float32", "bfloat16", "float16"), 1.1
_PARITY = 1e-5  # relative difference of the losses of two runs in fp32; ten times as much for gradient norms
_END = "conclusion/end"  # name of the last part


@dataclass(frozen=True)
class Part:
    """One part of the measurement, or a conclusion from several.

    Attributes:
        name: for example "attention/sdpa/0.6B/bfloat16/1024"; the first word is its kind.
        verdict: PASS, FAIL, UNAVAILABLE or NOT_RUN.
        said: the reason, with the numbers.
        seconds: how long it took.
        found: all numbers, as the measuring function returned them; None: nothing was measured.
    """

    name: str
    verdict: str
    said: str
    seconds: float = 0.0
    found: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        return self.name.split("/")[0]


@dataclass(frozen=True)
class Header:
    """The first line of a certificate."""

    format: int
    made: str  # UTC
    minutes: float  # the time limit
    machine: Machine


def read(path: Path) -> tuple[Header, list[Part]]:
    """Read a certificate. A last line that was cut off, because the command was killed, does not count.

    Raises:
        UserError: it cannot be read, or is of another format.
    """
    try:
        first, *lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        header = validated(json.loads(first), Header)
        if header.format == FORMAT:
            return header, [validated(json.loads(line), Part) for line in lines]
        problem = f"it has format {header.format}, not {FORMAT}"
    except (OSError, ValueError) as error:
        problem = str(error)
    raise UserError(f"{path}: is no certificate of this version ({problem}); measure again, or move its folder away")


def measured(parts: Sequence[Part], kind: str) -> list[dict[str, Any]]:
    """The numbers of the parts of a kind that passed."""
    return [part.found for part in parts if part.kind == kind and part.verdict == PASS and part.found]


def rankings(parts: Sequence[Part]) -> dict[str, list[Mapping[str, Any]]]:
    """ "MODEL/DTYPE/SEQ" -> the attention backends that a run may use there, the fastest first.

    A backend must be correct, repeatable, and must not compute the full (seq, seq) scores.
    """
    backends: dict[str, list[Mapping[str, Any]]] = {}
    for part in parts:
        if part.kind == "attention" and part.verdict in (PASS, FAIL):
            usable = backends.setdefault(part.name.split("/", 2)[2], [])
            if part.verdict == PASS and part.found and part.found["repeatable"] and not part.found["explicit"]:
                usable.append(part.found)
    return {name: sorted(usable, key=lambda one: float(one["ms"])) for name, usable in backends.items()}


def best_dtype(parts: Sequence[Part]) -> tuple[str, dict[str, float]]:
    """The recommended dtype, "": none was measured; and TFLOP/s by dtype."""
    rates = {one["dtype"]: one["tflops"] for one in measured(parts, "gemm")}
    right = {dtype: rates[dtype] for dtype in _IN_ORDER if dtype in rates}
    return next((dtype for dtype, rate in right.items() if rate * _WIDER >= max(right.values())), ""), right


def parity(runs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Compare the losses and gradient norms of all runs with the first one's: (the problem or "", the numbers)."""
    first, problems, worst = runs[0], [], 0.0
    for run, (metric, limit) in product(runs, {"losses": _PARITY, "norms": 10 * _PARITY}.items()):
        pairs = [*zip(run[metric], first[metric], strict=False)]
        apart = [abs(a - b) / max(abs(b), 1e-30) for a, b in pairs if a is not None and b is not None]
        off = max(apart) if len(apart) == len(run[metric]) == len(first[metric]) else math.inf
        worst = max(worst, off)
        if off > limit:
            problems.append(f"{metric} of {run['name']} and {first['name']} differ by {off:.1e} (at most {limit:.0e})")
    names = ", ".join(run["name"] for run in runs)
    return "; ".join(problems), f"{names}: {len(first['losses'])} steps, largest difference {worst:.1e}"


def conclusions(parts: Sequence[Part], interrupted: bool = False) -> list[Part]:
    """What follows from several parts together. The last conclusion sums all up."""
    concluded = []
    for name, ranked in rankings(parts).items():
        times = ", ".join(f"{one['backend']} {one['ms']:.3g} ms" for one in ranked)
        missing = sum(part.verdict == NOT_RUN and part.name.endswith(f"/{name}") for part in parts)
        message = f"the fastest that is right: {times}" if ranked else "no backend is right"
        message += f" ({missing} not run)" if missing else ""
        concluded.append(Part(f"conclusion/attention/{name}", PASS if ranked else FAIL, message))
    dtype, rates = best_dtype(parts)
    if dtype:
        told = ", ".join(f"{name} {rate:.3g} TFLOP/s" for name, rate in rates.items())
        message = f'training.mixed_precision_param = "{dtype}" is recommended; measured: {told}'
        concluded.append(Part("conclusion/dtype", PASS, message))
    problems = ["unfinished: it was interrupted"] * interrupted
    for verdict, words in ((FAIL, "failed"), (NOT_RUN, "not run")):
        if names := [part.name for part in (*parts, *concluded) if part.verdict == verdict]:
            problems.append(f"{len(names)} {words}: {some(names)}")
    return [*concluded, Part(_END, FAIL if problems else PASS, "; ".join(problems) or "all passed")]


def summary(parts: Sequence[Part]) -> str:
    """The last conclusion; a certificate without it is unfinished."""
    return parts[-1].said if parts and parts[-1].name == _END else "unfinished: the command was killed"
