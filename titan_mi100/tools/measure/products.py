"""Measures matrix products of a model's shapes, and the memory bandwidth of one device."""

import math
import statistics
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from titan_mi100.files.schema import if_finite
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import PRESETS
from titan_mi100.tools.measure.device import samples, use_device
from titan_mi100.wording import bytes_in_words

_ABOVE_PEAK = 1.05  # a rate above the data sheet's by this factor means that the time is wrong
_SHARE = 16  # an array takes 1/16 of the card's free memory
_LARGEST, _ON_CPU = 1 << 30, 1 << 27  # bytes: the largest array; the array on a CPU


def weights_of(spec: ModelSpec) -> dict[str, tuple[int, int, int]]:
    """Name of a weight -> (outputs, inputs, number of such weights in the model)."""
    found: dict[str, tuple[int, int, int]] = {}
    for layer in spec.layers:
        matrices = [(name, p.shape) for name, p in layer.parameters.items() if p.role == "matrix"]
        for (outputs, inputs), group in groupby(matrices, lambda each: each[1]):  # neighbours of one shape
            names = [name.split(".")[-2].removesuffix("_proj") for name, _ in group]
            before = found.get(", ".join(names), (0, 0, 0))[2]
            found[", ".join(names)] = (outputs, inputs, before + len(names))
    return {**found, "head": (spec.vocab_size, spec.hidden_size, 1)}


def gemm(model: str, tokens: int, dtype: str, peak: float | None, card: int = 0, only: str = "") -> dict[str, Any]:
    """Measure each weight's forward and both gradient products on `tokens` tokens.

    Args:
        peak: TFLOP/s of the data sheet; None: not known.
        only: name of a single weight; "": all.
    """
    device, found = use_device(card), []
    generator = torch.Generator(device).manual_seed(0)
    weights = weights_of(PRESETS[model])
    for name, (outputs, inputs, count) in ({only: weights[only]} if only else weights).items():
        shapes = ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        x, w, grad = (
            torch.randn(shape, device=device, generator=generator).to(getattr(torch, dtype)) for shape in shapes
        )
        for what, a, b in (
            (name, x, w.t()),
            (f"{name}: input's gradient", grad, w),
            (f"{name}: weight's gradient", grad.t(), x),
        ):
            sizes = {"m": a.shape[0], "k": a.shape[1], "n": b.shape[1], "count": count}
            times = samples(partial(torch.mm, a, b), device)
            found.append({"name": what, **sizes, "error": _error(a, b), "times": times})
    # a part of the products does not count as the model's rate
    return {"model": model, "dtype": dtype, **({"card": card} if only else {}), **judged(found, dtype, peak)}


def judged(products: list[dict[str, Any]], dtype: str, peak: float | None) -> dict[str, Any]:
    """The verdict on measured products, and their rate over a step, in TFLOP/s."""
    problems, flops, seconds = [], 0.0, 0.0
    for one in products:
        # rounding of the result, and of fp32 sums of k products (random walk: sqrt(k))
        limit = 2 * (torch.finfo(getattr(torch, dtype)).eps + torch.finfo(torch.float32).eps * one["k"] ** 0.5)
        where = f"{one['name']} ({one['m']} x {one['k']} x {one['n']})"
        error = math.inf if one["error"] is None else one["error"]
        if error > limit:
            problems.append(f"{where} is wrong by {error:.1e} of its largest element (at most {limit:.1e})")
        work, time = 2e-12 * one["m"] * one["k"] * one["n"], statistics.median(one["times"])
        if peak and work / time > _ABOVE_PEAK * peak:
            problems.append(f"{where}: {work / time:.0f} TFLOP/s, above the data sheet's {peak:g}: its time is wrong")
        flops, seconds = flops + work * one["count"], seconds + time * one["count"]
    share = f", {flops / seconds / peak:.0%} of the data sheet's {peak:g}" if peak else ""
    said = f"{flops / seconds:.3g} TFLOP/s for all products of a step{share}"
    return {"products": products, "tflops": flops / seconds, "problem": "; ".join(problems), "said": said}


def _error(a: Tensor, b: Tensor) -> float | None:
    """The largest error of a @ b against fp64, relative to the largest element. None: not finite."""
    exact = a.double() @ b.double()
    scale = _largest(exact)
    return if_finite(_largest(exact.sub_(a @ b)) / scale)


def _largest(x: Tensor) -> float:
    """The largest absolute value, without a copy of x (a head's gradient in fp64 takes gigabytes). NaN if x has one."""
    return max(x.max().item(), -x.min().item())


def bandwidth(card: int = 0) -> dict[str, Any]:
    """Measure copy and triad (a = b + 3 c) on fp32."""
    device = use_device(card)
    size = _ON_CPU
    if device.type == "cuda":
        size = min(_LARGEST, torch.cuda.mem_get_info(device)[0] // _SHARE // 4 * 4)
    b = torch.arange(size // 4, device=device, dtype=torch.int32).remainder_(1 << 20).float()
    a, c = torch.zeros_like(b), b.clone()
    copied = samples(lambda: a.copy_(b), device)
    wrong = int((a != b).sum())
    triad = samples(lambda: torch.add(b, c, alpha=3, out=a), device)
    wrong += int((a != b * 4).sum())
    rates = [n * size / statistics.median(times) / 1e9 for n, times in ((2, copied), (3, triad))]
    return {
        "size": size, "copy": copied, "triad": triad, "problem": f"{wrong:,} elements are wrong" if wrong else "",
        "said": f"copy {rates[0]:.4g} GB/s, triad {rates[1]:.4g} GB/s, arrays of {bytes_in_words(size)}",
    }  # fmt: skip
