"""Our other kernels, and operations that are composed of several: values against the same in fp64, and times beside
other implementations. To add a kernel, add an entry to KERNELS.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from gpu_check.attention import DEVICE, in_words, launches_of, run_once
from titan_mi100.attention.base import Documents
from titan_mi100.attention.trial import difference
from titan_mi100.config.settings import OptimizerConfig
from titan_mi100.device import accelerator
from titan_mi100.model import delta_rule, nf4
from titan_mi100.model.elementwise import at_least_fp32, gated_norm, norm_and_rotate, rotary_tables, swiglu
from titan_mi100.model.experts import ExpertLinear, Routes, choose_products
from titan_mi100.model.fused.running import only
from titan_mi100.model.layers import RMSNorm
from titan_mi100.model.loss import HeadMemory, head_loss
from titan_mi100.optim.lean import LeanAdamW, choose_kernel
from titan_mi100.workshop.measure.children import Task
from titan_mi100.workshop.measure.products import samples

_FORMATS = (("8bit", "fp32", 0.03), ("bf16", "fp32", 0.01), ("8bit", "bf16_sr", 0), ("8bit", "24bit", 0))
_UPDATE: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)}


class Kernel(NamedTuple):
    """A kernel, or an operation that is composed of several.

    Attributes:
        draw: (generator, *sizes) -> its inputs on the CPU; floating ones in fp32.
        ours: of the inputs.
        reference: the same in plain operations, which is computed in fp64.
        sizes: to compare values with; timed: to time.
        others: name -> other implementations to time.
    """

    draw: Callable[..., tuple[Tensor, ...]]
    ours: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    sizes: Sequence[int]
    timed: Sequence[int]
    dtypes: Sequence[str] = ("bfloat16", "float32")
    others: Mapping[str, Callable[..., Tensor]] = {}  # not changed


def _draw_rule(by: torch.Generator, tokens: int, k_heads: int, v_heads: int, size: int) -> tuple[Tensor, ...]:
    q, k, v = (torch.randn(1, tokens, heads, size, generator=by) for heads in (k_heads, k_heads, v_heads))
    decay, strength = (torch.rand(1, tokens, v_heads, generator=by) for _ in range(2))
    documents = Documents(1, tokens, (tokens // 3, tokens - tokens // 3))
    return q, k, v, -decay, strength, delta_rule.document_ids(documents, torch.device("cpu"))


def _draw_experts(by: torch.Generator, rows: int, experts: int, inputs: int, outputs: int) -> tuple[Tensor, ...]:
    expert = torch.randint(0, experts, (rows, 1), generator=by).sort(0).values
    return torch.randn(rows, inputs, generator=by), torch.randn(experts * outputs, inputs, generator=by), expert


@cache
def _experts(experts: int, columns: int, rows: int, dtype: torch.dtype, by_torch: bool) -> ExpertLinear:
    """The layer, if `by_torch` with torch's grouped product where that passes the trial of a run."""
    layer = ExpertLinear(columns, rows, experts, False).to(DEVICE)
    if by_torch:
        choose_products(layer, dtype, DEVICE)
    return layer


def _grouped(x: Tensor, weight: Tensor, expert: Tensor, by_torch: bool = False) -> Tensor:
    experts = int(expert.max()) + 1
    layer = _experts(experts, x.shape[1], len(weight), x.dtype, by_torch)
    return functional_call(layer, {"weight": weight}, (x, Routes(expert, experts)))


def _expert_by_expert(x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
    counts = expert.flatten().bincount().tolist()
    return torch.cat([rows @ part.t() for rows, part in zip(x.split(counts), weight.chunk(len(counts)), strict=True)])


_pairs = cache(nf4.value_pairs)  # a run keeps the table, too


def _dequantize(codes: Tensor, largest: Tensor) -> Tensor:
    return nf4.dequantize(codes.view(largest.dtype), largest.detach(), _pairs(largest.dtype, DEVICE))


def _look_up(codes: Tensor, largest: Tensor) -> Tensor:
    values = _pairs(largest.dtype, DEVICE)[codes.long()].flatten(1)
    return values * largest.detach().repeat_interleave(nf4.BLOCK, 1)


def _draw_head(by: torch.Generator, tokens: int, vocabulary: int, hidden: int) -> tuple[Tensor, ...]:
    labels = torch.randint(0, vocabulary, (1, tokens), generator=by)
    return torch.randn(1, tokens, hidden, generator=by), 0.02 * torch.randn(vocabulary, hidden, generator=by), labels


def _head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    tokens = torch.arange(labels.numel(), device=DEVICE)
    return head_loss(hidden, weight, labels, tokens, memory=HeadMemory.of(DEVICE))


def _cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(at_least_fp32(hidden[0] @ weight.t()), labels[0], reduction="sum")[None]


def _fused(kind: str, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The call with our fused kernels of a kind, where Triton runs."""

    def run(*inputs: Tensor) -> Tensor:
        with only([kind] if accelerator.is_cuda(DEVICE) else []):
            return call(*inputs)

    return run


def _draw_rows(by: torch.Generator, tokens: int, columns: int) -> tuple[Tensor, ...]:
    return (*torch.randn(2, 1, tokens, columns, generator=by), torch.rand(columns, generator=by))


def _norm_of_sum(x: Tensor, y: Tensor, gain: Tensor) -> Tensor:
    return torch.cat(functional_call(RMSNorm(len(gain), 1e-6), {"weight": gain}, (x, y)))


def _rotated(x: Tensor, y: Tensor, gain: Tensor) -> Tensor:
    q, k = (rows.unflatten(-1, (-1, 128)) for rows in (x, y))
    norm = RMSNorm(128, 1e-6)
    del norm.weight
    norm.weight = gain[:128]  # type: ignore[assignment]
    tables = rotary_tables(torch.arange(x.shape[1], device=DEVICE)[None], 128, 1e6)
    return torch.cat(norm_and_rotate(q, k, (norm, norm), *tables))


KERNELS: Mapping[str, Kernel] = {
    "delta rule": Kernel(  # tokens, key heads, value heads, size of a key and of a value
        _draw_rule, _fused("delta", lambda *x: delta_rule.delta_rule(*x)[0]), lambda *x: delta_rule.recurrence(*x)[0],
        (200, 2, 4, 64), (8192, 16, 16, 128),
    ),
    **{
        name: Kernel(  # rows, experts, inputs, outputs
            _draw_experts, call, _expert_by_expert,
            (512, 16, 256, 128), (32768, 128, 2048, 768), others={"one by one": _expert_by_expert},
        )
        for name, call in (
            ("grouped products", partial(_grouped, by_torch=True)),
            ("our grouped products", _fused("experts", _grouped)),
        )
    },
    "NF4": Kernel(  # outputs, half of the inputs
        lambda by, m, n: (torch.randint(256, (m, n), generator=by).byte(), torch.rand(m, n // 32, generator=by)),
        _fused("nf4", _dequantize), _look_up,
        (512, 512), (12288, 2048), dtypes=("bfloat16", "float16"), others={"plain": _dequantize},
    ),
    **{
        name: Kernel(  # tokens, columns
            _draw_rows, _fused("elementwise", call), call, (70, 1024), (8192, columns), others={"plain": call}
        )
        for name, call, columns in (
            ("SwiGLU", lambda x, y, gain: swiglu(x, y) * gain, 3072), ("norm of a sum", _norm_of_sum, 1024),
            ("gated norm", lambda x, y, gain: gated_norm(x, y, gain, 1e-6), 1024), ("rotation", _rotated, 2048),
        )
    },
    "head's loss": Kernel(  # tokens, vocabulary, hidden
        _draw_head, _fused("head", _head), _cross_entropy, (128, 5000, 256), (5325, 151936, 1024),
        others={"plain": _head, "cross_entropy": _cross_entropy},
    ),
}  # fmt: skip


def tasks(tiny: bool) -> dict[str, Any]:
    """A task for each kernel and dtype. Args: tiny: time small sizes."""
    listed = [
        asdict(Task(f"kernels/{name}/{dtype}", f"{__name__}:measure", {"name": name, "dtype": dtype, "tiny": tiny}))
        for name, kernel in KERNELS.items() for dtype in kernel.dtypes
    ]  # fmt: skip
    return {"tasks": listed, "problem": "", "said": f"{len(KERNELS)} kernels"}


def measure(name: str, dtype: str, tiny: bool) -> dict[str, Any]:
    """Results and gradients against the reference in fp64, whether equal calls give equal bits, and milliseconds of
    forward and backward.
    """
    kernel, least = KERNELS[name], torch.finfo(getattr(torch, dtype)).eps
    inputs = _inputs(kernel, dtype, kernel.sizes)
    computed, again, usual = (_results(call, inputs) for call in (kernel.ours, kernel.ours, kernel.reference))
    exact = _results(kernel.reference, [_cast(x, torch.float64) for x in inputs])
    errors, plain = ([*map(difference, some, exact)] for some in (computed, usual))
    # at most four times that of the reference in the same dtype, as in attention's trial
    problems = [f"an error is {a:.1e}, {b:.1e} with plain operations"
                for a, b in zip(errors, plain, strict=True) if not a <= 4 * max(b, least)]  # fmt: skip
    problems += [] if all(map(torch.equal, computed, again)) else ["equal calls give other bits"]
    inputs = inputs if tiny else _inputs(kernel, dtype, kernel.timed)
    calls = {"ours": kernel.ours, **kernel.others}
    times = {name: 1000 * median(samples(partial(_results, call, inputs), DEVICE)) for name, call in calls.items()}
    each = ", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items())
    said = "errors of output and gradients {} (plain operations: {}); {}".format(*map(in_words, (errors, plain)), each)
    return {"ms": times, "problem": "; ".join(problems), "said": said}


def _inputs(kernel: Kernel, dtype: str, sizes: Sequence[int]) -> list[Tensor]:
    drawn = kernel.draw(torch.Generator().manual_seed(0), *sizes)
    return [_cast(x.to(DEVICE), getattr(torch, dtype)) for x in drawn]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _results(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output, and the gradients of floating inputs if it has any."""
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in inputs]
    output = function(*leaves)
    if not output.requires_grad:
        return [output]
    weights = torch.linspace(0.5, 1.5, output.numel(), device=DEVICE, dtype=output.dtype).view(output.shape)
    return [output.detach(), *torch.autograd.grad(output, [x for x in leaves if x.requires_grad], weights)]


def optimizer(rows: int, columns: int) -> dict[str, Any]:
    """Each format: whether one kernel gives the bits of plain operations, three updates against fp64, and times."""
    lines, problems, draw = list[str](), list[str](), torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(rows, columns, generator=draw).to(DEVICE) for _ in range(4))
    exact, wide = nn.Parameter(start.double()), nn.Parameter(start.clone())
    for parameter, fused in ((exact, False), (wide, True)):
        adam = torch.optim.AdamW([parameter], fused=fused, **_UPDATE)
        for gradient in gradients:
            parameter.grad = gradient.to(parameter.dtype)
            adam.step()
    for state, master, bar in _FORMATS:
        config = OptimizerConfig(state=state, master=master)
        weight = nn.Parameter(start.to(torch.float32 if master == "fp32" else torch.bfloat16, copy=True))
        ours = LeanAdamW([{**_UPDATE, "params": [weight], "param_names": ["weight"]}], config, 1, DEVICE)
        for gradient in gradients:
            weight.grad = gradient.to(weight.dtype)
            ours.update(1.0)
        error = ((weight - exact).norm() / (exact - start).norm()).item() if bar else 0.0
        ms = 1000 * median(samples(partial(ours.update, 1.0), DEVICE))
        words = f", error of three updates {error:.1e} of their norm" if bar else ""
        lines.append(f"{state}, {master}: {choose_kernel(config, DEVICE)[1]}, {ms:.2f} ms{words}")
        problems += [lines[-1]] if error > bar else []
    said = f"{rows:,} x {columns:,}; torch's fused AdamW in fp32 {1000 * median(samples(adam.step, DEVICE)):.2f} ms"
    return {"lines": lines, "problem": "; ".join(problems), "said": said}


def launch_all() -> None:
    """Launch each kernel once, for a sanitizer."""
    for dim in (128, 256):
        print(f"attention {dim}", run_once(2, dim, "bfloat16", launches_of(dim, "bfloat16")[0]))
    print("optimizer", choose_kernel(OptimizerConfig(state="8bit", master="bf16_sr"), DEVICE)[1])
    for name, kernel in KERNELS.items():
        print(name, len(_results(kernel.ours, _inputs(kernel, kernel.dtypes[0], kernel.sizes))), "results", flush=True)
