"""Our Triton kernels on the CPU, by Triton's interpreter, which conftest.py has asked for.

Triton is not a dependency: it comes with torch on Linux with a GPU. Where it is missing the importing test is skipped,
unless TITAN_TESTS_REQUIRE names it, as CI does.
"""

import os
from typing import Any

import numpy as np
import pytest

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


interpreter.InterpreterBuilder.create_dot = _right_dot

__all__ = ["triton_backend"]
