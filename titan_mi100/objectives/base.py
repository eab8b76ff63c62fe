"""Objectives, which a run learns: an objective turns the losses of tokens into the loss of a microbatch.

The trainer, the layouts and the evaluation know only this protocol. An objective is a module beside this one, such as
sft.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from titan_mi100.data.microbatch import Microbatch, supervised
from titan_mi100.model.loss import Predicted, Targets, of_labels, token_losses


class Objective(ABC):
    """Computation of a microbatch's loss from the model's predictions.

    Attributes:
        columns: arrays of a row that it reads on the device, besides the labels; see data.rows.
        measures: names of what is summed beside the loss; see `means`.
        printed: those that each step's line shows.
        has_level: whether a loss far above the usual one says that the weights are ruined.
    """

    columns: tuple[str, ...] = ()
    measures: tuple[str, ...] = ()
    printed: tuple[str, ...] = ()
    has_level = True

    def count(self, microbatch: Microbatch) -> int:
        """The number that the loss is divided by, summed over the step and all ranks; read on the host. Default: the
        supervised tokens.
        """
        return int(supervised(microbatch).sum())

    def means(self, sums: Mapping[str, float], mean: Callable[[float], float]) -> dict[str, float]:
        """What is reported of the measures' sums over step and ranks. Args: mean: divides a sum by the count."""
        return {name: mean(total) for name, total in sums.items()}

    def targets(self, labels: Tensor, tokens: Tensor, columns: Mapping[str, Tensor]) -> Targets:
        """Ids that the supervised tokens should predict; default: their labels.

        Args:
            labels: (batch, seq).
            tokens: (n,), n > 0: the supervised tokens' index in the flattened batch. If there are none, one token whose
                label is IGNORE.
            columns: name -> (batch, seq, ...).
        """
        return of_labels(labels, tokens)

    @abstractmethod
    def loss(self, predicted: Predicted, tokens: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        """The summed loss, and the sum of each measure, which has no gradient: (1 + measures,)."""

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
