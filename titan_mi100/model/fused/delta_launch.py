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


def tile_of(x: Tensor) -> tuple[int, dict[str, Any]]:
    return tile(architecture(x.device) if accelerator.is_cuda(x.device) else "")


def _launch(kernel: Any, state: Tensor, k: Tensor, *tensors: Tensor) -> None:
    """Launch on all value heads and all parts of ROWS rows of their states."""
    rows, options = tile_of(state)
    sizes = {"GROUP": state.shape[-3], "TOKENS": k.shape[-2], "KEY": k.shape[-1], "VALUE": state.shape[-2]}
    programs = (state.shape[0] * state.shape[1] * state.shape[2], state.shape[-2] // rows)
    if rows == 8:  # RDNA multiplies fp32 without matrix instructions: more threads, each with fewer registers
        options = {**options, "num_warps": 16}
    launch(kernel, programs, state, k, *tensors, len(k), **sizes, ROWS=rows, **options)


def _rows(x: Tensor) -> Tensor:
    """(batch, seq, heads, size) whose tokens are contiguous."""
    return x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous()


def prepare(q: Tensor, k: Tensor, v: Tensor, tokens: int) -> tuple[Tensor, ...]:
    """q, k, v, qk and kk of delta_rule._Chunks. Args: of `delta_rule`; tokens: C."""
    q, k, v = map(_rows, (q, k, v))
    (batch, seq, heads, key), (of_values, size) = k.shape, v.shape[2:]
    chunks, group = triton.cdiv(seq, tokens), of_values // heads

    def empty(*sizes: int) -> Tensor:
        return torch.empty(chunks, batch, heads, *sizes, dtype=torch.float32, device=k.device)

    q_out, k_out, v_out = empty(tokens, key), empty(tokens, key), empty(group, size, tokens)
    qk, kk = empty(1, tokens, tokens), empty(1, tokens, tokens)
    launch(kernels.prepare_kernel, (chunks * batch, heads), q, k, v, q_out, k_out, v_out, qk, kk, seq, batch,
           *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], key**-0.5, GROUP=group, TOKENS=tokens, KEY=key,
           VALUE=size, WIDTH=WIDTH, **tile_of(k)[1])  # fmt: skip
    return q_out, k_out, v_out, qk, kk


def invert(kk: Tensor, number: Tensor, high: Tensor, low: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The decays L and the inverses of delta_rule._Chunks. Args: number, high, low: see kernels.inverse_kernel."""
    tokens, heads = kk.shape[-1], high.shape[2]
    decay = kk.new_empty(*beta.shape[:-2], tokens, tokens)
    inverse = kk.new_empty(decay.shape)
    launch(kernels.inverse_kernel, (high.numel() // tokens,), kk, number.contiguous(), high, low, beta, decay, inverse,
           heads, GROUP=heads // kk.shape[2], HALF=tokens // 2, **tile_of(kk)[1])  # fmt: skip
    return decay, inverse


def forward_states(state: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    k, beta, enters, last, inverse, v = (part.contiguous() for part in parts)
    states, changes = state.new_empty(len(v) + 1, *state.shape), v.new_empty(v.shape)
    _launch(kernels.states_kernel, state.contiguous(), k, beta, enters, last, inverse, v, states, changes)
    return states, changes


def backward_states(grad_state: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    parts = [part.contiguous() for part in parts]
    k, last, inside = parts[0], parts[3], parts[7]
    states, scaled = grad_state.new_empty(len(k) + 1, *grad_state.shape), inside.new_empty(inside.shape)
    lasts = last.new_empty(grad_state.shape[-2] // tile_of(k)[0], *last.shape)
    _launch(kernels.states_gradient_kernel, grad_state.contiguous(), *parts, states, scaled, lasts)
    return states, scaled, lasts.sum(0)


def gradients(x: Any, states: Tensor, grad: Tensor, grad_state: Tensor) -> tuple[Tensor, ...]:
    """Of the first state and of q, k and v, sums of the logarithms' gradients, that of beta; see delta_rule._gradients.

    Args:
        x: delta_rule._Chunks. states: before each chunk. grad: of the outputs, (batch, seq, Hv, dv).
    """
    grad, last = _rows(grad), x.decay[..., -1:, :].contiguous()
    read, changes, entering, inside, grad_v = (x.v.new_empty(x.v.shape) for _ in range(5))
    grad_qk, grad_kk = (x.decay.new_empty(x.decay.shape) for _ in range(2))
    grad_q, grad_k = (x.k.new_empty(x.k.shape) for _ in range(2))
    grad_beta, asked = x.beta.new_empty(x.beta.shape), x.beta.new_empty(x.v.shape[-2] // WIDTH, *x.beta.shape)
    sums = x.beta.new_empty(2, *x.beta.shape)
    group, size, tokens = x.v.shape[3:]
    sizes = {"GROUP": group, "TOKENS": tokens, "KEY": x.k.shape[-1], "VALUE": size, "ROWS": WIDTH, **tile_of(grad)[1]}
    of_grad = [grad.shape[1], len(grad), x.k.shape[2], grad.stride(0), grad.stride(1)]
    of_values, of_keys = x.v.numel() // (size * tokens), x.k.numel() // (x.k.shape[-1] * tokens)
    launch(kernels.read_kernel, (of_values, size // WIDTH), states, x.k, x.q, x.v, x.beta, x.entry, x.inverse,
           x.decay, x.qk, grad, read, changes, entering, inside, asked, *of_grad, WIDTH=WIDTH, **sizes)  # fmt: skip
    parts = [x.k, x.beta, x.entry, last, x.inverse, x.q, entering, inside, changes]
    grad_states, scaled, grad_last = backward_states(grad_state, parts)
    behind = grad_states[1:]
    launch(kernels.pairs_gradient_kernel, (of_values,), states, behind, x.v, x.beta, x.entry, x.decay, x.qk, x.kk,
           grad, read, changes, scaled, asked.sum(0), grad_last, grad_v, grad_beta, sums, grad_qk, grad_kk,
           *of_grad, **sizes)  # fmt: skip
    launch(kernels.keys_gradient_kernel, (of_keys, x.k.shape[-1] // WIDTH), states, behind, x.k, x.q, x.entry,
           x.decay, entering, changes, grad_v, grad_qk, grad_kk, grad_q, grad_k, WIDTH=WIDTH, **sizes)  # fmt: skip
    return grad_states[0].clone(), grad_q, grad_k, grad_v, sums[0] - sums[1], grad_beta
