"""What the hardware can do: peak rates by architecture, and how many GPUs there are. Imports no torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Gpu:
    """One device as the system shows it (an MI250X shows two), by its data sheet.

    Attributes:
        tflops: peak dense rates by compute dtype; float32 is true fp32, not tf32.
        memory_gib: memory of the device, in GiB.
        link_gbs: GB/s to its neighbour in a node and direction.
        host_gbs: GB/s to the host's memory and back.
        overlap: share of the computation's time in which it also sends; 0 where the same cores do both.
        per_node: devices of a node.
        node_gbs: its share of what a node sends to others, GB/s and direction.
    """

    name: str
    tflops: Mapping[str, float]
    memory_gib: float
    link_gbs: float
    host_gbs: float = 32
    overlap: float = 1.0
    per_node: int = 8
    node_gbs: float = 12.5


# Keyed by (gcnArchName without its features, or "sm" + compute capability; number of compute units or SMs), because
# device names vary: "AMD Instinct MI100", empty, "Arcturus GL-XL". Source: the vendors' data sheets; a single figure
# per dtype, the matrix-core rate without sparsity. float32 on CDNA is the matrix rate.
# Links, GB/s in one direction. PCIe 4.0 x16: 32, 5.0: 64. Frontier (OLCF's user guide): 8 GCDs a node; between GCDs of
# two cards 50 to 100 over xGMI (within a card 200; a ring is as fast as its slowest link), to the host 36, four
# Slingshot NICs of 25 a node. NVLink, half of the data sheets' sum of both directions: A100 300, H100 450. InfiniBand
# as in the DGX data sheets: A100 eight HDR ports of 25 a node, H100 eight NDR ports of 50; MI300X: eight ports of 50 in
# the vendors' platforms. MI100 and MI210 have no node of their own: 8 cards (ROCm's architecture page of the MI100) and
# one HDR port for two of them are assumed, as for a device of a user who says nothing else.
_DGX_H100 = {"host_gbs": 64, "node_gbs": 50}
GPUS: Mapping[tuple[str, int], Gpu] = {
    ("gfx908", 120): Gpu("MI100", {"float16": 184.6, "bfloat16": 92.3, "float32": 46.1}, 32, 32),
    ("gfx90a", 104): Gpu("MI210 or half an MI250", {"float16": 181.0, "bfloat16": 181.0, "float32": 45.3}, 64, 50),
    ("gfx90a", 110): Gpu("half an MI250X", {"float16": 191.5, "bfloat16": 191.5, "float32": 47.9}, 64, 50, 36),
    ("gfx942", 304): Gpu("MI300X", {"float16": 1307.4, "bfloat16": 1307.4, "float32": 163.4}, 192, 64, **_DGX_H100),
    ("sm80", 108): Gpu("A100", {"float16": 312.0, "bfloat16": 312.0, "float32": 19.5}, 80, 300, node_gbs=25),
    ("sm90", 132): Gpu(
        "H100 SXM or H200", {"float16": 989.4, "bfloat16": 989.4, "float32": 66.9}, 80, 450, **_DGX_H100
    ),
    ("sm90", 114): Gpu("H100 PCIe", {"float16": 756.0, "bfloat16": 756.0, "float32": 51.2}, 80, 64, **_DGX_H100),
}
DEVICES: Mapping[str, Gpu] = {  # what people call them
    "mi100": GPUS["gfx908", 120],
    "mi210": GPUS["gfx90a", 104],
    "mi250x": GPUS["gfx90a", 110],
    "mi300x": GPUS["gfx942", 304],
    "a100": GPUS["sm80", 108],
    "a100-40gb": replace(GPUS["sm80", 108], memory_gib=40),
    "h100": GPUS["sm90", 132],
    "h100-pcie": GPUS["sm90", 114],
}


def find_gpu(arch: str, compute_units: int) -> Gpu | None:
    """The table's entry, or None for hardware that it does not know (then no MFU is printed, not a guessed one)."""
    return GPUS.get((arch.split(":")[0], compute_units))


_INSTRUCTIONS = {  # by which a CPU multiplies in a dtype: the names that Linux gives them, on x86 and Arm
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def dtype_advice(dtype: str, gpu: Gpu | None, is_cpu: bool, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What speaks against computing in a dtype on this hardware; "": nothing that is known."""
    if gpu and dtype == "bfloat16" and (ratio := gpu.tflops["float16"] / gpu.tflops[dtype]) > 1.5:
        return f"float16's peak on {gpu.name} is {ratio:.1f} times {dtype}'s; titan-mi100 certify shows what is reached"
    if is_cpu and dtype in _INSTRUCTIONS:
        known = _cpu_flags(cpuinfo)
        if known and not known & _INSTRUCTIONS[dtype]:
            return (
                f"this CPU has no {dtype} instructions, so it computes many times more slowly than in float32; "
                'set training.mixed_precision_param = "float32"'
            )
    return ""


def compile_advice(dtype: str, is_cpu: bool, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What speaks for torch.compile on this hardware: where it was measured to be faster; "": nothing that is known."""
    if is_cpu and dtype == "bfloat16" and "amx_bf16" in _cpu_flags(cpuinfo):
        return "compile.enable = true was measured to make a step a fifth shorter on a CPU with AMX"
    return ""


def is_amd_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    return cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text(errors="replace")


def _cpu_flags(cpuinfo: Path) -> set[str]:
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    return {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}


# Graphics inside a processor, by KFD's gfx_target_version (100306: gfx1036). PyTorch has builds for the second kind,
# such as Strix Halo's gfx1151, and none for the first, which the desktop Ryzen have.
_NEVER_USED = {90002, 90009, 90012, 100103, 100303, 100305, 100306, 100307}
_USED_ALONE = {110003, 110500, 110501, 110502, 110503}


def count_gpus(root: Path = Path("/"), environ: Mapping[str, str] = os.environ, is_rocm: bool | None = None) -> int:
    """GPUs that a process started here would see, without importing torch: from the kernel's files.

    AMD: KFD topology nodes that have SIMDs, of a processor's own graphics only where there is no card. NVIDIA:
    /dev/nvidia0 and on; in WSL2, which has no such files, one. A `*_VISIBLE_DEVICES` list lowers the number.

    Args:
        is_rocm: of a machine with cards of both, whether AMD's are counted; None: NVIDIA's, as scripts/setup_env.sh
            installs torch for them.
    """
    versions = []
    for node in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        try:
            properties = dict(line.split(maxsplit=1) for line in node.read_text().splitlines() if " " in line)
        except OSError:  # a node of another container's GPU may not be read
            continue
        if int(properties.get("simd_count", 0)) > 0:
            versions.append(int(properties.get("gfx_target_version", 0)))
    inside = sum(version in _USED_ALONE for version in versions)
    amd = sum(version not in _USED_ALONE | _NEVER_USED for version in versions) or inside
    nvidia = sum(path.name[len("nvidia") :].isdigit() for path in (root / "dev").glob("nvidia[0-9]*"))
    if not nvidia and (root / "dev/dxg").exists():
        nvidia = int(any((root / "usr/lib/wsl/lib").glob("libcuda.so*")))
    count = amd if is_rocm or not nvidia else nvidia
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environ:
            count = min(count, len([entry for entry in environ[name].split(",") if entry.strip() not in ("", "-1")]))
    return count


def default_process_count(is_rocm: bool | None = None) -> int:
    """One process per GPU, or two on CPU, so that a trial on a laptop runs the same code as two cards."""
    return count_gpus(is_rocm=is_rocm) or 2
