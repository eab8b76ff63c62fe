"""Attention by kernels of libraries: PyTorch's varlen attention, and the flash_attn package.

A constructor raises UserError if its kernel is missing. trial.py tries a backend before a run uses it.
"""

import importlib
import inspect
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_mi100.attention.base import Backend, Documents
from titan_mi100.attention.repeatable import differs, repeatable, with_repeatable_backward
from titan_mi100.device.accelerator import to_device
from titan_mi100.errors import UserError


class Cumulative(NamedTuple):
    """The documents of a flattened batch, in the form of the varlen kernels."""

    ends: Tensor  # (documents + 1,) int32 on the device: 0, then the token after each document
    longest: int  # tokens of the longest document


class _Varlen(Backend):
    """A kernel that takes all tokens as one row, and the ends of the documents."""

    _call: Any  # (q, k, v, ends of queries, ends of keys, longest query, longest key document) -> the output

    def prepare(self, documents: Documents, device: torch.device) -> Cumulative:
        ends = np.cumsum([0, *documents.lengths], dtype=np.int32)
        return Cumulative(to_device(torch.from_numpy(ends), device), max(documents.lengths))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Cumulative) -> Tensor:
        ends, longest = prepared
        with repeatable(differs(q.device)):
            output: Tensor = self._call(*(x.flatten(0, 1) for x in (q, k, v)), ends, ends, longest, longest)
        return with_repeatable_backward(output, differs(q.device)).view(q.shape)


class TorchVarlen(_Varlen):
    """Flash attention without padding by torch.nn.attention.varlen, from torch 2.10."""

    def __init__(self) -> None:
        kernel = _function("torch.nn.attention.varlen", "varlen_attn", "needs torch 2.10 or later")
        options = inspect.signature(kernel).parameters  # the names changed between versions of torch
        causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in options else {"is_causal": True}
        grouped = {"enable_gqa": True} if "enable_gqa" in options else {}
        self._call = lambda *arguments: kernel(*arguments, **causal, **grouped)


class FlashAttention(_Varlen):
    """The flash_attn package: its own kernels on CUDA, Composable Kernel's on ROCm."""

    def __init__(self) -> None:
        kernel = _function("flash_attn", "flash_attn_varlen_func", "the package flash_attn is not installed")
        self._call = lambda *arguments: kernel(*arguments, causal=True, deterministic=True)


def _function(module: str, name: str, lacking: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError) as error:  # OSError: a shared library is missing
        raise UserError(f"{lacking} ({error})") from None
