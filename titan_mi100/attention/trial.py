"""Tries whether a backend works on this machine, in a child process, which may crash or hang.

The child runs forward and backward at the run's shape on random documents. It compares the values with explicit
attention in higher precision (Chunked), checks that documents do not influence each other, and checks whether equal
calls give equal bits. It times documents of the run's lengths; for our own kernels each of the launch settings, too. It
reads one JSON object and prints one.
"""

import functools
import hashlib
import itertools
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import Backend, Documents, Shape
from titan_mi100.attention.launches import Launch, candidates
from titan_mi100.attention.running import running_kernel
from titan_mi100.attention.torch_backends import Chunked
from titan_mi100.cli import version_of
from titan_mi100.config.kernels import KERNELS, OWN
from titan_mi100.device import accelerator
from titan_mi100.device.compiler import cannot_compile
from titan_mi100.errors import UserError
from titan_mi100.files import durable, isolated
from titan_mi100.files.plain import read_checked
from titan_mi100.log import log
from titan_mi100.wording import shortened

PATIENCE = 600  # seconds; it may have to compile a dozen kernels
_HUNG, _LATE = "it hung", "the time for trials was over; the next run's start tries it"
_SLACK = 4.0  # the error may be this many times that of explicit attention in the run's dtype
_ROUNDS = 5  # timed calls


@dataclass(frozen=True)
class Trial:
    """The result of a trial.

    Attributes:
        refused: why the backend must not be used; "": it may be used.
        error: the largest difference from attention in higher precision, relative to the largest element.
        repeatable: equal calls give equal bits.
        kernel: the kernel that ran, see running.running_kernel.
        ms: median of forward and backward of one layer on the run's documents, in milliseconds.
        launch: the fastest launch settings of the Triton kernels.
        passed_over: launch settings that cannot run or give wrong values, and why.
    """

    refused: str = ""
    error: float = 0.0
    repeatable: bool = True
    kernel: str = ""
    ms: float = 0.0
    launch: str = ""
    passed_over: str = ""


@dataclass(frozen=True)
class Case:
    """What backends are tried for.

    Attributes:
        lengths: of the documents that fill a row of the run. A verdict holds for those of about the same cost.
        arch: "gfx908", "sm90", "cpu".
        cache: folder of the verdicts; it may not exist, and may not be writable.
    """

    shape: Shape
    lengths: Sequence[int]
    device: torch.device
    arch: str
    cache: Path


def try_backend(name: str, case: Case, launch: str = "", patience: float = PATIENCE) -> Trial:
    """The verdict on a backend: from the cache, or from a trial now.

    Args:
        launch: launch settings of the Triton kernels to try; "": find the fastest.
        patience: seconds that are left for trials. One that takes them all is refused, and not remembered.
    """
    question = {"name": name, "arch": case.arch, "launch": launch, "device": str(case.device), **asdict(case.shape)}
    # the length of the document that a token is in, on average
    usual = 2 ** round(math.log2(sum(n * n for n in case.lengths) / case.shape.seq))
    machine = _machine(case.device)

    def note(launch: str) -> Path:
        depends = json.dumps([{**question, "launch": launch, "usual": usual}, machine], sort_keys=True)
        return case.cache / "attention" / f"{name}-{hashlib.sha256(depends.encode()).hexdigest()[:32]}.json"

    with suppress(UserError):
        remembered: Trial = read_checked(note(launch), Trial, "")
        again = f" (result of an earlier trial; remove {note(launch)} to try it again)" if remembered.refused else ""
        return replace(remembered, refused=remembered.refused + again)
    if patience <= 0:
        return Trial(_LATE)
    log.info(f"attention: trying {name} on this device, once for this shape and documents of about {usual:,} tokens")
    verdict = _ask_child({**question, "lengths": [*case.lengths]}, patience)
    if name == OWN and verdict.refused and any(cannot_compile()):
        verdict = replace(verdict, refused=": ".join((verdict.refused, *cannot_compile())))
    if verdict.passed_over:
        log.warning(f"attention: {name} does not use these launch settings: {verdict.passed_over}")
    if patience < PATIENCE and verdict.refused.startswith(_HUNG):
        return Trial(_LATE)
    if torch.OutOfMemoryError.__name__ in verdict.refused:  # not cached: another process may use the memory now
        return verdict
    with suppress(OSError):
        note(launch).parent.mkdir(parents=True, exist_ok=True)
        for known in {launch, verdict.launch}:  # a resumed run asks for the launch that was found
            durable.replace(note(known), json.dumps(asdict(verdict)))
    return verdict


def _machine(device: torch.device) -> dict[str, Any]:
    """Everything that a verdict depends on apart from the question: device, driver, versions, and our own code."""
    facts: dict[str, Any] = {"torch": torch.__version__, **accelerator.runtimes(), "compiler": cannot_compile()}
    facts |= {name: version_of(name) for kernel in KERNELS.values() for name in kernel.packages}
    for driver in ("/sys/module/amdgpu/version", "/sys/module/nvidia/version"):
        with suppress(OSError):
            facts[driver] = Path(driver).read_text()
    if accelerator.is_gpu(device):
        facts["device"] = accelerator.properties(device).name
    sources = sorted(Path(__file__).parent.glob("*.py"))
    facts["sources"] = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    return facts


def _ask_child(question: dict[str, Any], patience: float) -> Trial:
    child = isolated.command("attention.trial:main")
    try:
        ended = subprocess.run(child, input=json.dumps(question), capture_output=True, text=True, timeout=patience)
    except subprocess.TimeoutExpired:
        return Trial(f"{_HUNG}: no answer within {patience:.0f} s")
    with suppress(ValueError, IndexError, TypeError):  # it printed something other than a verdict
        return Trial(**json.loads(ended.stdout.splitlines()[-1]))
    last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
    return Trial(f"it crashed ({isolated.ended(ended.returncode)}): {last[:300]}")


def judge(name: str, shape: Shape, lengths: Sequence[int], device: torch.device, arch: str, launch: str) -> Trial:
    """The child's part: try the backend in this process."""
    documents, timed = random_documents(shape), Documents(shape.batch, shape.seq, (*lengths,) * shape.batch)
    tensors = inputs(shape, device)
    passed_over: list[str] = []
    try:
        backend = make_backend(name, arch, launch)
        reference = Reference(tensors, documents)
        if name == OWN and not launch:
            launch, passed_over = fastest_launch(reference, timed, arch)
            backend = make_backend(name, arch, launch)
        verdict, ms = reference.judge(backend), _median_ms(backend, tensors, timed)
        kernel = running_kernel(backend, shape, documents, device)
    except Exception as error:
        return Trial(_reason(error))
    return replace(verdict, kernel=kernel, ms=ms, launch=launch, passed_over="; ".join(passed_over))


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + shortened((str(error).splitlines() or ["no message"])[0], 200)


class Reference:
    """Inputs, their right results, and how far the results of a kernel may be from these."""

    def __init__(self, tensors: Sequence[Tensor], documents: Documents) -> None:
        """Args:
        tensors: the result of `inputs`.
        """
        self.tensors = tensors
        self.documents = documents
        # The reference has more precision than the run: fp32 for 16-bit dtypes, fp64 for fp32.
        wide = torch.float32 if tensors[0].itemsize == 2 else torch.float64
        self._exact = forward_backward(Chunked(), in_dtype(tensors, wide), documents)
        usual = forward_backward(Chunked(), tensors, documents)
        self._bar = _SLACK * max(*map(difference, usual, self._exact), torch.finfo(tensors[0].dtype).eps)

    def judge(self, backend: Backend) -> Trial:
        """The verdict on a backend's values. Compilers and launchers of kernels raise errors of any type."""
        computed = forward_backward(backend, self.tensors, self.documents)
        again = forward_backward(backend, self.tensors, self.documents)
        off = max(map(difference, computed, self._exact))
        if not off <= self._bar:  # `not <=` instead of `>`: a NaN must be refused too
            return Trial(f"wrong: its results differ from explicit attention by {off:.1e} (at most {self._bar:.1e})")
        repeatable = all(map(torch.equal, computed, again))
        changed = with_another_first_document(self.tensors, self.documents)
        others = forward_backward(backend, changed, self.documents)
        rest = slice(self.documents.lengths[0], None)
        for ours, theirs in zip(computed, others, strict=True):
            a, b = (x.flatten(0, 1)[rest] for x in (ours, theirs))
            if not (torch.equal(a, b) if repeatable else difference(a, b) <= self._bar):
                return Trial("wrong: the content of another document changes its results")
        return Trial(error=off, repeatable=repeatable)


def random_documents(shape: Shape, seed: int = 0) -> Documents:
    """Rows of documents with random lengths from 1 to 1024. If there are several rows, the last is one document."""
    random = np.random.default_rng(seed)
    lengths: list[int] = []
    for row in range(shape.batch):
        left = shape.seq
        while left:
            length = int(2 ** random.uniform(0, 10)) if lengths else -(-shape.seq // 3)
            length = left if 0 < row == shape.batch - 1 else min(left, length)
            lengths.append(length)
            left -= length
    return Documents(shape.batch, shape.seq, tuple(lengths))


def inputs(shape: Shape, device: torch.device, seed: int = 0) -> list[Tensor]:
    """Random q, k, v, and gradient of the output, each (batch, seq, heads or kv_heads, head_dim)."""
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    made = [torch.randn(shape.batch, shape.seq, n, shape.head_dim, generator=generator) for n in heads]
    *inputs, grad = (x.to(device, getattr(torch, shape.dtype)) for x in made)
    return [*(x.requires_grad_() for x in inputs), grad]


def in_dtype(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of the result of `inputs` in another dtype."""
    return [x.detach().to(dtype).requires_grad_(x.requires_grad) for x in tensors]


def with_another_first_document(tensors: Sequence[Tensor], documents: Documents) -> list[Tensor]:
    """Copies of the result of `inputs` with other values in the first document."""
    changed = [x.detach().clone() for x in tensors]
    for x in changed:
        x[0, : documents.lengths[0]] *= -3
    return [*(x.requires_grad_() for x in changed[:3]), changed[3]]


def forward_backward(backend: Backend, tensors: Sequence[Tensor], documents: Documents) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    return _one_layer(backend, tensors, backend.prepare(documents, tensors[0].device))


def _one_layer(backend: Backend, tensors: Sequence[Tensor], prepared: Any) -> list[Tensor]:
    q, k, v, grad = tensors
    output = backend(q, k, v, prepared)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), grad)]


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference, relative to the largest expected element."""
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def milliseconds(backend: Backend, tensors: Sequence[Tensor], documents: Documents, rounds: int = 1) -> list[float]:
    """Times of one layer's forward and backward, in milliseconds, after a warm-up.

    Without `prepare`: a step calls it once for all its layers.

    Args:
        tensors: the result of `inputs`.
    """
    device, times = tensors[0].device, []
    prepared = backend.prepare(documents, device)
    for _ in range(rounds + 1):
        accelerator.synchronize(device)
        started = time.perf_counter()
        _one_layer(backend, tensors, prepared)
        accelerator.synchronize(device)
        times.append(1000 * (time.perf_counter() - started))
    return times[1:]


def _median_ms(backend: Backend, tensors: Sequence[Tensor], documents: Documents) -> float:
    return statistics.median(milliseconds(backend, tensors, documents, _ROUNDS))


def fastest_launch(reference: Reference, timed: Documents, arch: str) -> tuple[str, list[str]]:
    """Find the fastest launch settings: for one kernel after the other, the tile with the lowest total time.

    A tile that cannot run (for example too little shared memory on this device), or whose values are wrong, is passed
    over. Each kernel reads what those before it wrote, so a tile is tried together with others that are right.

    Args:
        timed: the documents that are timed; the values are those of the reference's.

    Returns:
        The launch, and which tiles were passed over and why. If no launch is right, it is the first candidate.

    Raises:
        UserError: the kernels have no launch for this shape.
    """
    from titan_mi100.attention.triton_backend import Triton

    @functools.cache
    def problem(launch: Launch) -> str:
        try:
            verdict = reference.judge(Triton(str(launch)))
        except Exception as error:
            return _reason(error)
        return verdict.refused or ("" if verdict.repeatable else "the same call gives other bits each time")

    options = candidates(arch, reference.tensors[0].shape[3], reference.tensors[0].itemsize)
    first = Launch.first_of(options)
    best = next((launch for launch in map(Launch._make, itertools.product(*options)) if not problem(launch)), first)
    passed_over = []
    for kernel, tiles in zip(Launch._fields, options, strict=True) if not problem(best) else ():
        times = {}
        for tile in tiles:
            launch = best._replace(**{kernel: tile})
            if why := problem(launch):
                passed_over.append(f"{kernel} {tile}: {why}")
            else:
                times[launch] = _median_ms(Triton(str(launch)), reference.tensors, timed)
        best = min(times, key=lambda launch: times[launch])
    return str(best), passed_over


def main() -> None:
    """The child process: read the question from stdin and print the verdict."""
    question = json.loads(sys.stdin.read())
    name, lengths, device, arch, launch = map(question.pop, ("name", "lengths", "device", "arch", "launch"))
    print(json.dumps(asdict(judge(name, Shape(**question), lengths, torch.device(device), arch, launch))))
