"""Logits of transformers' models in fp64 throughout: their casts to fp32 are lifted."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


class _Wide(ModuleType):
    """torch, whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def lifted(hf: Any, ids: Tensor, module: ModuleType, rotary_name: str) -> Tensor:
    """Logits of transformers' model in fp64, see `lifting`."""
    with lifting(module, rotary_name):
        return hf(ids).logits


@contextmanager
def lifting(module: ModuleType, rotary_name: str) -> Iterator[None]:
    """Context in which transformers' layers compute in the dtype of their weights; only the rotary tables stay in fp32,
    as ours. Args: module: the model's; rotary_name: of the class of the rotary tables in it.
    """
    rotary_class = getattr(module, rotary_name)
    narrow, rotary = Tensor.float, rotary_class.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(Tensor, "float", narrow)
            inside.setattr(module, "torch", torch)
            return rotary(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "torch", _Wide("torch"))
        patch.setattr(rotary_class, "forward", forward)
        patch.setattr(Tensor, "float", Tensor.double)
        yield
