"""The device of a measuring process, and timing on it."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from titan_mi100.attention.trial import wait
from titan_mi100.parallel.distributed import init_distributed
from titan_mi100.planning.hardware import count_gpus
from titan_mi100.run.machine import describe


def use_device(card: int = 0) -> torch.device:
    """Initialise torch.distributed and return this process's device.

    Args:
        card: another GPU of the node, for a single process.

    Raises:
        UserError: there are GPUs that torch cannot use.
    """
    device = init_distributed().device
    return torch.device("cuda", card) if card else device


def machine() -> dict[str, Any]:
    """The machine that the certificate will be bound to, as the fields of Machine."""
    return asdict(describe(use_device(), max(1, count_gpus())))


def samples(call: Callable[[], Any], device: torch.device, seconds: float = 0.3, most: int = 20) -> list[float]:
    """Time single calls, after a warm-up call: at least three, at most `most`, until they add up to `seconds`."""
    call()
    found: list[float] = []
    while len(found) < 3 or (sum(found) < seconds and len(found) < most):
        wait(device)
        started = time.perf_counter()
        call()
        wait(device)
        found.append(time.perf_counter() - started)
    return found
