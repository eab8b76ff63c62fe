"""Records log probabilities of supervised tokens, without gradients: of a reference, a teacher, sampled answers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from titan_mi100.model.loss import Predicted, SharedTokens, likeliest, of_labels, token_losses
from titan_mi100.objectives.base import Objective
from titan_mi100.objectives.preference import DOCUMENT, sums_of_documents


class Record(Objective):
    """Recorder of log probabilities, which are its "loss", flattened, in fp64. Of a reference (k = 0): each answer's
    sum of log p, (batch, seq), computed as the objective of preferences does it. Of a teacher: (batch x seq x 2 k),
    zero where nothing is learned: the k likeliest ids, then their log p.
    """

    def __init__(self, k: int = 0, vocabulary: int = 0) -> None:
        """Args: vocabulary: only ids below it are recorded; later rows of a head are padding."""
        self._k, self._vocabulary = k, vocabulary
        self.columns = () if k else (DOCUMENT,)

    def loss(self, predicted: Predicted, tokens: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        tokens: Tensor,
        columns: Mapping[str, Tensor],
        **options: Any,
    ) -> Tensor:
        predicted = token_losses(hidden, weight, of_labels(labels, tokens), **options)
        if not self._k:
            return sums_of_documents(-predicted.losses[:, 0], tokens, columns[DOCUMENT]).double().flatten()
        ids, log_p = self.chosen(hidden, weight, labels, tokens, predicted, **options)
        recorded = torch.cat((ids.double(), log_p.double()), 1)
        dense = recorded.new_zeros(labels.numel(), recorded.shape[1])
        return dense.index_put((tokens,), recorded).flatten()

    def chosen(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, tokens: Tensor, predicted: Predicted, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """The ids of each token and their log p, (n, k) each."""
        shared: SharedTokens | None = options.pop("shared", None)
        own = tokens if shared is None else shared.own
        best = predicted.best if shared is None else shared.of_rank(predicted.best[:, None])[:, 0]
        ids, log_p = likeliest(hidden.flatten(0, 1)[own], weight, best, self._k, self._vocabulary, **options)
        return (ids, log_p) if shared is None else (shared.gathered(ids), shared.gathered(log_p))


class SampledLogp(Record):
    """Recorder of the learned tokens themselves, as a teacher with k = 1."""

    def __init__(self) -> None:
        super().__init__(k=1)

    def chosen(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, tokens: Tensor, predicted: Predicted, **options: Any
    ) -> tuple[Tensor, Tensor]:
        return labels.flatten()[tokens][:, None], -predicted.losses
