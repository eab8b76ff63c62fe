"""Restores an NF4 matrix as one Triton kernel: 0.53 bytes are read per weight, its 2 are written.

This file needs Triton and knows nothing of torch; `nf4_launch.py` calls it.
"""

import triton
import triton.language as tl


@triton.jit
def dequantize_kernel(codes, largest, pairs, out, count, SCALED: tl.constexpr, BLOCK: tl.constexpr):
    """Computes out[i] = pairs[codes[i // 2]][i % 2] * largest[i // SCALED], rounded once.

    Args:
        codes: bytes of two codes each. largest: a scale per SCALED weights. pairs: (256, 2), see nf4.value_pairs.
        count: bytes of codes. BLOCK: bytes of codes per program.
    """
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = byte < count
    code = tl.load(codes + byte, mask=inside, other=0).to(tl.int32)
    scale = tl.load(largest + byte // (SCALED // 2), mask=inside, other=0.0).to(tl.float32)
    half = tl.arange(0, 2)[None, :]
    weight = tl.load(pairs + 2 * code[:, None] + half).to(tl.float32) * scale[:, None]
    tl.store(out + 2 * byte[:, None] + half, weight.to(out.dtype.element_ty), mask=inside[:, None])
