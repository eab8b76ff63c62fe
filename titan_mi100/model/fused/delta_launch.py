"""Launches the kernels of the delta rule's loops over chunks. Args: see delta_rule.forward_states, backward_states."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from titan_mi100.device import accelerator
from titan_mi100.device.compiler import architecture
from titan_mi100.model.fused import delta_kernels as kernels
from titan_mi100.model.fused.running import launch


def takes(state: Tensor, keys: Tensor) -> bool:
    """Whether the kernels have these sizes: powers of two, keys of 32 to 128. Args: state, keys: of a chunk."""
    sizes = (*state.shape[-2:], *keys.shape[-2:])
    return all(size & (size - 1) == 0 and 16 <= size <= 128 for size in sizes) and sizes[1] >= 32 and sizes[2] <= 64


def _launch(kernel: Any, state: Tensor, k: Tensor, *tensors: Tensor) -> None:
    """Launch on all value heads and all parts of ROWS rows of their states."""
    rows, warps, precision = _tile(state)
    constants: dict[str, Any] = {"GROUP": state.shape[-3], "TOKENS": k.shape[-2]}
    constants |= {"KEY": k.shape[-1], "VALUE": state.shape[-2]}
    constants |= {"ROWS": rows, "PRECISION": precision, "num_warps": warps, "num_stages": 1}  # more need more memory
    programs = (state.shape[0] * state.shape[1] * state.shape[2], state.shape[-2] // rows)
    launch(kernel, programs, state, k, *tensors, len(k), **constants)


def tile(arch: str) -> tuple[int, int, str]:
    """Rows of a program, its warps, and how products of fp32 are computed: these spill no registers.

    NVIDIA's cards compute a product by three of tf32, if the trial finds that exact enough there.

    Args:
        arch: of the device; "": none, for Triton's interpreter.
    """
    if arch.startswith("sm"):
        return 16, 8, "tf32x3"
    return (8, 16, "ieee") if arch.startswith("gfx1") else (16, 4, "ieee")


def _tile(x: Tensor) -> tuple[int, int, str]:
    return tile(architecture(x.device) if accelerator.is_cuda(x.device) else "")


def forward_states(state: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    k, beta, entry, last, inverse, v = (part.contiguous() for part in parts)
    states, changes = state.new_empty(len(v) + 1, *state.shape), v.new_empty(v.shape)
    _launch(kernels.states_kernel, state.contiguous(), k, beta, entry, last, inverse, v, states, changes)
    return states, changes


def backward_states(grad_state: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    parts = [part.contiguous() for part in parts]
    k, last, inside = parts[0], parts[3], parts[7]
    states, scaled = grad_state.new_empty(len(k) + 1, *grad_state.shape), inside.new_empty(inside.shape)
    lasts = last.new_empty(grad_state.shape[-2] // _tile(k)[0], *last.shape)
    _launch(kernels.states_gradient_kernel, grad_state.contiguous(), *parts, states, scaled, lasts)
    return states, scaled, lasts.sum(0)
