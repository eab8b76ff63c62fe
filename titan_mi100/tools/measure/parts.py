"""The content of a certificate: one part per measurement, each with its verdict and numbers. Imports no torch."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from titan_mi100.run.machine import Machine

FORMAT = 3  # raised with every change of the form, of a limit or of a verdict's text
PASS, FAIL, UNAVAILABLE, NOT_RUN = "pass", "fail", "unavailable", "not run"
DTYPES = ("bfloat16", "float16", "float32")
# Order of preference: fp32 needs no master weights, bf16 no loss scale. The first that is slower than the fastest by at
# most _WIDER is recommended.
_IN_ORDER, _WIDER = ("float32", "bfloat16", "float16"), 1.1
_PARITY = 1e-5  # relative difference of the losses of two layouts in fp32; ten times as much for gradient norms


@dataclass(frozen=True)
class Part:
    """One part of the measurement, which ran in processes of its own, or a conclusion from several.

    Attributes:
        name: for example "attention/sdpa/0.6B/bfloat16"; the first word is its kind.
        verdict: PASS, FAIL, UNAVAILABLE or NOT_RUN.
        said: the reason, with the numbers.
        seconds: how long it took.
        found: all numbers, as the measuring function returned them; None: nothing was measured.
    """

    name: str
    verdict: str
    said: str
    seconds: float = 0.0
    found: Mapping[str, Any] | None = None

    @property
    def kind(self) -> str:
        return self.name.split("/")[0]


@dataclass(frozen=True)
class Certificate:
    format: int
    made: str  # UTC
    minutes: float  # the time limit
    machine: Machine
    parts: list[Part]
    conclusions: list[Part]

    @property
    def all_pass(self) -> bool:
        """Whether no part failed, and none was skipped because the time ended."""
        return not {part.verdict for part in (*self.parts, *self.conclusions)} & {FAIL, NOT_RUN}


def as_json(certificate: Certificate) -> str:
    """The certificate as JSON, with one line per part."""
    values = []
    for key, value in asdict(certificate).items():
        items = [json.dumps(item, allow_nan=False) for item in (value if isinstance(value, list) else [value])]
        values.append(f'"{key}": ' + ("[\n" + ",\n".join(items) + "\n]" if isinstance(value, list) else items[0]))
    return "{\n" + ",\n".join(values) + "\n}\n"


def measured(parts: Sequence[Part], kind: str) -> list[Mapping[str, Any]]:
    """The numbers of the parts of a kind that passed."""
    return [part.found for part in parts if part.kind == kind and part.verdict == PASS and part.found]


def ranking(parts: Sequence[Part], dtype: str) -> list[Mapping[str, Any]]:
    """The attention backends that a run may use in a dtype on the first model's shape, the fastest first.

    A backend must be correct, repeatable, and must not compute the full (seq, seq) scores.
    """
    found = [one for one in measured(parts, "attention") if one["dtype"] == dtype]
    usable = [one for one in found if one["repeatable"] and not one["explicit"]]
    shapes = [(one["heads"], one["head_dim"]) for one in usable]
    return sorted((one for one, shape in zip(usable, shapes, strict=True) if shape == shapes[0]), key=_ms)


def _ms(found: Mapping[str, Any]) -> float:
    return float(found["ms"])


def best_dtype(parts: Sequence[Part]) -> tuple[str, dict[str, float]]:
    """The recommended dtype, "": none was measured; and TFLOP/s by dtype, of the first model's products."""
    gemms = [one for one in measured(parts, "gemm") if "card" not in one]
    rates = {one["dtype"]: one["tflops"] for one in gemms if one["model"] == gemms[0]["model"]}
    right = {dtype: rates[dtype] for dtype in _IN_ORDER if dtype in rates}
    return next((dtype for dtype, rate in right.items() if rate * _WIDER >= max(right.values())), ""), right


def parity(runs: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Compare the losses and gradient norms of all runs with the first one's: (the problem or "", the numbers)."""
    first, problems, worst = runs[0], [], 0.0
    for run in runs:
        for what, limit in (("losses", _PARITY), ("norms", 10 * _PARITY)):
            pairs = [*zip(run[what], first[what], strict=False)]
            apart = [abs(a - b) / max(abs(b), 1e-30) for a, b in pairs if a is not None and b is not None]
            off = max(apart) if len(apart) == len(run[what]) == len(first[what]) else math.inf
            worst = max(worst, off)
            if off > limit:
                problems.append(
                    f"{what} of {run['name']} and {first['name']} differ by {off:.1e} (at most {limit:.0e})"
                )
    names = ", ".join(run["name"] for run in runs)
    return "; ".join(problems), f"{names}: {len(first['losses'])} steps, largest difference {worst:.1e}"


def conclusions(parts: Sequence[Part]) -> list[Part]:
    """What follows from several parts together."""
    found = []
    tried = [part.name.split("/") for part in parts if part.kind == "attention" and part.verdict != NOT_RUN]
    for dtype in dict.fromkeys(name[-1] for name in tried):
        ranked = ranking(parts, dtype)
        times = ", ".join(f"{one['backend']} {one['ms']:.3g} ms" for one in ranked)
        said = f"the fastest that is right: {times}" if ranked else "no backend is right"
        found.append(Part(f"conclusion/attention/{dtype}", PASS if ranked else FAIL, said))
    dtype, rates = best_dtype(parts)
    if dtype:
        told = ", ".join(f"{name} {rate:.3g} TFLOP/s" for name, rate in rates.items())
        said = f'training.mixed_precision_param = "{dtype}" is recommended; measured: {told}'
        found.append(Part("conclusion/dtype", PASS, said))
    runs = [run for one in measured(parts, "parity") for run in one["runs"]]
    if len({run["ranks"] for run in runs}) > 1:
        problem, said = parity(runs)
        found.append(Part("conclusion/parity", FAIL if problem else PASS, problem or said))
    return found
