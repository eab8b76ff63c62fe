"""Our other kernels and composed operations: values against the same in fp64, and speed beside other implementations.

To add a kernel, add an entry to KERNELS.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from gpu_check.attention import device_and_arch
from titan_mi100.attention.base import Documents
from titan_mi100.attention.trial import difference
from titan_mi100.config.settings import LoRAConfig
from titan_mi100.model import delta_rule, elementwise, nf4
from titan_mi100.model.experts import ExpertLinear, Routes, choose_products
from titan_mi100.model.layers import Linear
from titan_mi100.model.lora import LoRALinear
from titan_mi100.model.loss import HeadMemory, head_loss
from titan_mi100.workshop.measure.products import samples

Sizes = Sequence[int]
_SLACK = 4.0  # the error may be this many times that of the reference in the same dtype, as in attention's trial


class Kernel(NamedTuple):
    """A kernel, or an operation that is composed of several.

    Attributes:
        draw: (generator, *sizes) -> its inputs on the CPU; floating ones in fp32.
        ours: of the inputs.
        reference: the same in plain operations, which is computed in fp64.
        sizes: to compare values with; speed: to time; tiny: for a CPU.
        others: name -> other implementations to time.
        has_gradient: backward is compared and timed, too.
    """

    draw: Callable[..., tuple[Tensor, ...]]
    ours: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    sizes: Sizes
    speed: Sizes
    tiny: Sizes
    dtypes: Sequence[str] = ("bfloat16", "float32")
    others: Mapping[str, Callable[..., Tensor]] = {}
    has_gradient: bool = True


def _normal(by: torch.Generator, *size: int, scale: float = 1.0) -> Tensor:
    return torch.randn(size, generator=by) * scale


# Delta rule. Sizes: tokens, key heads, value heads, size of a key and of a value.
def _draw_rule(by: torch.Generator, tokens: int, k_heads: int, v_heads: int, size: int) -> tuple[Tensor, ...]:
    q, k = _normal(by, 1, tokens, k_heads, size), _normal(by, 1, tokens, k_heads, size)
    v, strength = _normal(by, 1, tokens, v_heads, size), torch.rand(1, tokens, v_heads, generator=by)
    decay = -torch.rand(1, tokens, v_heads, generator=by)
    return q, k, v, decay, strength, _ids(tokens)


def _ids(tokens: int) -> Tensor:
    lengths = tokens // 3, tokens - tokens // 3
    return delta_rule.document_ids(Documents(1, tokens, lengths), torch.device("cpu"))


def _convolve(x: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    """The convolution of each document by itself. Its length is known: see _ids."""
    first = x.shape[1] // 3
    parts = [part.mT for part in x.split([first, x.shape[1] - first], 1)]
    width = weight.shape[1]
    padded = [F.pad(part, (width - 1, 0)) for part in parts]
    return torch.cat([F.conv1d(part, weight[:, None], groups=len(weight)) for part in padded], 2).mT


# Products of experts. Sizes: rows, experts, inputs, outputs.
def _draw_experts(by: torch.Generator, rows: int, experts: int, inputs: int, outputs: int) -> tuple[Tensor, ...]:
    expert = torch.randint(0, experts, (rows, 1), generator=by)
    return _normal(by, rows, inputs), _normal(by, experts * outputs, inputs, scale=0.02), expert


@cache
def _experts(experts: int, inputs: int, rows: int, dtype: torch.dtype, device: torch.device) -> ExpertLinear:
    """The layer, with torch's grouped product where that passes the trial of a run."""
    layer = ExpertLinear(inputs, rows, experts, False).to(device)
    choose_products(layer, dtype, device)
    return layer


def _grouped(x: Tensor, weight: Tensor, expert: Tensor, by_loop: bool = False) -> Tensor:
    experts = int(expert.max()) + 1
    layer = _experts(experts, x.shape[1], len(weight), x.dtype, x.device)
    before, layer.by_kernel = layer.by_kernel, layer.by_kernel and not by_loop
    try:
        return functional_call(layer, {"weight": weight}, (x, Routes(expert, experts)))
    finally:
        layer.by_kernel = before


def _expert_by_expert(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    """Rows are sorted by expert, as _grouped's are: x is in that order already."""
    counts = expert.flatten().bincount(minlength=int(expert.max()) + 1).tolist()
    matrices = weight.chunk(len(counts))
    return torch.cat([part @ matrix.t() for part, matrix in zip(x.split(counts), matrices, strict=True)])


# NF4. Sizes: outputs, inputs.
def _draw_codes(by: torch.Generator, outputs: int, inputs: int) -> tuple[Tensor, ...]:
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=by, dtype=torch.uint8)
    return codes, torch.rand(outputs, inputs // nf4.BLOCK, generator=by)


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    return nf4.value_pairs(dtype, device)


def _dequantize(codes: Tensor, largest: Tensor) -> Tensor:
    return nf4.dequantize(codes.view(largest.dtype), largest, _pairs(largest.dtype, largest.device))


def _look_up(codes: Tensor, largest: Tensor) -> Tensor:
    values = _pairs(largest.dtype, largest.device)[codes.long()].flatten(1)
    return values * largest.repeat_interleave(nf4.BLOCK, 1)


# Adapters. Sizes: tokens, inputs, outputs, rank.
def _draw_adapter(by: torch.Generator, tokens: int, inputs: int, outputs: int, rank: int) -> tuple[Tensor, ...]:
    matrices = [_normal(by, *size, scale=0.02) for size in ((outputs, inputs), (rank, inputs), (outputs, rank))]
    return _normal(by, tokens, inputs), *matrices


def _adapted(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    with torch.device("meta"):
        layer = LoRALinear(Linear(x.shape[1], len(weight)), LoRAConfig(rank=len(a), alpha=2.0 * len(a)))
    return functional_call(layer, {"weight": weight, "lora_A.weight": a, "lora_B.weight": b}, (x,))


def _adapted_plainly(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ weight.t() + 2.0 * (x @ a.t() @ b.t())


# The head's loss. Sizes: tokens, vocabulary, hidden.
def _draw_head(by: torch.Generator, tokens: int, vocabulary: int, hidden: int) -> tuple[Tensor, ...]:
    labels = torch.randint(0, vocabulary, (1, tokens), generator=by)
    return _normal(by, 1, tokens, hidden), _normal(by, vocabulary, hidden, scale=0.02), labels


def _head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    tokens = torch.arange(labels.numel(), device=labels.device)
    return head_loss(hidden, weight, labels, tokens, memory=HeadMemory.of(hidden.device))


def _cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(elementwise.at_least_fp32(hidden[0] @ weight.t()), labels[0], reduction="sum")[None]


KERNELS: Mapping[str, Kernel] = {
    "delta rule": Kernel(
        _draw_rule, lambda *inputs: delta_rule.delta_rule(*inputs)[0], lambda *inputs: delta_rule.recurrence(*inputs)[0],
        (300, 4, 8, 128), (8192, 16, 16, 128), (96, 2, 4, 32),
    ),
    "convolution": Kernel(
        lambda by, tokens, channels: (_normal(by, 1, tokens, channels), _normal(by, channels, 4), _ids(tokens)),
        lambda x, weight, ids: delta_rule.causal_convolution(x, weight, ids)[0], _convolve,
        (300, 256), (8192, 6144), (96, 32), others={"conv1d": _convolve},
    ),
    "grouped products": Kernel(
        lambda *sizes: (lambda x, w, e: (x, w, e.sort(0).values))(*_draw_experts(*sizes)), _grouped, _expert_by_expert,
        (512, 16, 256, 128), (32768, 128, 2048, 768), (64, 4, 32, 16), others={"a loop": partial(_grouped, by_loop=True)},
    ),
    "NF4": Kernel(
        _draw_codes, _dequantize, _look_up, (512, 1024), (12288, 4096), (64, 128), dtypes=("bfloat16", "float16"),
        has_gradient=False,
    ),
    "LoRA": Kernel(
        _draw_adapter, _adapted, _adapted_plainly, (512, 256, 512, 16), (4096, 4096, 12288, 16), (64, 32, 96, 4),
        others={"without adapter": lambda x, weight, a, b: F.linear(x, weight) + 0 * (a.sum() + b.sum())},
    ),
    "head's loss": Kernel(
        _draw_head, _head, _cross_entropy, (256, 20000, 256), (5325, 151936, 1024), (48, 999, 32),
        others={"torch's cross_entropy": _cross_entropy},
    ),
    "SwiGLU": Kernel(
        lambda by, *size: (_normal(by, *size), _normal(by, *size)), elementwise.swiglu,
        lambda gate, up: gate * gate.sigmoid() * up, (512, 1024), (8192, 3072), (64, 96),
    ),
    "norm": Kernel(
        lambda by, *size: (_normal(by, *size), _normal(by, size[-1])), partial(elementwise.rms_norm, eps=1e-6),
        lambda x, gain: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain,
        (512, 1024), (8192, 1024), (64, 96), dtypes=("float32",),
    ),
}  # fmt: skip


def tasks(what: str, tiny: bool) -> dict[str, Any]:
    """A task for each kernel and, for values, dtype."""
    listed = [
        {"name": f"{what}/{name}/{dtype}", "target": f"gpu_check.kernels:{what}",
         "arguments": {"kernel": name, "dtype": dtype, "tiny": tiny}}
        for name, kernel in KERNELS.items()
        for dtype in (kernel.dtypes if what == "values" else kernel.dtypes[:1])
    ]  # fmt: skip
    return {"tasks": listed, "problem": "", "said": f"{len(KERNELS)} kernels"}


def values(kernel: str, dtype: str, tiny: bool) -> dict[str, Any]:
    """Results and gradients against the reference in fp64. Equal calls must give equal bits."""
    checked, device = KERNELS[kernel], device_and_arch()[0]
    inputs = checked.draw(torch.Generator().manual_seed(0), *(checked.tiny if tiny else checked.sizes))
    # what our kernel reads, in its dtype: the reference computes with the same numbers
    inputs = tuple(_cast(x.to(device), getattr(torch, dtype)) for x in inputs)
    ours, again = (_results(checked.ours, inputs, checked) for _ in range(2))
    usual = _results(checked.reference, inputs, checked)
    exact = _results(checked.reference, tuple(_cast(x, torch.float64) for x in inputs), checked)
    errors, theirs = ([*map(difference, computed, exact)] for computed in (ours, usual))
    eps = torch.finfo(getattr(torch, dtype)).eps
    problems = [
        f"result {number} is wrong by {error:.1e} of its largest element (at most {bar:.1e})"
        for number, (error, other) in enumerate(zip(errors, theirs, strict=True))
        if not error <= (bar := _SLACK * max(other, eps))
    ]
    if not all(map(torch.equal, ours, again)):
        problems.append("equal calls give other bits")
    said = f"errors of output and gradients {' '.join(f'{error:.1e}' for error in errors)}"
    said += f" (plain operations: {' '.join(f'{error:.1e}' for error in theirs)})"
    return {"errors": errors, "plain": theirs, "problem": "; ".join(problems), "said": said}


def speed(kernel: str, dtype: str, tiny: bool) -> dict[str, Any]:
    """Milliseconds of forward, and of forward and backward, of ours and of others."""
    timed, device = KERNELS[kernel], device_and_arch()[0]
    inputs = timed.draw(torch.Generator().manual_seed(0), *(timed.tiny if tiny else timed.speed))
    inputs = tuple(_cast(x.to(device), getattr(torch, dtype)) for x in inputs)
    times = {}
    for name, function in {"ours": timed.ours, **timed.others}.items():
        leaves = _leaves(inputs, timed)
        calls = [lambda function=function, leaves=leaves: function(*leaves)]
        if timed.has_gradient:
            calls.append(lambda function=function: _results(function, inputs, timed))
        times[name] = [1000 * median(samples(call, device)) for call in calls]
    each = ", ".join(f"{name} {' / '.join(f'{ms:.2f}' for ms in both)} ms" for name, both in times.items())
    words = "forward / with backward" if timed.has_gradient else "forward"
    return {"times": times, "problem": "", "said": f"{words}: {each}"}


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _leaves(inputs: Sequence[Tensor], kernel: Kernel) -> list[Tensor]:
    return [x.detach().requires_grad_(kernel.has_gradient and x.is_floating_point()) for x in inputs]


def _results(function: Callable[..., Tensor], inputs: Sequence[Tensor], kernel: Kernel) -> list[Tensor]:
    """The output, and the gradients of floating inputs."""
    leaves = _leaves(inputs, kernel)
    output = function(*leaves)
    if not kernel.has_gradient:
        return [output]
    weights = torch.linspace(-1, 1, output.numel(), device=output.device, dtype=output.dtype).view(output.shape)
    weights = weights if output.numel() > 1 else torch.ones_like(output)
    differentiable = [x for x in leaves if x.requires_grad]
    return [output.detach(), *torch.autograd.grad(output, differentiable, weights)]
