"""The interface between the trainer and a layout: forward, backward and evaluation of a model split over ranks.

The second half is a microbatch's way into the model. The loader describes documents and supervised tokens in CPU
tensors, (batch, seq) and padded, because a pipeline schedule splits tensors on dim 0. The model wants Python integers
and a flat index instead. The change between the two happens in a forward pre-hook on the CPU, so that no forward waits
for the device to learn a size.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_mi100.attention.base import Backend, Documents, to_device
from titan_mi100.data.loader import Microbatch
from titan_mi100.model.qwen3 import Qwen3
from titan_mi100.parallel.distributed import Gradients, measure_gradients
from titan_mi100.parallel.offload import HostGradients
from titan_mi100.parallel.tensor_parallel import gather_vocabulary


class ParallelModel(ABC):
    """What this rank holds of the model, and its part in a step.

    Attributes:
        parts: the model, or this rank's pipeline stages; materialised, values to be filled in.
        counts_rows: several ranks may read the same rows (a tensor-parallel group, a pipeline); exactly one of them
            counts the rows' tokens.
        counts_loss: likewise, exactly one of the ranks that know a loss counts it.
        gradient_bytes: of gradients that this rank gave to collectives in the last step; None: not counted.
        extra_state_name: names what this layout keeps from step to step beside weights and optimizer state, each rank
            its own (see extra_state); "": nothing.
        host_gradients: those that are added up in the host's memory instead of `grad`.
    """

    parts: list[Qwen3]
    device: torch.device
    _tp: DeviceMesh
    counts_rows = True
    counts_loss = True
    gradient_bytes: int | None = None
    extra_state_name = ""
    host_gradients: HostGradients | None = None

    @abstractmethod
    def forward_backward(self, microbatches: Sequence[Microbatch], weight: float) -> Tensor:
        """Leave the gradient of weight x summed loss, summed over all ranks, in every parameter's `grad`, or in
        host_gradients.

        Args:
            weight: of each token's loss: 1 / supervised tokens of the whole step over all ranks.

        Returns:
            The microbatches' summed losses without the weight, (microbatches,) fp64. Each loss is counted on one rank;
            the others that took part in it return zeros. So the sum over all ranks is the step's loss.
        """

    def evaluate(self, microbatches: Iterator[Microbatch]) -> Tensor:
        """The loss summed over the microbatches, (1,) fp64, without gradients; counted as in forward_backward."""
        loss_sum = torch.zeros(1, dtype=torch.float64, device=self.device)
        with self.evaluating():
            for microbatch in microbatches:
                loss = self._forward(self._on_device(microbatch))
                loss_sum += 0 if loss is None else loss
        return self._counted_once(loss_sum)

    def logits(self, microbatch: Microbatch) -> Tensor | None:
        """The logits of some tokens, the same on every rank that has them. Call it inside `evaluating`. A collective.

        Args:
            microbatch: without labels; its supervised_columns are the columns of these n tokens. Its shape may differ
                from a step's; seq must be a multiple of the tensor-parallel degree.

        Returns:
            (n, vocabulary), in the order of the rows; None: another rank of the pipeline has them.
        """
        logits = self._forward(self._on_device(microbatch))
        return None if logits is None else gather_vocabulary(logits, self._tp)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """For forwards without a backward: no gradients, no dropout, and nothing is left behind."""
        with torch.no_grad(), without_dropout(self.parts):
            yield
        self._after_evaluation()

    def _forward(self, inputs: Microbatch) -> Tensor | None:
        """What the whole model makes of inputs on the device; None: another rank has it."""
        return self.parts[0](**inputs)

    @property
    def weights_device(self) -> torch.device:
        """Of the parameters: the host, where each is fetched when it is used."""
        return next(self.named_parameters())[1].device

    @property
    def tp_degree(self) -> int:
        return self._tp.size()

    def measure_gradients(self) -> Gradients:
        """What a step's gradients are, before they are used; on `device`."""
        on_host: Collection[nn.Parameter] = self.host_gradients or ()
        found = measure_gradients((p for _, p in self.trained_parameters() if p not in on_host), self.copies())
        if self.host_gradients is not None:
            found = self.host_gradients.measure(found, self.copies())
        return Gradients(found.squares.to(self.device), found.finite.to(self.device))

    def clear_gradients(self) -> None:
        for _, parameter in self.trained_parameters():
            parameter.grad = None
        if self.host_gradients is not None:
            self.host_gradients.clear()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter that this rank holds, by its HF name."""
        for part in self.parts:
            yield from part.named_parameters()

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that are not frozen. Only these are optimised, counted in the gradient norm and saved."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def extra_state(self) -> dict[str, Tensor]:
        """What this rank keeps from step to step beside weights and optimizer state, by name, for the checkpoint."""
        return {}

    def restore_extra_state(self, step: int, state: dict[str, Tensor]) -> None:  # noqa: B027  # most layouts have none
        """Continue after this step of the run.

        Args:
            state: what extra_state gave this rank then; empty if the checkpoint has none of this name, or was saved by
                another number of ranks.
        """

    def copies(self) -> list[nn.Parameter]:
        """Plain parameters that another rank holds too and counts: DDP's, a pipeline's second copy of a tied weight."""
        return []

    def _after_evaluation(self) -> None:  # noqa: B027  # most layouts leave nothing behind
        """Undo what a forward without backward leaves behind."""

    def _counted_once(self, losses: Tensor) -> Tensor:
        return losses if self.counts_loss else torch.zeros_like(losses)

    def _on_device(self, microbatch: Microbatch) -> Microbatch:
        return model_inputs(microbatch, self.device)


@contextmanager
def without_dropout(parts: Sequence[nn.Module]) -> Iterator[None]:
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for part in parts:
            part.train()


READ_ON_HOST = ("document_ends", "supervised_columns")
_NOT_FOR_THE_MODEL = ("document_ids",)  # only counted and shown


def model_inputs(microbatch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The model's arguments from a microbatch on the CPU; those that the host reads stay there."""
    return {
        name: tensor if name in READ_ON_HOST else to_device(tensor, device)
        for name, tensor in microbatch.items()
        if name not in _NOT_FOR_THE_MODEL
    }


def supervised_index(columns: Tensor) -> Tensor:
    """Positions of the supervised tokens in the flattened batch, (n,) int64 on the CPU; [0] if there are none.

    Args:
        columns: (batch, seq) integers on the CPU: the supervised columns of each row, then -1.

    The index is never empty, so every rank runs the head, and with it the same collectives. A token that stands in for
    none has the label IGNORE, which weighs zero.
    """
    assert columns.device.type == "cpu", "the supervised columns are read on the host"
    found = columns.numpy().astype(np.int64)
    flat = (found + found.shape[1] * np.arange(len(found))[:, None])[found >= 0]
    return torch.from_numpy(flat if len(flat) else np.zeros(1, dtype=np.int64))


def read_on_host(model: Qwen3, device: torch.device) -> None:
    """Let a model, or a pipeline stage, take a microbatch's host tensors. Call it after `fully_shard`.

    FSDP2's own pre-hook moves every tensor argument to the device, where reading it would make the host wait. A hook
    that is prepended later runs first. A pipeline calls the stage itself, so wrapping the call is no alternative.
    """

    def describe(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "document_ends" in kwargs:  # a loader's microbatch
            kwargs = describe_on_host(model.model.backend, kwargs, device)
        return args, kwargs

    model.register_forward_pre_hook(describe, prepend=True, with_kwargs=True)


def describe_on_host(backend: Backend, inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The inputs with `documents` and `supervised`, as Qwen3.forward takes them, instead of the host's two tensors."""
    described = {name: value for name, value in inputs.items() if name not in READ_ON_HOST}
    described["documents"] = backend.prepare(Documents.from_ends(inputs["document_ends"]), device)
    described["supervised"] = to_device(supervised_index(inputs["supervised_columns"]), device)
    return described
