"""Which builds of torch have code for AMD's cards, and how to install them. docs/DOCTOR.md has the sources."""

from collections.abc import Collection

PYTORCH_WHEELS = "https://download.pytorch.org/whl"
AMD_WHEELS = "https://repo.amd.com/rocm/whl-multi-arch/"
_ROCM_6 = {
    "gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201",
}  # fmt: skip
_ROCM_7 = _ROCM_6 | {"gfx950", "gfx1103", "gfx1150", "gfx1151"}
# PyTorch's builds and their architectures, by which scripts/setup_env.sh chooses, too. AMD's have an extra for each.
PYTORCH_ARCHS = {"torch==2.8.0": ("rocm6.4", _ROCM_6), "torch==2.13.0": ("rocm7.2", _ROCM_7)}
AMD_ARCHS = _ROCM_7 | {"gfx1010", "gfx1011", "gfx1012", "gfx1031", "gfx1032", "gfx1034", "gfx1152", "gfx1153"}


def rocm_remedy(archs: Collection[str | None]) -> str:
    """The commands that install a torch for cards of these architectures, one alternative per line."""
    builds = [(torch, build) for torch, (build, known) in PYTORCH_ARCHS.items() if known >= set(archs) - {None}]
    places = [f"pip install {torch} --index-url {PYTORCH_WHEELS}/{build}" for torch, build in builds]
    places += [
        f"pip install 'torch[device-{arch}]' --index-url {AMD_WHEELS}" for arch in sorted(AMD_ARCHS & set(archs))
    ]
    return "\n".join(places) or "no build that we know has code for it: hide it by HIP_VISIBLE_DEVICES"
