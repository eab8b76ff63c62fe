"""AdamW whose state and master weights take fewer bytes than fp32: one update in every layout and on every device.

What is rounded at random is rounded by noise that is a function of the seed, the step, the parameter's name and the
element's number in the whole parameter. Sums and products are single operations of fp32, which IEEE 754 rounds in one
way only: a kernel that fuses two of them, as `torch.lerp` may, gives other bits on other devices, or at the end of a
tensor. So equal gradients give equal updates, on replicas, on both copies of a tied weight, and after a resume in
another layout.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_mi100.config.settings import OptimizerConfig
from titan_mi100.logging import log
from titan_mi100.optim import host
from titan_mi100.optim.formats import SIGNED, UNSIGNED, Format, block_size, decode, draw_noise, encode, part_of_noise
from titan_mi100.optim.state import NamedState

ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 22}  # that are worked on at a time: what caches hold; 128 MiB of buffers

Kernel = Callable[[dict[str, Tensor], int, int, "_Numbers", str], None]  # see fused.update


class LeanAdamW(NamedState):
    """AdamW (Loshchilov & Hutter, 2019) with less state.

    Per parameter it keeps, each sharded as the parameter is:
        exp_avg, exp_avg_sq: the moments in fp32; or in bf16, rounded at random; or as codes of 8 bits, see formats.py,
            with exp_avg_exponent and exp_avg_sq_exponent: there exp_avg_sq is the root of the second moment. Vectors,
            and matrices with rows too short for blocks, have fp32 instead of codes.
        residual: int8, the next 8 bits of weights of which the parameter itself holds 16 (`master = "24bit"`).
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        config: OptimizerConfig,
        seed: int,
        device: torch.device,
        on_host: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        """Args:
        groups: of parameters in fp32, or in bf16 unless `config.master` is fp32; see build_optimizer.
        on_host: of some parameters the gradients, in the host's memory. Their state is kept there too, and comes to
            the device in pieces: two streams take turns, so that one piece is worked on while others move.
        """
        defaults = {"betas": (config.beta1, config.beta2), "eps": config.eps}
        super().__init__(groups, defaults)
        self._config, self._seed = config, seed
        self._on_host = on_host or {}
        self._device = torch.get_device_module(device)
        self._lanes = [_Lane(), *(_Lane(self._device.Stream()) for _ in range(2 if self._on_host else 0))]
        self._turns = itertools.cycle(self._lanes[1:])
        self._kernel: Kernel | None = None
        if device.type == "cuda":
            self._kernel, how = sound_kernel(config, device)
            log.info(f"optimizer: AdamW, state {config.state}, weights {config.master}, {how}")

    def _start(self, parameter: nn.Parameter) -> None:
        state, stays = self.state[parameter], parameter not in self._on_host
        state["step"] = torch.tensor(0.0)
        block = block_size(parameter.shape[-1]) if parameter.ndim == 2 and self._config.state == "8bit" else 0
        for name in ("exp_avg", "exp_avg_sq"):
            if block:
                state[name] = _like(parameter, torch.uint8, stays)
                state[f"{name}_exponent"] = _like(parameter, torch.uint8, stays, block)
            else:
                dtype = torch.bfloat16 if self._config.state == "bf16" else torch.float32
                state[name] = _like(parameter, dtype, stays)
        if self._config.master == "24bit":
            state["residual"] = _like(parameter, torch.int8, stays)

    @torch.no_grad()
    def update(self, factor: float) -> None:
        """One step. Args: factor: what gradients are multiplied with first."""
        beside = [lane.stream for lane in self._lanes if lane.stream is not None]
        for stream in beside:
            stream.wait_stream(self._device.current_stream())
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if not self.state[parameter]:
                    self._start(parameter)
                self.state[parameter]["step"] += 1
                step = int(self.state[parameter]["step"])
                seed = zlib.crc32(f"{self._seed}/update/{step}/{name}".encode())
                numbers = _Numbers(group, step, factor, seed - (1 << 32) if seed >> 31 else seed)
                self._update(parameter, numbers)
        if beside:
            self._device.synchronize()  # the host may read its memory next, for a checkpoint

    def _update(self, parameter: nn.Parameter, numbers: "_Numbers") -> None:
        local, (row, column), whole = self._rows_of(parameter), _offset(parameter), parameter.shape[-1]
        if local["weight"].numel():
            self._update_local(local, row * whole + column, whole, numbers, parameter in self._on_host)

    def _rows_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """What this rank holds of a parameter, its gradient and its state, as matrices."""
        gradient = self._on_host.get(parameter, parameter.grad)
        assert gradient is not None, "a parameter has no gradient"
        tensors = {"weight": parameter.detach(), "gradient": gradient, **self.state[parameter]}
        del tensors["step"]
        return {name: _as_rows(tensor) for name, tensor in tensors.items()}

    def _update_local(
        self, local: dict[str, Tensor], first: int, whole: int, numbers: "_Numbers", is_on_host: bool
    ) -> None:
        """This rank's part of a parameter, some rows at a time; by the kernel all that are on the device at once.

        Args: first: number of the first element. whole: columns of the whole parameter.
        """
        rows, columns = local["weight"].shape
        size = rows_at_a_time(local["weight"].device.type, columns, is_on_host)
        size = rows if self._kernel is not None and not is_on_host else size
        for start in range(0, rows, size):
            part = {name: tensor[start : start + size] for name, tensor in local.items()}
            number = first + start * whole
            if not is_on_host:
                self._update_rows(part, number, whole, numbers, self._lanes[0])
                continue
            lane = next(self._turns)
            with self._device.stream(lane.stream):
                here = lane.bring(part)
                self._update_rows(here, number, whole, numbers, lane)
                for name in part.keys() - {"weight", "gradient"}:
                    part[name].copy_(here[name], non_blocking=True)

    def _update_rows(
        self, part: dict[str, Tensor], number: int, whole: int, numbers: "_Numbers", lane: "_Lane"
    ) -> None:
        if self._kernel is not None:
            self._kernel(part, number, whole, numbers, self._config.master)
        else:
            update_plainly(part, number, whole, numbers, self._config, lane.scratch(part["weight"]))


def rows_at_a_time(device_type: str, columns: int, is_on_host: bool) -> int:
    """Args: is_on_host: two such parts are worked on at a time, and are copied first."""
    return max(1, (ELEMENTS[device_type] >> is_on_host) // columns)


def sound_kernel(config: OptimizerConfig, device: torch.device) -> tuple[Kernel | None, str]:
    """The Triton kernel if it works here, and in words what updates.

    It is tried on random numbers, and must leave the bits that `update_plainly` does.
    """
    try:
        from titan_mi100.optim import fused
    except ImportError as error:
        return None, f"plain torch operations: {error}"
    results = []
    for kernel in (None, fused.update):
        draw = torch.Generator().manual_seed(1)
        weights = torch.randn(8, 1024, generator=draw), torch.randn(1000, generator=draw)
        dtype = torch.float32 if config.master == "fp32" else torch.bfloat16
        named = [(str(number), nn.Parameter(weight.to(device, dtype))) for number, weight in enumerate(weights)]
        names, parameters = zip(*named, strict=True)
        group = {"params": parameters, "param_names": names, "lr": 1e-3, "weight_decay": 0.1}
        optimizer = LeanAdamW([group], config, 1, torch.device("cpu"))
        optimizer._kernel = kernel
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=draw).to(device, dtype)
            optimizer.update(0.5)
        results.append([*(p.detach() for p in parameters), *(value for _, value in optimizer.named_state())])
    if all(torch.equal(one, other) for one, other in zip(*results, strict=True)):
        return fused.update, "one Triton kernel"
    log.warning("the Triton kernel of the optimizer gives other bits than plain torch operations, and is not used")
    return None, "plain torch operations"


class _Lane:
    """Memory that every update uses again, where allocating it anew would take longer than many operations; and a
    stream of operations on it, if they are not to wait for all others.
    """

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream
        self._size = 0
        self._copies: dict[tuple[str, torch.dtype], Tensor] = {}

    def scratch(self, weight: Tensor) -> "_Scratch":
        count = weight.numel()
        if self._size < count:
            self._size = count
            self._floats = torch.empty(5, count, device=weight.device)
            self._integers = torch.empty(3, count, dtype=torch.int32, device=weight.device)
            self._double = torch.empty(count, dtype=torch.float64, device=weight.device)
        buffers = (*self._floats, *self._integers, self._double)
        return _Scratch(*(x[:count].view(weight.shape) for x in buffers))

    def bring(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weight, which is on the device, and copies of the rest there."""
        here = {"weight": part["weight"]}
        for name in part.keys() - here.keys():
            there = part[name]
            kind, count = (name, there.dtype), there.numel()
            if kind not in self._copies or self._copies[kind].numel() < count:
                self._copies[kind] = torch.empty(count, dtype=there.dtype, device=part["weight"].device)
            here[name] = self._copies[kind][:count].view(there.shape).copy_(there, non_blocking=True)
        return here


class _Scratch(NamedTuple):
    gradient: Tensor
    first: Tensor
    second: Tensor
    weight: Tensor
    other: Tensor
    noise: Tensor
    integers: Tensor
    more_integers: Tensor
    double: Tensor


class _Numbers:
    """What is the same for all elements of a parameter in a step."""

    def __init__(self, group: dict[str, Any], step: int, factor: float, key: int) -> None:
        self.beta1, self.beta2 = group["betas"]
        self.eps, self.factor, self.key = group["eps"], factor, key
        self.kept = 1 - group["lr"] * group["weight_decay"]
        self.rate = group["lr"] / (1 - self.beta1**step)
        self.correction = 1 / math.sqrt(1 - self.beta2**step)


def update_plainly(
    tensors: dict[str, Tensor], first_number: int, whole: int, numbers: _Numbers, config: OptimizerConfig, s: _Scratch
) -> None:
    """Update some rows of a parameter by operations of torch.

    Args:
        tensors: `weight`, `gradient`, and the state by its names, (rows, columns) each.
        first_number: of the first element; whole: columns of the whole parameter.
    """
    weight = tensors["weight"]
    if config.state != "fp32" or config.master == "bf16_sr":
        rows, columns = weight.shape
        lines = torch.arange(first_number, first_number + rows * whole, whole, device=weight.device)
        torch.add(
            lines.to(torch.int32)[:, None],
            torch.arange(columns, dtype=torch.int32, device=weight.device),
            out=s.noise,
        )
        draw_noise(s.noise, numbers.key, s.integers)

    gradient = s.gradient.copy_(tensors["gradient"])
    if numbers.factor != 1:
        gradient.mul_(numbers.factor)
    second = _load(tensors, "exp_avg_sq", UNSIGNED, s.second, s.integers)
    if "exp_avg_sq_exponent" in tensors:
        second.mul_(second)
    second.mul_(numbers.beta2)
    second.add_(torch.mul(gradient, gradient, out=s.other).mul_(1 - numbers.beta2))
    root = s.other.copy_(s.double.copy_(second).sqrt_())  # MKL's root of fp32 is off by a bit at times
    first = _load(tensors, "exp_avg", SIGNED, s.first, s.integers)
    first.mul_(numbers.beta1).add_(gradient.mul_(1 - numbers.beta1))

    divisor = torch.mul(root, numbers.correction, out=s.gradient).add_(numbers.eps)
    change = torch.div(first, divisor, out=divisor).mul_(numbers.rate)
    wide = _load_weight(tensors, s)
    wide.mul_(numbers.kept).sub_(change)
    _store_weight(tensors, wide, s, config.master)

    _store(tensors, "exp_avg", first, SIGNED, 16, s)
    is_coded = "exp_avg_sq_exponent" in tensors
    _store(tensors, "exp_avg_sq", root if is_coded else second, UNSIGNED, 24, s)


def _load(tensors: dict[str, Tensor], name: str, kind: Format, out: Tensor, scratch: Tensor) -> Tensor:
    """A moment in fp32, as it is kept."""
    exponents = tensors.get(f"{name}_exponent")
    return out.copy_(tensors[name]) if exponents is None else decode(tensors[name], exponents, kind, out, scratch)


def _store(tensors: dict[str, Tensor], name: str, value: Tensor, kind: Format, bit: int, s: _Scratch) -> None:
    """Args: value: lost. bit: the first of the eight bits of noise to use."""
    kept, exponents = tensors[name], tensors.get(f"{name}_exponent")
    if exponents is not None:
        encode(value, kept, exponents, kind, part_of_noise(s.noise, bit, kind.shift, s.integers), s.more_integers)
    elif kept.dtype == torch.bfloat16:
        _round_to_bf16(value, kept, part_of_noise(s.noise, bit, 16, s.integers))
    else:
        kept.copy_(value)


def _load_weight(tensors: dict[str, Tensor], s: _Scratch) -> Tensor:
    """The weight in fp32, whatever it is kept in."""
    if "residual" not in tensors:
        return s.weight.copy_(tensors["weight"])
    bits = s.weight.view(torch.int32).copy_(tensors["weight"].view(torch.int16))
    bits.bitwise_left_shift_(8).add_(tensors["residual"]).bitwise_left_shift_(8)
    return s.weight


def _store_weight(tensors: dict[str, Tensor], value: Tensor, s: _Scratch, master: str) -> None:
    """Args: value: lost."""
    weight = tensors["weight"]
    if master == "bf16_sr":
        _round_to_bf16(value, weight, torch.bitwise_and(s.noise, 0xFFFF, out=s.integers))
    elif master == "24bit":
        # The upper 24 bits as a whole number; of these the upper 16, rounded, and what is missing then: -128 to 127.
        bits = value.view(torch.int32).add_(0x80).bitwise_right_shift_(8)
        upper = torch.add(bits, 0x80, out=s.integers).bitwise_right_shift_(8)
        weight.view(torch.int16).copy_(upper)
        tensors["residual"].copy_(bits.sub_(upper.bitwise_left_shift_(8)))
    else:
        weight.copy_(value)


def _round_to_bf16(value: Tensor, out: Tensor, noise: Tensor) -> None:
    """Args: value: fp32, lost. noise: int32, from 0 to 2 ** 16."""
    out.view(torch.int16).copy_(value.view(torch.int32).add_(noise).bitwise_right_shift_(16))


def _like(parameter: nn.Parameter, dtype: torch.dtype, stays: bool, block: int = 1) -> Tensor:
    """Zeros, sharded as the parameter is, on its device or the host; of `block` columns one."""
    local = _local(parameter)
    *rows, columns = local.shape
    assert columns % block == 0, "a block of the optimizer's state is cut: tensor parallel of more than 8 ranks?"
    size = (*rows, columns // block)
    place = local.device
    zeros = torch.zeros(size, dtype=dtype, device=place) if stays else host.reserve(size, dtype, place)
    if not isinstance(parameter, DTensor):
        return zeros
    *rows, columns = parameter.shape
    shape = torch.Size((*rows, columns // block))
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, meta)
    return DTensor(zeros, spec, requires_grad=False)  # type: ignore[call-arg]


def _offset(parameter: nn.Parameter) -> tuple[int, int]:
    """Row and column of the parameter at which this rank's part begins; a vector is a single row."""
    if not isinstance(parameter, DTensor):
        return 0, 0
    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return (0, offset[0]) if len(offset) == 1 else (offset[0], offset[1])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_rows(tensor: Tensor) -> Tensor:
    local = _local(tensor)
    return local[None] if local.ndim == 1 else local
