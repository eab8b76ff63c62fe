"""Describes the device of a measuring process."""

from dataclasses import asdict
from typing import Any

from titan_mi100.parallel.distributed import init_distributed
from titan_mi100.planning.hardware import count_gpus
from titan_mi100.run.machine import describe


def machine() -> dict[str, Any]:
    """This machine, as the fields of Machine. Raises UserError: there are GPUs that torch cannot use."""
    return asdict(describe(init_distributed().device, max(1, count_gpus())))
