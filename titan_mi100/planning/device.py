"""The device that a command plans for, and parsers of option values. Imports no torch."""

import argparse
import re
from dataclasses import fields
from typing import Any

from titan_mi100.config.toml_file import read_toml
from titan_mi100.errors import UserError, did_you_mean
from titan_mi100.planning.cards import DEVICES, Gpu
from titan_mi100.wording import as_key

_DTYPES = {"bfloat16", "float16", "float32"}
_MAY_BE_LEFT_OUT = ("host_gbs", "overlap", "per_node", "node_gbs")


def find_device(name: str) -> Gpu:
    """The device of this name, or the one that a user's TOML file describes."""
    if found := [gpu for key, gpu in DEVICES.items() if _plain(key) == _plain(name)]:
        return found[0]
    if not name.endswith(".toml"):
        raise UserError(f"--device {name} is not known{did_you_mean(name, DEVICES)}; or name a TOML file")
    defaults = {key: getattr(Gpu, key) for key in _MAY_BE_LEFT_OUT}
    values, known = {**defaults, **read_toml(name)}, {field.name for field in fields(Gpu)}
    wrong = {key for key in ("memory_gib", "link_gbs", "host_gbs", "node_gbs") if not _is_rate(values.get(key))}
    rates, overlap, text = values.get("tflops"), values["overlap"], values.get("name")
    has_rates = isinstance(rates, dict) and rates and all(map(_is_rate, rates.values()))
    is_right = {
        "name": isinstance(text, str) and text != "",
        "per_node": isinstance(values["per_node"], int) and _is_rate(values["per_node"]),
        "overlap": overlap == 0 or (_is_rate(overlap) and overlap <= 1),
        "tflops": has_rates and _DTYPES.issuperset(rates or ()),
    }
    wrong |= {key for key, right in is_right.items() if not right} | ({*values} ^ known)
    if wrong:
        raise UserError(
            f"{name}: missing, unknown or wrong: {', '.join(sorted(map(as_key, wrong)))}; a device has "
            f"{', '.join(sorted(known))} and nothing else: a text, numbers above 0, and tflops a table such as "
            "{ bfloat16 = 92.3, float16 = 184.6, float32 = 46.1 }; host_gbs, node_gbs, overlap (0 to 1) and per_node "
            "(whole) may be left out"
        )
    return Gpu(**values)


def _plain(name: str) -> str:
    """4090 of "RTX 4090", 7900xtx of "Radeon RX 7900 XTX"."""
    return re.sub(r"nvidia|amd|geforce|radeon|instinct|rtx|rx|pro|[ _-]", "", name.lower())


NAMES = f"{', '.join(DEVICES)}, or a TOML file that describes one"


def find_card(name: str, memory: float, default: str) -> tuple[Gpu, int]:
    """The device of --device and --memory, and bytes of its memory. --memory alone gives no name and no rates."""
    gpu = Gpu("card", {}, memory, 0) if memory and not name else find_device(name or default)
    return gpu, round((memory or gpu.memory_gib) * (1 << 30))


def _is_rate(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


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
    """The number that a text stands for; 0 if it is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0
