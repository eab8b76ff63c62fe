"""Attention by kernels of libraries: PyTorch's varlen attention and FlexAttention, and the flash_attn package.

A constructor raises UserError if its kernel is missing. trial.py tries a backend before a run uses it.
"""

import importlib
import inspect
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_mi100.attention.base import Backend, Documents, boundaries
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

    def __init__(self, why: str) -> None:
        super().__init__(why)
        kernel = _function("torch.nn.attention.varlen", "varlen_attn", "needs torch 2.10 or later")
        options = inspect.signature(kernel).parameters  # the names changed between versions of torch
        causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in options else {"is_causal": True}
        grouped = {"enable_gqa": True} if "enable_gqa" in options else {}
        self._call = lambda *arguments: kernel(*arguments, **causal, **grouped)


class FlashAttention(_Varlen):
    """The flash_attn package: its own kernels on CUDA, Composable Kernel's on ROCm."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        kernel = _function("flash_attn", "flash_attn_varlen_func", "the package flash_attn is not installed")
        self._call = lambda *arguments: kernel(*arguments, causal=True, deterministic=True)


_BLOCK = 128  # queries and keys of a block of FlexAttention's mask


def key_blocks(documents: Documents, size: int) -> tuple[np.ndarray, ...]:
    """The blocks of keys that each block of queries needs, as flex_attention.BlockMask.from_kv_blocks takes them.

    Returns:
        For blocks of which a part is visible: how many there are, (batch, 1, blocks), and their numbers, these first,
        (batch, 1, blocks, blocks), int32; then the same for blocks of which every pair is visible.
    """
    count = -(-documents.seq // size)
    starts = boundaries(documents)[0].reshape(documents.batch, -1) - documents.seq * np.arange(documents.batch)[:, None]
    first = np.arange(count) * size
    last = np.minimum(first + size, documents.seq) - 1
    keys = np.arange(count)[None, None, :]
    needed = (keys >= starts[:, first, None] // size) & (keys <= np.arange(count)[:, None])
    # every pair: all keys are in the document of the last query, which begins latest; a block cut off is never whole
    full = needed & (keys < np.arange(count)[:, None]) & (keys * size >= starts[:, last, None])
    full &= (last - first == size - 1)[:, None]
    arrays = []
    for mask in (needed & ~full, full):
        numbers = np.argsort(~mask, axis=2, kind="stable")
        arrays += [array.astype(np.int32)[:, None] for array in (mask.sum(2), numbers)]
    return tuple(arrays)


class Flex(Backend):
    """Compiled FlexAttention with a block mask."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        module = "torch.nn.attention.flex_attention"
        self._masks = _function(module, "BlockMask", "this torch has no FlexAttention")
        self._kernel = torch.compile(_function(module, "flex_attention", "this torch has no FlexAttention"))

    def prepare(self, documents: Documents, device: torch.device) -> Any:
        numbers = np.repeat(np.arange(len(documents.lengths)), documents.lengths).reshape(documents.batch, -1)
        number = to_device(torch.from_numpy(numbers), device)

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (number[batch, query] == number[batch, key])

        # not create_block_mask, which looks at all S x S pairs of each microbatch
        blocks = [to_device(torch.from_numpy(array), device) for array in key_blocks(documents, _BLOCK)]
        lengths = (documents.seq, documents.seq)
        return self._masks.from_kv_blocks(*blocks, BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=lengths)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        output: Tensor = self._kernel(q, k, v, block_mask=prepared, enable_gqa=True)
        return output.transpose(1, 2)


def _function(module: str, name: str, lacking: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError) as error:  # OSError: a shared library is missing
        raise UserError(f"{lacking} ({error})") from None
