"""The work between products, one function per kind: norm, rotation, SwiGLU; the norm of hidden states: layers.RMSNorm.

Where the fused kernels run (fused/elementwise_launch.py), they replace a function whole. What plain operations save for
backward is listed in shapes/ (`saved`); the kernels save only their inputs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_mi100.model.fused.running import difference, runs_unwatched
from titan_mi100.model.layers import RMSNorm, local_weight
from titan_mi100.model.pieces import in_pieces
from titan_mi100.shapes.rope import LINEAR, YARN, RopeScaling


def at_least_fp32(x: Tensor) -> Tensor:
    """Cast to fp32. fp64 stays fp64, so that tests that run the model in fp64 keep their precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """F.rms_norm over the last dimension, of x and gain in fp32 or fp64; on a CPU in a third of its time."""
    return _CPUNorm.apply(x, gain, eps) if x.device.type == "cpu" else F.rms_norm(x, gain.shape, gain, eps)


def gated_norm(x: Tensor, gate: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of x times silu(gate), computed in fp32."""
    if runs_unwatched("elementwise", x):
        from titan_mi100.model.fused.elementwise_launch import Norm

        return Norm.apply(x, gate, gain, eps, {"KIND": "gate", "CENTRED": False, "ROUNDED": False})
    wide = at_least_fp32(x)
    return (rms_norm(wide, gain.to(wide.dtype), eps) * F.silu(gate.to(wide.dtype))).to(x.dtype)


class _CPUNorm(torch.autograd.Function):
    """PyTorch has no kernel for a CPU: it passes over x about ten times, and over its gradient twice as often."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        size = x.shape[-1]
        factor = (torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_() / size + eps).rsqrt_()
        ctx.save_for_backward(x, gain, factor)
        return (x * factor).mul_(gain)[:]  # a view, as in delta_rule.py

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, gain, factor = ctx.saved_tensors
        both = grad * x
        along = (both @ gain)[..., None] * factor.pow(3) / -x.shape[-1]
        grad_gain = factor.flatten() @ both.flatten(0, -2)
        return (grad * gain).mul_(factor).addcmul_(x, along), grad_gain, None


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles (RoPE; Su et al., 2021).

    Args:
        positions: (batch, seq), restarting at 0 in each document.

    Returns:
        Two tensors (batch, seq, 1, head_dim) in fp32. The first half of sin is negated, see `rotate`.

    They are computed in every forward instead of being kept in a buffer: there is nothing to initialise, save or cast.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    turns = 1.0 / theta**exponents  # of a pair of dimensions, in radians per position
    if scaling is not None:
        turns = _scaled(turns, theta**exponents, theta, scaling)
    angles = positions[..., None].float() * turns  # (batch, seq, head_dim / 2)
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None:
        cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
    return torch.cat((cos, cos), dim=-1)[:, :, None], torch.cat((-sin, sin), dim=-1)[:, :, None]


def _scaled(turns: Tensor, powers: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Angles per position, (head_dim / 2,), after scaling; in transformers' order of operations, so in its bits."""
    if scaling.rope_type != YARN:  # dynamic: as they are, up to the positions that are not refused
        return turns / scaling.factor if scaling.rope_type == LINEAR else turns
    low, high = scaling.ramp(2 * len(turns), theta)
    pairs = torch.arange(len(turns), dtype=torch.float32, device=turns.device)
    kept = 1 - ((pairs - low) / (high - low)).clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + turns * kept


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) by its angle.

    Args:
        x: (batch, seq, heads, head_dim), in fp32 or fp64.
    """
    # (a cos - b sin, b cos + a sin): sin already has the minus sign in its first half
    first, second = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((second, first), dim=-1), sin)


def norm_and_rotate(
    q: Tensor, k: Tensor, norms: tuple[RMSNorm, RMSNorm], cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply a norm to each head of queries and keys, and rotate its first values, as many as the tables have.

    Both run in fp32, so that the result is rounded to 16 bits once and not twice.

    Args:
        q, k: (batch, seq, heads, head_dim), with heads of their own.
    """
    if runs_unwatched("elementwise", q):
        from titan_mi100.model.fused.elementwise_launch import Turn

        gains = (local_weight(norm.weight, norm.weight.dtype) for norm in norms)
        return Turn.apply(q, k, *gains, cos, sin, norms[0].eps, norms[0].is_centred)
    return _normed_and_rotated(q, norms[0], cos, sin), _normed_and_rotated(k, norms[1], cos, sin)


def _normed_and_rotated(x: Tensor, norm: RMSNorm, cos: Tensor, sin: Tensor) -> Tensor:
    weight = norm.operand(torch.promote_types(x.dtype, torch.float32))
    return in_pieces(partial(_piece_rotated, norm), norm.piece_tokens, [x, cos, sin], [weight])


def _piece_rotated(norm: RMSNorm, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor) -> Tensor:
    normed = norm.plain(at_least_fp32(x), weight)
    if (rest := x.shape[-1] - cos.shape[-1]) == 0:
        return rotate(normed, cos, sin).to(x.dtype)
    first, kept = normed.split([cos.shape[-1], rest], dim=-1)
    return torch.cat((rotate(first, cos, sin), kept), dim=-1).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Computes silu(gate) * up (Shazeer, 2020)."""
    if runs_unwatched("elementwise", gate):
        from titan_mi100.model.fused.elementwise_launch import SwiGLU

        return SwiGLU.apply(gate, up)
    return F.silu(gate) * up


def gated(x: Tensor, gate: Tensor) -> Tensor:
    """Computes x * sigmoid(gate)."""
    if runs_unwatched("elementwise", gate):
        from titan_mi100.model.fused.elementwise_launch import SwiGLU

        return SwiGLU.apply(gate, x, False)
    return x * gate.sigmoid()


def trial(device: torch.device, dtype: torch.dtype) -> str:
    """What is wrong with the kernels on this device: they must compute what plain operations do. See running.Trial."""
    draw, norm, eps = torch.Generator().manual_seed(1), RMSNorm(128, 1e-6).to(device), torch.finfo(dtype).eps
    cos, sin = rotary_tables(torch.arange(70, device=device)[None], 64, 1e4)
    cases: dict[str, Callable[..., Any]] = {
        "SwiGLU": swiglu,
        "the norm": lambda x, y: norm(x),
        "the norm of a sum": norm,
        "the gated norm": lambda x, y: gated_norm(x, y, norm.weight, norm.eps),
        "the rotation": lambda x, y: norm_and_rotate(x, y, (norm, norm), cos, sin),
        "the gate": gated,
    }
    x, y = (torch.randn(1, 70, 3, 128, generator=draw).to(device, dtype) for _ in range(2))
    for name, function in cases.items():
        if problem := difference("elementwise", function, (x, y), (dtype, dtype), 8 * eps, [norm.weight]):
            return f"{name} {problem}"
    return ""
