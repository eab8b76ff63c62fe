"""Runs PyTorch's own attention with kernels that give equal bits for equal inputs.

On CUDA the backward of flash attention adds with atomics, in any order, unless torch is asked for deterministic
algorithms. That setting holds for the whole process and makes other operators slow or fail, so it is on only while
attention chooses its kernel and while its own backward runs.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from titan_mi100.device import accelerator


def _may_differ(device: torch.device) -> bool:
    return accelerator.is_cuda(device)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Deterministic algorithms inside, on devices where the kernels would differ from call to call."""
    if not _may_differ(device):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    fills = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # with warn_only the kernel would only warn
    settings.fill_uninitialized_memory = False  # every element is written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fills


def with_repeatable_backward(out: Tensor) -> Tensor:
    """The same tensor; the operator that made it runs its backward inside `repeatable`."""
    if out.grad_fn is None or not _may_differ(out.device):
        return out
    scope, device = ExitStack(), out.device

    def begin(_: Any) -> None:
        scope.enter_context(repeatable(device))

    def end(*_: Any) -> None:
        scope.close()

    out.grad_fn.register_prehook(begin)
    out.grad_fn.register_hook(end)
    return out
