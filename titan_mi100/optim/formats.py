"""Numbers in 8 bits, and the noise by which numbers are rounded at random.

A block of neighbours in a row shares the exponent of its largest value; each has an 8-bit float below it (as in the OCP
Microscaling formats; block-wise state is from Dettmers et al., 2022). Two kinds, both with 15 powers of two below the
largest: `SIGNED` has a sign and 3 bits of mantissa, `UNSIGNED` 4 bits. Code 0 is zero.

Everything here is integer arithmetic on the bits of fp32, or a product with a power of two. So equal inputs give equal
codes on every device, whatever part of a tensor a rank holds. Functions take rows of whole blocks, (rows, columns),
contiguous, and `exponents` (rows, columns / block).
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

_RANGE = 15  # powers of two
# of an exponent as fp32 has it, with its bias: below, the smallest code would be subnormal; above lies infinity
_LOWEST, _HIGHEST = _RANGE + 1, 254
_LARGEST_BLOCK, _LEAST_BLOCK, _MOST_PARTS = 256, 16, 8


@dataclass(frozen=True)
class Format:
    """How a value is kept in 8 bits. mantissa: bits of it; the sign has the highest bit, if there is one."""

    signed: bool
    mantissa: int

    @functools.cached_property
    def shift(self) -> int:
        """Bits of fp32's mantissa that are dropped."""
        return 23 - self.mantissa

    def values(self, device: torch.device) -> Tensor:
        """What the codes stand for, (256,) fp32, as shares of the power of two that the exponent names."""
        return _on(device, self)

    def table(self) -> Tensor:
        codes = torch.arange(256)
        magnitude = codes & (127 if self.signed else 255)
        exponent = (magnitude >> self.mantissa) - _RANGE
        found = (1 + (magnitude % (1 << self.mantissa)) / (1 << self.mantissa)) * 2.0**exponent
        found[magnitude == 0] = 0.0
        return torch.where(codes > magnitude, -found, found).float()


SIGNED, UNSIGNED = Format(True, 3), Format(False, 4)
_TABLES = {kind: kind.table() for kind in (SIGNED, UNSIGNED)}  # made here, where no mode makes tensors without values


@functools.cache
def _on(device: torch.device, kind: Format) -> Tensor:
    return _TABLES[kind].to(device)


def block_size(columns: int) -> int:
    """Of rows of so many values; 0: too short for blocks.

    A function of the whole tensor's shape, and small enough that tensor parallel, which splits rows over up to 8 ranks,
    cuts no block.
    """
    size = _LARGEST_BLOCK
    while columns % (size * _MOST_PARTS):
        size //= 2
        if size < _LEAST_BLOCK:
            return 0
    return size


def decode(codes: Tensor, exponents: Tensor, kind: Format, out: Tensor, scratch: Tensor) -> Tensor:
    """The values, in fp32.

    Args:
        codes, exponents: uint8.
        out: fp32 for the values. scratch: int32. Both of the codes' shape.
    """
    scratch.copy_(codes)
    torch.index_select(kind.values(codes.device), 0, scratch.view(-1), out=out.view(-1))
    scale = (exponents.to(torch.int32) << 23).view(torch.float32)
    _blocks(out, exponents).mul_(scale[..., None])
    return out


def encode(values: Tensor, codes: Tensor, exponents: Tensor, kind: Format, noise: Tensor, scratch: Tensor) -> None:
    """Round values at random to one of the two nearest codes, the nearer one more often, so that the mean is right.

    What is too small for a code becomes zero in the signed format, in the other the smallest that is not zero: the
    root of a second moment, by which something is divided.

    Args:
        values: fp32; lost.
        codes, exponents: uint8, to be written.
        noise: int32, from 0 to 2 ** kind.shift; lost. scratch: int32.
    """
    bits = values.view(torch.int32)
    rounded = torch.bitwise_and(bits, 0x7FFFFFFF, out=scratch) if kind.signed else scratch.copy_(bits)
    rounded.add_(noise).bitwise_right_shift_(kind.shift)
    blocks = _blocks(rounded, exponents)
    exponent = (blocks.amax(dim=-1) >> kind.mantissa).clamp_(_LOWEST, _HIGHEST)
    exponents.copy_(exponent)
    lowest = ((exponent - _RANGE) << kind.mantissa)[..., None]
    if kind.signed:
        blocks.sub_(lowest)
        rounded.clamp_(0, 127)
        rounded.add_(bits.bitwise_right_shift_(24).bitwise_and_(128))
    else:
        least = torch.clamp(rounded, max=1, out=bits)
        blocks.sub_(lowest)
        torch.maximum(rounded, least, out=rounded).clamp_(max=255)
    codes.copy_(rounded)


def _blocks(x: Tensor, exponents: Tensor) -> Tensor:
    return x.view(*exponents.shape, -1)


def part_of_noise(noise: Tensor, first: int, bits: int, out: Tensor) -> Tensor:
    """Eight of the random bits, from bit `first` on, as the highest of `bits` bits, with a half below, for the mean."""
    torch.bitwise_right_shift(noise, first + 8 - bits, out=out)
    return out.bitwise_and_(0xFF << (bits - 8)).bitwise_or_(1 << (bits - 9))


def draw_noise(numbers: Tensor, key: int, scratch: Tensor) -> Tensor:
    """32 random bits for each element, in place: a function of the element's number in the whole tensor and of a key.

    Args:
        numbers: int32, overwritten. key: a 32-bit number with a sign. scratch: int32, of the same shape.

    The mixing is of the kind of MurmurHash3's end (public domain), with constants of C. Wellons' search for low bias.
    """
    numbers.bitwise_xor_(key)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 1)):
        torch.bitwise_right_shift(numbers, shift, out=scratch)
        numbers.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))  # zeros come in, not the sign
        if factor != 1:
            numbers.mul_(factor)
    return numbers
