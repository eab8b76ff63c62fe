"""The interface between the trainer and a layout: forward, backward and evaluation of a model split over ranks.

The second half converts a microbatch to the model's arguments. The loader describes documents and supervised tokens by
padded CPU tensors, (batch, seq), because a pipeline schedule splits tensors on dim 0. The model takes Python integers
and a flat index instead. A forward pre-hook converts them on the CPU, so that no forward waits for the device to learn
a size.
"""

from abc import ABC
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_mi100.attention.base import Documents
from titan_mi100.data.microbatch import DRAFTED, ENDS, READ_ON_HOST, SUPERVISED, Microbatch, for_the_model, with_draft
from titan_mi100.device.accelerator import to_device
from titan_mi100.model.decoder import CausalLM, Decoder
from titan_mi100.model.layers import StepCopies
from titan_mi100.model.lora import is_adapter
from titan_mi100.objectives.base import Objective
from titan_mi100.objectives.sft import SFT
from titan_mi100.parallel.context_parallel import ContextRanks
from titan_mi100.parallel.distributed import Gradients, measure_gradients
from titan_mi100.parallel.offload import HostGradients
from titan_mi100.parallel.tensor_parallel import gather_vocabulary, sum_replicated_gradients
from titan_mi100.shapes.base import DRAFT


class ParallelModel(ABC):
    """This rank's share of the model and of a step.

    Attributes:
        parts: the model, or this rank's pipeline stages; materialised but not initialised.
        is_whole: whether every rank holds all weights as plain tensors, so that it can generate by itself.
        counts_rows: whether this rank counts the tokens of its rows. The ranks of a tensor-parallel group or a pipeline
            read the same rows; exactly one of them counts them.
        counts_loss: whether this rank counts the loss of its rows; again exactly one rank does.
        gradient_bytes: bytes of gradients that this rank sent in collectives in the last step; None: not counted.
        extra_state_name: name of the layout's own state beside weights and optimizer state (see extra_state); "": it
            has none.
        copies: of weights, which the forwards of a step share.
        host_gradients: gradients that are accumulated in host memory instead of `grad`.
        wrapped: what forward and backward of a step call: the model, or torch's wrapper around it.
        loss_factor: the loss is multiplied by it, because the layout's collectives divide by it.
        context: the ranks that share the tokens of each row; None: this rank has whole rows.
        objective: what is learned.
        draft: of the draft head, as draft_head.train.
        passed_through: on rank 0: tensors of the model's folder that are not used, see ModelSpec.passes_through.
    """

    objective: Objective = SFT
    draft = "no"
    passed_through: Mapping[str, Tensor] = MappingProxyType({})

    parts: list[CausalLM]
    device: torch.device
    _tp: DeviceMesh
    is_whole = False
    counts_rows = True
    counts_loss = True
    gradient_bytes: int | None = None
    extra_state_name = ""
    host_gradients: HostGradients | None = None
    copies: StepCopies | None = None
    loss_factor = 1
    context: ContextRanks | None = None
    wrapped: Any

    def forward_backward(self, microbatches: Sequence[Microbatch], weight: float, draft_weight: float = 0.0) -> Tensor:
        """Compute the gradient of weight x loss, summed over all tokens and ranks, in `grad` or host_gradients.

        Args:
            microbatches: the microbatches of this step, on the CPU, at least one.
            weight: of each loss: 1 / what the objective counts in the step over all ranks, times fp16's loss scale.
            draft_weight: the same of the loss of a draft head that is trained along.

        Returns:
            The summed loss of each microbatch without the weight, and the objective's measures, summed,
            (microbatches, outputs) fp64; see CausalLM.forward. One rank returns them; the other ranks that worked on
            the same rows return zeros. So the sum over all ranks is the step's.
        """
        losses = []
        for number, microbatch in enumerate(microbatches, start=1):
            with self._microbatch(is_last=number == len(microbatches)):
                loss = self.wrapped(**self._on_device(microbatch))
                self.weighted(loss, weight * self.loss_factor, draft_weight * self.loss_factor).backward()
            losses.append(loss.detach().double())
        self._after_backward()
        return self._counted_once(torch.stack(losses))

    def weighted(self, loss: Tensor, weight: float, draft_weight: float) -> Tensor:
        """What backward begins with, of the model's output."""
        total = loss[0] * weight
        return total + loss[-2] * draft_weight if self.draft == "along" else total

    @property
    def outputs(self) -> int:
        """Values that a forward with labels returns."""
        return 1 + len(self.objective.measures) + {"no": 0, "along": 2, "after": 1}[self.draft]

    @contextmanager
    def _microbatch(self, is_last: bool) -> Iterator[None]:
        """Context of a microbatch's forward and backward."""
        yield

    def _after_backward(self) -> None:
        """Hook after a step's last backward, before its gradients are read."""
        if self.copies is not None:
            self.copies.finish()
        sum_replicated_gradients(self.parts, self._tp)

    def copy_weights(self) -> None:
        """Let all forwards of a step share one copy of each of the layers' weights, see layers.StepCopies.

        But not of an A of LoRA that several layers use: their gradients would be added in its dtype.
        """
        modules = [module for part in self.parts for module in part.model.layers.modules()]
        shared = {id(module.__dict__["lora_A"].weight) for module in modules if "lora_A" in module.__dict__}
        weights = (p for module in modules for p in module.parameters(recurse=False))
        self.copies = StepCopies(p for p in weights if p.requires_grad and id(p) not in shared)

    def evaluate(self, microbatches: Iterator[Microbatch]) -> Tensor:
        """Loss and measures summed over the microbatches, (outputs,) fp64, without gradients. One rank per row
        returns them, the others zeros, as in forward_backward.
        """
        loss_sum = torch.zeros(self.outputs, dtype=torch.float64, device=self.device)
        with self.evaluating():
            for microbatch in microbatches:
                loss = self.forward(microbatch)
                loss_sum += 0 if loss is None else loss
        return self._counted_once(loss_sum)

    def forward(self, microbatch: Microbatch) -> Tensor | None:
        """The objective's loss and measures, or whatever it returns. Call it inside `evaluating`. A collective.

        Returns:
            The same on all tensor-parallel ranks; None on ranks without the last pipeline stage.
        """
        return self._forward(self._on_device(microbatch))

    @contextmanager
    def with_objective(self, objective: Objective) -> Iterator[None]:
        """Context in which forwards compute another objective, without a draft head."""
        before = self.objective, self.draft, [(part.head_loss, part.columns) for part in self.parts]
        self.objective, self.draft = objective, "no"
        for part in self.parts:
            part.head_loss, part.columns = partial(objective, **part.head_loss.keywords), objective.columns  # type: ignore[attr-defined]
        try:
            yield
        finally:
            self.objective, self.draft, heads = before
            for part, (loss, columns) in zip(self.parts, heads, strict=True):
                part.head_loss, part.columns = loss, columns

    def logits(self, microbatch: Microbatch) -> Tensor | None:
        """The logits of n chosen tokens. Call it inside `evaluating`. A collective.

        Args:
            microbatch: without labels; its supervised_columns choose the tokens. Its shape may differ from that of a
                training step; seq must be a multiple of row_multiple.

        Returns:
            (n, vocabulary), in the order of the rows, the same on all tensor-parallel ranks; None on ranks without the
            last pipeline stage.
        """
        logits = self._forward(self._on_device(microbatch))
        return None if logits is None else gather_vocabulary(logits, self._tp)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context for forwards without backward: no gradients, no dropout; gathered weights are freed at the end."""
        with torch.no_grad(), without_dropout(self.parts):
            yield
        self._after_evaluation()

    def _forward(self, inputs: Microbatch) -> Tensor | None:
        """The output of the full model for inputs on the device; None: another pipeline rank has it."""
        return self.parts[0](**inputs)

    @property
    def weights_device(self) -> torch.device:
        """The device of the parameters: `device`, or the CPU if weights are offloaded."""
        return next(self.named_parameters())[1].device

    @property
    def tp_degree(self) -> int:
        return self._tp.size()

    @property
    def row_multiple(self) -> int:
        """What the tokens of a row must be a multiple of."""
        return self._tp.size() * (self.context.size if self.context else 1)

    def share_rows(self, context: ContextRanks) -> None:
        """Share the tokens of each row with the other ranks, all of which compute the loss of whole rows."""
        self.context = context
        if context.rank > 0:
            self.counts_rows = self.counts_loss = False

    def measure_gradients(self, of_draft: bool = False) -> Gradients:
        """Norm and finiteness of this rank's gradients, as tensors on `device`. Not a collective.

        Args: of_draft: those of a draft head that is trained along, which all others leave out.
        """
        on_host: Collection[nn.Parameter] = self.host_gradients or ()
        replicas = self.replicated_parameters()
        measured = [p for name, p in self.trained_parameters() if self.is_draft(name) == of_draft]
        gradients = measure_gradients((p for p in measured if p not in on_host), replicas)
        if self.host_gradients is not None:
            gradients = self.host_gradients.measure(gradients, replicas, measured)
        return Gradients(to_device(gradients.squares, self.device), to_device(gradients.finite, self.device))

    def after_update(self) -> None:  # noqa: B027  # most layouts have no copies of weights
        """Hook after an update of the weights. A collective."""

    def clear_gradients(self) -> None:
        """Drop the gradients before the next step."""
        for _, parameter in self.trained_parameters():
            parameter.grad = None
        if self.host_gradients is not None:
            self.host_gradients.begin_step()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Pairs (HF name, parameter) of every parameter that this rank holds."""
        for part in self.parts:
            yield from part.named_parameters()

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are not frozen. Only these are optimised, and counted in the gradient norm."""
        return ((name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad)

    def is_draft(self, name: str) -> bool:
        """Whether a parameter of this name is of a draft head that is trained along, with rules of its own."""
        return self.draft == "along" and name.startswith(DRAFT)

    def saved_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of a checkpoint: adapters and a draft head alone, if the rest is frozen; else all."""
        named = list(self.named_parameters())
        added = [(name, p) for name, p in named if is_adapter(name) or (self.draft != "no" and name.startswith(DRAFT))]
        is_frozen = self.draft == "after" or any(is_adapter(name) for name, _ in added)
        return iter(added if is_frozen else named)

    def extra_state(self) -> dict[str, Tensor]:
        """State of the layout on this rank beside weights and optimizer state, for the checkpoint: name -> tensor."""
        return {}

    def restore_extra_state(self, step: int, state: dict[str, Tensor]) -> None:  # noqa: B027  # most layouts have none
        """Restore the layout's state on resume.

        Args:
            step: the last step of the checkpoint.
            state: what extra_state returned on this rank; empty if the checkpoint has no state under this name, or was
                saved with another number of ranks.
        """

    def replicated_parameters(self) -> list[nn.Parameter]:
        """Parameters that another rank counts in the gradient norm: DDP replicas, the second copy of a tied weight.

        FSDP2 and tensor-parallel replicas are not listed; their DTensors show them (see distributed.local_part).
        """
        return []

    def _after_evaluation(self) -> None:  # noqa: B027  # most layouts leave nothing behind
        """Clean up after forwards without backward."""

    def _counted_once(self, losses: Tensor) -> Tensor:
        """The losses on the rank that counts them, zeros on the others."""
        return losses if self.counts_loss else torch.zeros_like(losses)

    def _on_device(self, microbatch: Microbatch) -> Microbatch:
        if self.draft != "no" and "labels" in microbatch:
            microbatch = with_draft(microbatch)
        inputs = for_the_model(microbatch, self.objective.columns)
        return model_inputs(inputs if self.context is None else self.context.cut(inputs), self.device)


@contextmanager
def without_dropout(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which the modules are in eval mode."""
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for part in parts:
            part.train()


def model_inputs(microbatch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Move a microbatch to the device, except the tensors of READ_ON_HOST, see `read_on_host`."""
    return {name: tensor if name in READ_ON_HOST else to_device(tensor, device) for name, tensor in microbatch.items()}


def supervised_index(columns: Tensor) -> np.ndarray:
    """Positions of the supervised tokens in the flattened batch.

    Args:
        columns: (batch, seq) integers on the CPU: the supervised columns of each row, padded with -1.

    Returns:
        (n,) int64; [0] if no token is supervised.

    The index is never empty: every rank must run the head and its collectives. The token in [0] then has the label
    IGNORE, so it adds nothing to the loss.
    """
    assert columns.device.type == "cpu", "the supervised columns are read on the host"
    positions = columns.numpy().astype(np.int64)
    flat = (positions + positions.shape[1] * np.arange(len(positions))[:, None])[positions >= 0]
    return flat if len(flat) else np.zeros(1, dtype=np.int64)


def read_on_host(model: CausalLM, device: torch.device, context: ContextRanks | None = None) -> None:
    """Add a pre-hook that converts `document_ends` and `supervised_columns` to the model's arguments on the CPU.

    Call it after `fully_shard`: a hook that is prepended later runs first, and FSDP2's own pre-hook moves every tensor
    argument to the device, where reading it would make the host wait. It is a hook because a pipeline schedule calls
    the stage itself: there is no call of ours to wrap.

    Args:
        model: the model or a pipeline stage.
    """

    def describe(_: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if ENDS in kwargs:  # a microbatch of the loader; other callers pass `documents` themselves
            kwargs = describe_on_host(model.model, kwargs, device, context)
        return args, kwargs

    model.register_forward_pre_hook(describe, prepend=True, with_kwargs=True)


def describe_on_host(
    model: Decoder, inputs: Mapping[str, Any], device: torch.device, context: ContextRanks | None = None
) -> dict[str, Any]:
    """Replace `document_ends` and `supervised_columns` by `documents` and `supervised`; see CausalLM.forward."""
    described = {name: argument for name, argument in inputs.items() if name not in READ_ON_HOST}
    described["documents"] = model.prepare(Documents.from_ends(inputs[ENDS]), device)
    index = supervised_index(inputs[SUPERVISED])
    shared = to_device(torch.from_numpy(index), device) if context is None else context.share(index, device)
    if DRAFTED in inputs:
        described["draft_supervised"] = to_device(torch.from_numpy(supervised_index(inputs[DRAFTED])), device)
    return {**described, "supervised": shared}
