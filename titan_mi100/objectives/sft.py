"""Supervised fine-tuning and continued pretraining: cross-entropy of the next token, a mean over supervised tokens."""

from collections.abc import Mapping

from torch import Tensor

from titan_mi100.data.microbatch import Microbatch, supervised
from titan_mi100.model.loss import Targets, of_labels
from titan_mi100.objectives.base import Objective


class Sft(Objective):
    def count(self, microbatch: Microbatch) -> int:
        return int(supervised(microbatch).sum())

    def targets(self, labels: Tensor, tokens: Tensor, columns: Mapping[str, Tensor]) -> Targets:
        return of_labels(labels, tokens)

    def loss(self, losses: Tensor, tokens: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        return losses.sum(dim=0, keepdim=True)


SFT = Sft()
