"""Offload to host memory during a step: gradients are accumulated there, and inputs of blocks wait there."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from titan_mi100.device import pinned
from titan_mi100.model.decoder import CausalLM
from titan_mi100.parallel.distributed import Gradients, local_part, sum_of_squares

_ON_THE_WAY = 1 << 30  # bytes of gradients that may wait on the device for their copy to the host
_PIECE = 1 << 24  # elements of a sum that are copied back to the device at a time


@dataclass
class _Sum:
    """The accumulated gradient of one parameter."""

    values: Tensor  # this rank's shard, in host memory
    has_value: bool = False  # this step's first microbatch was added; before, `values` are those of the last step
    is_first: bool = True  # this rank is the first of those that hold the same shard
    squares: Tensor | None = None  # 0-dim fp64, on the device: sum of squares of the sum so far


class HostGradients(dict[nn.Parameter, Tensor]):
    """Gradients of matrices, accumulated in host memory: parameter -> this rank's shard.

    A hook takes each gradient as soon as backward has computed it. A second stream copies the host's sum to the device,
    adds the gradient there, and copies the sum back. So the result has the same bits as accumulation on the device, and
    the CPU does no arithmetic. If too many gradients wait for this, backward waits.
    """

    def __init__(self, parts: Sequence[CausalLM], device: torch.device) -> None:
        """Args:
        parts: the model's parts, materialised, on `device`. Gradients of vectors stay on the device.
        """
        super().__init__()
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream()
        self._waiting: deque[tuple[Any, Tensor]] = deque()
        self._sums: dict[nn.Parameter, _Sum] = {}
        for norm in [part.model.norm for part in parts if part.model.norm is not None]:
            # Finish all copies, and free their gradients, before the head allocates its large buffers.
            norm.register_forward_pre_hook(lambda *_: self._wait(0))
        for parameter in [parameter for part in parts for parameter in part.parameters() if parameter.requires_grad]:
            if parameter.ndim > 1:
                shape = tuple(local_part(parameter.detach())[0].shape)
                self[parameter] = pinned.page_locked_zeros(shape, parameter.dtype, device)
                self._sums[parameter] = _Sum(self[parameter])
                parameter.register_post_accumulate_grad_hook(self._take)
            elif isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(_copy_out_of_group_buffer)

    def begin_step(self) -> None:
        """Start a new step: the next gradient overwrites the sum."""
        for host_sum in self._sums.values():
            host_sum.has_value = False

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        """Autograd's hook: move a gradient to the host's sum without waiting for the copy."""
        assert parameter.grad is not None
        host_sum = self._sums[parameter]
        gradient, host_sum.is_first = local_part(parameter.grad)
        parameter.grad = None
        self._wait(max(0, _ON_THE_WAY - gradient.nbytes))
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            self._add(gradient, host_sum)
            event = self._module.Event()
            event.record()
        # Keep a reference until the event: otherwise torch would reuse the memory while the second stream reads it.
        self._waiting.append((event, gradient))

    def add_rows(self, parameter: nn.Parameter, rows: Tensor) -> None:
        """Add a sparse gradient to a sum that has a value. Only on a CPU, see unsharded.TiedRows."""
        host_sum = self._sums[parameter]
        host_sum.values += rows
        host_sum.squares = sum_of_squares(host_sum.values)

    def _wait(self, left: int) -> None:
        """Block until at most `left` bytes of gradients wait for their copy. The device still has queued work."""
        while self._waiting and sum(gradient.nbytes for _, gradient in self._waiting) > left:
            self._waiting[0][0].synchronize()
            self._waiting.popleft()

    def _add(self, gradient: Tensor, entry: _Sum) -> None:
        """Add a gradient, (rows, columns) on the device, to the host's sum, some rows at a time."""
        rows = max(1, _PIECE // max(1, gradient.shape[1]))
        for here, there in zip(gradient.split(rows), entry.values.split(rows), strict=True):
            if entry.has_value:
                before = torch.empty_like(here)
                here.add_(before.copy_(there, non_blocking=True))
            there.copy_(here, non_blocking=True)
        # `gradient` is the sum now. Its norm is taken as without offload: clipping must have the same factor.
        entry.has_value, entry.squares = True, sum_of_squares(gradient)

    def measure(
        self, others: Gradients, copies: Collection[nn.Parameter], measured: Collection[nn.Parameter]
    ) -> Gradients:
        """Combine these gradients with those on the device. Later operations of the device wait for the sums.

        Args:
            others: the gradients that stayed on the device.
            copies: parameters that another rank counts in the norm.
            measured: the parameters whose gradients are wanted.
        """
        self._waiting.clear()
        self._module.current_stream().wait_stream(self._stream)
        counted_elsewhere, asked = ({id(parameter) for parameter in group} for group in (copies, measured))
        every: list[Tensor] = []
        counted = [others.squares]
        for parameter, host_sum in self._sums.items():
            if id(parameter) not in asked:
                continue
            assert host_sum.has_value and host_sum.squares is not None, "a parameter has no gradient"
            every.append(host_sum.squares)
            if host_sum.is_first and id(parameter) not in counted_elsewhere:
                counted.append(host_sum.squares)
        finite = others.finite & torch.stack(every).sum().isfinite()  # a sum of squares is finite iff all values are
        return Gradients(torch.stack(counted).sum(), finite)


def _copy_out_of_group_buffer(parameter: nn.Parameter) -> None:
    """Copy a vector's gradient: FSDP2 makes it a view of its group's buffer, and the view keeps that buffer alive."""
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


def inputs_on_host(recomputed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a checkpointed function: the inputs that autograd saves for the recomputation wait in host memory."""

    def run(*inputs: Any) -> Tensor:
        with saved_tensors_hooks(_to_host, _from_host):
            return recomputed(*inputs)

    return run


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor] | Tensor:
    # Not the rotary tables: all blocks share them. Not the empty placeholder that torch 2.8 saves.
    if not tensor.requires_grad or not tensor.numel():
        return tensor
    return tensor.device, pinned.pinned_like(tensor).copy_(tensor.detach(), non_blocking=True)


def _from_host(kept: tuple[torch.device, Tensor] | Tensor) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, there = kept
    return torch.empty_like(there, device=device).copy_(there, non_blocking=True)
