"""Measures an attention backend on random documents: its errors against explicit attention, and its time."""

import statistics
from dataclasses import asdict
from typing import Any

import torch

from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import NO_KERNEL, Backend, Shape
from titan_mi100.attention.running import running_kernel
from titan_mi100.attention.trial import Reference, fastest_launch, inputs, milliseconds, random_documents
from titan_mi100.config.kernels import OWN
from titan_mi100.parallel.distributed import device_name, init_distributed

_SEEDS = (0, 1, 2)  # each gives other documents and values
_ROUNDS = 7  # timed calls


def measure(name: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Measure one backend on this process's device.

    Args:
        name: the backend's name.
        shape: the fields of base.Shape.

    Raises:
        UserError: a package or device that the backend needs is missing.
    """
    device, asked, launch = init_distributed().device, Shape(**shape), ""
    arch, documents = device_name(device)[1].split(":")[0], random_documents(asked)
    backend = make_backend(name, arch)
    if name == OWN:
        launch, _ = fastest_launch(Reference(inputs(asked, device), documents), documents, arch)
        backend = make_backend(name, arch, launch)
    return {"backend": name, "launch": launch, **judged(backend, asked, device)}


def judged(backend: Backend, shape: Shape, device: torch.device) -> dict[str, Any]:
    """The judgement of a trial on several layouts of documents, and milliseconds of forward and backward."""
    trials = [Reference(inputs(shape, device, s), random_documents(shape, s)).judge(backend) for s in _SEEDS]
    documents, tensors = random_documents(shape), inputs(shape, device)
    times = milliseconds(backend, tensors, documents, _ROUNDS)
    kernel, ms = running_kernel(backend, shape, documents, device), statistics.median(times)
    error, is_repeatable = max(trial.error for trial in trials), all(trial.repeatable for trial in trials)
    repeated = "" if is_repeatable else "; equal calls give other bits, so auto does not take it"
    return {
        **asdict(shape), "kernel": kernel, "explicit": kernel == NO_KERNEL, "repeatable": is_repeatable, "ms": ms,
        "times": times, "error": error, "problem": next((trial.refused for trial in trials if trial.refused), ""),
        "said": f"error {error:.1e}, {ms:.3g} ms forward and backward, {kernel}{repeated}",
    }  # fmt: skip
