"""The device that a run computes on: CUDA (NVIDIA's cards, AMD's under ROCm), a device that an entry point of
`torch.backends` registered, or the CPU. No other file names CUDA, except launch/torch_build.py, which asks a build of
torch about it for the doctor.

`torch.get_device_module` gives what all of them have. `torch.accelerator` does not choose: in torch 2.8 it has neither
memory nor properties, and it takes devices without fp64.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

_CUDA = "cuda"
module: Any = torch.get_device_module  # of a device or its type: torch.cuda and the like


def kind() -> str:
    """The type of the device: "cuda", the name of a registered one, or "cpu"."""
    names = (_CUDA, torch._C._get_privateuse1_backend_name())
    modules: dict[str, Any] = {name: getattr(torch, name, None) for name in names}
    return next((name for name, its in modules.items() if its is not None and its.is_available()), "cpu")


def count() -> int:
    """Devices that this process can use; 0: it computes on the CPU."""
    return int(module(kind()).device_count()) if kind() != "cpu" else 0


def select(index: int) -> torch.device:
    """Make this device the process's."""
    device = torch.device(kind(), index)
    module(device).set_device(device)
    return device


def group_backend() -> str:
    """The backend for init_process_group: the device's own library for its tensors, gloo for those of the CPU."""
    library = torch.distributed.Backend.default_device_backend_map.get(kind(), "")
    return "gloo" if kind() == "cpu" else f"cpu:gloo,{kind()}:{library}"


def is_gpu(device: torch.device) -> bool:
    """Whether the device has its own memory and runs asynchronously."""
    return device.type not in ("cpu", "meta")


def is_cuda(device: torch.device) -> bool:
    """Whether kernels of CUDA and ROCm run there: Triton's, flash attention, the fused AdamW."""
    return device.type == _CUDA


def is_rocm() -> bool:
    """Whether this torch is built for AMD's cards."""
    return torch.version.hip is not None


def runtimes() -> dict[str, str | None]:
    """Versions of HIP and CUDA that this torch was built for; None: not built for it."""
    return {"hip": torch.version.hip, "cuda": torch.version.cuda}


def properties(device: torch.device) -> Any:
    """Torch's properties of the device: name, total_memory, multi_processor_count ..."""
    return module(device).get_device_properties(device)


def memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a GPU."""
    free, total = module(device).mem_get_info(device)
    return free, total


def peak_memory(device: torch.device) -> int:
    """Most bytes that torch's allocator has held of a GPU."""
    return int(module(device).max_memory_reserved(device))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if is_gpu(device):
        module(device).synchronize(device)


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Make it the current device inside the context: Triton launches on that."""
    return module(device).device(device) if is_gpu(device) else nullcontext()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without waiting: only a copy from pinned memory is asynchronous."""
    if is_gpu(device) and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def lock_pages(pages: Tensor) -> int:
    """Register host memory with the driver: the device can copy from and to it. Returns an error code; 0 is success."""
    return int(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.nbytes, 0))


def activities(device: torch.device) -> list[ProfilerActivity]:
    """The profiler activities of this device."""
    return [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * is_cuda(device)


def remember_allocations(most: int) -> Callable[[str], None]:
    """Record the allocator's history. Returns a function that writes it, with the current allocations, to a file."""
    torch.cuda.memory._record_memory_history(max_entries=most, stacks="python")
    return torch.cuda.memory._dump_snapshot
