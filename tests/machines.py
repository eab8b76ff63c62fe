"""Machines that are not at hand: tests/fixtures/machines/*.json as folders with the kernel's files.

A file has: `synthetic` (always true: no such machine was read), `what` it is, the published `reports` that it is made
from, `files` and `links` below the root, the owning `groups` of device files, which of them are `closed` to the user,
`shm_free`, `environ`, what `torch` says, the `expected` state of each check, and which of them must stop a start
(`stops`). With `base`, another machine's, of which it states the differences only.

KINDS are kinds of machines by the few files that tell their cards, with what set-up, launcher and doctor do there.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conftest import REPO

from titan_mi100.files.schema import validated
from titan_mi100.launch.machine_facts import Facts, System, read
from titan_mi100.launch.torch_build import Torch
from titan_mi100.launch.wheels import PYTORCH_ARCHS

FOLDER = REPO / "tests" / "fixtures" / "machines"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> dict[str, Any]:
    machine = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    if "base" not in machine:
        return {"stops": [], **machine}
    base = load(machine["base"])
    merged = {key: {**base[key], **machine.get(key, {})} for key in ("files", "environ", "expected")}
    return {**base, **machine, **merged}


def build(machine: dict[str, Any], root: Path) -> System:
    """Make the machine's files below `root`; a file whose content is None is left out."""
    for path, content in machine["files"].items():
        if content is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(f"{content}\n")
    for path, target in machine["links"].items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).symlink_to(root / target)

    def group_of(path: Path) -> str:
        path.stat()  # raises where there is no file
        return str(machine["groups"][str(path.relative_to(root))])

    def may_use(path: Path) -> bool:
        return str(path.relative_to(root)) not in machine["closed"]

    return System(root, machine["environ"], may_use, group_of, lambda path: int(machine["shm_free"]))


def facts_of(machine: dict[str, Any], root: Path, processes: int | None = None) -> Facts:
    """What the doctor reads there, with what the machine's torch says."""
    return replace(read(build(machine, root), processes), torch=validated(machine["torch"], Torch))


@dataclass(frozen=True)
class Kind:
    """A kind of machine.

    Attributes:
        torch: pip's arguments for torch there.
        words: what the set-up says of it.
        archs: architectures of the cards that a run computes on, one process for each.
        advice: what the doctor says: check that does not pass -> words of its fact or remedy.
        amd: gfx_target_version of each of KFD's GPUs.
        nvidia: model of each NVIDIA card.
        device: PCI device id of the NVIDIA cards.
        driver: what the NVIDIA driver says of itself.
        rocm: content of /opt/rocm/.info/version.
        closed: device files that the user may not open.
    """

    torch: str
    words: str
    archs: tuple[str, ...]
    advice: Mapping[str, str] = field(default_factory=dict)
    amd: tuple[int, ...] = ()
    nvidia: tuple[str, ...] = ()
    device: str = ""
    driver: str = ""
    rocm: str = ""
    files: tuple[str, ...] = ()
    closed: tuple[str, ...] = ()

    def build(self, root: Path) -> System:
        """Make its files below `root`."""
        texts = dict.fromkeys(self.files, "")
        for node, version in enumerate([None, *self.amd]):
            lines = f"simd_count 480\nsimd_per_cu 4\ngfx_target_version {version}\ndrm_render_minor {127 + node}\n"
            texts[f"sys/class/kfd/kfd/topology/nodes/{node}/properties"] = (
                "simd_count 0\n" if version is None else lines
            )
        texts |= dict.fromkeys(["dev/kfd", *(f"dev/dri/renderD{128 + card}" for card in range(len(self.amd)))], "")
        for card, model in enumerate(self.nvidia):
            address = f"0000:{card + 1:02x}:00.0"
            texts |= {f"dev/nvidia{card}": "", f"sys/bus/pci/drivers/nvidia/{address}/device": f"{self.device}\n"}
            told = f"Model: \t\t {model}\nDevice Minor: \t {card}\n"
            texts[f"proc/driver/nvidia/gpus/{address}/information"] = told
        if self.driver:
            texts["proc/driver/nvidia/version"] = (
                f"NVRM version: NVIDIA UNIX {self.driver}  Release Build\nGCC 12.3.0\n"
            )
        if self.rocm:
            texts["opt/rocm/.info/version"] = self.rocm
        for path, text in texts.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)

        def may_use(path: Path) -> bool:
            return str(path.relative_to(root)) not in self.closed

        return System(root, {}, may_use, lambda path: str(path.stat() and "render"), lambda _: 8 << 30)

    def facts(self, root: Path) -> Facts:
        """What the doctor knows there, if the torch that the set-up chooses answers."""
        facts, requirement = read(self.build(root)), self.torch.split()[0]
        version, build = requirement.partition("==")[2], self.torch.rpartition("/")[2]
        if build in CUDA_ARCHS and self.archs[:1] and self.archs[0].startswith("sm"):
            torch = Torch(version, cuda=f"{build[2:4]}.{build[4:]}", archs=CUDA_ARCHS[build])
        elif requirement == self.torch and self.archs:
            torch = Torch(version, cuda="13.0", archs=CUDA_ARCHS["cu130"])
        elif requirement in PYTORCH_ARCHS and build.startswith("rocm"):
            torch = Torch(version, hip=build[4:], archs=tuple(PYTORCH_ARCHS[requirement][1]))
        elif "device-" in requirement:
            extras = requirement.partition("[")[2].partition("]")[0].replace("device-", "")
            torch = Torch(version, hip="7.14", archs=tuple(extras.split(",")))
        else:
            torch = Torch(version)
        facts = replace(facts, torch=torch)
        return replace(facts, torch=replace(torch, usable=len(facts.numbered())))


# PyTorch's CUDA builds and their architectures: the matrix in its RELEASE.md
CUDA_ARCHS = {
    "cu126": ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"),
    "cu128": ("sm_70", "sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    "cu130": ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"),
}
_PYTORCH = "--index-url https://download.pytorch.org/whl"
ROCM_6, ROCM_7 = f"torch==2.8.0 {_PYTORCH}/rocm6.4", f"torch==2.13.0 {_PYTORCH}/rocm7.2"
CUDA_12, CUDA_13, CPU = f"torch==2.13.0 {_PYTORCH}/cu126", "torch==2.13.0", f"torch==2.13.0 {_PYTORCH}/cpu"
BLACKWELL_12, FOR_CPU = f"torch==2.8.0 {_PYTORCH}/cu128", "torch 2.13.0 for the CPU (no card that it has code for)"
RYZEN, MI100, STRIX_HALO, OLD_KERNEL = 100306, 90008, 110501, 0
OPEN = "Open Kernel Module for x86_64"
KINDS = {
    "Ryzen's graphics and two RTX 4090": Kind(
        CUDA_12, "NVIDIA's cards (driver 550.54.14: CUDA 12.6's build)", ("sm_89",) * 2,
        amd=(RYZEN,), nvidia=("NVIDIA GeForce RTX 4090",) * 2, device="0x2684", driver=f"{OPEN}  550.54.14",
    ),
    "Ryzen's graphics and an MI100": Kind(
        ROCM_6, "AMD's cards (gfx908, ROCm 6.4.1)", ("gfx908",), {"own graphics": "export HIP_VISIBLE_DEVICES=1"},
        amd=(RYZEN, MI100), rocm="6.4.1-83",
    ),
    "two MI100": Kind(
        ROCM_6, "torch 2.8.0 for AMD's cards (gfx908, ROCm 6.4.1)", ("gfx908",) * 2,
        amd=(MI100,) * 2, rocm="6.4.1-83\n",
    ),
    "two MI100, ROCm 7": Kind(ROCM_7, "(gfx908, ROCm 7.1.1)", ("gfx908",) * 2, amd=(MI100,) * 2, rocm="7.1.1-38"),
    "two MI100, ROCm 10": Kind(
        ROCM_7, "(gfx908, ROCm 10.0.0)", ("gfx908",) * 2,
        amd=(MI100,) * 2, rocm="10.0.0",
    ),
    "WSL2": Kind(
        CUDA_13, "torch 2.13.0 for NVIDIA's cards from pip's index", ("sm_89",),
        files=("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"),
    ),
    "WSL2 without a driver": Kind(CPU, FOR_CPU, (), files=("dev/dxg",)),
    "Strix Halo": Kind(ROCM_7, "AMD's cards (gfx1151)", ("gfx1151",), amd=(STRIX_HALO,)),
    "Strix Halo and two MI100": Kind(
        ROCM_6, "AMD's cards (gfx908)", ("gfx908",) * 2, {"own graphics": "export HIP_VISIBLE_DEVICES=1,2"},
        amd=(STRIX_HALO, MI100, MI100),
    ),
    "RX 7900 XTX": Kind(ROCM_6, "AMD's cards (gfx1100)", ("gfx1100",), amd=(110000,)),
    "RX 6700 XT": Kind(
        "torch[device-gfx1031]==2.12.0 --index-url https://repo.amd.com/rocm/whl-multi-arch/",
        "torch 2.12.0 for AMD's cards (gfx1031) from https://repo.amd.com", ("gfx1031",), amd=(100301,),
    ),
    "DGX H100": Kind(
        CUDA_12, "driver 570.86.15: CUDA 12.6", ("sm_90",) * 8,
        nvidia=("NVIDIA H100 80GB HBM3",) * 8, device="0x2330", driver="x86_64 Kernel Module  570.86.15",
    ),
    "MI300X x8": Kind(ROCM_6, "AMD's cards (gfx942, ROCm 6.4.3)", ("gfx942",) * 8, amd=(90402,) * 8, rocm="6.4.3-128"),
    "MI355X x8": Kind(ROCM_7, "AMD's cards (gfx950)", ("gfx950",) * 8, amd=(90500,) * 8),
    "MI250X node": Kind(ROCM_7, "AMD's cards (gfx90a, ROCm 7.1.1)", ("gfx90a",) * 8, amd=(90010,) * 8, rocm="7.1.1-38"),
    "login node with ROCm": Kind(ROCM_6, "AMD's cards (ROCm 6.4.1)", (), rocm="6.4.1-83"),
    "laptop": Kind(CPU, FOR_CPU, ()),
    "Ryzen laptop": Kind(CPU, FOR_CPU, (), amd=(90012,)),
    "container without rights": Kind(
        ROCM_6, "AMD's cards (gfx908)", ("gfx908",) * 2, {"device files": "/dev/kfd: no permission; group render"},
        amd=(MI100,) * 2, closed=("dev/kfd",),
    ),
    "two V100": Kind(
        CUDA_12, "NVIDIA's cards (older than Turing, driver 580.95.05: CUDA 12.6's build)", ("sm_70",) * 2,
        nvidia=("Tesla V100-PCIE-32GB",) * 2, device="0x1db6", driver="x86_64 Kernel Module  580.95.05",
    ),
    "a V100, no driver to be seen": Kind(
        CUDA_12, "older than Turing, driver unknown: CUDA 12.6's build", ("sm_70",),
        nvidia=("Tesla V100-PCIE-32GB",), device="0x1db6",
    ),
    "two RTX 5090, old driver": Kind(
        BLACKWELL_12, "torch 2.8.0 for NVIDIA's cards (driver 575.64: CUDA 12.8's build)", ("sm_120",) * 2,
        nvidia=("NVIDIA GeForce RTX 5090",) * 2, device="0x2b85", driver=f"{OPEN}  575.64",
    ),
    "A100, very old driver": Kind(
        CUDA_12, "driver 470.57.02: CUDA 12.6's build, which needs driver 525", ("sm_80",),
        nvidia=("NVIDIA A100-SXM4-40GB",), device="0x20b0", driver="x86_64 Kernel Module  470.57.02",
    ),
    "an MI100 and two RTX 3090": Kind(
        CUDA_13, "NVIDIA's cards", ("sm_86",) * 2,
        amd=(MI100,), nvidia=("NVIDIA GeForce RTX 3090",) * 2, device="0x2204",
    ),
    "RX 580": Kind(
        CPU, "the CPU (no build has code for gfx803)", ("gfx803",), {"torch": "hide it by HIP_VISIBLE_DEVICES"},
        amd=(80003,),
    ),
    "old kernel": Kind(ROCM_6, "2.8.0 for AMD's cards from", ("",), amd=(OLD_KERNEL,)),
}  # fmt: skip
