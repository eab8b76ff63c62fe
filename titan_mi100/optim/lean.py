"""AdamW with smaller state and master weights than fp32. The update has the same bits in every layout and device.

Two rules make it so:
1. The noise of stochastic rounding is a function of the seed, the step, the parameter's name and the element's number
   in the full parameter. It does not depend on the shard.
2. Sums and products are separate fp32 operations, whose rounding IEEE 754 defines. Fused operations, as `torch.lerp`
   may use, round differently on other devices, or at the end of a tensor.

So equal gradients give equal updates on replicas, on both copies of a tied weight, and after a resume in another
layout.

If nothing is smaller than fp32 and only the state is on the host, the update is that of torch's fused AdamW: such a run
has the same bits with its state on the device.
"""

import itertools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from titan_mi100.config.settings import OptimizerConfig
from titan_mi100.device import accelerator, pinned
from titan_mi100.device.compiler import cannot_compile
from titan_mi100.device.shards import local_of, offset_of
from titan_mi100.log import log
from titan_mi100.optim.formats import block_size, split_24_bits
from titan_mi100.optim.reference_update import Scalars, Scratch, update_with_torch, update_with_torch_fused
from titan_mi100.optim.state import NamedState, Read
from titan_mi100.planning.memory import UPDATED_AT_ONCE
from titan_mi100.wording import shortened

# Elements that are updated at a time, by whether it is a GPU. The buffers fit into a CPU's caches.
ELEMENTS = {False: 1 << 17, True: UPDATED_AT_ONCE}

Kernel = Callable[[dict[str, Tensor], int, int, Scalars, str], None]  # see triton_update.update


class LeanAdamW(NamedState):
    """AdamW (Loshchilov & Hutter, 2019) with less state.

    State per parameter, sharded as the parameter is:
        exp_avg, exp_avg_sq: the moments, in fp32, or in bf16 with stochastic rounding, or as 8-bit codes (formats.py).
            With 8-bit codes exp_avg_sq holds the root of the second moment. Vectors, and matrices whose rows are too
            short for blocks, have fp32 moments instead of codes.
        exp_avg_exponent, exp_avg_sq_exponent: the blocks' exponents of the 8-bit codes.
        residual: int8, with `master = "24bit"`: the parameter holds the upper 16 bits of a weight, this the next 8. The
            24 bits are rounded stochastically, because an update is often smaller than half of the last one.
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
        groups: parameter groups, see build_optimizer. A parameter is in the dtype of `config.master`, or in fp32.
        seed: seeds stochastic rounding.
        device: the device of the computation.
        on_host: gradients in host memory, by parameter. The state of these parameters is in host memory too. It is
            copied to the device in pieces; two streams alternate, so that copies overlap with computation.
        """
        defaults = {"betas": (config.beta1, config.beta2), "eps": config.eps}
        super().__init__(groups, defaults)
        self._config, self._in_fp32, self._seed = config, replace(config, master="fp32"), seed
        self._on_host = on_host or {}
        self._device = torch.get_device_module(device)
        # The first lane runs on the current stream, for state on the device; the two others alternate, see update.
        self._lanes = [_Lane(), *(_Lane(self._device.Stream()) for _ in range(2 if self._on_host else 0))]
        self._turns = itertools.cycle(self._lanes[1:])
        self._kernel: Kernel | None = None
        if accelerator.is_cuda(device) and config.is_lean:
            self._kernel, how = choose_kernel(config, device)
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
                wide = torch.promote_types(parameter.dtype, torch.float32)
                dtype = torch.bfloat16 if self._config.state == "bf16" else wide
                state[name] = _like(parameter, dtype, stays)
        if self._config.master == "24bit" and parameter.dtype == torch.bfloat16:
            state["residual"] = _like(parameter, torch.int8, stays)

    def keep_residuals(self, read: Read) -> Read:
        """See NamedState. Of a weight with a residual, the result returns the upper 16 bits; the next 8 become the
        residual. So training starts from 24 bits of an fp32 folder.
        """
        kept = {name.rpartition(".")[0]: x for name, x in self.named_state() if name.endswith(".residual")}

        def upper(name: str, shape: torch.Size, offset: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
            part = read(name, shape, offset, size)
            if name not in kept:
                return part
            weight, residual = split_24_bits(part.float())
            local_of(kept[name]).copy_(residual)
            return weight

        return upper

    @torch.no_grad()
    def update(self, factor: float | None, draft_factor: float | None = None) -> None:
        """Do one step; see NamedState.update."""
        beside = [lane.stream for lane in self._lanes if lane.stream is not None]
        for stream in beside:  # the gradients are complete before the copy streams read them
            stream.wait_stream(self._device.current_stream())
        for group in self.param_groups:
            if (own := draft_factor if group.get("is_draft") else factor) is None:
                continue
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if not self.state[parameter]:
                    self._start(parameter)
                self.state[parameter]["step"] += 1
                step = int(self.state[parameter]["step"])
                seed = zlib.crc32(f"{self._seed}/update/{step}/{name}".encode())
                # crc32 is unsigned; the int32 arithmetic of the noise needs the same bits as a signed number
                numbers = Scalars(group, step, own, seed - (1 << 32) if seed >> 31 else seed)
                self._update(parameter, numbers)
        if beside:
            self._device.synchronize()  # the host may read its memory next, for a checkpoint

    def _update(self, parameter: nn.Parameter, numbers: Scalars) -> None:
        local, (row, column), columns = self._rows_of(parameter), _offset(parameter), parameter.shape[-1]
        if local["weight"].numel():
            self._update_local(local, row * columns + column, columns, numbers, parameter in self._on_host)

    def _rows_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """This rank's shards of a parameter, its gradient and its state, each as a matrix (rows, columns)."""
        gradient = self._on_host.get(parameter, parameter.grad)
        assert gradient is not None, "a parameter has no gradient"
        tensors = {"weight": parameter.detach(), "gradient": gradient, **self.state[parameter]}
        del tensors["step"]
        return {name: _as_rows(tensor) for name, tensor in tensors.items()}

    def _update_local(
        self, local: dict[str, Tensor], first: int, whole: int, numbers: Scalars, is_on_host: bool
    ) -> None:
        """Update this rank's shard of a parameter, some rows at a time.

        Args:
            first: number of the shard's first element within the full parameter.
            whole: columns of the full parameter.
        """
        rows, columns = local["weight"].shape
        size = rows_at_a_time(accelerator.is_gpu(local["weight"].device), columns, is_on_host)
        # The kernel needs no buffers: it updates all rows at once unless they have to be copied from the host.
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

    def _update_rows(self, part: dict[str, Tensor], number: int, whole: int, numbers: Scalars, lane: "_Lane") -> None:
        config = self._config if part["weight"].dtype == torch.bfloat16 else self._in_fp32
        if not self._config.is_lean:
            update_with_torch_fused(part, numbers)
        elif self._kernel is not None:
            self._kernel(part, number, whole, numbers, config.master)
        else:
            update_with_torch(part, number, whole, numbers, config, lane.scratch(part["weight"]))


def rows_at_a_time(is_gpu: bool, columns: int, is_on_host: bool) -> int:
    """Number of rows that are updated at a time.

    Args:
        is_gpu: whether the update runs on a GPU.
        is_on_host: the state is copied from the host; two pieces are in flight then, so each is half as large.
    """
    return max(1, (ELEMENTS[is_gpu] >> is_on_host) // columns)


def choose_kernel(config: OptimizerConfig, device: torch.device) -> tuple[Kernel | None, str]:
    """Choose the Triton kernel if it works on this device.

    It is tried on random numbers, and must give exactly the bits of `update_with_torch`.

    Returns:
        The kernel, or None for `update_with_torch`; and a description for the log.
    """
    try:
        from titan_mi100.optim import triton_update
    except ImportError as error:
        return None, f"plain torch operations: {error}"
    results = []
    # The same seed for both. Three steps, so that the second one reads state that the kernel has written.
    for kernel in (None, triton_update.update):
        draw = torch.Generator().manual_seed(1)
        weights = torch.randn(8, 1024, generator=draw), torch.randn(1000, generator=draw)
        dtype = torch.float32 if config.master == "fp32" else torch.bfloat16
        named = [(str(number), nn.Parameter(weight.to(device, dtype))) for number, weight in enumerate(weights)]
        named.append(("fp32", nn.Parameter(weights[1].to(device, torch.float32))))  # some weights stay so
        names, parameters = zip(*named, strict=True)
        group = {"params": parameters, "param_names": names, "lr": 1e-3, "weight_decay": 0.1}
        optimizer = LeanAdamW([group], config, 1, torch.device("cpu"))
        optimizer._kernel = kernel
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=draw).to(device, parameter.dtype)
            try:
                optimizer.update(0.5)
            except Exception as error:  # Triton builds its launcher with the C compiler at the first call
                reason = shortened(" ".join(str(error).split()) or type(error).__name__, 300)
                reason = ": ".join(filter(None, (reason, *cannot_compile())))
                log.warning(f"the optimizer's Triton kernel cannot be used, slower operations replace it: {reason}")
                return None, "plain torch operations"
        results.append([*(p.detach() for p in parameters), *(tensor for _, tensor in optimizer.named_state())])
    if all(torch.equal(one, other) for one, other in zip(*results, strict=True)):
        return triton_update.update, "one Triton kernel"
    log.warning("the optimizer's Triton kernel gives other bits than plain torch operations; it is not used")
    return None, "plain torch operations"


class _Lane:
    """Reusable buffers for updates, and optionally a stream of their own.

    The buffers are reused because allocating them costs more than many of the operations. The stream lets copies of one
    lane overlap with the computation of another.
    """

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream
        self._size = 0
        self._copies: dict[tuple[str, torch.dtype], Tensor] = {}

    def scratch(self, weight: Tensor) -> Scratch:
        """Buffers of the weight's shape."""
        count = weight.numel()
        if self._size < count:
            self._size = count
            self._floats = torch.empty(5, count, device=weight.device)
            self._integers = torch.empty(3, count, dtype=torch.int32, device=weight.device)
            self._double = torch.empty(count, dtype=torch.float64, device=weight.device)
        buffers = (*self._floats, *self._integers, self._double)
        return Scratch(*(x[:count].view(weight.shape) for x in buffers))

    def bring(self, part: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors to the device, except the weight, which is there already."""
        here = {"weight": part["weight"]}
        for name in part.keys() - here.keys():
            there = part[name]
            kind, count = (name, there.dtype), there.numel()
            if kind not in self._copies or self._copies[kind].numel() < count:
                self._copies[kind] = torch.empty(count, dtype=there.dtype, device=part["weight"].device)
            here[name] = self._copies[kind][:count].view(there.shape).copy_(there, non_blocking=True)
        return here


def _like(parameter: nn.Parameter, dtype: torch.dtype, stays: bool, block: int = 1) -> Tensor:
    """Zeros, sharded as the parameter is.

    Args:
        stays: whether the zeros are on the parameter's device; False: they are in page-locked host memory.
        block: one element per `block` columns.
    """
    local = local_of(parameter)
    *rows, columns = local.shape
    assert columns % block == 0, "a block of the optimizer's state is cut: tensor parallel of more than 8 ranks?"
    size = (*rows, columns // block)
    device = local.device
    zeros = torch.zeros(size, dtype=dtype, device=device) if stays else pinned.page_locked_zeros(size, dtype, device)
    if not isinstance(parameter, DTensor):
        return zeros
    *rows, columns = parameter.shape
    shape = torch.Size((*rows, columns // block))
    # The global shape is given, because shards can be uneven: it does not follow from the local one.
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, meta)
    return DTensor(zeros, spec, requires_grad=False)  # type: ignore[call-arg]


def _offset(parameter: nn.Parameter) -> tuple[int, int]:
    """Row and column of the full parameter at which this rank's shard begins; a vector is a single row."""
    offset = offset_of(parameter)
    return (0, offset[0]) if len(offset) == 1 else (offset[0], offset[1])


def _as_rows(tensor: Tensor) -> Tensor:
    local = local_of(tensor)
    return local[None] if local.ndim == 1 else local
