"""Supervised fine-tuning and continued pretraining: cross-entropy of the next token, a mean over supervised tokens."""

from collections.abc import Mapping

from torch import Tensor

from titan_mi100.model.loss import Predicted
from titan_mi100.objectives.base import Objective


class Sft(Objective):
    def loss(self, predicted: Predicted, tokens: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return predicted.losses[:, 0].sum(dim=0, keepdim=True)


SFT = Sft()
