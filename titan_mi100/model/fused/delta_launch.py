"""Launches the kernels of the delta rule. The two loops: see delta_rule.forward_states and backward_states."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from titan_mi100.device import accelerator
from titan_mi100.device.compiler import architecture
from titan_mi100.model.fused import delta_kernels as kernels
from titan_mi100.model.fused.running import launch

WIDTH = 16  # columns that prepare_kernel reads at once


def takes(value: int, key: int, tokens: int) -> bool:
    """Whether the kernels have these sizes of a head's values and keys, and of a chunk."""
    are_powers = all(size & (size - 1) == 0 for size in (value, key, tokens))
    return are_powers and 16 <= value <= 128 and 32 <= key <= 128 and 32 <= tokens <= 64


def tile(arch: str) -> tuple[int, dict[str, Any]]:
    """Rows of a state that a program has, and the options of all launches: these spill no registers.

    NVIDIA's cards compute a product of fp32 by three of tf32, if the trial finds that exact enough there.

    Args:
        arch: of the device; "": none, for Triton's interpreter.
    """
    if arch.startswith("sm"):
        return 16, {"PRECISION": "tf32x3", "num_warps": 8, "num_stages": 1}
    if arch.startswith("gfx1"):
        return 8, {"PRECISION": "ieee", "num_warps": 8, "num_stages": 1}
    options = {"matrix_instr_nonkdim": 16} if arch else {}  # as attention's kernels
    return 16, {"PRECISION": "ieee", "num_warps": 4, "num_stages": 1, **options}


def _tile(x: Tensor) -> tuple[int, dict[str, Any]]:
    return tile(architecture(x.device) if accelerator.is_cuda(x.device) else "")


def _launch(kernel: Any, state: Tensor, k: Tensor, *tensors: Tensor) -> None:
    """Launch on all value heads and all parts of ROWS rows of their states."""
    rows, options = _tile(state)
    sizes = {"GROUP": state.shape[-3], "TOKENS": k.shape[-2], "KEY": k.shape[-1], "VALUE": state.shape[-2]}
    programs = (state.shape[0] * state.shape[1] * state.shape[2], state.shape[-2] // rows)
    options = {**options, "num_warps": 16} if rows == 8 else options
    launch(kernel, programs, state, k, *tensors, len(k), **sizes, ROWS=rows, **options)


def _rows(x: Tensor) -> Tensor:
    """(batch, seq, heads, size) whose tokens are contiguous."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()


def prepare(q: Tensor, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, ...]:
    """q, k, v, qk and kk of delta_rule._Chunks. Args: of `delta_rule`; tokens: C."""
    q, k, v = map(_rows, (q, k, v))
    batch, seq, heads, key = k.shape
    shape, group, value = (triton.cdiv(seq, tokens), batch, heads), v.shape[2] // heads, v.shape[3]
    q_out, k_out = (torch.empty(*shape, tokens, key, device=k.device) for _ in range(2))
    v_out = torch.empty(*shape, group, value, tokens, device=k.device)
    qk, kk = (torch.empty(*shape, 1, tokens, tokens, device=k.device) for _ in range(2))
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    launch(kernels.prepare_kernel, (shape[0] * batch, heads), q, k, v, q_out, k_out, v_out, qk, kk, seq, batch,
           *strides, key**-0.5, GROUP=group, TOKENS=tokens, KEY=key, VALUE=value, WIDTH=WIDTH,
           **_tile(k)[1])  # fmt: skip
    return q_out, k_out, v_out, qk, kk


def invert(kk: Tensor, number: Tensor, high: Tensor, low: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The decays L and the inverses of delta_rule._Chunks. Args: number, high, low: see kernels.inverse_kernel."""
    tokens, heads = kk.shape[-1], high.shape[2]
    decay = kk.new_empty(*beta.shape[:-2], tokens, tokens)
    inverse = kk.new_empty(decay.shape)
    launch(kernels.inverse_kernel, (high.numel() // tokens,), kk, number.contiguous(), high, low, beta, decay, inverse,
           heads, GROUP=heads // kk.shape[2], HALF=tokens // 2, **_tile(kk)[1])  # fmt: skip
    return decay, inverse


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
