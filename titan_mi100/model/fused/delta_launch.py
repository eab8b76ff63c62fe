"""Launches the kernels of the delta rule and of its gates, from autograd functions and from its two operators."""

from collections import namedtuple
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_mi100.device import accelerator
from titan_mi100.device.compiler import architecture
from titan_mi100.model.fused import delta_kernels as kernels
from titan_mi100.model.fused.elementwise_launch import sum_of_parts
from titan_mi100.model.fused.running import launch

WIDTH = 16  # rows or columns that programs without a loop over chunks have at once
PROGRAMS = 64  # that sum parts of the gradients of gates. Never by the card: it decides bits


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


class _Sizes(NamedTuple):
    chunks: int  # N
    rows: int  # B
    seq: int
    heads: int  # Hk
    group: int  # G
    tokens: int  # C
    key: int  # dk
    value: int  # dv

    @classmethod
    def of(cls, k: Tensor, v: Tensor, tokens: int) -> "_Sizes":
        """Args: k, v: (batch, seq, heads, size)."""
        rows, seq, heads, key = k.shape
        return cls(triton.cdiv(seq, tokens), rows, seq, heads, v.shape[2] // heads, tokens, key, v.shape[3])

    def empty(self, like: Tensor, *sizes: int) -> Tensor:
        """A tensor (N, B, Hk, ...) in fp32."""
        return like.new_empty(self.chunks, self.rows, self.heads, *sizes, dtype=torch.float32)

    def _launch(self, kernel: Any, programs: tuple[int, ...], tensors: Sequence[Tensor], *numbers: int) -> None:
        (rows, options), width = tile_of(tensors[0]), WIDTH
        # RDNA multiplies fp32 without matrix instructions: more threads, fewer registers each
        if numbers and rows == 8:
            options = {**options, "num_warps": 16}
        elif numbers:
            width = self.tokens // 2
        launch(kernel, programs, *tensors, *numbers, self.seq, self.rows, self.heads, GROUP=self.group,
               TOKENS=self.tokens, KEY=self.key, VALUE=self.value, ROWS=rows, WIDTH=width, **options)  # fmt: skip

    def by_key(self, kernel: Any, *tensors: Tensor, parts: int = 1) -> None:
        """Launch on each chunk of a key head, and each part."""
        self._launch(kernel, (self.chunks * self.rows * self.heads, parts), tensors)

    def by_value(self, kernel: Any, *tensors: Tensor, parts: int = 1) -> None:
        """The same of value heads."""
        self._launch(kernel, (self.chunks * self.rows * self.heads * self.group, parts), tensors)

    def through(self, kernel: Any, *tensors: Tensor) -> None:
        """Launch on value heads and parts of their states' rows, which go through all chunks."""
        programs = self.rows * self.heads * self.group, self.value // tile_of(tensors[0])[0]
        self._launch(kernel, programs, tensors, self.chunks)


_Chunks = namedtuple("_Chunks", "q_factor k_factor beta entry last high low products inverse")  # of chunks_kernel


def _chunks(sizes: _Sizes, ids: Tensor, inputs: Sequence[Tensor]) -> _Chunks:
    (q, k, _, g, beta), (tokens, empty) = inputs, (sizes.tokens, sizes.empty)
    factors, gates = ([empty(k, n, tokens) for _ in range(count)] for n, count in ((1, 2), (sizes.group, 5)))
    x = _Chunks._make((*factors, *gates, empty(k, tokens, tokens), empty(k, sizes.group, tokens, tokens)))
    sizes.by_key(kernels.chunks_kernel, q, k, g, beta, ids, *x)
    return x


class DeltaRule(torch.autograd.Function):
    """The delta rule of whole rows: C, ids, state, q, k, v, g and beta, see delta_rule.delta_rule.

    Saves its arguments and the state at each chunk, (N, B, Hk, G, dv, dk).
    """

    @staticmethod
    def forward(ctx: Any, tokens: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        ids, state, q, k, v, g, beta = inputs = tuple(x.contiguous() for x in inputs)
        sizes = ctx.sizes = _Sizes.of(k, v, tokens)
        x = _chunks(sizes, ids, inputs[2:])
        states, changes = (sizes.empty(v, sizes.group, sizes.value, n) for n in (sizes.key, tokens))
        behind, outputs = state.new_empty(state.shape), v.new_empty(v.shape)
        sizes.through(kernels.states_kernel, state, k, x.k_factor, x.beta, x.entry, x.last, x.inverse, v,
                      states, behind, changes)  # fmt: skip
        sizes.by_value(kernels.outputs_kernel, states, q, x.q_factor, x.entry, x.high, x.low, ids, x.products,
                       changes, outputs, parts=sizes.value // WIDTH)  # fmt: skip
        ctx.save_for_backward(ids, q, k, v, g, beta, states)
        return outputs, behind

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_state: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ids, q, k, v, g, beta, states = ctx.saved_tensors
        sizes, grad, grad_state = ctx.sizes, grad.contiguous(), grad_state.contiguous()
        x = _chunks(sizes, ids, (q, k, v, g, beta))
        group, tokens, empty, parts = sizes.group, sizes.tokens, sizes.empty, sizes.value // WIDTH
        read, changes, inside, scaled = (empty(v, group, sizes.value, tokens) for _ in range(4))
        asked = v.new_empty(parts, *x.beta.shape, dtype=torch.float32)
        sizes.by_value(kernels.read_kernel, states, q, k, v, x.q_factor, x.k_factor, x.beta, x.entry, x.high, x.low,
                       ids, x.inverse, x.products, grad, read, changes, inside, asked, parts=parts)  # fmt: skip
        behind, first = v.new_empty(states.shape, dtype=torch.float32), grad_state.new_empty(grad_state.shape)
        lasts = v.new_empty(sizes.value // tile_of(v)[0], *x.beta.shape, dtype=torch.float32)
        sizes.through(kernels.states_gradient_kernel, grad_state, k, q, x.k_factor, x.q_factor, x.beta, x.entry,
                      x.entry, x.last, x.inverse, grad, inside, changes, behind, first, scaled, lasts)  # fmt: skip
        grads = [part.new_empty(part.shape) for part in (q, k, v, g, beta)]
        sums, grad_products = lasts.new_empty(4, *x.beta.shape), empty(v, group, tokens, tokens)
        sizes.by_value(kernels.pairs_gradient_kernel, v, x.beta, x.entry, x.last, x.high, x.low, ids, x.products, grad,
                       read, changes, scaled, asked, lasts, grads[2], grads[4], sums, grad_products)  # fmt: skip
        kept = lasts.new_empty(sizes.key // WIDTH, *x.beta.shape[:-1])
        sizes.by_key(kernels.keys_gradient_kernel, states, behind, q, k, x.q_factor, x.k_factor, x.beta, x.entry,
                     x.last, grad, changes, scaled, sums, grad_products, *grads[:2], kept,
                     parts=len(kept))  # fmt: skip
        sizes.by_value(kernels.decays_gradient_kernel, sums, kept, x.entry, ids, grads[3])
        return None, None, first, *grads


# The two loops as operators have keys that are normalised and values, of chunks: see delta_rule.forward_states.


def forward_states(state: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    k, beta, enters, last, inverse, v = (part.contiguous() for part in parts)
    states, changes = state.new_empty(len(v) + 1, *state.shape), v.new_empty(v.shape)
    keys, rows = _rows(k), _rows(v.mT.flatten(2, 3))
    sizes = _Sizes.of(keys, rows, k.shape[-2])
    sizes.through(kernels.states_kernel, state.contiguous(), keys, k.new_ones(k.shape[:-1]), beta, enters, last,
                  inverse, rows, states, states[-1], changes)  # fmt: skip
    return states, changes


def backward_states(grad_state: Tensor, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    k, beta, enters, last, inverse, q, entering, inside, changes = (part.contiguous() for part in parts)
    states, scaled = grad_state.new_empty(len(k) + 1, *grad_state.shape), inside.new_empty(inside.shape)
    keys, grad, ones = _rows(k), _rows(entering.mT.flatten(2, 3)), torch.ones_like(enters)
    lasts, factor = last.new_empty(grad_state.shape[-2] // tile_of(k)[0], *last.shape), k.new_ones(k.shape[:-1])
    _Sizes.of(keys, grad, k.shape[-2]).through(
        kernels.states_gradient_kernel, grad_state.contiguous(), keys, _rows(q), factor, factor, beta, enters, ones,
        last, inverse, grad, inside, changes, states[1:], states, scaled, lasts)  # fmt: skip
    return states, scaled, lasts.sum(0)


def _rows(x: Tensor) -> Tensor:
    """(N, B, heads, C, size) -> (B, N x C, heads, size)."""
    return x.permute(1, 0, 3, 2, 4).flatten(1, 2).contiguous()


class Gates(torch.autograd.Function):
    """The gates g and beta in fp32: a, b, and the decays' rate and bias, see delta_rule.gates."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        a, b, rate, bias = inputs = tuple(x.contiguous() for x in inputs)
        g, beta = (x.new_empty(x.shape, dtype=torch.float32) for x in (a, b))
        ctx.save_for_backward(*inputs, g)
        blocks, tokens, constants = _gates(a)
        if tokens:
            launch(kernels.gates_kernel, (blocks,), a, b, rate, bias, g, beta, tokens, **constants)
        return g, beta

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_g: Tensor, grad_beta: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        a, b, rate, bias, g = ctx.saved_tensors
        grad_a, grad_b = a.new_empty(a.shape), b.new_empty(b.shape)
        blocks, tokens, constants = _gates(a)
        steps = triton.cdiv(blocks, PROGRAMS)
        programs = triton.cdiv(blocks, steps)
        sums = g.new_empty(2 * programs, g.shape[-1])
        launch(kernels.gates_gradient_kernel, (programs,), grad_g.contiguous(), grad_beta.contiguous(), a, b, rate,
               bias, g, grad_a, grad_b, sums, tokens, steps, **constants)  # fmt: skip
        return grad_a, grad_b, *sum_of_parts(sums, (programs, programs), (rate, bias))


def _gates(a: Tensor) -> tuple[int, int, dict[str, int]]:
    """Blocks of tokens, tokens, and constants of both kernels."""
    heads = a.shape[-1]
    tokens, block = a.numel() // heads, triton.next_power_of_2(heads)
    rows = max(1, 1024 // block)
    return triton.cdiv(tokens, rows), tokens, {"HEADS": heads, "BLOCK": block, "ROWS": rows, "num_warps": 4}
