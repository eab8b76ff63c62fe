"""The grouped products of experts in Triton's interpreter, against fp64."""

import pytest
import torch
from interpreted import DEVICE
from torch import Tensor

from titan_mi100.model.fused import experts_launch

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
COUNTS = {
    "one without rows": [23, 0, 41, 1],
    "all to one": [0, 0, 70, 0],
    "whole tiles": [16, 32, 0, 64],
    "one row": [0, 1, 0, 0],
    "many experts": [3, 0, 0, 17, 1, 0, 15, 16, 0, 5, 0],
}


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts, device=DEVICE).cumsum(0, dtype=torch.int32)


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(shape[0])
    return torch.randn(shape, generator=draw).to(DEVICE, dtype)


def assert_rounded_once(ours: Tensor, exact: Tensor, size: float) -> None:
    """Args: size: of the terms that were added in fp32."""
    eps = torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours.double(), exact, rtol=0.51 * eps, atol=max(1e-6 * size, 1e-7))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize(("inner", "columns"), [(48, 72), (5, 33), (80, 3)])
def test_products_and_sums_equal_fp64(inner: int, columns: int, name: str, dtype: torch.dtype) -> None:
    counts = COUNTS[name]
    ends, experts, rows = ends_of(counts), len(counts), sum(counts)
    x, y = drawn(rows, inner, dtype=dtype), drawn(rows, columns, dtype=dtype)
    weight = drawn(experts, inner, columns, dtype=dtype)
    parts = [part.double() for part in x.split(counts)]
    exact = torch.cat([part @ matrix.double() for part, matrix in zip(parts, weight, strict=True)])
    for is_transposed, stored in ((True, weight.flatten(0, 1)), (False, weight.mT.reshape(-1, inner))):
        found = experts_launch.products(x, stored, ends, is_transposed)
        assert_rounded_once(found, exact, inner)
        assert torch.equal(experts_launch.products(x, stored, ends, is_transposed), found)
        added = experts_launch.products(x, stored, ends, is_transposed, 0.375, y)
        assert_rounded_once(added, y.double() + 0.375 * exact, inner)
    found = experts_launch.sums(x, y, ends, 0.375)
    exact = torch.cat([0.375 * a.t() @ b.double() for a, b in zip(parts, y.split(counts), strict=True)])
    assert_rounded_once(found, exact, max(counts))
    assert torch.equal(experts_launch.sums(x, y, ends, 0.375), found)
