"""What leaves the device during a step: gradients, to be added up in the host's memory, and blocks' inputs."""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.optim import host
from titan_mi100.parallel.distributed import Gradients, local_part, sum_of_squares

_ON_THE_WAY = 1 << 30  # bytes of gradients that may wait on the device for their way to the host
_PIECE = 1 << 24  # elements that come back at a time, to be added to


@dataclass
class _Sum:
    values: Tensor  # of this rank's part
    is_there: bool = False
    is_first: bool = True  # of the ranks that hold the same part
    squares: Tensor | None = None


class HostGradients(Mapping[nn.Parameter, Tensor]):
    """The sums of matrices' gradients, in the host's memory: by parameter, this rank's part of each.

    Backward hands over each gradient when it is complete. A stream beside the computation adds it on the device to what
    the host holds, and writes the sum back: bit for bit what would have been added up on the device, and the host's
    processor does nothing. What waits for its way is limited; then backward waits too.
    """

    def __init__(self, parts: Sequence[Qwen3], device: torch.device) -> None:
        """Args: parts: of the model, materialised, on `device`; their vectors keep their gradients there."""
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream()
        self._waiting: deque[tuple[Any, Tensor]] = deque()
        self._sums: dict[nn.Parameter, _Sum] = {}
        for norm in [part.model.norm for part in parts if part.model.norm is not None]:
            norm.register_forward_pre_hook(lambda *_: self._wait(0))  # before the head takes much memory
        for parameter in [parameter for part in parts for parameter in part.parameters() if parameter.requires_grad]:
            if parameter.ndim > 1:
                shape = tuple(local_part(parameter.detach())[0].shape)
                self._sums[parameter] = _Sum(host.reserve(shape, parameter.dtype, device))
                parameter.register_post_accumulate_grad_hook(self._take)
            elif isinstance(parameter, DTensor):
                parameter.register_post_accumulate_grad_hook(_part_from_others)

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        return self._sums[parameter].values

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)

    def clear(self) -> None:
        """Before a step: nothing is added up yet."""
        for entry in self._sums.values():
            entry.is_there = False

    @torch.no_grad()
    def _take(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        entry = self._sums[parameter]
        gradient, entry.is_first = local_part(parameter.grad)
        parameter.grad = None
        self._wait(max(0, _ON_THE_WAY - gradient.nbytes))
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            self._add(gradient, entry)
            event = self._module.Event()
            event.record()
        self._waiting.append((event, gradient))  # which no other operation may take the memory of until then

    def _wait(self, left: int) -> None:
        """Until gradients of at most so many bytes are on their way; the device has work meanwhile."""
        while self._waiting and sum(gradient.nbytes for _, gradient in self._waiting) > left:
            self._waiting[0][0].synchronize()
            self._waiting.popleft()

    def _add(self, gradient: Tensor, entry: _Sum) -> None:
        rows = max(1, _PIECE // max(1, gradient.shape[1]))
        squares = []
        for here, there in zip(gradient.split(rows), entry.values.split(rows), strict=True):
            if entry.is_there:
                before = torch.empty_like(here)
                here.add_(before.copy_(there, non_blocking=True))
            there.copy_(here, non_blocking=True)
            squares.append(sum_of_squares(here))
        entry.is_there, entry.squares = True, torch.stack(squares).sum()

    def measure(self, others: Gradients, copies: Collection[nn.Parameter]) -> Gradients:
        """With the gradients that stayed on the device. The device's operations from here on wait for the sums."""
        self._waiting.clear()
        self._module.current_stream().wait_stream(self._stream)
        counted_elsewhere = {id(parameter) for parameter in copies}
        every: list[Tensor] = []
        counted = [others.squares]
        for parameter, entry in self._sums.items():
            assert entry.is_there and entry.squares is not None, "a parameter has no gradient"
            every.append(entry.squares)
            if entry.is_first and id(parameter) not in counted_elsewhere:
                counted.append(entry.squares)
        finite = others.finite & torch.stack(every).sum().isfinite()  # if all of them are
        return Gradients(torch.stack(counted).sum(), finite)


def _part_from_others(parameter: nn.Parameter) -> None:
    """A vector's gradient that stays must not keep the memory of its group's, of which FSDP2 makes it a view."""
    assert parameter.grad is not None
    parameter.grad = parameter.grad.clone()


def inputs_on_host(recomputed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Of what is recomputed, autograd keeps the inputs that have gradients; they wait in the host's memory."""

    def run(*inputs: Any) -> Tensor:
        with saved_tensors_hooks(_to_host, _from_host):
            return recomputed(*inputs)

    return run


def _to_host(tensor: Tensor) -> tuple[torch.device, Tensor] | Tensor:
    if not tensor.requires_grad or not tensor.numel():  # tables that all blocks share; torch 2.8's placeholder
        return tensor
    return tensor.device, host.lend(tensor).copy_(tensor.detach(), non_blocking=True)


def _from_host(kept: tuple[torch.device, Tensor] | Tensor) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, there = kept
    return torch.empty_like(there, device=device).copy_(there, non_blocking=True)
