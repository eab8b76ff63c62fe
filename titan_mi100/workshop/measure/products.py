"""Measures matrix products of a model's shapes, and the memory bandwidth of one device."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from titan_mi100.device import accelerator
from titan_mi100.files.schema import if_finite
from titan_mi100.parallel.distributed import data_sheet, init_distributed
from titan_mi100.shapes.families import PRESETS
from titan_mi100.wording import bytes_in_words

_ABOVE_PEAK = 1.05  # a rate above the data sheet's by this factor means that the time is wrong
_ARRAY = {True: 1 << 29, False: 1 << 27}  # bytes: larger than the caches; five fit a card of 8 GiB


def gemm(model: str, tokens: int, dtype: str) -> dict[str, Any]:
    """Measure the forward and both gradient products of a model's weights, of each shape once, on `tokens` tokens."""
    spec, device, products = PRESETS[model], init_distributed().device, []
    gpu = data_sheet(device)
    weights = [p.shape for layer in spec.layers for p in layer.parameters.values() if p.role == "matrix"]
    shapes = Counter([*weights, (spec.vocab_size, spec.hidden_size)]).most_common()
    generator = torch.Generator(device).manual_seed(0)
    for (outputs, inputs), count in shapes:
        x, w, grad = (
            torch.randn(shape, device=device, generator=generator).to(getattr(torch, dtype))
            for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
        )
        for name, a, b in (("forward", x, w.t()), ("input's gradient", grad, w), ("weight's gradient", grad.t(), x)):
            sizes = {"m": a.shape[0], "k": a.shape[1], "n": b.shape[1], "count": count}
            times = samples(partial(torch.mm, a, b), device)
            products.append({"name": name, **sizes, "error": _error(a, b), "times": times})
    return {"model": model, "dtype": dtype, **judged(products, dtype, gpu.tflops.get(dtype) if gpu else None)}


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
        work, took = 2e-12 * one["m"] * one["k"] * one["n"], statistics.median(one["times"])
        if peak and work / took > _ABOVE_PEAK * peak:
            problems.append(f"{where}: {work / took:.0f} TFLOP/s, above the data sheet's {peak:g}: its time is wrong")
        flops, seconds = flops + work * one["count"], seconds + took * one["count"]
    share = f", {flops / seconds / peak:.0%} of the data sheet's {peak:g}" if peak else ""
    summary = f"{flops / seconds:.3g} TFLOP/s for all products of a step{share}"
    return {"products": products, "tflops": flops / seconds, "problem": "; ".join(problems), "said": summary}


def _error(a: Tensor, b: Tensor) -> float | None:
    """The largest error of a @ b against fp64, relative to the largest element. None: not finite."""
    exact = a.double() @ b.double()
    scale = _largest(exact)
    return if_finite(_largest(exact.sub_(a @ b)) / scale)


def _largest(x: Tensor) -> float:
    """The largest absolute value, without a copy of x (a head's gradient in fp64 takes gigabytes). NaN if x has one."""
    return max(x.max().item(), -x.min().item())


def samples(call: Callable[[], Any], device: torch.device) -> list[float]:
    """Seconds of single calls, after a warm-up call: at least three, at most 20, until they add up to 0.3."""
    call()
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) < 0.3 and len(seconds) < 20):
        accelerator.synchronize(device)
        started = time.perf_counter()
        call()
        accelerator.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds


def bandwidth() -> dict[str, Any]:
    """Measure copy and triad (a = b + 3 c) on fp32."""
    device = init_distributed().device
    size = _ARRAY[accelerator.is_gpu(device)]
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
