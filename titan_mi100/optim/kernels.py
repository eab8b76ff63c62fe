"""The update of reference_update.py as one Triton kernel: each number is read and written once. The bits are the same.

It is to be compiled without fusing sums and products (`enable_fp_fusion=False`): fp32 operations are then those that
IEEE 754 rounds in one way, as in reference_update.py. bf16 tensors come as int16, whose bits are moved by hand; what
is rounded at random, is so by integer arithmetic. The steps and their names are those of reference_update.py and
formats.py, which say why.

This file needs Triton and knows nothing of torch; `triton_update.py` calls it.
"""

import triton
import triton.language as tl

RANGE = tl.constexpr(15)


@triton.jit
def _float(x):
    """Converts a stored number to fp32: fp32, or bf16 as int16."""
    if x.dtype == tl.int16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _random(number, key):
    x = number ^ key
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)


@triton.jit
def _part_of_noise(noise, FIRST: tl.constexpr, BITS: tl.constexpr):
    return ((noise >> (FIRST + 8 - BITS)) & (0xFF << (BITS - 8))) | (1 << (BITS - 9))


@triton.jit
def _decode(codes, exponents, SIGNED: tl.constexpr, SHIFT: tl.constexpr):
    code = codes.to(tl.int32)
    size = code & 127 if SIGNED else code
    lowest = (exponents.to(tl.int32) - RANGE) << (23 - SHIFT)
    bits = tl.where(size == 0, 0, (size + lowest[:, None]) << SHIFT)
    if SIGNED:
        bits = bits | ((code & 128) << 24)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _encode(value, noise, SIGNED: tl.constexpr, SHIFT: tl.constexpr):
    bits = value.to(tl.int32, bitcast=True)
    rounded = ((bits & 0x7FFFFFFF) + noise) >> SHIFT
    exponent = tl.max(rounded, 1) >> (23 - SHIFT)
    exponent = tl.minimum(tl.maximum(exponent, RANGE + 1), 254)
    lowest = ((exponent - RANGE) << (23 - SHIFT))[:, None]
    if SIGNED:
        code = tl.minimum(tl.maximum(rounded - lowest, 0), 127) + ((bits >> 24) & 128)
    else:
        code = tl.minimum(tl.maximum(rounded - lowest, tl.minimum(rounded, 1)), 255)
    return code.to(tl.uint8), exponent.to(tl.uint8)


# These numbers change with the shard or the step: Triton would compile again for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["rows", "number", "whole", "key"])
def update_kernel(
    weight, gradient, first, second, first_exponent, second_exponent, residual,
    rows, columns, number, whole, key,
    factor, beta1, new1, beta2, new2, correction, eps, rate, kept, decay,
    MASTER: tl.constexpr, CODED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Args: number: of the first element; whole: columns of the whole parameter. CODED: moments are in 8 bits. BLOCK
    elements side by side share an exponent; a program has BLOCKS of them. residual is read where MASTER is "24bit"."""
    per_row = tl.cdiv(columns, BLOCK)
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    row = block // per_row
    column = (block % per_row)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = (row < rows)[:, None] & (column < columns)
    offset = row[:, None] * columns + column
    noise = _random((number + row[:, None] * whole + column).to(tl.int32), key)

    grad = _float(tl.load(gradient + offset, mask, 0)) * factor
    if CODED:
        old = _decode(
            tl.load(second + offset, mask, 0), tl.load(second_exponent + block, row < rows, 0), SIGNED=False, SHIFT=19
        )
        old = old * old
        moment = _decode(
            tl.load(first + offset, mask, 0), tl.load(first_exponent + block, row < rows, 0), SIGNED=True, SHIFT=20
        )
    else:
        old = _float(tl.load(second + offset, mask, 0))
        moment = _float(tl.load(first + offset, mask, 0))
    square = old * beta2 + grad * grad * new2
    root = tl.sqrt_rn(square)
    moment = moment * beta1 + grad * new1
    change = tl.div_rn(moment, root * correction + eps) * rate

    stored = tl.load(weight + offset, mask, 0)
    if MASTER == "24bit":
        low = tl.load(residual + offset, mask, 0).to(tl.int32)
        wide = (((stored.to(tl.int32) << 8) + low) << 8).to(tl.float32, bitcast=True)
        change = change + wide * decay
        power = (wide.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        unit = (((noise >> 8) & 0xFF).to(tl.float32) - 127.5) * 4.656612873077393e-10  # 2 ** -31
        wide = wide - (change + unit * power)
    else:
        wide = _float(stored)
        wide = wide * kept - change

    bits = wide.to(tl.int32, bitcast=True)
    if MASTER == "bf16_sr":
        tl.store(weight + offset, ((bits + (noise & 0xFFFF)) >> 16).to(tl.int16), mask)
    elif MASTER == "24bit":
        bits = (bits + (noise & 0xFF)) >> 8
        upper = (bits + 0x80) >> 8
        tl.store(weight + offset, upper.to(tl.int16), mask)
        tl.store(residual + offset, (bits - (upper << 8)).to(tl.int8), mask)
    else:
        tl.store(weight + offset, wide, mask)

    if CODED:
        code, exponent = _encode(moment, _part_of_noise(noise, FIRST=16, BITS=20), SIGNED=True, SHIFT=20)
        tl.store(first + offset, code, mask)
        tl.store(first_exponent + block, exponent, row < rows)
        code, exponent = _encode(root, _part_of_noise(noise, FIRST=24, BITS=19), SIGNED=False, SHIFT=19)
        tl.store(second + offset, code, mask)
        tl.store(second_exponent + block, exponent, row < rows)
    elif first.dtype.element_ty == tl.int16:
        bits = moment.to(tl.int32, bitcast=True) + _part_of_noise(noise, FIRST=16, BITS=16)
        tl.store(first + offset, (bits >> 16).to(tl.int16), mask)
        bits = square.to(tl.int32, bitcast=True) + _part_of_noise(noise, FIRST=24, BITS=16)
        tl.store(second + offset, (bits >> 16).to(tl.int16), mask)
    else:
        tl.store(first + offset, moment, mask)
        tl.store(second + offset, square, mask)
