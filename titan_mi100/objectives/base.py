"""What a run learns: an objective turns one loss per token into the loss of a microbatch.

The trainer, the layouts and the evaluation know only this protocol. An objective is a module beside this one, such as
sft.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from titan_mi100.data.microbatch import Microbatch
from titan_mi100.model.loss import Targets, token_losses


class Objective(ABC):
    """How a microbatch's loss is computed from the model's predictions.

    Attributes:
        columns: arrays of a row that it reads on the device, besides the labels; see data.rows.
        together: documents of a record, which share a row; no layout splits a row.
    """

    columns: ClassVar[tuple[str, ...]] = ()
    together: ClassVar[int] = 1

    @abstractmethod
    def count(self, microbatch: Microbatch) -> int:
        """The number that the loss is divided by, summed over the step and all ranks; read on the host."""

    @abstractmethod
    def targets(self, labels: Tensor, tokens: Tensor, columns: Mapping[str, Tensor]) -> Targets:
        """What the supervised tokens should predict.

        Args:
            labels: (batch, seq).
            tokens: (n,), n > 0: the supervised tokens' index in the flattened batch. If there are none, one token whose
                label is IGNORE.
            columns: name -> (batch, seq).
        """

    @abstractmethod
    def loss(self, losses: Tensor, tokens: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """The summed loss, (1,). Args: losses: (n,), of the supervised tokens; 0 for IGNORE."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        tokens: Tensor,
        columns: Mapping[str, Tensor],
        **options: Any,
    ) -> Tensor:
        """The loss of the last hidden states, see decoder.HeadLoss. Args: options: of loss.token_losses."""
        targets = self.targets(labels, tokens, columns)
        return self.loss(token_losses(hidden, weight, targets, **options), tokens, columns)
