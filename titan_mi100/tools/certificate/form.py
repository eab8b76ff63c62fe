"""The content of a certificate: raw numbers of a machine, and the verdicts that follow from them. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from titan_mi100.files.schema import validated
from titan_mi100.run.machine import Machine

FORMAT = 2  # raised with every change of the form, of a limit or of a verdict's text
MEASURED, UNAVAILABLE, NOT_RUN = "measured", "unavailable", "not run"
DTYPES = ("bfloat16", "float16", "float32")
_TIMES = ("ms", "seconds", "copy", "triad")
_POSITIVE = (*_TIMES, "scale", "m", "k", "n", "count", "size", "ranks", "tokens")  # keys whose values must be above 0


@dataclass(frozen=True)
class Errors:
    """The largest absolute errors of one tensor against fp64. None: not finite.

    Attributes:
        error: error of the tested backend.
        usual: error of explicit attention in the same dtype.
        scale: the largest absolute value of the tensor in fp64.
    """

    tensor: str
    error: float | None
    usual: float | None
    scale: float


@dataclass(frozen=True)
class MeasuredLayout:
    """The errors on documents of random lengths.

    Attributes:
        seed: seed of the random lengths and values.
        documents: number of documents.
        others: the largest change in the results of the other documents when the content of the first one changes,
            relative to the largest element; must be 0. None: not finite.
    """

    seed: int
    documents: int
    errors: list[Errors]
    others: float | None


@dataclass(frozen=True)
class MeasuredAttention:
    """An attention backend.

    Attributes:
        kernel: name of the kernel that ran.
        launch: launch settings of the Triton kernels.
        repeatable: equal calls give equal bits.
        ms: milliseconds of forward and backward, per call.
    """

    backend: str
    dtype: str
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    kernel: str
    explicit: bool  # it computes the full (seq, seq) scores
    launch: str
    repeatable: bool
    layouts: list[MeasuredLayout]
    ms: list[float]


@dataclass(frozen=True)
class Product:
    """A matrix product (m, k) x (k, n); a step has `count` of them. Attributes: error, scale: as in Errors."""

    name: str
    m: int
    k: int
    n: int
    count: int
    error: float | None
    scale: float
    seconds: list[float]


@dataclass(frozen=True)
class Gemm:
    """The matrix products of a model in one dtype."""

    model: str
    dtype: str
    products: list[Product]


@dataclass(frozen=True)
class Bandwidth:
    """Memory bandwidth. Attributes: size: bytes of one array. wrong: number of wrong elements in the results."""

    size: int
    copy: list[float]  # seconds
    triad: list[float]  # a = b + 3 c
    wrong: int


@dataclass(frozen=True)
class MeasuredTransfer:
    """One timed transfer.

    Attributes:
        size: bytes of the larger buffer.
        ranks: the ranks that took part.
        wrong: number of wrong elements over all ranks.
        seconds: seconds of the slowest rank, one number per round.
    """

    size: int
    ranks: list[int]
    wrong: int
    seconds: list[float]


@dataclass(frozen=True)
class Collective:
    operation: str
    transfers: list[MeasuredTransfer]


@dataclass(frozen=True)
class Losses:
    layout: str
    ranks: int
    losses: list[float | None]
    norms: list[float | None]


@dataclass(frozen=True)
class Parity:
    runs: list[Losses]


@dataclass(frozen=True)
class Planned:
    """The planner's forecast.

    Attributes:
        least, most: bytes of a card's memory.
        seconds: seconds per step; None: the device's speed is not known.
    """

    least: float
    most: float
    seconds: float | None


@dataclass(frozen=True)
class Steps:
    """Training steps of a model.

    Attributes:
        batch: rows per data-parallel rank and forward.
        ga: forwards per step (gradient accumulation).
        comm_ms, exposed_ms: milliseconds in collectives per step, total and not hidden by computation, by rank.
    """

    model: str
    layout: str
    ranks: int
    batch: int
    ga: int
    seq: int
    checkpointing: str
    dtype: str
    attention: str
    tokens: int
    flops: float
    seconds: list[float]
    losses: list[float | None]
    peak_memory_gib: float
    comm_ms: list[float]
    exposed_ms: list[float]
    profiled_seconds: float
    plan: Planned


KINDS: Mapping[str, Any] = {
    "attention": MeasuredAttention, "gemm": Gemm, "bandwidth": Bandwidth, "collective": Collective, "parity": Parity,
    "steps": Steps,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One part of the measurement, which ran in processes of its own.

    Attributes:
        name: for example "attention/sdpa/bfloat16"; the first word is a key of KINDS.
        status: MEASURED, UNAVAILABLE or NOT_RUN; "failed": an exception; "crashed": an exit code without a result;
            "killed": a signal; "hung": time-out; "out of memory".
        said: why nothing was measured.
        seconds: how long it took.
        found: the numbers, an object of one of KINDS; None: nothing was measured.
    """

    name: str
    status: str
    said: str
    seconds: float
    found: Any = None

    @property
    def kind(self) -> str:
        return self.name.split("/")[0]

    @property
    def is_of_one_card(self) -> bool:
        """A part that is repeated on each further card, such as gemm/device 1; it says nothing about a whole model."""
        return "/device" in self.name


@dataclass(frozen=True)
class Verdict:
    """A verdict.

    Attributes:
        of: a part's name, or "conclusion/..." for a conclusion from several parts.
        verdict: "pass", "fail", UNAVAILABLE or NOT_RUN.
        said: the reason, with the numbers.
    """

    of: str
    verdict: str
    said: str


@dataclass(frozen=True)
class Certificate:
    format: int
    made: str  # UTC
    minutes: float  # the time limit
    machine: Machine
    parts: list[Part]
    verdicts: list[Verdict]


def as_json(certificate: Certificate) -> str:
    """The certificate as JSON, with one line per part and verdict."""
    values = []
    for key, value in asdict(certificate).items():
        items = [json.dumps(item, allow_nan=False) for item in (value if isinstance(value, list) else [value])]
        values.append(f'"{key}": ' + ("[\n" + ",\n".join(items) + "\n]" if isinstance(value, list) else items[0]))
    return "{\n" + ",\n".join(values) + "\n}\n"


def parse_found(kind: str, found: Any, where: str) -> Any:
    """Parse a part's raw numbers as the class of its kind.

    Raises:
        ValueError: a key, type or value is not possible.
    """
    typed = validated(found, KINDS[kind], where)
    _check_values(asdict(typed), where)
    return typed


def _check_values(content: Any, where: str) -> None:
    """Check what types do not express: lists are not empty; times, sizes and dtypes have possible values."""
    if isinstance(content, int | float) and content < 0:
        raise ValueError(f"{where} = {content} must not be below 0")
    if isinstance(content, list):
        if not content:
            raise ValueError(f"{where}: is empty")
        for i, item in enumerate(content):
            _check_values(item, f"{where}[{i}]")
    for key, item in content.items() if isinstance(content, dict) else ():
        place = f"{where}.{key}"
        _check_values(item, place)
        lowest = min(item) if key in _TIMES and isinstance(item, list) else item
        if key in _POSITIVE and isinstance(lowest, int | float) and lowest <= 0:
            raise ValueError(f"{place} = {lowest} must be above 0")
        if key == "dtype" and item not in DTYPES:
            raise ValueError(f"{place} = {item!r} must be one of {', '.join(DTYPES)}")
