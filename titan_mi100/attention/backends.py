"""All attention backends by name."""

from collections.abc import Mapping

from titan_mi100.attention.base import Backend
from titan_mi100.attention.library import FlashAttention, Flex, TorchVarlen
from titan_mi100.attention.plain import Chunked, Eager, Sdpa
from titan_mi100.errors import UserError

PLAIN: Mapping[str, type[Backend]] = {kind.name: kind for kind in (Eager, Sdpa, Chunked)}
LIBRARY: Mapping[str, type[Backend]] = {kind.name: kind for kind in (TorchVarlen, FlashAttention, Flex)}
TRITON = "triton"


def make_backend(name: str, why: str, arch: str, launch: str = "") -> Backend:
    """Create the backend with this name.

    Args:
        why: the reason for the choice, for the log.
        arch: "gfx908", "sm90", "cpu"; a key of hardware.GPUS.
        launch: launch settings of the Triton kernels; "": the first candidate of the architecture.

    Raises:
        UserError: a package or kernel that the backend needs is missing.
    """
    if name != TRITON:
        return {**PLAIN, **LIBRARY}[name](why)
    try:
        from titan_mi100.attention import triton_backend  # imported here: triton may not be installed
    except ImportError as error:
        raise UserError(f"Triton cannot be imported ({error})") from None
    if not launch and arch not in triton_backend.CANDIDATES:
        raise UserError(f"the kernels have no launch table for {arch}")
    return triton_backend.Triton(why, launch or str(triton_backend.CANDIDATES[arch].first()))
