"""The device that a command plans for, and parsers of option values. Imports no torch."""

import argparse
import re

from titan_mi100.errors import UserError, did_you_mean
from titan_mi100.planning.cards import DEVICES, Gpu

NAMES = ", ".join(DEVICES)


def find_device(name: str) -> Gpu:
    """The device of this name. Raises UserError: it is not known."""
    if gpus := [gpu for key, gpu in DEVICES.items() if _plain(key) == _plain(name)]:
        return gpus[0]
    problem = f"is not known{did_you_mean(name, DEVICES)}; or give the memory of another card: --memory 24GB"
    raise UserError(f"--device {name} {problem}")


def _plain(name: str) -> str:
    """4090 of "RTX 4090", 7900xtx of "Radeon RX 7900 XTX"."""
    return re.sub(r"nvidia|amd|geforce|radeon|instinct|rtx|rx|pro|[ _-]", "", name.lower())


def find_card(name: str, memory: float, default: str) -> tuple[Gpu, int]:
    """The device of --device and --memory, and bytes of its memory. --memory alone gives no name and no rates."""
    gpu = Gpu("card", {}, memory, 0) if memory and not name else find_device(name or default)
    return gpu, round((memory or gpu.memory_gib) * (1 << 30))


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to {1 << 20:,}, such as 2")
    return int(text)


def positive_float(text: str) -> float:
    if not 0 < (number := _number(text)) < 1e18:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0, such as 1e9")
    return number


def size_gib(text: str) -> float:
    """A size in GiB. `32GB` means 32 GiB: cards are sold by such names."""
    if not 0 < (size := _number(text.upper().removesuffix("B").removesuffix("I").removesuffix("G"))) < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 32GB")
    return size


def _number(text: str) -> float:
    """The text as a number; 0 if it is not one."""
    try:
        return float(text)
    except ValueError:
        return 0.0
