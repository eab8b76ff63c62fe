"""The device of a process that measures, and times on it."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from titan_mi100.attention.trial import wait
from titan_mi100.certificate.machine import describe
from titan_mi100.config.hardware import count_gpus
from titan_mi100.parallel.distributed import init_distributed


def use_device() -> torch.device:
    """The device of this process, which joins its job. Raises UserError: there are GPUs that torch cannot use."""
    return init_distributed().device


def machine() -> dict[str, Any]:
    """What the certificate is bound to, as form.Machine."""
    return asdict(describe(use_device(), max(1, count_gpus())))


def samples(call: Callable[[], Any], device: torch.device, seconds: float = 0.3, most: int = 20) -> list[float]:
    """Seconds of single calls, after one that is not counted: at least three, until they add up to `seconds`."""
    call()
    found: list[float] = []
    while len(found) < 3 or (sum(found) < seconds and len(found) < most):
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        found.append(time.perf_counter() - started)
    return found
