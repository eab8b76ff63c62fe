"""Our Triton kernels on the CPU, by Triton's interpreter, which conftest.py has asked for; or on this machine's GPU.

Triton is not a dependency: it comes with torch on Linux with a GPU. Where it is missing the importing test is skipped,
unless TITAN_TESTS_REQUIRE names it, as CI does.
"""

import dataclasses
import os
from typing import Any

import numpy as np
import pytest
import torch

if "triton" in os.environ.get("TITAN_TESTS_REQUIRE", ""):
    import triton.language as tl
else:
    tl = pytest.importorskip("triton.language")
from triton.runtime import interpreter

from titan_mi100.attention import triton_backend

# In the interpreter of triton 3.4 to 3.9 a product of bf16 matrices multiplies their bits as integers.
_dot = interpreter.InterpreterBuilder.create_dot


def _widened(x: Any) -> Any:
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _right_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _dot(self, _widened(a), _widened(b), *rest)


# It cuts off where a GPU rounds to the nearest bf16, ties to even.
_cast = interpreter.InterpreterBuilder.cast_impl


def _rounding_cast(self: Any, x: Any, target: Any) -> Any:
    if x.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
        return _cast(self, x, target)
    bits = np.ascontiguousarray(x.data, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    rounded = np.where(np.isnan(x.data), bits >> 16 | 0x40, rounded)
    return interpreter.TensorHandle(rounded.astype(np.uint16), target.scalar)


# That of 3.4 to 3.9 makes numbers of arrays with one element, which numpy 2.5 refuses.
_patch_tensor = interpreter._patch_lang_tensor


def _indexed(tensor: Any, *scope: Any) -> None:
    _patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())


# It makes the table of numbers' types anew for each look into it.
_get_np_dtype = interpreter._get_np_dtype
_numpy_dtypes: dict[str, Any] = {}


def _numpy_dtype(dtype: Any) -> Any:
    if dtype.name not in _numpy_dtypes:
        _numpy_dtypes[dtype.name] = _get_np_dtype(dtype)
    return _numpy_dtypes[dtype.name]


# That of 3.4 asks each function that a kernel calls for triton.language's operations anew, and they stay replaced; that
# of 3.6 and later puts them back.
_patch_lang = interpreter._patch_lang
_replaced: set[int] = set()


def _patch_lang_once(function: Any) -> Any:
    if id(function.__globals__) in _replaced:
        return None
    scope = _patch_lang(function)
    if scope is None:
        _replaced.add(id(function.__globals__))
    return scope


DEVICE = torch.device("cuda")  # where the kernels compute
if os.environ.get("TRITON_INTERPRET") == "1":
    DEVICE = torch.device("cpu")
    interpreter.InterpreterBuilder.create_dot = _right_dot
    interpreter.InterpreterBuilder.cast_impl = _rounding_cast
    interpreter._patch_lang_tensor = _indexed
    interpreter._patch_lang = _patch_lang_once
    interpreter._get_np_dtype = _numpy_dtype
    # each sum and product of integers has its overflow computed, and thrown away without `debug`
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

__all__ = ["DEVICE", "triton_backend"]
