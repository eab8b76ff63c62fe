"""What the trainer knows of a layout: how the model goes through a step, whichever way it is split over the ranks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from titan_mi100.data.loader import Microbatch
from titan_mi100.model.inputs import model_inputs
from titan_mi100.model.qwen3 import Qwen3


class ParallelModel(ABC):
    """What this rank holds of the model, and how it goes through a step with the others.

    Attributes:
        parts: the model, or this rank's pipeline stages; materialised, values to be filled in.
        counts_rows: several ranks may read the same rows (a tensor-parallel group, a pipeline); exactly one of them
            counts the rows' tokens.
        counts_loss: likewise, exactly one of the ranks that know a loss counts it.
        gradient_bytes: of gradients that this rank gave to collectives in the last step; None: not counted.
        extra_state_name: names what this layout keeps from step to step beside weights and optimizer state, each rank
            its own (see extra_state); "": nothing.
    """

    parts: list[Qwen3]
    device: torch.device
    counts_rows = True
    counts_loss = True
    gradient_bytes: int | None = None
    extra_state_name = ""

    @abstractmethod
    def forward_backward(self, microbatches: Sequence[Microbatch], weight: float) -> Tensor:
        """Leave the gradient of weight x summed loss, summed over all ranks, in every parameter's `grad`.

        Args:
            weight: of each token's loss: loss scale / supervised tokens of the whole step over all ranks.

        Returns:
            The microbatches' summed losses without the weight, (microbatches,) fp64. Each loss is counted on one rank;
            the others that took part in it return zeros. So the sum over all ranks is the step's loss.
        """

    @torch.no_grad()
    def evaluate(self, microbatches: Iterator[Microbatch]) -> Tensor:
        """The loss summed over the microbatches, (1,) fp64, without gradients; counted as in forward_backward."""
        loss_sum = torch.zeros(1, dtype=torch.float64, device=self.device)
        with without_dropout(self.parts):
            for microbatch in microbatches:
                loss_sum += self.parts[0](**self._on_device(microbatch))
        self._after_evaluation()
        return self._counted_once(loss_sum)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter that this rank holds, by its HF name."""
        for part in self.parts:
            yield from part.named_parameters()

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of them that are not frozen: of the optimizer, the gradient norm and the checkpoints."""
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
        """Parameters that another rank holds too and counts: a pipeline's second copy of a tied weight."""
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
