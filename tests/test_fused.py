"""Our fused kernels in Triton's interpreter, against the plain forms and fp64."""

import pytest
import torch
from interpreted import DEVICE

from titan_mi100.model import nf4
from titan_mi100.model.fused.running import only

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 64), (40, 192), (7, 1088)])
def test_a_matrix_in_4_bits_is_restored_to_the_same_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    weight[0, :64] = 0.0
    codes, largest = (x.to(DEVICE) for x in nf4.quantize(weight, dtype))
    plain = nf4.dequantize(codes, largest)
    with only(["nf4"]):
        assert torch.equal(nf4.dequantize(codes, largest), plain)
    assert nf4.trial(DEVICE, dtype) == ""
