"""Page-locked (pinned) host memory: the GPU copies from and to it directly, without the CPU."""

import mmap

import torch
from torch import Tensor

from titan_mi100.device import accelerator

# Registered memory is kept until the process ends: the driver refers to these pages, so they must not be freed.
_RESERVED: list[Tensor] = []


def page_locked_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate zeros in page-locked host memory. They are never freed.

    Args:
        device: the GPU that will use it; for a CPU device the memory is ordinary.

    Raises:
        MemoryError: the host has too little memory, or the limit for locked memory (`ulimit -l`) is too low.
    """
    if device.type == "cpu":
        return torch.zeros(shape, dtype=dtype)
    zeros = whole_pages(shape, dtype)
    error = accelerator.lock_pages(zeros) if zeros.nbytes else 0
    if error:
        raise MemoryError(
            f"cannot lock {zeros.nbytes:,} more bytes of host memory for the GPU (error {error}); "
            "raise the limit for locked memory (ulimit -l)"
        )
    _RESERVED.append(zeros)
    return zeros


def whole_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Allocate zeros in pages of their own, to be registered with the driver.

    Torch's own `pin_memory` rounds up to a power of two, so it can take twice the memory that is needed.

    Raises:
        MemoryError: the host has too little memory.
    """
    count = torch.Size(shape).numel()
    if not count:
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Without DONTFORK, a write after a fork goes to a copied page, which the GPU does not see.
        memory.madvise(mmap.MADV_DONTFORK)
    except OSError as error:
        raise MemoryError(f"the host cannot allocate {count * dtype.itemsize:,} more bytes: {error}") from None
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def pinned_like(like: Tensor) -> Tensor:
    """An uninitialised host tensor for a copy of `like`, pinned for a GPU. Torch's allocator reuses such buffers."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=accelerator.is_gpu(like.device))
