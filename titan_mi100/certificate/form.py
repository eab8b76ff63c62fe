"""What a certificate holds: raw numbers of a machine, the verdicts that follow from them, and a digest. No torch.

A certificate is read as a file from a stranger: every key, type and bound is checked, and nothing else is accepted.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_object
from titan_mi100.files.schema import checked

FORMAT = 1  # raised with every change of the form, of a limit or of a verdict's words
REMEDY = "make it again with python -m titan_mi100.certify"
MEASURED, UNAVAILABLE, NOT_RUN = "measured", "unavailable", "not run"
DTYPES = ("bfloat16", "float16", "float32")
_TIMES = ("ms", "seconds", "copy", "triad")
_POSITIVE = (*_TIMES, "scale", "m", "k", "n", "count", "size", "ranks", "tokens")
# how a part ended; the last five: it raised, left with an exit code, got a signal, did not end in time, lacked memory
STATUSES = (MEASURED, UNAVAILABLE, NOT_RUN, "failed", "crashed", "killed", "hung", "out of memory")


@dataclass(frozen=True)
class Machine:
    """What the numbers depend on. An empty text: there is none.

    Attributes:
        device: in words.
        arch: "gfx908:sramecc+:xnack-", "sm90", "cpu".
        compute_units: 0 on a CPU.
        memory: bytes of a card; 0 on a CPU.
        cards: processes that the parts of several ranks have, one per card; 2 on a CPU.
        driver: version of amdgpu or nvidia.
        runtime: "hip 6.4.1", "cuda 12.8".
        version, commit: of this package; the commit only in a git checkout, with "+changes" where files differ.
        kernels: SHA-256 of the kernels' sources, see machine.KERNELS.
    """

    device: str
    arch: str
    compute_units: int
    memory: int
    cards: int
    driver: str
    torch: str
    runtime: str
    triton: str
    python: str
    version: str
    commit: str
    kernels: str


@dataclass(frozen=True)
class Errors:
    """The largest absolute error of a tensor against fp64, None: not finite.

    Attributes:
        error: of what was tested.
        usual: of explicit attention in the same dtype.
        scale: the largest absolute value in fp64.
    """

    tensor: str
    error: float | None
    usual: float | None
    scale: float


@dataclass(frozen=True)
class Layout:
    """Documents of random lengths: what was found on them.

    Attributes:
        documents: how many.
        others: the largest change of the results when the first document's content changes, in all other documents;
            relative to the largest element. None: not finite.
    """

    seed: int
    documents: int
    errors: list[Errors]
    others: float | None


@dataclass(frozen=True)
class Attention:
    """Attributes: launch: of Triton's kernels. repeatable: equal calls give equal bits. ms: forward and backward."""

    backend: str
    dtype: str
    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    kernel: str
    explicit: bool  # it runs as S x S scores
    launch: str
    repeatable: bool
    layouts: list[Layout]
    ms: list[float]


@dataclass(frozen=True)
class Product:
    """(m, k) times (k, n), `count` of them in a step. Attributes: error, scale: as in Errors."""

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
    model: str
    dtype: str
    products: list[Product]


@dataclass(frozen=True)
class Bandwidth:
    """Attributes: size: bytes of one array. wrong: elements of the results that are not what they must be."""

    size: int
    copy: list[float]  # seconds
    triad: list[float]  # a = b + 3 c
    wrong: int


@dataclass(frozen=True)
class Transfer:
    """Attributes: size: bytes of the larger buffer. ranks: who took part. wrong: elements, over all ranks."""

    size: int
    ranks: list[int]
    wrong: int
    seconds: list[float]


@dataclass(frozen=True)
class Collective:
    operation: str
    transfers: list[Transfer]


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
    """Attributes: least, most: bytes of a card. seconds: of a step; None: the device's speed is not known."""

    least: float
    most: float
    seconds: float | None


@dataclass(frozen=True)
class Steps:
    """Attributes: batch: rows per data-parallel rank and forward. comm_ms, exposed_ms: of each rank, per step."""

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
    "attention": Attention, "gemm": Gemm, "bandwidth": Bandwidth, "collective": Collective, "parity": Parity,
    "steps": Steps,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One thing that was tried in a process of its own.

    Attributes:
        name: "attention/sdpa/bfloat16"; its first word is one of KINDS.
        said: why nothing was measured.
        seconds: that it took.
        found: one of KINDS; None: nothing was measured.
    """

    name: str
    status: str
    said: str
    seconds: float
    found: Any = None

    @property
    def kind(self) -> str:
        return self.name.split("/")[0]


@dataclass(frozen=True)
class Verdict:
    """Attributes: of: a part's name, or "conclusion/..." for what follows from several parts. verdict: "pass", "fail",
    UNAVAILABLE or NOT_RUN.
    """

    of: str
    verdict: str
    said: str


@dataclass(frozen=True)
class Certificate:
    format: int
    made: str  # UTC
    minutes: float  # that it was given
    machine: Machine
    parts: list[Part]
    verdicts: list[Verdict]
    sha256: str  # of all else: shows a slip of the hand, proves no origin


def sealed(certificate: Certificate) -> Certificate:
    """With its digest, and numbers as reading them back gives them."""
    certificate = _parsed(json.loads(as_json(certificate)))
    return replace(certificate, sha256=digest(certificate))


def digest(certificate: Certificate) -> str:
    content = asdict(certificate)
    del content["sha256"]
    return hashlib.sha256(json.dumps(content, sort_keys=True, allow_nan=False).encode()).hexdigest()


def as_json(certificate: Certificate) -> str:
    """A line for each part and verdict."""
    values = []
    for key, value in asdict(certificate).items():
        items = [json.dumps(item, allow_nan=False) for item in (value if isinstance(value, list) else [value])]
        values.append(f'"{key}": ' + ("[\n" + ",\n".join(items) + "\n]" if isinstance(value, list) else items[0]))
    return "{\n" + ",\n".join(values) + "\n}\n"


def read(path: Path) -> Certificate:
    """A certificate whose form is right.

    Raises:
        UserError: the file is missing, holds something else, or is not what was sealed.
    """
    content = read_object(path, REMEDY)
    if content.get("format") != FORMAT:
        raise UserError(f"{path}: its format is {content.get('format')!r}, not {FORMAT}; {REMEDY}")
    try:
        certificate = _parsed(content)
    except ValueError as error:
        raise UserError(f"{path}: {error}; {REMEDY}") from None
    if digest(certificate) != certificate.sha256:
        raise UserError(f"{path}: is not what was written: its sha256 does not fit its content; {REMEDY}")
    return certificate


def _parsed(content: Any) -> Certificate:
    certificate: Certificate = checked(content, Certificate)
    return replace(certificate, parts=[_typed(part) for part in certificate.parts])


def _typed(part: Part) -> Part:
    if part.kind not in KINDS:
        raise ValueError(f"part {part.name!r} is of no kind that is known: {', '.join(KINDS)}")
    if part.status not in STATUSES:
        raise ValueError(f"{part.name}: status {part.status!r} must be one of {', '.join(STATUSES)}")
    if (part.status == MEASURED) != (part.found is not None):
        raise ValueError(f"{part.name}: has numbers exactly if it was measured")
    return replace(part, found=parse_found(part.kind, part.found, part.name)) if part.found is not None else part


def parse_found(kind: str, found: Any, where: str) -> Any:
    """A part's raw numbers, as KINDS has them. Raises ValueError: they are not that, or a value is impossible."""
    typed = checked(found, KINDS[kind], where)
    _check_values(asdict(typed), where)
    return typed


def _check_values(content: Any, where: str) -> None:
    """What a schema of types cannot say: lists have something in them, times, sizes and dtypes are possible."""
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
