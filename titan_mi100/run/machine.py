"""Describes this machine, for a run's environment.json and for a certificate."""

import os
import platform
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan_mi100.cli import version_of
from titan_mi100.config.kernels import KERNELS, OWN

if TYPE_CHECKING:
    import torch

_PACKAGE = Path(__file__).parents[1]
_CPU_PROCESSES = 2  # on a CPU two processes replace two cards


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that the numbers depend on. An empty string: it has none.

    Attributes:
        device: description of the device.
        arch: "gfx908:sramecc+:xnack-", "sm90", "cpu".
        compute_units: 0 on a CPU.
        memory: bytes of a card; 0 on a CPU.
        cards: number of cards, and of ranks in the parts with several ranks; 2 ranks on a CPU.
        driver: version of amdgpu or nvidia.
        runtime: "hip 6.4.1", "cuda 12.8".
        version, commit: this package's version and commit; the commit only in a git checkout,
            with "+changes" where files differ.
    """

    device: str
    arch: str
    compute_units: int
    memory: int
    cards: int
    driver: str
    torch: str
    runtime: str
    triton: str
    python: str
    version: str
    commit: str


def describe(device: "torch.device", cards: int) -> Machine:
    """Describe this machine.

    Args:
        cards: number of this node's cards that a run would use.
    """
    import torch  # a certificate is read without it

    from titan_mi100.device import accelerator
    from titan_mi100.parallel.distributed import device_name

    words, arch, units = device_name(device)
    is_gpu = accelerator.is_gpu(device)
    return Machine(
        device=words if is_gpu else f"CPU: {_cpu()}, {os.cpu_count()} cores",
        arch=arch,
        compute_units=units,
        memory=accelerator.properties(device).total_memory if is_gpu else 0,
        cards=cards if is_gpu else _CPU_PROCESSES,
        driver=_driver() if is_gpu else "",
        torch=torch.__version__,
        runtime=next((f"{name} {version}" for name, version in accelerator.runtimes().items() if version), ""),
        triton=next(filter(None, map(version_of, KERNELS[OWN].packages)), ""),
        python=platform.python_version(),
        version=version_of("titan_mi100"),
        commit=_commit(),
    )


def _driver() -> str:
    for name in ("amdgpu", "nvidia"):
        module = Path("/sys/module") / name
        with suppress(OSError):
            return f"{name} {(module / 'version').read_text().strip()}"
        if module.is_dir():  # a driver that is part of Linux has no version of its own
            return f"{name} of Linux {platform.release()}"
    return ""


def _cpu() -> str:
    """The processor's name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _commit() -> str:
    """The commit of this package's checkout; "": the package is not in a checkout, or git is missing."""
    root = _PACKAGE.parent
    if not (root / ".git").exists():
        return ""
    with suppress(OSError, subprocess.SubprocessError):
        commit, changed = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "titan_mi100")
        return commit + ("+changes" if changed else "")
    return ""


def _git(root: Path, *arguments: str) -> str:
    ran = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=30)
    return ran.stdout.strip()
