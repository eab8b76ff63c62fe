"""What the ALUs compute: name -> (kinds of the sources > kinds of the results, function).

Kinds of vector operands: u, i, f are 32 bits of each lane as unsigned, signed, float; U, I are pairs of registers;
d is a pair as fp64; h is fp16 in the low half; B is a flag for each lane, in a pair of SGPRs (with 32 lanes b, in one);
D is the old value of the target as float.
Kinds of scalar operands: u, i are 32 bits, U, I 64; s is scc, which no operand names; D is the old value of the target.

Written after AMD's "Instinct MI100 Instruction Set Architecture" (CDNA1), chapters 5, 6 and 12, and the same of MI200
and MI300. The roots, reciprocals, logarithms and powers are the exact ones, rounded; denormals there are zero.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from machine_code.assembly import Unknown

u8, u16, u32, i32, u64, i64 = np.uint8, np.uint16, np.uint32, np.int32, np.uint64, np.int64
f16, f32, f64 = np.float16, np.float32, np.float64
TINY = f32(2.0**-126)
LOW32, LOW64 = 2**32 - 1, 2**64 - 1


def wide(x: Any) -> Any:
    return np.asarray(x).astype(u64)


def flush(x: Any) -> Any:
    return np.where(np.abs(x) < TINY, np.copysign(f32(0), x), x).astype(f32)


def fma(a: Any, b: Any, c: Any) -> Any:
    """a b + c, rounded once. Where the sum in fp64 may be halfway between two results, or is tiny, it is rounded to odd
    first, so that the second rounding is the only one that counts (Boldo and Melquiond, 2008)."""
    product, c = np.asarray(a).astype(f64) * b, np.asarray(c).astype(f64)
    total = np.asarray(product + c, f64)
    bits = total.view(i64)
    if not ((bits & 0x1FFFFFFF == 0x10000000) | (np.abs(total) < TINY) & (total != 0)).any():
        return total.astype(f32)
    part = total - product
    error = (product - (total - part)) + (c - part)
    to_odd = (error != 0) & (bits & 1 == 0) & np.isfinite(total)
    toward = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(to_odd, bits + toward, bits).view(f64).astype(f32)


def half(x: Any, place: int = 0) -> Any:
    """fp16 from the lower or the upper half of 32 bits, as fp32."""
    return ((np.asarray(x, u32) >> (16 * place)) & 0xFFFF).astype(u16).view(f16).astype(f32)


def from_half(x: Any) -> Any:
    return np.asarray(x).astype(f16).view(u16).astype(u32)


def _exponent(x: Any) -> Any:
    return ((np.asarray(x, f32).view(u32) >> 23) & 255).astype(i32)


def _select(cases: list[tuple[Any, Any]], other: Any) -> Any:
    """In each lane the value of the first case that is true."""
    for condition, value in reversed(cases):
        if condition.any():
            other = np.where(condition, value, other)
    return other


def _div_scale(s0: Any, s1: Any, s2: Any) -> Any:
    """Scale s0, which is the denominator s1 or the numerator s2, where the steps of a division would overflow; the flag
    says that v_div_fmas must scale back."""
    s0, s1, s2 = np.broadcast_arrays(*(np.asarray(x, f32) for x in (s0, s1, s2)))
    up, down = s0 * f32(2.0**64), s0 * f32(2.0**-64)
    inverse, quotient = 1 / s1.astype(f64), s2.astype(f64) / s1
    tiny_inverse = (inverse != 0) & (np.abs(inverse) < 2.0**-1022)
    tiny_quotient = (quotient != 0) & (np.abs(quotient) < 2.0**-126)
    is_denominator, is_numerator = s0.view(u32) == s1.view(u32), s0.view(u32) == s2.view(u32)
    cases = [
        ((s2 == 0) | (s1 == 0), f32(np.nan), False),
        (_exponent(s2) - _exponent(s1) >= 96, np.where(is_denominator, up, s0), True),
        ((s1 != 0) & (np.abs(s1) < TINY), up, False),
        (tiny_inverse & tiny_quotient, np.where(is_denominator, up, s0), True),
        (tiny_inverse, down, False),
        (tiny_quotient, np.where(is_numerator, up, s0), True),
        (_exponent(s2) <= 23, up, False),
    ]
    value = _select([(condition, value) for condition, value, _ in cases], s0)
    return value, _select([(condition, flag) for condition, _, flag in cases], np.False_)


def _div_fmas(a: Any, b: Any, c: Any, scaled: Any) -> Any:
    result = fma(a, b, c)
    return np.where(scaled, np.ldexp(result, np.where(_exponent(c) > 127, 64, -64)), result).astype(f32)


def _div_fixup(quotient: Any, s1: Any, s2: Any) -> Any:
    """The special cases of s2 / s1."""
    a1, a2 = np.abs(s1), np.abs(s2)
    cases = [
        (np.isnan(s1) | np.isnan(s2) | ((a1 == 0) & (a2 == 0)) | (np.isinf(a1) & np.isinf(a2)), f32(np.nan)),
        ((a1 == 0) | np.isinf(a2), f32(np.inf)),
        (np.isinf(a1) | (a2 == 0), f32(0)),
        (_exponent(s2) - _exponent(s1) < -150, f32(0)),
        (_exponent(s1) == 255, f32(np.inf)),
    ]
    size = _select(cases, np.abs(quotient))
    return np.where(np.signbit(s1) ^ np.signbit(s2), -size, size)


def _permute_bytes(high: Any, low: Any, selector: Any) -> Any:
    choices, lanes = np.array([selector], u32).view(u8).reshape(-1, 4), np.broadcast(high, low, selector).size
    both = np.empty((lanes, 2), u32)
    both[:, 0], both[:, 1] = low, high
    picked = both.view(u8)[np.arange(lanes)[:, None], choices & 7]
    if (choices > 7).any():
        assert not ((choices > 7) & (choices < 12)).any(), "v_perm_b32 that extends a sign"
        picked = np.where(choices > 7, np.where(choices > 12, u8(255), u8(0)), picked)
    return picked.view(u32).reshape(lanes)


def _is_of_class(x: Any, classes: Any) -> Any:
    normal, zero, negative = np.isfinite(x) & (np.abs(x) >= TINY), x == 0, np.signbit(x)
    denormal = np.isfinite(x) & ~normal & ~zero
    quiet = (np.asarray(x, f32).view(u32) >> 22) & 1 == 1
    tests = (
        *(np.isnan(x) & ~quiet, np.isnan(x) & quiet),
        *(x == -np.inf, normal & negative, denormal & negative, zero & negative),
        *(zero & ~negative, denormal & ~negative, normal & ~negative, x == np.inf),
    )
    return np.any([test & ((classes >> bit) & 1 == 1) for bit, test in enumerate(tests)], 0)


def _to_unsigned(x: Any) -> Any:
    return np.where(np.isnan(x), 0, np.clip(np.trunc(np.asarray(x).astype(f64)), 0, LOW32)).astype(u32)


def _multiply_add_64(a: Any, b: Any, c: Any) -> Any:
    total = wide(a) * wide(b) + c
    return total, total < c


def _multiply_add_signed(a: Any, b: Any, c: Any) -> Any:
    total = np.asarray(a).astype(i64) * np.asarray(b).astype(i64) + c
    return total.view(u64), np.zeros(np.shape(total), bool)  # what the flag is, no kernel reads


def _add_halves(a: Any, b: Any) -> Any:
    return from_half(half(a) + half(b)) | from_half(half(a, 1) + half(b, 1)) << u32(16)


def _reversed(a: Any) -> Any:
    """The 32 bits in the other order."""
    for shift in (1, 2, 4, 8, 16):
        low = u32(LOW32 // ((1 << shift) + 1))  # every second group of bits
        a = (a >> u32(shift) & low) | (a & low) << u32(shift)
    return a


def _s24(x: Any) -> Any:
    return x << i32(8) >> i32(8)


_LOW24 = u32(0xFFFFFF)
VECTOR: dict[str, tuple[str, Callable]] = {
    "v_mov_b32": ("u>u", lambda a: a),
    **{f"v_accvgpr_{name}_b32": ("u>u", lambda a: a) for name in ("read", "write", "mov")},
    "v_mov_b64": ("U>U", lambda a: a),
    "v_cndmask_b32": ("uuB>u", lambda a, b, flag: np.where(flag, b, a)),
    # integers
    "v_add_u32": ("uu>u", lambda a, b: a + b),
    "v_sub_u32": ("uu>u", lambda a, b: a - b),
    "v_subrev_u32": ("uu>u", lambda a, b: b - a),
    "v_add3_u32": ("uuu>u", lambda a, b, c: a + b + c),
    "v_add_co_u32": ("uu>uB", lambda a, b: (a + b, a + b < a)),
    "v_sub_co_u32": ("uu>uB", lambda a, b: (a - b, a < b)),
    "v_subrev_co_u32": ("uu>uB", lambda a, b: (b - a, b < a)),
    "v_addc_co_u32": ("uuB>uB", lambda a, b, c: (a + b + c, (a + b < a) | (c & (a + b == LOW32)))),
    "v_subb_co_u32": ("uuB>uB", lambda a, b, c: (a - b - c, (a < b) | (c & (a == b)))),
    "v_subbrev_co_u32": ("uuB>uB", lambda a, b, c: (b - a - c, (b < a) | (c & (a == b)))),
    "v_mad_u64_u32": ("uuU>UB", _multiply_add_64),
    "v_mad_i64_i32": ("iiI>UB", _multiply_add_signed),
    "v_mul_lo_u32": ("uu>u", lambda a, b: a * b),
    "v_mul_hi_u32": ("uu>u", lambda a, b: ((wide(a) * wide(b)) >> u64(32)).astype(u32)),
    "v_mul_u32_u24": ("uu>u", lambda a, b: (a & _LOW24) * (b & _LOW24)),
    "v_mad_u32_u24": ("uuu>u", lambda a, b, c: (a & _LOW24) * (b & _LOW24) + c),
    "v_mul_i32_i24": ("ii>i", lambda a, b: _s24(a) * _s24(b)),
    "v_mad_i32_i24": ("iii>i", lambda a, b, c: _s24(a) * _s24(b) + c),
    "v_min_i32": ("ii>i", np.minimum),
    "v_max_i32": ("ii>i", np.maximum),
    "v_max3_i32": ("iii>i", lambda a, b, c: np.maximum(np.maximum(a, b), c)),
    "v_med3_i32": ("iii>i", lambda a, b, c: np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))),
    # bits
    "v_bfrev_b32": ("u>u", _reversed),
    "v_not_b32": ("u>u", lambda a: ~np.asarray(a)),
    "v_and_b32": ("uu>u", lambda a, b: a & b),
    "v_or_b32": ("uu>u", lambda a, b: a | b),
    "v_xor_b32": ("uu>u", lambda a, b: a ^ b),
    "v_and_or_b32": ("uuu>u", lambda a, b, c: (a & b) | c),
    "v_or3_b32": ("uuu>u", lambda a, b, c: a | b | c),
    "v_xad_u32": ("uuu>u", lambda a, b, c: (a ^ b) + c),
    "v_bfi_b32": ("uuu>u", lambda a, b, c: (a & b) | (~a & c)),
    "v_lshlrev_b16": ("uu>u", lambda a, b: (b << (a & u32(15))) & u32(0xFFFF)),
    "v_lshlrev_b32": ("uu>u", lambda a, b: b << (a & u32(31))),
    "v_lshrrev_b32": ("uu>u", lambda a, b: b >> (a & u32(31))),
    "v_ashrrev_i32": ("ui>i", lambda a, b: b >> (a & u32(31)).astype(i32)),
    "v_lshlrev_b64": ("uU>U", lambda a, b: b << wide(a & u32(63))),
    "v_lshl_add_u32": ("uuu>u", lambda a, b, c: (a << (b & u32(31))) + c),
    "v_lshl_or_b32": ("uuu>u", lambda a, b, c: (a << (b & u32(31))) | c),
    "v_add_lshl_u32": ("uuu>u", lambda a, b, c: (a + b) << (c & u32(31))),
    "v_lshl_add_u64": ("UuU>U", lambda a, b, c: (a << wide(b & u32(63))) + c),
    "v_bfe_u32": ("uuu>u", lambda a, b, c: (a >> (b & u32(31))) & ((u32(1) << (c & u32(31))) - u32(1))),
    "v_bfe_i32": ("iii>i", lambda a, b, c: (a << (32 - (b & 31) - (c & 31))) >> (32 - (c & 31))),
    "v_perm_b32": ("uuu>u", _permute_bytes),
    "v_pack_b32_f16": ("uu>u", lambda a, b: (a & u32(0xFFFF)) | (b << u32(16))),
    "v_pk_add_f16": ("uu>u", _add_halves),
    # fp32
    "v_add_f32": ("ff>f", lambda a, b: a + b),
    "v_sub_f32": ("ff>f", lambda a, b: a - b),
    "v_subrev_f32": ("ff>f", lambda a, b: b - a),
    "v_mul_f32": ("ff>f", lambda a, b: a * b),
    "v_max_f32": ("ff>f", np.fmax),
    "v_min_f32": ("ff>f", np.fmin),
    "v_max3_f32": ("fff>f", lambda a, b, c: np.fmax(np.fmax(a, b), c)),
    "v_fma_f32": ("fff>f", fma),
    "v_fmac_f32": ("ffD>f", fma),
    "v_fmamk_f32": ("fff>f", fma),
    "v_madmk_f32": ("fff>f", lambda a, k, b: flush(flush(flush(a) * k) + flush(b))),
    "v_dot2c_f32_f16": ("uuD>f", lambda a, b, d: half(a) * half(b) + half(a, 1) * half(b, 1) + d),
    **dict.fromkeys(("v_rcp_f32", "v_rcp_iflag_f32"), ("f>f", lambda a: flush(1 / flush(a)))),
    "v_rsq_f32": ("f>f", lambda a: flush(1 / np.sqrt(flush(a).astype(f64)))),
    "v_sqrt_f32": ("f>f", lambda a: np.sqrt(flush(a))),
    "v_exp_f32": ("f>f", lambda a: flush(np.exp2(flush(a).astype(f64)))),
    "v_log_f32": ("f>f", lambda a: np.log2(flush(a).astype(f64)).astype(f32)),
    "v_ldexp_f32": ("fi>f", lambda a, b: np.ldexp(np.asarray(a).astype(f64), b).astype(f32)),
    "v_trunc_f32": ("f>f", np.trunc),
    "v_div_scale_f32": ("fff>fB", _div_scale),
    "v_div_fmas_f32": ("fffB>f", _div_fmas),  # the flag is vcc, which no operand names
    "v_div_fixup_f32": ("fff>f", _div_fixup),
    "v_cmp_class_f32": ("fu>B", _is_of_class),
    # fp64
    "v_add_f64": ("dd>d", lambda a, b: a + b),
    "v_cvt_f64_f32": ("f>d", lambda a: np.asarray(a).astype(f64)),
    "v_cvt_f32_f64": ("d>f", lambda a: np.asarray(a).astype(f32)),
    # conversions
    "v_cvt_f32_u32": ("u>f", lambda a: np.asarray(a).astype(f32)),
    "v_cvt_u32_f32": ("f>u", _to_unsigned),
    "v_cvt_f16_f32": ("f>u", from_half),
    "v_cvt_f32_f16": ("h>f", lambda a: a),
}
_COMPARISONS: dict[str, Callable] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lg": lambda a, b: a != b,
    "o": lambda a, b: ~np.isnan(a) & ~np.isnan(b),
    "u": lambda a, b: np.isnan(a) | np.isnan(b),
}
_TYPES = {"f32": "f", "i32": "i", "u32": "u", "i64": "I", "u64": "U"}
for _test, _function in _COMPARISONS.items():
    for _type, _kind in _TYPES.items():
        VECTOR[f"v_cmp_{_test}_{_type}"] = (f"{_kind}{_kind}>B", _function)
VECTOR["v_cmp_ne_u16"] = ("uu>B", lambda a, b: (a ^ b) & u32(0xFFFF) != 0)
for _byte in range(4):
    VECTOR[f"v_cvt_f32_ubyte{_byte}"] = ("u>f", lambda a, n=8 * _byte: np.asarray(a >> u32(n) & u32(255)).astype(f32))
# two results, of the two registers of a pair
PACKED = {"v_pk_mul_f32": lambda a, b: a * b, "v_pk_add_f32": lambda a, b: a + b, "v_pk_fma_f32": fma}


def _fits(value: int) -> bool:
    return -(2**31) <= value < 2**31


def _signed16(short: int) -> int:
    """A constant of 16 bits."""
    return (short & 0xFFFF) - ((short & 0x8000) << 1)


def _bit_field(value: int, field: int, is_signed: bool) -> tuple[int, bool]:
    offset, width = field & 31, field >> 16 & 127
    bits = value >> offset & (1 << width) - 1
    bits -= (1 << width) if is_signed and width and bits >> width - 1 else 0
    return bits, bits != 0


# integers of Python, which the machine cuts to size; the second result is scc
SCALAR: dict[str, tuple[str, Callable]] = {
    "s_mov_b32": ("u>u", lambda a: a),
    "s_mov_b64": ("U>U", lambda a: a),
    "s_movk_i32": ("u>u", _signed16),
    "s_brev_b32": ("u>u", lambda a: int(f"{a:032b}"[::-1], 2)),
    "s_not_b32": ("u>us", lambda a: (~a, ~a & LOW32 != 0)),
    "s_add_u32": ("uu>us", lambda a, b: (a + b, a + b > LOW32)),
    "s_addc_u32": ("uus>us", lambda a, b, c: (a + b + c, a + b + c > LOW32)),
    "s_sub_u32": ("uu>us", lambda a, b: (a - b, b > a)),
    "s_subb_u32": ("uus>us", lambda a, b, c: (a - b - c, b + c > a)),
    "s_add_i32": ("ii>us", lambda a, b: (a + b, not _fits(a + b))),
    "s_addk_i32": ("Du>us", lambda a, k: (a + _signed16(k), not _fits(a + _signed16(k)))),
    "s_sub_i32": ("ii>us", lambda a, b: (a - b, not _fits(a - b))),
    "s_mul_i32": ("uu>u", lambda a, b: a * b),
    "s_mul_hi_u32": ("uu>u", lambda a, b: a * b >> 32),
    "s_mul_hi_i32": ("ii>u", lambda a, b: a * b >> 32),
    "s_mulk_i32": ("Du>u", lambda a, k: a * _signed16(k)),
    "s_abs_i32": ("i>us", lambda a: (abs(a), a != 0)),
    "s_min_i32": ("ii>us", lambda a, b: (min(a, b), a <= b)),
    "s_max_i32": ("ii>us", lambda a, b: (max(a, b), a >= b)),
    "s_ff1_i32_b32": ("u>u", lambda a: (a & -a).bit_length() - 1),
    "s_ashr_i64": ("Iu>Us", lambda a, b: (a >> (b & 63) & LOW64, a >> (b & 63) != 0)),
    "s_ashr_i32": ("iu>us", lambda a, b: (a >> (b & 31), a >> (b & 31) != 0)),
    "s_lshr_b32": ("uu>us", lambda a, b: (a >> (b & 31), a >> (b & 31) != 0)),
    "s_lshl_b32": ("uu>us", lambda a, b: (a << (b & 31), (a << (b & 31)) & LOW32 != 0)),
    "s_lshl_b64": ("Uu>Us", lambda a, b: (a << (b & 63), (a << (b & 63)) & LOW64 != 0)),
    "s_bfe_u32": ("uu>us", lambda a, b: _bit_field(a, b, False)),
    "s_bfe_i32": ("uu>us", lambda a, b: _bit_field(a, b, True)),
    "s_bitcmp1_b32": ("uu>s", lambda a, b: a >> (b & 31) & 1),
    "s_cselect_b32": ("uus>u", lambda a, b, c: a if c else b),
    "s_cselect_b64": ("UUs>U", lambda a, b, c: a if c else b),
}
LOGIC: dict[str, Callable] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "andn2": lambda a, b: a & ~b & LOW64,
}
for _name, _function in LOGIC.items():
    for _bits, _kind in (("32", "u"), ("64", "U")):
        SCALAR[f"s_{_name}_b{_bits}"] = (
            f"{_kind}{_kind}>{_kind}s",
            lambda a, b, f=_function: (f(a, b), f(a, b) != 0),
        )
for _test, _function in _COMPARISONS.items():
    for _type, _kind in _TYPES.items():
        SCALAR[f"s_cmp_{_test}_{_type}"] = (f"{_kind}{_kind}>s", _function)
    SCALAR[f"s_cmpk_{_test}_u32"] = ("uu>s", _function)
for _shift in range(1, 5):
    SCALAR[f"s_lshl{_shift}_add_u32"] = (
        "uu>us",
        lambda a, b, n=_shift: ((a << n) + b, (a << n) + b > LOW32),
    )


def matrix_shape(name: str) -> tuple[int, str]:
    """-> K, type of A and B, of the MFMA instructions that are known: M and N are 16."""
    found = re.fullmatch(r"v_mfma_f32_16x16x(4|8|16)_?(bf16_1k|bf16|f16|f32)", name)
    if found is None:
        raise Unknown("no such matrix instruction here")
    return int(found[1]), found[2].removesuffix("_1k")
