"""Chooses the attention backend of a run, and gives the reason."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import NO_KERNEL, Backend, Documents, Shape
from titan_mi100.attention.running import running_kernel
from titan_mi100.attention.torch_backends import Chunked, Sdpa
from titan_mi100.attention.trial import Case, Trial, try_backend
from titan_mi100.config.kernels import AUTO, EXPLICIT, FASTEST, KERNELS, OWN, REFERENCE
from titan_mi100.errors import UserError

_CANDIDATES = [name for name in KERNELS if name != REFERENCE]
_MOST = 180.0  # seconds that a start spends in trials


@dataclass(frozen=True)
class Choice:
    """A backend and the reason for it. It is stored with the run, so that a resume adds numbers in the same order.

    Attributes:
        name: of the backend.
        why: the reason, for the log.
        arch: the architecture it was chosen for.
        launch: launch settings of the Triton kernels; "" for other backends.
    """

    name: str
    why: str
    arch: str
    launch: str = ""

    def make(self) -> Backend:
        return make_backend(self.name, self.arch, self.launch)


def choose(
    wanted: str, shape: Shape, lengths: Sequence[int], device: torch.device, arch: str, cache: Path,
    before: Choice | None = None,
) -> tuple[Choice, list[str]]:  # fmt: skip
    """Choose the backend for the config's `attention_backend`. It tries kernels on the device: call it on one rank.

    In this order: the backend that the run used before; the table FASTEST; the fastest in a trial.

    Args:
        wanted: the config's value, AUTO or one of KERNELS.
        lengths: of the documents in a row of the run, which trials time.
        arch: as in distributed.device_name: "gfx908:sramecc+:xnack-", "sm90", "cpu".
        cache: folder that stores the verdicts of trials.
        before: the choice that the run used until now; kept if it is still wanted and works.

    Returns:
        The choice, and lines for the log about refused backends.

    Raises:
        UserError: the backend that the config names is refused.
    """
    arch = arch.split(":")[0]
    case = Case(shape, lengths, device, arch, cache)
    lines: list[str] = []
    if before and before.name in KERNELS and before.arch == arch and wanted in (AUTO, before.name):
        problem = _refusal(case, before.name, before.launch)
        if not problem:
            return before, []
        lines.append(f"attention: {before.name}, which the run used until now, is refused here: {problem}")
    if wanted == AUTO and arch not in FASTEST:
        choice, trial_lines = _fastest(case)
        return choice, lines + trial_lines
    name = FASTEST[arch] if wanted == AUTO else wanted
    if problem := _refusal(case, name):
        raise UserError(f"[model] attention_backend = {wanted}: {name} is refused on this machine: {problem}; use auto")
    why = f"measured fastest on {arch}" if wanted == AUTO else "chosen by name"
    why = "reference implementation" if name == REFERENCE else why
    launch = try_backend(name, case).launch if name == OWN else ""
    return Choice(name, why, arch, launch), lines


def without_trial(shape: Shape, device: torch.device) -> Backend:
    """A backend for generation, without a trial: PyTorch's SDPA, unless it would compute explicit S x S scores here."""
    has_kernel = running_kernel(Sdpa(), shape, Documents.one_per_row(shape.batch, shape.seq), device) != NO_KERNEL
    return (Sdpa if has_kernel else Chunked)()


def _refusal(case: Case, name: str, launch: str = "") -> str:
    """Why the backend must not be used here; "": it may be used.

    No trial is needed for the explicit backends, which are the reference of trials, nor for a CPU's fastest, which the
    tests cover.
    """
    if name in (REFERENCE, EXPLICIT) or (case.device.type == "cpu" and name == FASTEST["cpu"]):
        return ""
    return try_backend(name, case, launch).refused


def _fastest(case: Case) -> tuple[Choice, list[str]]:
    """The fastest backend that works, is repeatable, and does not compute S x S scores."""
    until = time.monotonic() + _MOST
    verdicts = {name: try_backend(name, case, patience=until - time.monotonic()) for name in _CANDIDATES}
    refused = {name: _problem(verdict) for name, verdict in verdicts.items()}
    times = {name: verdict.ms for name, verdict in verdicts.items() if not refused[name]}
    lines = [f"attention: {name} is refused: {problem}" for name, problem in refused.items() if problem]
    if not times:  # chunked needs no trial to be right; see `refused`
        return Choice(EXPLICIT, "every trial was refused; it needs no kernel", case.arch), lines
    name = min(times, key=lambda name: times[name])
    timed = ", ".join(f"{other} {ms:.1f} ms" for other, ms in sorted(times.items(), key=lambda item: item[1]))
    why = f"fastest in a trial before this run, per layer: {timed}; there is no earlier measurement on {case.arch}"
    return Choice(name, why, case.arch, verdicts[name].launch), lines


def _problem(verdict: Trial) -> str:
    if verdict.refused:
        return verdict.refused
    if not verdict.repeatable:
        return "the same call gives other bits each time, so a resumed run would differ; name it to use it anyway"
    return f"it runs as {NO_KERNEL}" if verdict.kernel == NO_KERNEL else ""
