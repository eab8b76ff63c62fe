"""The attention kernels: values and times of each tile."""

import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch

from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import Documents, Shape
from titan_mi100.attention.launches import Launch, candidates
from titan_mi100.attention.torch_backends import Chunked
from titan_mi100.attention.trial import (
    Reference,
    difference,
    forward_backward,
    in_dtype,
    inputs,
    milliseconds,
    random_documents,
)  # fmt: skip
from titan_mi100.config.kernels import OWN
from titan_mi100.device import accelerator
from titan_mi100.errors import UserError
from titan_mi100.parallel.distributed import device_name

DEVICE = torch.device(accelerator.kind())
ARCH = device_name(DEVICE)[1].split(":")[0]


def launches_of(dim: int, dtype: str) -> list[Launch]:
    """Launches that have each tile of the table once; only one tile of each is not the table's first.

    Raises:
        UserError: no tile is known, or Triton cannot run here.
    """
    if not find_spec("triton") or not (accelerator.count() or os.environ.get("TRITON_INTERPRET") == "1"):
        raise UserError("Triton's kernels need Triton and a GPU, or TRITON_INTERPRET=1")
    table = candidates(ARCH, dim, getattr(torch, dtype).itemsize)
    first, kernels = Launch.first_of(table), zip(Launch._fields, table, strict=True)
    return [first, *(first._replace(**{name: tile}) for name, tiles in kernels for tile in tiles[1:])]


def warm_up(shapes: list[tuple[int, int, int, str]]) -> dict[str, Any]:
    """Compile all launches into Triton's cache, in many processes. Args: shapes: heads, key heads, size, dtype."""
    jobs = [(heads // kv_heads, dim, dtype, launch)
            for heads, kv_heads, dim, dtype in shapes for launch in launches_of(dim, dtype)]  # fmt: skip
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), mp_context=get_context("spawn")) as pool:
        refused = [*filter(None, pool.map(run_once, *zip(*jobs, strict=True)))]
    return {"lines": refused, "problem": "", "said": f"{len(jobs)} launches of three kernels, {len(refused)} refused"}


def run_once(group: int, dim: int, dtype: str, launch: Launch) -> str:
    """Run the three kernels at a size that is no multiple of a tile's. Returns why they are refused, or ""."""
    tensors, documents = inputs(Shape(1, 203, group, 1, dim, dtype), DEVICE), Documents(1, 203, (1, 77, 125))
    try:
        forward_backward(make_backend(OWN, ARCH, str(launch)), tensors, documents)
    except Exception as error:
        return f"head size {dim}, {dtype}, {launch}: {(str(error).splitlines() or [type(error).__name__])[0][:150]}"
    return ""


def tiles(heads: int, kv_heads: int, dim: int, dtype: str, seq: int, timed: int) -> dict[str, Any]:
    """Judge every launch as the product's trial does, compare it with explicit attention in fp64, and time it.

    Args:
        seq: tokens of the values.
        timed: tokens of the document that is timed; 0: none is.
    """
    launches, shape = launches_of(dim, dtype), Shape(1, seq, heads, kv_heads, dim, dtype)
    documents, tensors, long = random_documents(shape), inputs(shape, DEVICE), inputs(replace(shape, seq=timed), DEVICE)
    exact = forward_backward(Chunked(), in_dtype(tensors, torch.float64), documents)
    explicit = [*map(difference, forward_backward(Chunked(), tensors, documents), exact)]
    reference, errors, ms, problems = Reference(tensors, documents), [[0.0] * 4], dict[Launch, float](), {}
    for launch in launches:
        try:
            trial = reference.judge(backend := make_backend(OWN, ARCH, str(launch)))
            problems[launch] = trial.refused or ("" if trial.repeatable else "equal calls give other bits")
            errors.append([*map(difference, forward_backward(backend, tensors, documents), exact)])
            if timed:
                ms[launch] = median(milliseconds(backend, long, Documents(1, timed, (timed,)), 5))
        except Exception as error:
            problems[launch] = (str(error).splitlines() or [type(error).__name__])[0][:150]
    best, right = launches[0], [launch for launch in ms if not problems[launch]]
    for kernel, tile in launches[0]._asdict().items() if right else ():
        some = [launch for launch in right if launch._replace(**{kernel: tile}) == launches[0]]  # others have no change
        best = best._replace(**{kernel: getattr(min(some, key=lambda launch: ms[launch]), kernel)}) if some else best
    said = f"errors of output and gradients {in_words(map(max, *errors))} (explicit attention: {in_words(explicit)})"
    if right:
        rate, least = 7 * heads * dim * timed * (timed + 1) / 1e9, min(ms[launch] for launch in right)
        said += f"; {least:.2f} ms of {timed} tokens, {rate / least:.0f} TFLOP/s; fastest tiles {best}"
    lines = [f"{ms.get(launch, 0):7.2f} ms {launch} {problem}" for launch, problem in problems.items()]
    problem = "; ".join(f"{launch}: {problem}" for launch, problem in problems.items() if problem)
    return {"head_dim": dim, "launch": str(best) if right else "", "lines": lines, "problem": problem, "said": said}


def in_words(errors: Iterable[float]) -> str:
    return " ".join(f"{error:.1e}" for error in errors)
