"""The attention kernels by name, in the order in which they are tried. To add one: its file in attention/, a line here.

Imports no torch.
"""

from typing import NamedTuple


class Kernel(NamedTuple):
    source: str  # module in attention/ and class
    packages: tuple[str, ...] = ()  # distributions whose version decides what it computes


KERNELS = {
    "triton": Kernel("triton_backend:Triton", packages=("triton", "pytorch-triton-rocm", "triton-rocm")),
    "varlen": Kernel("external_backends:TorchVarlen"),
    "flash_attn": Kernel("external_backends:FlashAttention", packages=("flash_attn",)),
    "sdpa": Kernel("torch_backends:Sdpa"),
    "chunked": Kernel("torch_backends:Chunked"),
    "eager": Kernel("torch_backends:Eager"),
}
OWN, EXPLICIT, REFERENCE = "triton", "chunked", "eager"  # our kernels; needs no kernel; S x S scores in full
AUTO = "auto"
# The fastest kernel by architecture ("gfx908", "sm90", "cpu"), measured by scripts/bench/attention.py of 93afab2;
# docs/PERFORMANCE.md has the figures. On other architectures the candidates are timed before the run.
FASTEST = {"cpu": "sdpa"}
