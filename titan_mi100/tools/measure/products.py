"""Measures matrix products of a model's shapes, and the memory bandwidth of one device."""

from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from titan_mi100.files.schema import if_finite
from titan_mi100.shapes.base import ModelSpec
from titan_mi100.shapes.families import PRESETS
from titan_mi100.tools.measure.device import samples, use_device

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


def gemm(model: str, tokens: int, dtype: str, card: int = 0, only: str = "") -> dict:
    """Measure each weight's forward and both gradient products on `tokens` tokens; the result is a form.Gemm.

    Args:
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
            error, scale = _error(a, b)
            sizes = {"m": a.shape[0], "k": a.shape[1], "n": b.shape[1], "count": count}
            times = samples(partial(torch.mm, a, b), device)
            found.append({"name": what, **sizes, "error": error, "scale": scale, "seconds": times})
    # with another name, so that a part of the products does not count as the model's rate
    return {"model": f"{model}: {only}" if only else model, "dtype": dtype, "products": found}


def _error(a: Tensor, b: Tensor) -> tuple[float | None, float]:
    """The largest error of a @ b against fp64, and the largest absolute element of the fp64 product."""
    exact = a.double() @ b.double()
    scale = _largest(exact)
    return if_finite(_largest(exact.sub_(a @ b))), scale


def _largest(x: Tensor) -> float:
    """The largest absolute value, without a copy of x (a head's gradient in fp64 takes gigabytes). NaN if x has one."""
    return max(x.max().item(), -x.min().item())


def bandwidth(card: int = 0) -> dict:
    """Measure copy and triad (a = b + 3 c) on fp32; the result is a form.Bandwidth."""
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
    return {"size": size, "copy": copied, "triad": triad, "wrong": wrong}
