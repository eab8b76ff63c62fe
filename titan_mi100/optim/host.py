"""Memory of the host from which a device reads, and into which it writes, on its own: page-locked."""

import mmap

import torch
from torch import Tensor

_RESERVED: list[Tensor] = []  # pages that are known to the driver must not be given back


def reserve(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros for as long as the process lives.

    Raises:
        MemoryError: the host has none left, or lets a process lock less (`ulimit -l`).
    """
    if device.type == "cpu":
        return torch.zeros(shape, dtype=dtype)
    found = whole_pages(shape, dtype)
    error = int(torch.cuda.cudart().cudaHostRegister(found.data_ptr(), found.nbytes, 0)) if found.nbytes else 0
    if error:
        raise MemoryError(f"the host locks no {found.nbytes:,} bytes more for the device (error {error}): ulimit -l")
    _RESERVED.append(found)
    return found


def whole_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in pages of their own. Torch's page-locked memory comes in powers of two, up to twice what is needed."""
    count = torch.Size(shape).numel()
    if not count:
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_DONTFORK)  # or a write after a fork would go to a page that the device does not know
    except OSError as error:
        raise MemoryError(f"the host has no {count * dtype.itemsize:,} bytes more: {error}") from None
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def lend(like: Tensor) -> Tensor:
    """Memory for a copy of a device's tensor, of those that are used again and again; it holds nothing yet."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")
