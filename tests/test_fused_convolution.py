"""The kernels of the delta rule's convolution in Triton's interpreter, against the plain form in fp64."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from interpreted import DEVICE
from test_fused_elementwise import BARS, DTYPES, drawn, gradients
from torch import Tensor

from titan_mi100.attention.base import Documents
from titan_mi100.model.delta_rule import convolved, document_ids
from titan_mi100.model.fused import convolution_launch
from titan_mi100.model.fused.running import only


def inputs_of(rows: int, seq: int, channels: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    parts = [drawn(rows, seq, n, dtype=dtype, seed=number) for number, n in enumerate(channels)]
    return parts + [drawn(n, 4, dtype=dtype, seed=number) for number, n in enumerate(channels)]


def run(inputs: Sequence[Tensor], ids: Tensor, kinds: Sequence[str] = ("delta",)) -> list[Tensor]:
    with only(kinds):
        return gradients(lambda *leaves: convolved(leaves[:3], leaves[3:], ids), inputs)


def agree(inputs: Sequence[Tensor], ids: Tensor) -> None:
    ours, expected = run(inputs, ids), run([x.double() for x in inputs], ids)
    assert all(torch.equal(*pair) for pair in zip(ours, run(inputs, ids), strict=True))
    for x, y in zip(ours, expected, strict=True):
        assert x.shape == y.shape and torch.isfinite(x).all()
        error = ((x.double() - y).abs() / y.abs().clamp_min(y.abs().max() / 8)).max().item()
        assert error <= BARS[x.dtype], error


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[1], [2, 1], [15, 1, 16, 3, 30], [300], [129, 1, 2, 3, 4, 161]], ids=str)
def test_values_and_gradients(lengths: list[int], dtype: torch.dtype) -> None:
    rows = 1 if len(lengths) == 1 else 2
    ids = document_ids(Documents(rows, sum(lengths), tuple(lengths) * rows), DEVICE)
    agree(inputs_of(rows, sum(lengths), (64, 64, 96) if sum(lengths) > 3 else (5, 5, 77), dtype), ids)
