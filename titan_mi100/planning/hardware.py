"""Limits of the hardware: which data sheet is a device's, and how many GPUs there are. Imports no torch."""

import os
from collections.abc import Mapping
from pathlib import Path

from titan_mi100.planning.cards import CARDS, Gpu


def find_gpu(arch: str, compute_units: int, memory: float = 0) -> Gpu | None:
    """The data sheet of a device, or None for one that is not known (then no MFU is printed, not a guessed one).

    Args:
        arch: "gfx908:sramecc+:xnack-", "sm90".
        compute_units: as HIP, CUDA or KFD count them. On RDNA HIP counts pairs of compute units, KFD each.
        memory: bytes. It tells cards of one chip apart (a W7900 from a 7900 XTX); 0: the first one is meant.
    """
    arch = arch.split(":")[0]
    counts = (compute_units, 2 * compute_units) if arch.startswith("gfx1") else (compute_units,)
    gpus = [card.gpu for card in CARDS if card.arch == arch and card.units in counts]
    return min(gpus, key=lambda gpu: abs(gpu.memory_gib - memory / 2**30) if memory else 0, default=None)


_INSTRUCTIONS = {  # by which a CPU multiplies in a dtype: the names that Linux gives them, on x86 and Arm
    "bfloat16": {"avx512_bf16", "amx_bf16", "bf16"},
    "float16": {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def dtype_advice(dtype: str, gpu: Gpu | None, is_cpu: bool, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Why this dtype is a bad choice on this hardware; "" if nothing is known against it."""
    if gpu and dtype not in gpu.tflops:
        return f"{gpu.name} has no {dtype} instructions; take float16"
    if gpu and dtype == "bfloat16" and (ratio := gpu.tflops["float16"] / gpu.tflops[dtype]) > 1.5:
        return f"float16's peak on {gpu.name} is {ratio:.1f} times {dtype}'s; scripts/gpu_check shows what is reached"
    if is_cpu and dtype in _INSTRUCTIONS:
        known = _cpu_flags(cpuinfo)
        if known and not known & _INSTRUCTIONS[dtype]:
            return (
                f"this CPU has no {dtype} instructions, so it computes many times more slowly than in float32; "
                'set training.mixed_precision_param = "float32"'
            )
    return ""


def is_amd_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    return cpuinfo.is_file() and "AuthenticAMD" in cpuinfo.read_text(errors="replace")


def _cpu_flags(cpuinfo: Path) -> set[str]:
    lines = cpuinfo.read_text(errors="replace").splitlines() if cpuinfo.is_file() else []
    return {word for line in lines if line.lower().startswith(("flags", "features")) for word in line.split()}


# Graphics inside a processor, by KFD's gfx_target_version (100306: gfx1036). PyTorch has builds for the second kind,
# such as Strix Halo's gfx1151, and none for the first, which the desktop Ryzen have.
NEVER_USED = {90002, 90009, 90012, 100103, 100303, 100305, 100306, 100307}
USED_ALONE = {110003, 110500, 110501, 110502, 110503}


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
    inside = sum(version in USED_ALONE for version in versions)
    amd = sum(version not in USED_ALONE | NEVER_USED for version in versions) or inside
    nvidia = sum(path.name[len("nvidia") :].isdigit() for path in (root / "dev").glob("nvidia[0-9]*"))
    if not nvidia and (root / "dev/dxg").exists():
        nvidia = int(any((root / "usr/lib/wsl/lib").glob("libcuda.so*")))
    count = amd if is_rocm or not nvidia else nvidia
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environ:
            count = min(count, len([card for card in environ[name].split(",") if card.strip() not in ("", "-1")]))
    return count


def default_process_count(is_rocm: bool | None = None) -> int:
    """One process per GPU; one on a CPU, with a thread for each core: two had 0.6 of its tokens per CPU second, and
    twice its memory, by a reading from outside.
    """
    return count_gpus(is_rocm=is_rocm) or 1
