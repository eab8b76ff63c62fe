"""The update of LeanAdamW by plain torch operations: the reference for the Triton kernel (kernels.py), bit by bit."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_mi100.config.settings import OptimizerConfig
from titan_mi100.optim.formats import (
    SIGNED,
    UNSIGNED,
    StateFormat,
    decode,
    draw_noise,
    encode,
    join_24_bits,
    part_of_noise,
)


class Scratch(NamedTuple):
    """Buffers of (rows, columns): five fp32, three int32, one fp64."""

    gradient: Tensor
    first: Tensor
    second: Tensor
    weight: Tensor
    other: Tensor
    noise: Tensor
    integers: Tensor
    more_integers: Tensor
    double: Tensor


class Scalars:
    """The scalars of an update, equal for all elements of a parameter in a step."""

    def __init__(self, group: dict[str, Any], step: int, factor: float, key: int) -> None:
        self.group, self.step = group, step
        self.beta1, self.beta2 = group["betas"]
        self.eps, self.factor, self.key = group["eps"], factor, key
        self.decay = group["lr"] * group["weight_decay"]
        self.kept = 1 - self.decay  # decoupled weight decay multiplies the weight by this
        self.rate = group["lr"] / (1 - self.beta1**step)  # learning rate with the bias correction of exp_avg
        self.correction = 1 / math.sqrt(1 - self.beta2**step)  # bias correction of the root of exp_avg_sq


def update_with_torch_fused(tensors: dict[str, Tensor], numbers: Scalars) -> None:
    """Update some rows of a parameter by the kernel of torch.optim.AdamW, with which a run has its state on the device.

    Args: see update_with_torch.
    """
    if numbers.factor != 1:
        tensors["gradient"].mul_(numbers.factor)
    lists = [[tensors[name]] for name in ("weight", "gradient", "exp_avg", "exp_avg_sq")]
    step = torch.full((), numbers.step, dtype=torch.float32, device=tensors["weight"].device)
    options: dict[str, Any] = {name: numbers.group[name] for name in ("lr", "weight_decay", "eps")}
    options |= {"beta1": numbers.beta1, "beta2": numbers.beta2, "amsgrad": False, "maximize": False}
    update: Any = torch._fused_adamw_
    update(*lists, [], [step], **options)


def update_with_torch(
    tensors: dict[str, Tensor], first_number: int, whole: int, numbers: Scalars, config: OptimizerConfig, s: Scratch
) -> None:
    """Update some rows of a parameter by plain torch operations.

    Args:
        tensors: `weight`, `gradient` and the state by its names, (rows, columns) each; exponents have fewer columns.
        first_number: number of the first element within the full parameter.
        whole: columns of the full parameter.
        s: buffers of the weight's shape.
    """
    weight = tensors["weight"]
    # Stochastic rounding uses 32 random bits per element: 0-15 for the weight, 16-23 and 24-31 for the moments.
    rows, columns = weight.shape
    lines = torch.arange(first_number, first_number + rows * whole, whole, device=weight.device)
    columns_of = torch.arange(columns, dtype=torch.int32, device=weight.device)
    torch.add(lines.to(torch.int32)[:, None], columns_of, out=s.noise)
    draw_noise(s.noise, numbers.key, s.integers)

    gradient = s.gradient.copy_(tensors["gradient"])  # fp32 from here on
    if numbers.factor != 1:
        gradient.mul_(numbers.factor)
    second = _load(tensors, "exp_avg_sq", UNSIGNED, s.second, s.integers)
    if "exp_avg_sq_exponent" in tensors:  # codes hold the root: squared, it needs half as many powers of two
        second.mul_(second)
    second.mul_(numbers.beta2)
    second.add_(torch.mul(gradient, gradient, out=s.other).mul_(1 - numbers.beta2))
    # The root is taken in fp64: MKL's fp32 root is sometimes off by one bit, and bits must agree between devices.
    root = s.other.copy_(s.double.copy_(second).sqrt_())
    first = _load(tensors, "exp_avg", SIGNED, s.first, s.integers)
    first.mul_(numbers.beta1).add_(gradient.mul_(1 - numbers.beta1))

    # s.gradient and s.other are free from here on, and are reused.
    divisor = torch.mul(root, numbers.correction, out=s.gradient).add_(numbers.eps)
    change = torch.div(first, divisor, out=divisor).mul_(numbers.rate)
    if config.master == "24bit":
        wide = join_24_bits(weight, tensors["residual"], s.weight)
        wide.sub_(_dithered(change, wide, numbers.decay, s))
    else:  # decoupled weight decay first, then the update, as in torch's AdamW
        wide = s.weight.copy_(weight).mul_(numbers.kept).sub_(change)
    _store_weight(tensors, wide, s, config.master)

    _store(tensors, "exp_avg", first, SIGNED, 16, s)
    is_coded = "exp_avg_sq_exponent" in tensors
    # The root's noise comes from other bits than the first moment's, so their rounding errors are independent.
    _store(tensors, "exp_avg_sq", root if is_coded else second, UNSIGNED, 24, s)


def _dithered(change: Tensor, wide: Tensor, decay: float, s: Scratch) -> Tensor:
    """The change of a weight, so that `wide - change` is right in the mean, though fp32 rounds the difference.

    At a learning rate of 1e-6 a change of a weight of 4 is two units in fp32's last place. So weight decay joins the
    change instead of multiplying the weight, and noise of one unit is added.

    Args:
        change: the change without weight decay; overwritten.
    """
    change.add_(torch.mul(wide, decay, out=s.more_integers.view(torch.float32)))
    power = torch.bitwise_and(wide.view(torch.int32), 0x7F800000, out=s.more_integers).view(torch.float32)
    # 1 to 2 in steps of 1 / 256, by bits 8-15 of the noise. Less its mean it is exact, and so is all but the last sum.
    noise = torch.bitwise_left_shift(s.noise, 7, out=s.integers).bitwise_and_(0x7F8000).bitwise_or_(0x3F800000)
    return change.add_(noise.view(torch.float32).sub_(1 + 127.5 / 256).mul_(2.0**-23).mul_(power))


def _load(tensors: dict[str, Tensor], name: str, kind: StateFormat, out: Tensor, scratch: Tensor) -> Tensor:
    """Read a moment into `out` as fp32."""
    exponents = tensors.get(f"{name}_exponent")
    return out.copy_(tensors[name]) if exponents is None else decode(tensors[name], exponents, kind, out, scratch)


def _store(tensors: dict[str, Tensor], name: str, value: Tensor, kind: StateFormat, bit: int, s: Scratch) -> None:
    """Write a moment in its stored format.

    Args:
        value: fp32; overwritten.
        bit: the first of the eight bits of noise to use.
    """
    kept, exponents = tensors[name], tensors.get(f"{name}_exponent")
    if exponents is not None:
        encode(value, kept, exponents, kind, part_of_noise(s.noise, bit, kind.shift, s.integers), s.more_integers)
    elif kept.dtype == torch.bfloat16:
        _round_to_bf16(value, kept, part_of_noise(s.noise, bit, 16, s.integers))
    else:
        kept.copy_(value)


def _store_weight(tensors: dict[str, Tensor], value: Tensor, s: Scratch, master: str) -> None:
    """Write the weight in its stored format.

    Args:
        value: fp32; overwritten.
    """
    weight = tensors["weight"]
    if master == "bf16_sr":
        _round_to_bf16(value, weight, torch.bitwise_and(s.noise, 0xFFFF, out=s.integers))
    elif master == "24bit":
        # bits: the upper 24 bits, rounded stochastically, as an integer; see formats.split_24_bits
        noise = torch.bitwise_and(s.noise, 0xFF, out=s.integers)
        bits = value.view(torch.int32).add_(noise).bitwise_right_shift_(8)
        upper = torch.add(bits, 0x80, out=s.integers).bitwise_right_shift_(8)
        weight.view(torch.int16).copy_(upper)
        tensors["residual"].copy_(bits.sub_(upper.bitwise_left_shift_(8)))
    else:
        weight.copy_(value)


def _round_to_bf16(value: Tensor, out: Tensor, noise: Tensor) -> None:
    """Round stochastically: add noise below the upper 16 bits, then truncate.

    Args:
        value: fp32; overwritten. noise: int32, from 0 to 2 ** 16.
    """
    out.view(torch.int16).copy_(value.view(torch.int32).add_(noise).bitwise_right_shift_(16))
