"""A card's sensors while it works, as text: clock, power, temperature, memory errors."""

import subprocess
from contextlib import suppress
from pathlib import Path


def amd_health(folder: Path) -> str:
    """Read an AMD card's sensors from amdgpu's hwmon and RAS files (kernel documentation, "AMDGPU driver").

    Args:
        folder: the card's folder in sysfs.
    """
    units = (  # file, text, divisor: the files have Hz, microwatts and millidegrees
        ("freq1_input", "clock {:.0f} MHz", 1e6), ("power1_average", "power {:.0f} W", 1e6),
        ("power1_input", "power {:.0f} W", 1e6), ("power1_cap", "cap {:.0f} W", 1e6),
        ("temp2_input", "junction {:.0f} °C", 1e3), ("temp3_input", "memory {:.0f} °C", 1e3),
    )  # fmt: skip
    said = []
    for name, words, unit in units:
        for path in sorted(folder.glob(f"hwmon/hwmon*/{name}"))[:1]:
            with suppress(OSError, ValueError):
                said.append(words.format(int(path.read_text()) / unit))
    with suppress(OSError):
        said.append("memory errors " + " ".join((folder / "ras" / "umc_err_count").read_text().split()))
    return ", ".join(said) or "the driver shows no sensors of this card"


def nvidia_health(address: str) -> str:
    """Read an NVIDIA card's sensors from nvidia-smi.

    Args:
        address: the card's PCI address.
    """
    wanted = "clocks.sm,power.draw,power.limit,temperature.gpu,ecc.errors.uncorrected.volatile.total"
    try:
        command = ["nvidia-smi", f"--id={address}", f"--query-gpu={wanted}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"nvidia-smi does not answer ({type(error).__name__})"
    names = ("clock", "power", "limit", "temperature °C", "uncorrected memory errors")
    return ", ".join(f"{name} {value.strip()}" for name, value in zip(names, answer.split(","), strict=False))
