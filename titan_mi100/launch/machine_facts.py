"""Facts about the machine, from the kernel's files, the environment and torch's files, without importing torch.

Every read can fail: a file is missing, unreadable or has other content. Then the fact is None ("not known"), and the
checks skip it. `torch_build` asks torch itself.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from titan_mi100.launch.torch_build import Torch, installed
from titan_mi100.planning.hardware import NEVER_USED, USED_ALONE, find_gpu

# PCI device ids of AMD Instinct cards
INSTINCT = {"0x738c": "MI100", "0x738e": "MI100", "0x7408": "MI250X", "0x740c": "MI250X", "0x740f": "MI210"}
# variables that hide cards from torch
HIDING = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
VARIABLES = (*HIDING, "HSA_OVERRIDE_GFX_VERSION", "NCCL_ALGO")


def group_of(path: Path) -> str:
    """The name of the group that owns a file, or its number if the name is unknown, as in a container."""
    try:
        return path.group()
    except KeyError:
        return str(path.stat().st_gid)


@dataclass(frozen=True)
class System:
    """Where facts are read. Tests pass another root folder, and functions for what plain files cannot imitate."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    may_use: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    group_of: Callable[[Path], str] = group_of
    free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free

    def text(self, path: str | Path) -> str | None:
        """A file's first 64 KiB as text, stripped; None: it does not exist or cannot be read."""
        try:
            with open(self.root / path, "rb") as file:
                return file.read(1 << 16).decode(errors="replace").strip()
        except OSError:
            return None

    def names(self, path: str | Path) -> list[str]:
        """The names in a folder, in natural order (card2 before card10); [] if the folder does not exist."""
        try:
            listed = os.listdir(self.root / path)
        except OSError:
            return []
        return sorted(listed, key=lambda name: [int(part) if part.isdecimal() else 0 for part in _NUMBER.split(name)])


_NUMBER = re.compile(r"(\d{1,18})", re.ASCII)


@dataclass(frozen=True)
class Card:
    """One GPU as the kernel shows it. None: not known."""

    vendor: str  # amd or nvidia
    name: str
    arch: str | None  # gfx908; None for NVIDIA cards: only torch knows it
    device_file: str
    address: str  # on the PCI bus
    iommu: str | None  # type of its IOMMU domain: identity, DMA, DMA-FQ; "": no IOMMU
    use: str = "always"  # a processor's own graphics: "alone", where there is no card; "never": no torch has its code


@dataclass(frozen=True)
class DeviceFile:
    """A file through which programs use a card, such as /dev/kfd."""

    path: str
    exists: bool
    usable: bool  # this user may read and write it
    group: str  # the group that owns it


@dataclass(frozen=True)
class Facts:
    """The facts about a machine. None: not known."""

    kernel: str  # version of Linux
    driver: str  # version of the GPU driver; "": the driver is part of the kernel, or there is none
    rocm: str  # version in /opt/rocm; "": there is no ROCm
    cards: tuple[Card, ...]  # in the order of ROCm's numbers
    driverless: tuple[str, ...]  # AMD Instinct cards on the PCI bus that have no compute driver
    device_files: tuple[DeviceFile, ...]
    groups: tuple[str, ...]  # groups of this user
    environ: Mapping[str, str]  # those of VARIABLES that are set
    processes: int | None  # processes of the run on this machine; None: one per card
    shm_free: int | None  # free bytes in /dev/shm
    torch: Torch

    def vendor(self) -> str:
        """The vendor of the cards that torch is built for: "amd", "nvidia", "": no card. A laptop may have both."""
        present = {card.vendor for card in self.cards}
        built_for = "nvidia" if self.torch.cuda else "amd" if self.torch.hip else ""
        return built_for if built_for in present else max(present, default="")

    def visible(self) -> tuple[Card, ...]:
        """The visible cards that a run computes on, as planning/hardware.py counts them."""
        cards = self.numbered()
        return next((left for use in ("always", "alone") if (left := tuple(c for c in cards if c.use == use))), ())

    def numbered(self) -> tuple[Card, ...]:
        """The cards that torch sees, in the order of their numbers.

        ROCm's runtime applies ROCR_VISIBLE_DEVICES first and renumbers the remaining cards. HIP then applies
        HIP_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES if that is not set. A list ends at its first invalid entry.
        """
        *_, (_, left) = self.hiding()
        return left

    def present(self) -> tuple[Card, ...]:
        """The cards of `vendor`, including hidden ones."""
        return tuple(card for card in self.cards if card.vendor == self.vendor())

    def hiding(self) -> list[tuple[str, tuple[Card, ...]]]:
        """The variables that hide cards, in the order in which they apply, each with the cards that remain visible.

        The first entry is ("", all cards of the vendor).
        """
        own: tuple[str, ...] = ("CUDA_VISIBLE_DEVICES",)
        if self.vendor() == "amd":
            own = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES" if self.environ.get("HIP_VISIBLE_DEVICES") else own[0])
        steps = [("", self.present())]
        for name in own:
            if name in self.environ:
                steps.append((name, chosen(self.environ[name], steps[-1][1])))
        return steps

    def used(self) -> int:
        """The largest number of cards that the run can use."""
        count = len(self.visible())
        return count if self.processes is None else min(count, self.processes)


def chosen(value: str, cards: tuple[Card, ...]) -> tuple[Card, ...]:
    """The cards that a variable's value selects: "0,2" or "GPU-<uuid>". The list ends at its first invalid entry."""
    selected: list[Card] = []
    for number, word in enumerate(value.split(",")):
        word = word.strip()
        if word.isdecimal() and word.isascii() and int(word[:9]) < len(cards):
            selected.append(cards[int(word)])
        elif re.match("GPU-|MIG-", word) and cards:  # only the driver knows which card it is: count it as the next
            selected.append(cards[min(number, len(cards) - 1)])
        else:
            break
    return tuple(selected)


def read(system: System | None = None, processes: int | None = None) -> Facts:
    """Read the facts of this machine.

    Args:
        system: where to read; None: this machine.
        processes: processes of the run on this machine; None: one per card.
    """
    system = system or System()
    cards = (*_amd_cards(system), *_nvidia_cards(system))
    files = [card.device_file for card in cards]
    if any(card.vendor == "amd" for card in cards):
        files.insert(0, "/dev/kfd")
    return Facts(
        kernel=system.text("proc/sys/kernel/osrelease") or "",
        driver=_driver(system),
        rocm=(system.text("opt/rocm/.info/version") or "").partition("-")[0],
        cards=cards,
        driverless=_driverless(system, {card.address for card in cards}),
        device_files=tuple(_device_file(system, path) for path in files),
        groups=_groups(system),
        environ={name: system.environ[name] for name in VARIABLES if name in system.environ},
        processes=processes,
        shm_free=_shm_free(system),
        torch=installed(wants_blas=any(card.vendor == "amd" for card in cards), environ=system.environ),
    )


def _amd_cards(system: System) -> Iterable[Card]:
    """AMD cards: the nodes of KFD's topology that have SIMDs. CPUs are nodes too, but have none."""
    folder = "sys/class/kfd/kfd/topology/nodes"
    for node in system.names(folder):
        properties = _properties(system, f"{folder}/{node}/properties")
        simds, version = properties.get("simd_count", 0), properties.get("gfx_target_version", 0)
        if not simds:
            continue
        # The driver packs the version in decimal: 90008 is 9.0.8. The compiler writes the parts in hexadecimal: gfx908.
        arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else None
        location = properties.get("location_id", 0)  # bits 8-15: bus, 3-7: device, 0-2: function
        address = f"{properties.get('domain', 0):04x}:{location >> 8:02x}:{location >> 3 & 31:02x}.{location & 7}"
        gpu = find_gpu(arch or "", simds // max(properties.get("simd_per_cu", 0), 1))
        name = gpu.name if gpu else arch or "unknown AMD GPU"
        file = f"/dev/dri/renderD{properties.get('drm_render_minor', 0)}"
        card = _card(system, "amd", name, arch, address, file)
        yield replace(card, use="never" if version in NEVER_USED else "alone" if version in USED_ALONE else "always")


def _nvidia_cards(system: System) -> Iterable[Card]:
    told = [
        _colon_lines(system.text(f"proc/driver/nvidia/gpus/{name}/information") or "") | {"address": name}
        for name in system.names("proc/driver/nvidia/gpus")
    ]
    for name in system.names("dev"):
        if re.fullmatch(r"nvidia\d{1,4}", name, re.ASCII):
            minor = name.removeprefix("nvidia")
            own = next((card for card in told if card.get("Device Minor") == minor), {})
            address = own.get("address", "").lower()
            yield _card(system, "nvidia", own.get("Model", "NVIDIA GPU"), None, address, f"/dev/{name}")
    if "nvidia0" not in system.names("dev") and "libcuda.so.1" in system.names("usr/lib/wsl/lib"):
        yield _card(system, "nvidia", "NVIDIA GPU of WSL2", None, "", "/dev/dxg")


def _card(system: System, vendor: str, name: str, arch: str | None, address: str, file: str) -> Card:
    device = f"sys/bus/pci/devices/{address}"
    is_on_bus = bool(address) and (system.root / device).exists()
    has_group = is_on_bus and (system.root / device / "iommu_group").exists()
    iommu = system.text(f"{device}/iommu_group/type") if has_group else "" if is_on_bus else None
    return Card(vendor, name, arch, file, address, iommu)


def _driverless(system: System, known: set[str]) -> tuple[str, ...]:
    """See Facts.driverless. Args: known: PCI addresses of the cards that have a driver."""
    nodes = [f"sys/class/kfd/kfd/topology/nodes/{node}" for node in system.names("sys/class/kfd/kfd/topology/nodes")]
    # In a container the kernel does not let us read the node of a card that the container was not given. Which card on
    # the bus it is cannot be told then.
    if any("properties" in system.names(node) and system.text(f"{node}/properties") is None for node in nodes):
        return ()
    cards = []
    for address in system.names("sys/bus/pci/devices"):
        folder = f"sys/bus/pci/devices/{address}"
        name = INSTINCT.get(system.text(f"{folder}/device") or "")
        if name and system.text(f"{folder}/vendor") == "0x1002" and address not in known:
            cards.append(f"{name} at {address}")
    return tuple(cards)


def _device_file(system: System, path: str) -> DeviceFile:
    real = system.root / path.lstrip("/")
    try:
        group = system.group_of(real)
    except OSError:
        return DeviceFile(path, exists=False, usable=False, group="")
    return DeviceFile(path, exists=True, usable=system.may_use(real), group=group)


def _driver(system: System) -> str:
    nvidia = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", system.text("proc/driver/nvidia/version") or "")
    return nvidia[1] if nvidia else system.text("sys/module/amdgpu/version") or ""


def _groups(system: System) -> tuple[str, ...]:
    """The names of this process's groups; the number of a group whose name is unknown."""
    status = _colon_lines(system.text("proc/self/status") or "")
    own = status.get("Gid", "").split()[1:2]  # the line has the real, effective, saved and file system group
    numbers = dict.fromkeys([*own, *status.get("Groups", "").split()])
    lines = [line.split(":") for line in (system.text("etc/group") or "").splitlines()]
    names = {line[2]: line[0] for line in lines if len(line) > 2}
    return tuple(names.get(number, number) for number in numbers)


def _shm_free(system: System) -> int | None:
    try:
        return system.free_bytes(system.root / "dev/shm")
    except OSError:
        return None


def _properties(system: System, path: str) -> dict[str, int]:
    """The lines "name number" of a file."""
    return {
        name: int(digits) for name, digits in re.findall(r"^(\S+) (\d{1,18})$", system.text(path) or "", re.M | re.A)
    }


def _colon_lines(text: str) -> dict[str, str]:
    """Parse lines of the form "Model: NVIDIA H100"."""
    parts = [line.partition(":") for line in text.splitlines()]
    return {name.strip(): value.strip() for name, colon, value in parts if colon}
