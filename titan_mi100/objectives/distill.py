"""Distillation from a teacher's stored distributions: its k likeliest ids per learned token and their log p.

Per token: a KL(teacher || model) + (1 - a) cross-entropy of the label, at temperature 1; a mean over learned tokens.

Legend: p teacher, q model; P, Q their sums over the k ids.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from titan_mi100.config.layout import IGNORE
from titan_mi100.data.answers import TEACHER_IDS, TEACHER_LOG_P
from titan_mi100.losses import log_of_rest
from titan_mi100.model.loss import Predicted, Targets
from titan_mi100.objectives.base import Objective

_NO_REST = 1e-6  # the log p are stored in fp32: a smaller rest is rounding


class Distill(Objective):
    """Measures: kl, cross_entropy; kept_mass: P; agreement: the share of tokens whose likeliest id is the teacher's."""

    columns = (TEACHER_IDS, TEACHER_LOG_P)
    printed = measures = ("kl", "cross_entropy", "kept_mass", "agreement")

    def __init__(self, weight: float, renormalise: bool) -> None:
        """Args: weight: a. renormalise: KL over the k ids alone, p / P and q as it is; else with a bucket of the rest:
        KL += (1 - P) (log(1 - P) - log(1 - Q)).
        """
        self._weight, self._renormalise = weight, renormalise

    def targets(self, labels: Tensor, tokens: Tensor, columns: Mapping[str, Tensor]) -> Targets:
        label = labels.flatten()[tokens][:, None]
        ids = columns[TEACHER_IDS].flatten(0, 1)[tokens].to(label.dtype)
        return Targets(tokens, torch.cat((label, torch.where(label == IGNORE, IGNORE, ids)), 1))

    def loss(self, predicted: Predicted, tokens: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        cross_entropy, log_q = predicted.losses[:, 0], -predicted.losses[:, 1:]
        log_p = columns[TEACHER_LOG_P].flatten(0, 1)[tokens].to(log_q.dtype)
        kept = log_p.exp().sum(1)
        if self._renormalise:
            log_p = log_p - kept.log()[:, None]
        kl = (log_p.exp() * (log_p - log_q)).sum(1)
        if not self._renormalise:
            rest = torch.where(1 - kept > _NO_REST, 1 - kept, 0.0)
            has_rest = rest > 0
            log_rest = torch.where(has_rest, rest, 1.0).log() - log_of_rest(log_q.logsumexp(1))
            kl = kl + torch.where(has_rest, rest * log_rest, 0.0)
        each = self._weight * kl + (1 - self._weight) * cross_entropy
        agrees = log_q[:, 0] >= predicted.best
        parts = [each, *(x.detach() for x in (kl, cross_entropy, kept, agrees.to(kl.dtype)))]
        return torch.stack([torch.where(predicted.known[:, 0], part, 0.0).sum() for part in parts])
