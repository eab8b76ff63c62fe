"""Saves and restores a process's random states (Python, numpy, torch, GPU), in `rng-<rank>.json` of a checkpoint."""

import base64
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_mi100.checkpoint.resume import REMEDY
from titan_mi100.errors import UserError
from titan_mi100.files.plain import read_checked

_MT19937 = 624  # numbers in the state of numpy's generator


@dataclass(frozen=True)
class _RandomState:
    """The content of rng-R.json; torch and cuda are base64. cuda is missing where there was no GPU."""

    python: tuple[int, tuple[int, ...], float | None]
    numpy: tuple[str, list[int], int, int, float]
    torch: str
    cuda: str = ""


def random_state(device: torch.device) -> dict[str, Any]:
    """The current random states as JSON values. Args: device: its generator's state is included if it is a GPU."""
    # Tuples and arrays become lists, and bytes base64: a checkpoint holds no pickle.
    python = random.getstate()
    numpy = np.random.get_state(legacy=True)
    state = {
        "python": [python[0], list(python[1]), python[2]],
        "numpy": [numpy[0], numpy[1].tolist(), *numpy[2:]],  # type: ignore[index, union-attr]
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
    }
    if device.type == "cuda":
        state["cuda"] = base64.b64encode(torch.cuda.get_rng_state(device).numpy().tobytes()).decode()
    return state


def set_random_state(file: Path, device: torch.device) -> None:
    """Restore the random states. Raises UserError: the file is not a random state."""
    state = read_checked(file, _RandomState, REMEDY)

    def tensor(text: str) -> Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

    try:
        if state.numpy[2] > _MT19937:  # the position in the state; numpy would read beyond the array's end
            raise ValueError(f"numpy[2] = {state.numpy[2]} is more than {_MT19937}")
        random.setstate(state.python)
        np.random.set_state((state.numpy[0], np.array(state.numpy[1], dtype=np.uint32), *state.numpy[2:]))
        torch.set_rng_state(tensor(state.torch))
        if device.type == "cuda" and state.cuda:
            torch.cuda.set_rng_state(tensor(state.cuda), device)
    except Exception as error:  # three libraries, each with exceptions of its own
        raise UserError(f"{file}: is not a random state: {error}; {REMEDY}") from None
