"""What the machine is: read from the kernel's files, the environment and torch's files, without importing torch.

Every reading can fail: a file is missing, unreadable or holds something else. Then the fact is None, "not known", and
no check speaks about it. `torch_build` asks torch itself.
"""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from titan_mi100.config.hardware import find_gpu
from titan_mi100.machine.torch_build import Torch, installed

INSTINCT = {"0x738c": "MI100", "0x738e": "MI100", "0x7408": "MI250X", "0x740c": "MI250X", "0x740f": "MI210"}
HIDING = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
VARIABLES = (
    *HIDING, *ALLOCATOR, "HSA_OVERRIDE_GFX_VERSION", "NCCL_ALGO", "PYTORCH_TUNABLEOP_ENABLED",
    "PYTORCH_TUNABLEOP_TUNING",
)  # fmt: skip
UNLIMITED = 2**63 - 1
_QEMU = "0x1b36"
_PCIE, _NO_ATOMICS = "2", 0b1100  # of a link in KFD's topology: its type; flags NO_ATOMICS_32_BIT and _64_BIT


def group_of(path: Path) -> str:
    """The name of the group that owns a file, or its number: a container need not know the name."""
    import grp  # not on Windows, and rarely needed

    number = path.stat().st_gid
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


@dataclass(frozen=True)
class System:
    """Where facts are read. Tests give another root, and answers that a folder of plain files cannot give."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    may_use: Callable[[Path], bool] = lambda path: os.access(path, os.R_OK | os.W_OK)
    group_of: Callable[[Path], str] = group_of
    free_bytes: Callable[[Path], int] = free_bytes

    def text(self, path: str | Path) -> str | None:
        """A file's content without the spaces around it; None: there is nothing that can be read."""
        try:
            with open(self.root / path, "rb") as file:
                return file.read(1 << 16).decode(errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str | Path) -> int | None:
        found = self.text(path)
        return int(found) if found and re.fullmatch(r"\d{1,18}", found, re.ASCII) else None

    def names(self, path: str | Path) -> list[str]:
        """What is in a folder, sorted by number where the names have one; [] where there is none."""
        try:
            found = os.listdir(self.root / path)
        except OSError:
            return []
        return sorted(found, key=lambda name: [int(part) if part.isdecimal() else 0 for part in _NUMBER.split(name)])


_NUMBER = re.compile(r"(\d{1,18})", re.ASCII)


@dataclass(frozen=True)
class Card:
    """One GPU as the kernel shows it. None: not known."""

    vendor: str  # amd or nvidia
    name: str
    arch: str | None  # gfx908; of NVIDIA's cards torch alone knows it
    device_file: str
    address: str  # on the PCI bus
    width: int | None  # PCIe lanes in use, at the narrowest place between card and CPU
    full_width: int | None  # lanes that the card has
    speed: float | None  # GT/s that the slowest part between card and CPU is capable of, not what an idle link shows
    full_speed: float | None  # GT/s that the card is capable of
    atomics: bool | None  # PCIe atomics between card and CPU
    mapped: int | None  # bytes of its memory that the CPU and other cards can address
    memory: int | None  # bytes
    iommu: str | None  # how the IOMMU translates for it: identity, DMA, DMA-FQ; "": not at all
    watts: float | None  # power cap
    full_watts: float | None  # power cap as the card came
    level: str | None  # power_dpm_force_performance_level


@dataclass(frozen=True)
class DeviceFile:
    path: str
    exists: bool
    usable: bool  # by this user
    group: str


@dataclass(frozen=True)
class Facts:
    """A machine. None: not known."""

    kernel: str
    driver: str  # version of the GPU driver; "": part of the kernel, or none
    rocm: str  # version in /opt/rocm; "": none there
    cards: tuple[Card, ...]  # in the order in which ROCm counts them
    driverless: tuple[str, ...]  # AMD Instinct cards on the PCI bus that the driver does not offer for computing
    device_files: tuple[DeviceFile, ...]
    groups: tuple[str, ...]  # of this user
    environ: Mapping[str, str]  # of VARIABLES those that are set
    processes: int | None  # that will run here; None: one per card
    memlock: int | None  # bytes, or UNLIMITED
    open_files: int | None
    shm_free: int | None  # bytes in /dev/shm
    rdma: tuple[str, ...]  # InfiniBand, RoCE or Slingshot devices
    numa_nodes: int
    numa_balancing: int | None
    torch: Torch

    def vendor(self) -> str:
        """Whose cards torch is meant to use: a laptop may have an NVIDIA card beside a small AMD one. "": no card."""
        present = {card.vendor for card in self.cards}
        wanted = "nvidia" if self.torch.cuda else "amd" if self.torch.hip else ""
        return wanted if wanted in present else max(present, default="")

    def visible(self) -> tuple[Card, ...]:
        """The cards that the environment's variables leave to torch, in the order of their numbers.

        ROCm's runtime applies ROCR_VISIBLE_DEVICES first and numbers anew what is left; HIP applies
        HIP_VISIBLE_DEVICES, or else CUDA_VISIBLE_DEVICES, to that. A list ends at its first entry that names no card.
        """
        *_, (_, left) = self.hiding()
        return left

    def present(self) -> tuple[Card, ...]:
        """The cards of `vendor`, also those that are hidden."""
        return tuple(card for card in self.cards if card.vendor == self.vendor())

    def hiding(self) -> list[tuple[str, tuple[Card, ...]]]:
        """What hides cards from torch, in the order of effect, and which cards it leaves; first "", and all cards."""
        own: tuple[str, ...] = ("CUDA_VISIBLE_DEVICES",)
        if self.vendor() == "amd":
            own = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES" if self.environ.get("HIP_VISIBLE_DEVICES") else own[0])
        steps = [("", self.present())]
        for name in own:
            if name in self.environ:
                steps.append((name, chosen(self.environ[name], steps[-1][1])))
        return steps

    def used(self) -> int:
        """How many cards a run uses at most."""
        count = len(self.visible())
        return count if self.processes is None else min(count, self.processes)


def chosen(value: str, cards: tuple[Card, ...]) -> tuple[Card, ...]:
    """The cards that the value of a variable names, up to its first entry that names none."""
    found: list[Card] = []
    for number, entry in enumerate(value.split(",")):
        entry = entry.strip()
        if entry.isdecimal() and entry.isascii() and int(entry[:9]) < len(cards):
            found.append(cards[int(entry)])
        elif re.match("GPU-|MIG-", entry) and cards:  # which one, only the driver knows; MIG divides a card
            found.append(cards[min(number, len(cards) - 1)])
        else:
            break
    return tuple(found)


def read(system: System | None = None, processes: int | None = None) -> Facts:
    """The facts of this machine.

    Args:
        system: None: this one.
        processes: that will run here; None: one per card.
    """
    system = system or System()
    cards = (*_amd_cards(system), *_nvidia_cards(system))
    files = [card.device_file for card in cards]
    if any(card.vendor == "amd" for card in cards):
        files.insert(0, "/dev/kfd")
    limits = _limits(system)
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
        memlock=limits.get("Max locked memory"),
        open_files=limits.get("Max open files"),
        shm_free=_shm_free(system),
        rdma=(*system.names("sys/class/infiniband"), *system.names("sys/class/cxi")),
        numa_nodes=sum(re.fullmatch(r"node\d+", name) is not None for name in system.names("sys/devices/system/node")),
        numa_balancing=system.number("proc/sys/kernel/numa_balancing"),
        torch=installed(wants_blas=any(card.vendor == "amd" for card in cards), environ=system.environ),
    )


def _amd_cards(system: System) -> Iterable[Card]:
    """The nodes of KFD's topology that compute: those of CPUs have no SIMDs."""
    folder = "sys/class/kfd/kfd/topology/nodes"
    for node in system.names(folder):
        found = _properties(system, f"{folder}/{node}/properties")
        simds, version = found.get("simd_count", 0), found.get("gfx_target_version", 0)
        if not simds:
            continue
        # as the driver packs it: 90008 is 9.0.8, which the compiler writes in hexadecimal, gfx908
        arch = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}" if version else None
        place = found.get("location_id", 0)
        address = f"{found.get('domain', 0):04x}:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"
        gpu = find_gpu(arch or "", simds // max(found.get("simd_per_cu", 0), 1))
        name = gpu.name if gpu else arch or "unknown AMD GPU"
        file = f"/dev/dri/renderD{found.get('drm_render_minor', 0)}"
        yield _card(system, "amd", name, arch, address, file, _atomics(system, f"{folder}/{node}/io_links"))


def _nvidia_cards(system: System) -> Iterable[Card]:
    told = [
        _colons(system.text(f"proc/driver/nvidia/gpus/{name}/information") or "") | {"address": name}
        for name in system.names("proc/driver/nvidia/gpus")
    ]
    for name in system.names("dev"):
        if re.fullmatch(r"nvidia\d{1,4}", name, re.ASCII):
            minor = name.removeprefix("nvidia")
            own = next((entry for entry in told if entry.get("Device Minor") == minor), {})
            address = own.get("address", "").lower()
            yield _card(system, "nvidia", own.get("Model", "NVIDIA GPU"), None, address, f"/dev/{name}", None)


def _card(
    system: System, vendor: str, name: str, arch: str | None, address: str, file: str, atomics: bool | None
) -> Card:
    device = f"sys/bus/pci/devices/{address}"
    way = _way(system, device) if address else []
    # an MI100 has a switch of its own; a root complex reports no width
    widths = [width for part in way if (width := system.number(part / "current_link_width"))]
    speeds = [speed for part in way if (speed := _speed(system.text(part / "max_link_speed")))]
    monitor = next((f"{device}/hwmon/{name}" for name in system.names(f"{device}/hwmon")), "")
    cap, default = (system.number(f"{monitor}/power1_cap{end}") for end in ("", "_default"))
    most = default or system.number(f"{monitor}/power1_cap_max")
    return Card(
        vendor=vendor,
        name=name,
        arch=arch,
        device_file=file,
        address=address,
        width=min(widths, default=None),
        full_width=system.number(f"{device}/max_link_width") or None,
        speed=min(speeds, default=None),
        full_speed=_speed(system.text(f"{device}/max_link_speed")),
        atomics=atomics,
        mapped=system.number(f"{device}/mem_info_vis_vram_total"),
        memory=system.number(f"{device}/mem_info_vram_total"),
        iommu=_iommu(system, device) if way else None,
        watts=cap / 1e6 if cap else None,  # the files have microwatts
        full_watts=most / 1e6 if most else None,
        level=system.text(f"{device}/power_dpm_force_performance_level"),
    )


def _way(system: System, device: str) -> list[Path]:
    """The folders of the PCI devices from the card to the CPU."""
    try:
        folder = (system.root / device).resolve(strict=True)
    except (OSError, RuntimeError):
        return []
    parts = [part for part in (folder, *folder.parents) if re.fullmatch(r"[\da-f]{4,}:[\da-f]{2}:.*", part.name)]
    return [part for part in parts if system.text(part / "vendor") != _QEMU]  # its virtual ports make up link speeds


def _speed(text: str | None) -> float | None:
    """GT/s of "16.0 GT/s PCIe"."""
    found = re.match(r"(\d{1,3}(?:\.\d{1,2})?) GT/s", text or "")
    return float(found[1]) if found else None


def _iommu(system: System, device: str) -> str | None:
    if not (system.root / device / "iommu_group").exists():
        return ""
    return system.text(f"{device}/iommu_group/type")


def _atomics(system: System, folder: str) -> bool | None:
    """Whether PCIe links of this node allow atomics; KFD marks those that do not."""
    links = [_words(system.text(f"{folder}/{name}/properties")) for name in system.names(folder)]
    flags = [link["flags"] for link in links if link.get("type") == _PCIE and link.get("flags", "").isdecimal()]
    return not any(int(flag[:18]) & _NO_ATOMICS for flag in flags) if flags else None


def _driverless(system: System, known: set[str]) -> tuple[str, ...]:
    found = []
    for address in system.names("sys/bus/pci/devices"):
        folder = f"sys/bus/pci/devices/{address}"
        name = INSTINCT.get(system.text(f"{folder}/device") or "")
        if name and system.text(f"{folder}/vendor") == "0x1002" and address not in known:
            found.append(f"{name} at {address}")
    return tuple(found)


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
    """The names of this process's groups; the number of one without a name."""
    status = _colons(system.text("proc/self/status") or "")
    own = status.get("Gid", "").split()[1:2]  # the effective one of four
    numbers = dict.fromkeys([*own, *status.get("Groups", "").split()])
    lines = [line.split(":") for line in (system.text("etc/group") or "").splitlines()]
    names = {line[2]: line[0] for line in lines if len(line) > 2}
    return tuple(names.get(number, number) for number in numbers)


def _limits(system: System) -> dict[str, int]:
    """Soft limits of this process by the kernel's names."""
    lines = (system.text("proc/self/limits") or "").splitlines()
    found = (re.match(r"(Max \w[\w ]*?) {2,}(unlimited|\d{1,18}) ", line, re.ASCII) for line in lines)
    return {line[1]: UNLIMITED if line[2] == "unlimited" else int(line[2]) for line in found if line}


def _shm_free(system: System) -> int | None:
    try:
        return system.free_bytes(system.root / "dev/shm")
    except OSError:
        return None


def _properties(system: System, path: str) -> dict[str, int]:
    return {name: int(value) for name, value in _words(system.text(path)).items() if re.fullmatch(r"\d{1,18}", value)}


def _words(text: str | None) -> dict[str, str]:
    """Lines of a name and a value."""
    lines = [line.split() for line in (text or "").splitlines()]
    return {line[0]: line[1] for line in lines if len(line) == 2}


def _colons(text: str) -> dict[str, str]:
    """Lines such as "Model: NVIDIA H100"."""
    parts = [line.partition(":") for line in text.splitlines()]
    return {name.strip(): value.strip() for name, colon, value in parts if colon}
