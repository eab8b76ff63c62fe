"""8-bit floats with a shared exponent, and the random bits for stochastic rounding.

A block is a number of consecutive values of a row. The values share the exponent of the largest one; each value is an
8-bit float relative to it (as in the OCP Microscaling formats; block-wise state is from Dettmers et al., 2022). There
are two formats, both with 15 powers of two below the largest: `SIGNED` has a sign and 3 bits of mantissa, `UNSIGNED`
has 4 bits of mantissa. Code 0 is zero.

All operations are integer operations on the bits of fp32, or products with a power of two. So equal inputs give equal
codes on every device, whatever shard of a tensor a rank holds. The functions take contiguous (rows, columns) with full
blocks, and `exponents` of shape (rows, columns / block).
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

_RANGE = 15  # powers of two
# Limits of a block's exponent in fp32's biased form: below, the smallest code would be subnormal; 255 is infinity.
_LOWEST, _HIGHEST = _RANGE + 1, 254
_LARGEST_BLOCK, _LEAST_BLOCK, _MOST_PARTS = 256, 16, 8  # values; values; tensor-parallel ranks


@dataclass(frozen=True)
class StateFormat:
    """An 8-bit float format.

    Attributes:
        signed: the highest bit is the sign.
        mantissa: bits of the mantissa.
    """

    signed: bool
    mantissa: int

    @functools.cached_property
    def shift(self) -> int:
        """Number of bits of fp32's mantissa that are dropped."""
        return 23 - self.mantissa

    def table(self) -> Tensor:
        """The values of the 256 codes relative to the block's power of two, (256,) fp32 on the CPU."""
        codes = torch.arange(256)
        magnitude = codes & (127 if self.signed else 255)
        exponent = (magnitude >> self.mantissa) - _RANGE
        decoded = (1 + (magnitude % (1 << self.mantissa)) / (1 << self.mantissa)) * 2.0**exponent
        decoded[magnitude == 0] = 0.0
        return torch.where(codes > magnitude, -decoded, decoded).float()


SIGNED, UNSIGNED = StateFormat(True, 3), StateFormat(False, 4)
# Built on import: later calls can run under FakeTensorMode (memory counting), where new tensors have no values.
_TABLES = {kind: kind.table() for kind in (SIGNED, UNSIGNED)}


@functools.cache
def values_on(device: torch.device, kind: StateFormat) -> Tensor:
    return _TABLES[kind].to(device)


def block_size(columns: int) -> int:
    """The block size for rows of `columns` values; 0 if the rows are too short for blocks.

    It depends on the full tensor's shape only. It is small enough that tensor parallel, which splits a row over up to 8
    ranks, never splits a block.
    """
    size = _LARGEST_BLOCK
    while columns % (size * _MOST_PARTS):
        size //= 2
        if size < _LEAST_BLOCK:
            return 0
    return size


def decode(codes: Tensor, exponents: Tensor, kind: StateFormat, out: Tensor, scratch: Tensor) -> Tensor:
    """Decode codes to fp32.

    Args:
        codes: (rows, columns) uint8. exponents: (rows, columns / block) uint8.
        out: fp32, receives the values. scratch: int32, overwritten. Both have the codes' shape.

    Returns:
        `out`.
    """
    scratch.copy_(codes)
    torch.index_select(values_on(codes.device, kind), 0, scratch.view(-1), out=out.view(-1))
    scale = (exponents.to(torch.int32) << 23).view(torch.float32)  # the float 2 ** (exponent - 127)
    _blocks(out, exponents).mul_(scale[..., None])
    return out


def encode(values: Tensor, codes: Tensor, exponents: Tensor, kind: StateFormat, noise: Tensor, scratch: Tensor) -> None:
    """Round values stochastically to one of the two nearest codes, so that the expected value is unchanged.

    A value below the smallest code becomes zero in the signed format. In the unsigned format it becomes the smallest
    non-zero code: that format holds the root of the second moment, a divisor.

    Args:
        values: (rows, columns) fp32; overwritten.
        codes: uint8, receives the codes. exponents: uint8, receives the blocks' exponents.
        noise: int32, from 0 to 2 ** kind.shift; overwritten. scratch: int32, overwritten. Both have the values' shape.
    """
    bits = values.view(torch.int32)
    rounded = torch.bitwise_and(bits, 0x7FFFFFFF, out=scratch) if kind.signed else scratch.copy_(bits)
    # Adding noise below the kept bits and then truncating rounds up with the right probability. A carry out of the
    # mantissa correctly increments the exponent.
    rounded.add_(noise).bitwise_right_shift_(kind.shift)
    blocks = _blocks(rounded, exponents)
    exponent = (blocks.amax(dim=-1) >> kind.mantissa).clamp_(_LOWEST, _HIGHEST)
    exponents.copy_(exponent)
    lowest = ((exponent - _RANGE) << kind.mantissa)[..., None]  # the bits of code 0
    if kind.signed:
        blocks.sub_(lowest)
        rounded.clamp_(0, 127)
        rounded.add_(bits.bitwise_right_shift_(24).bitwise_and_(128))  # the sign
    else:
        least = torch.clamp(rounded, max=1, out=bits)  # 1, or 0 for zero
        blocks.sub_(lowest)
        torch.maximum(rounded, least, out=rounded).clamp_(max=255)
    codes.copy_(rounded)


def _blocks(x: Tensor, exponents: Tensor) -> Tensor:
    """(rows, columns) -> a view (rows, blocks, block)."""
    return x.view(*exponents.shape, -1)


def part_of_noise(noise: Tensor, first: int, bits: int, out: Tensor) -> Tensor:
    """Make noise of `bits` bits from eight of the random bits, those from bit `first` on.

    The eight bits are the highest ones of the noise. The next lower bit is 1, so that the noise has the mean of uniform
    noise and rounding stays unbiased.

    Args:
        noise: int32, not changed. out: int32, receives the result.
    """
    torch.bitwise_right_shift(noise, first + 8 - bits, out=out)
    return out.bitwise_and_(0xFF << (bits - 8)).bitwise_or_(1 << (bits - 9))


def draw_noise(numbers: Tensor, key: int, scratch: Tensor) -> Tensor:
    """Replace each element's number in the full tensor by 32 random bits, in place: a hash of the number and a key.

    Args:
        numbers: int32, overwritten. key: a signed 32-bit number. scratch: int32, of the same shape, overwritten.

    The hash has the form of MurmurHash3's finaliser (public domain), with low-bias constants found by C. Wellons.
    """
    numbers.bitwise_xor_(key)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 1)):
        torch.bitwise_right_shift(numbers, shift, out=scratch)
        # torch shifts int32 arithmetically; the mask makes it a logical shift
        numbers.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))
        if factor != 1:
            numbers.mul_(factor)
    return numbers


def split_24_bits(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 values, rounded to their upper 24 bits, into (bf16, int8).

    The bf16 value is the nearest one, so forward can use it. The residual is the difference between the 24 bits and
    these 16, as integers: -128 to 127.
    """
    bits = (values.view(torch.int32) + 0x80) >> 8
    upper = (bits + 0x80) >> 8
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 8)).to(torch.int8)


def join_24_bits(weight: Tensor, residual: Tensor, out: Tensor) -> Tensor:
    """The reverse of split_24_bits, into `out`, fp32."""
    bits = out.view(torch.int32).copy_(weight.view(torch.int16))
    # weight << 16 + residual << 8: the residual is signed, so adding it can borrow from the upper bits
    bits.bitwise_left_shift_(8).add_(residual).bitwise_left_shift_(8)
    return out
