"""Measures an attention backend on random documents: its errors against explicit attention in fp64, and its time."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import NO_KERNEL, Backend, Shape
from titan_mi100.attention.plain import Chunked, Eager
from titan_mi100.attention.running import running_kernel
from titan_mi100.attention.trial import (
    Reference,
    difference,
    fastest_launch,
    forward_backward,
    in_dtype,
    inputs,
    milliseconds,
    random_documents,
    with_another_first_document,
)
from titan_mi100.config.kernels import OWN
from titan_mi100.files.schema import if_finite
from titan_mi100.parallel.distributed import device_name
from titan_mi100.tools.measure.device import use_device

_SEEDS = (0, 1, 2)  # each gives other documents and values
_ROUNDS = 7  # timed calls
_TENSORS = ("output", "gradient of q", "gradient of k", "gradient of v")


def measure(name: str, shape: dict[str, Any]) -> dict[str, Any]:
    """Measure one backend on this process's device; the result is a form.Attention.

    Args:
        name: the backend's name.
        shape: the fields of base.Shape.

    Raises:
        UserError: a package or device that the backend needs is missing.
    """
    device = use_device()
    arch = device_name(device)[1].split(":")[0]
    launch = ""
    backend = make_backend(name, "", arch)
    if name == OWN:
        reference = Reference(inputs(Shape(**shape), device), random_documents(Shape(**shape)))
        launch, _ = fastest_launch(reference, arch)
        backend = make_backend(name, "", arch, launch)
    return {**of_backend(backend, Shape(**shape), device), "backend": name, "launch": launch}


def of_backend(backend: Backend, shape: Shape, device: torch.device) -> dict[str, Any]:
    """A form.Attention without the fields `backend` and `launch`."""
    documents, tensors = random_documents(shape), inputs(shape, device)
    layouts = [_layout(backend, shape, device, seed) for seed in _SEEDS]
    first, again = (forward_backward(backend, tensors, documents) for _ in range(2))
    milliseconds(backend, tensors, documents)  # a warm-up
    kernel = running_kernel(backend, shape, documents, device)
    return {
        **asdict(shape), "kernel": kernel, "explicit": kernel == NO_KERNEL, "layouts": layouts,
        "repeatable": all(map(torch.equal, first, again)),
        "ms": [milliseconds(backend, tensors, documents) for _ in range(_ROUNDS)],
    }  # fmt: skip


def _layout(backend: Backend, shape: Shape, device: torch.device, seed: int) -> dict[str, Any]:
    documents, tensors = random_documents(shape, seed), inputs(shape, device, seed)
    found = forward_backward(backend, tensors, documents)
    usual = forward_backward(Chunked(), tensors, documents)
    exact = forward_backward(Eager(), in_dtype(tensors, torch.float64), documents)
    # "usual": the error of explicit attention in the same dtype. A backend may be a small factor worse than that.
    errors = [
        {"tensor": name, "error": _error(a, c), "usual": _error(b, c), "scale": c.abs().max().item()}
        for name, a, b, c in zip(_TENSORS, found, usual, exact, strict=True)
    ]
    # Documents must not influence each other: change the first one, and compare the results of the others.
    changed = forward_backward(backend, with_another_first_document(tensors, documents), documents)
    rest = slice(documents.lengths[0], None)  # tokens of the flattened batch after the first document
    pairs = [[x.flatten(0, 1)[rest] for x in pair] for pair in zip(changed, found, strict=True)]
    others = max((_relative(a, b) for a, b in pairs), key=lambda value: torch.inf if value is None else value)
    return {"seed": seed, "documents": len(documents.lengths), "errors": errors, "others": others}


def _error(found: Tensor, exact: Tensor) -> float | None:
    return if_finite((found.double() - exact).abs().max().item())


def _relative(found: Tensor, expected: Tensor) -> float | None:
    """The difference; None if a value is NaN or infinite, so that a comparison with NaN cannot pass."""
    return if_finite(difference(found, expected))
