"""The kernels of the head's loss in Triton's interpreter, against fp64."""

import pytest
import torch
from interpreted import DEVICE

from titan_mi100.model import loss
from titan_mi100.model.fused.running import only


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_trial_passes(dtype: torch.dtype) -> None:
    assert loss.trial(DEVICE, dtype) == ""
