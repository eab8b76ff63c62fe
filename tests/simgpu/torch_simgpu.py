"""The Python side of the pretended device: `torch.simgpu`, the group "simccl", and the ledger of host waits.

torch loads it by the entry point of simgpu-0.dist-info where PYTHONPATH names this folder and that of build.py.
SIMGPU_SCHEDULE: now, lag, rush or random:SEED.
"""

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

NAME = "simgpu"
SCHEDULES = ("now", "lag", "rush", "random")
DEVICES = 2
PROPERTIES = SimpleNamespace(
    name="Simulated", major=0, minor=0, gcnArchName="", total_memory=1 << 30, multi_processor_count=1
)


def load() -> None:
    """torch calls it at the end of its own import."""
    import _simgpu
    import torch.distributed as dist

    torch.utils.rename_privateuse1_backend(NAME)
    _simgpu.init(DEVICES)
    choose_schedule()
    torch._register_device_module(NAME, _module(_simgpu))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("simccl", _make_group, devices=[NAME])
    _let_run_in_waits(dist.Work, _simgpu)
    # the product registers pages with CUDA's runtime
    torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=_simgpu.register_pages)


def choose_schedule() -> None:
    """Again in a process that was forked with an environment of its own."""
    import _simgpu

    name, _, seed = os.environ.get("SIMGPU_SCHEDULE", "now").partition(":")
    _simgpu.schedule(SCHEDULES.index(name), int(seed or 0))


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    import _simgpu
    import torch.distributed as dist

    return _simgpu.Group(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))


def _let_run_in_waits(work: Any, library: Any) -> None:
    """A host that waits in a collective of the CPU lets the device run, or ranks could wait for each other."""
    is_completed, wait = work.is_completed, work.wait

    def is_completed_meanwhile(self: Any) -> bool:
        library.let_run()
        return is_completed(self)

    def wait_meanwhile(self: Any, *arguments: Any, **named: Any) -> bool:
        while not isinstance(self, library.Work) and not is_completed_meanwhile(self):
            time.sleep(1e-4)
        return wait(self, *arguments, **named)

    work.is_completed, work.wait = is_completed_meanwhile, wait_meanwhile


def _module(library: Any) -> ModuleType:
    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0) -> Any:
            return torch.Stream.__new__(cls, device=torch.device(NAME, index(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            return torch.Event.__new__(cls, device=NAME, enable_timing=enable_timing)

    def index(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        found = None if device is None else torch.device(device).index
        return library.current_device() if found is None else found

    @contextlib.contextmanager
    def device(device: Any) -> Iterator[None]:
        before = library.current_device()
        library.set_device(index(device))
        try:
            yield
        finally:
            library.set_device(before)

    found: Any = ModuleType(f"torch.{NAME}")
    found.Stream, found.Event, found.device = Stream, Event, device
    found.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    found.is_available = found.is_initialized = lambda: True
    found._is_in_bad_fork = lambda: False
    found._lazy_init = found.empty_cache = lambda: None
    found.device_count, found.current_device = lambda: DEVICES, library.current_device
    found.set_device = lambda device: library.set_device(index(device))
    found.current_stream = lambda device=None: torch.accelerator.current_stream(index(device))
    found.set_stream = torch.accelerator.set_stream
    found.synchronize = lambda device=None: torch.accelerator.synchronize(index(device))
    found.manual_seed = found.manual_seed_all = lambda seed: None  # the CPU's generator is the device's
    found.get_rng_state = lambda device=None: torch.get_rng_state()
    found.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    found.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    found.get_device_properties = lambda device=None: PROPERTIES
    total = PROPERTIES.total_memory
    found.mem_get_info = lambda device=None: (total - library.allocated(index(device)), total)
    found.max_memory_reserved = lambda device=None: library.peak(index(device))
    found.set_per_process_memory_fraction = lambda share, device=None: library.set_limit(int(share * total))
    return found


class Ledger:
    """Counts where the host waits for the device: (what waits, file:function of the product) -> times."""

    def __init__(self) -> None:
        import _simgpu

        self.waits = Counter[tuple[str, str]]()
        _simgpu.note_waits(self._note)

    def take(self) -> list[tuple[str, str, int]]:
        """What was counted since the last call."""
        found, self.waits = self.waits, Counter()
        return sorted((kind, place, count) for (kind, place), count in found.items())

    def _note(self, kind: str, detail: str) -> None:
        place, frame = "torch", sys._getframe(1)
        while frame is not None:
            _, separator, name = frame.f_code.co_filename.rpartition("/titan_mi100/")
            if separator:
                place = f"{name}:{frame.f_code.co_name}"
                break
            frame = frame.f_back  # type: ignore[assignment]
        self.waits[f"{kind} {detail.removeprefix('aten::')}".strip(), place] += 1
