"""Cases of the tests of machine code: what is launched, and what it must give."""

import importlib.metadata
import os
import shutil
from importlib.util import find_spec
from typing import Any

import pytest
import test_fused_head
import torch
from conftest import FULL
from machine_code.launches import ORDERS, Attention, Compiled, Emulated, Head, Update, compile_all
from test_attention_kernel import BARS, inputs, results
from test_compile_report import LINKERS, REQUIRED
from test_lean_optimizer import dtype_of, optimizer_of
from torch import nn

from titan_mi100.attention import kernels
from titan_mi100.attention.backends import make_backend
from titan_mi100.attention.base import Documents
from titan_mi100.attention.launches import Launch, candidates
from titan_mi100.attention.torch_backends import Eager
from titan_mi100.errors import UserError
from titan_mi100.model.fused import head_kernel
from titan_mi100.optim import kernels as optimizer_kernels
from titan_mi100.optim import triton_update

if "lld" not in REQUIRED and not (any(map(shutil.which, LINKERS)) and find_spec("triton.backends.amd")):
    pytest.skip("no ld.lld (apt-get install lld-16), or a triton without AMD's compiler", allow_module_level=True)

only_full = pytest.mark.skipif(FULL not in os.environ, reason="only with --full")  # too long for --full-of
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KERNELS = ("forward_kernel", "queries_gradient_kernel", "keys_gradient_kernel")
HEADS = (2, 1)
VERSION = importlib.metadata.version("triton")
FORGOTTEN = (
    r"line \d+: v_mov_b32_e32 .*: \d+ wait states must be between it and: MFMA writes a register; there are [23569]"
)
MOVES = {"3.4.0": {64: 4, 128: 3, 256: 3}, "3.6.0": {64: 2, 128: 2, 256: 3}}  # that have too few, by head size


def launches(arch: str, dtype: str, head_dim: int, launch: Launch, kpack: int = 0) -> list[Attention]:
    found = [
        Attention(arch, kernel, dtype, head_dim, tile, kpack) for kernel, tile in zip(KERNELS, launch, strict=True)
    ]
    if launch.keys.parts == 1:
        return found
    return [*found[:2], found[2]._replace(parts=("KEYS",)), found[2]._replace(parts=("VALUES",))]


def documents_for(launch: Launch) -> Documents:
    """Boundaries inside a tile; for most rows a second block of keys, from which on sums are scaled; and a last tile in
    which some waves have no row."""
    largest = max(max(tile.block_q, tile.block_k) for tile in launch)
    return Documents(1, 133, (120, 5, 8)) if largest == 128 else Documents(1, 93, (56, 5, 32))


def errors(
    compiled: list[Compiled],
    launch: Launch,
    dtype: str,
    head_dim: int,
    order: str,
    patch: pytest.MonkeyPatch,
    known: str = "-",
) -> tuple[dict[str, float], list[Emulated]]:
    """The largest errors against fp64, relative to the largest element."""
    emulated = [Emulated(code, order, known=known) for code in compiled]
    emulated[2].other = emulated[3] if len(emulated) > 3 else None
    for name, kernel in zip(KERNELS, emulated, strict=False):
        patch.setattr(kernels, name, kernel)
    documents = documents_for(launch)
    tensors = [x.contiguous() for x in inputs(documents, HEADS, head_dim, DTYPES[dtype])]
    expected = results(Eager(), documents, [x.double() for x in tensors])
    found = results(make_backend("triton", "cpu", str(launch)), documents, tensors)
    differences = [(a.double() - b).abs().max() / b.abs().max() for a, b in zip(found, expected, strict=True)]
    names = ("out", "q", "k", "v")
    return {n: x.nan_to_num(nan=torch.inf).item() for n, x in zip(names, differences, strict=True)}, emulated


def updated(kind: tuple[str, str], kernel: Any) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(3, 2048)] if kind[0] == "8bit" else [(3, 2048), (5, 272)]  # in 8 bits, 272 columns have smaller blocks
    weights = [torch.randn(shape, generator=generator).to(dtype_of(kind)) for shape in shapes]
    named = [(str(number), nn.Parameter(weight)) for number, weight in enumerate(weights)]
    optimizer = optimizer_of(kind, named)
    optimizer._kernel = kernel
    for _ in range(3):
        for _, parameter in named:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            parameter.grad[0, :7] = torch.tensor([0.0, -0.0, 1e-30, 1e-38, 3e38, -1e20, 1e-41])
        optimizer.update(0.7)
    return [p.detach() for _, p in named] + [value for _, value in optimizer.named_state()]


def equals_plain_torch(kind: tuple[str, str], arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (compiled,) = compile_all([Update(arch, *kind)])
    monkeypatch.setattr(optimizer_kernels, "update_kernel", Emulated(compiled, "at random"))
    for plain, ours in zip(updated(kind, None), updated(kind, triton_update.update), strict=True):
        assert torch.equal(plain.reshape(-1).view(torch.uint8), ours.reshape(-1).view(torch.uint8))


def head_is_right(arch: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks with a second tile that ends inside; one id per token, and twenty."""
    for k, names in ((1, ("sum", "gradient")), (20, ("sum", "gradient", "pick", "ids_gradient"))):
        asked = [Head(arch, name, dtype, 1 if k == 1 else 32) for name in names]
        for name, code in zip(names, compile_all(asked), strict=True):
            monkeypatch.setattr(head_kernel, f"{name}_kernel", Emulated(code, "at random", may_be_part=True))
        tensors = test_fused_head.case(7, k, DTYPES[dtype], vocabulary=17_040)
        found = test_fused_head.results(tensors, block=7 * 4000)
        test_fused_head.assert_near(found, test_fused_head.in_fp64(tensors), test_fused_head.BARS[DTYPES[dtype]])


def table(arch: str, dtype: str, head_dim: int) -> list[Launch]:
    """Launches that have each tile of a row of launches.py at least once."""
    try:
        tiles = candidates(arch, head_dim, DTYPES[dtype].itemsize)
    except UserError:
        return []
    return [Launch(*(row[min(n, len(row) - 1)] for row in tiles)) for n in range(max(map(len, tiles)))]


def are_right(arch: str, dtype: str, head_dim: int, rows: list[Launch], patch: pytest.MonkeyPatch) -> None:
    assert rows
    asked = [launches(arch, dtype, head_dim, row) for row in rows]
    compiled = iter(compile_all([each for row in asked for each in row]))
    for number, (row, kernels_of_row) in enumerate(zip(rows, asked, strict=True)):
        order, ours = list(ORDERS)[number % len(ORDERS)], [next(compiled) for _ in kernels_of_row]
        # A finding: after a loop Triton 3.4.0 and 3.6.0 forget the wait states of some moves, see docs/TESTING.md.
        is_forgotten = arch in ("gfx90a", "gfx942") and dtype == "fp16" and row.keys.num_warps == 8
        is_forgotten &= VERSION in MOVES
        found, emulated = errors(ours, row, dtype, head_dim, order, patch, FORGOTTEN if is_forgotten else "-")
        assert max(found.values()) <= BARS[DTYPES[dtype]], (str(row), order, found)
        forgotten = [len(kernel.passed_over) for kernel in emulated]
        assert forgotten[:2] == [0, 0] and sum(forgotten) == (MOVES[VERSION][head_dim] if is_forgotten else 0)
