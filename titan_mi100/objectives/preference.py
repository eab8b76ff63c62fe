"""Preferences: pairs of answers of which the first is preferred, or single answers with a label; see losses.py.

Both answers of a pair are documents of one row: 2 i is the chosen one, 2 i + 1 the rejected one. So no layout splits a
pair, and the last pipeline stage computes the loss alone.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_mi100.data.answers import LABEL, REFERENCE
from titan_mi100.data.microbatch import Microbatch
from titan_mi100.data.rows import PADDING_DOCUMENT
from titan_mi100.losses import Logps, Loss, LossSettings
from titan_mi100.model.loss import Predicted
from titan_mi100.objectives.base import Objective

DOCUMENT = "document_ids"
_OF_BOTH = ("reward_chosen", "reward_rejected", "margin", "accuracy", "logp_chosen", "logp_rejected")
_OF_ONE = ("margin", "accuracy")
_ROUNDING = 8  # units in the last place of a sum of log p


class Preference(Objective):
    """The mean over the step's pairs, whatever the microbatches.

    Measures: an answer's reward is loss.reward; margin is their difference (of a single answer: its reward, or minus
    it if it is not wanted), accuracy the share where it is positive (ties, within
    rounding: half); logp is the sum over an answer's
    tokens. below_reference is the mean of reference - log p per answer, in nats: how much less likely the answers have
    become. It is no KL, which is never negative: the reference has not written these answers.
    """

    def __init__(self, loss: Loss, settings: LossSettings, sft_weight: float = 0.0) -> None:
        """Args: sft_weight: of a further term, minus log p per token of the chosen answer."""
        self._loss, self._settings, self._sft_weight = loss, settings, sft_weight
        self.columns = (DOCUMENT, *[REFERENCE] * loss.has_reference, *[LABEL] * (not loss.is_paired))
        self.printed = ("margin", "accuracy", *["below_reference"] * loss.has_reference)
        self.measures = (*(_OF_BOTH if loss.is_paired else _OF_ONE), *["below_reference"] * loss.has_reference)

    def count(self, microbatch: Microbatch) -> int:
        documents = microbatch[DOCUMENT].amax(1) + 1
        return int((documents // 2 if self._loss.is_paired else documents).sum())

    def loss(self, predicted: Predicted, tokens: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        documents, log_p = columns[DOCUMENT], -predicted.losses[:, 0]
        width = documents.shape[1] // 2 * 2
        sums = sums_of_documents(log_p, tokens, documents)[:, :width]
        counts = sums_of_documents(predicted.known[:, 0].to(log_p.dtype), tokens, documents)[:, :width].clamp(min=1)
        number = torch.arange(width, device=documents.device)
        is_answer = number <= documents.amax(1, keepdim=True)
        sums = torch.where(is_answer, sums, -1.0)  # of no answer: any value whose losses are finite
        reference = columns[REFERENCE][:, :width].to(sums.dtype) if self._loss.has_reference else torch.zeros_like(sums)
        answers = Logps(sums, reference, counts)
        if self._loss.is_paired:
            chosen, rejected = (Logps(*(x[:, i::2] for x in answers)) for i in (0, 1))
            return self._summed(chosen, is_answer[:, ::2], self._loss.of(self._settings, chosen, rejected), rejected)
        labels = columns[LABEL][:, :width].to(sums.dtype)
        each = self._loss.of(self._settings, answers, labels)
        return self._summed_single(answers, is_answer, each, labels)

    def _summed(self, chosen: Logps, exists: Tensor, each: Tensor, rejected: Logps) -> Tensor:
        each = each - self._sft_weight * chosen.mean if self._sft_weight else each
        rewards = [self._loss.reward(self._settings.beta, answers) for answers in (chosen, rejected)]
        margin = rewards[0] - rewards[1]
        measures = [*rewards, margin, self._accuracy(margin, chosen, rejected), chosen.sums, rejected.sums]
        if self._loss.has_reference:
            measures.append(-(chosen.ratio + rejected.ratio) / 2)
        return _total(exists, each, measures)

    def _summed_single(self, answers: Logps, exists: Tensor, each: Tensor, wanted: Tensor) -> Tensor:
        if self._sft_weight:
            each = each - self._sft_weight * torch.where(wanted > 0, answers.mean, 0.0)
        margin = wanted * self._loss.reward(self._settings.beta, answers)
        return _total(exists, each, [margin, self._accuracy(margin, answers), -answers.ratio])

    def _accuracy(self, margin: Tensor, *compared: Logps) -> Tensor:
        """1 of a positive margin, 0 of a negative one, a half within the rounding of the sums: other rows beside an
        answer may change its last bits.
        """
        errors = (Logps(_ROUNDING * torch.finfo(x.sums.dtype).eps * x.sums, 0 * x.sums, x.tokens) for x in compared)
        slack = sum((self._loss.reward(self._settings.beta, error).abs() for error in errors), torch.zeros_like(margin))
        return (torch.where(margin.abs() <= slack, 0.0, margin).sign() + 1) / 2


def _total(exists: Tensor, each: Tensor, measures: list[Tensor]) -> Tensor:
    """The sums of loss and measures over the answers or pairs that exist; the measures have no gradient."""
    parts = [each, *(measure.detach() for measure in measures)]
    return torch.stack([torch.where(exists, part, 0.0).sum() for part in parts])


def sums_of_documents(values: Tensor, tokens: Tensor, documents: Tensor) -> Tensor:
    """Sums over each document's tokens, deterministic on every device, with the rounding of a tree of additions.

    Args:
        values: (n,), of the tokens.
        tokens: (n,): their index in the flattened batch.
        documents: (batch, seq): as Row.document_ids.

    Returns:
        (batch, seq): of document d of each row at column d; zeros beyond.
    """
    batch, seq = documents.shape
    sums = values.new_zeros(batch * seq).index_put((tokens,), values).view(batch, seq)
    step = 1
    while step < seq:  # a scan inside each document: after it, a document's last token holds its sum
        inside = documents[:, step:] == documents[:, :-step]
        sums = sums + F.pad(torch.where(inside, sums[:, :-step], 0.0), (step, 0))
        step *= 2
    is_last = F.pad(documents[:, 1:] != documents[:, :-1], (0, 1), value=True) & (documents != PADDING_DOCUMENT)
    column = torch.where(is_last, documents, seq)  # all others share a column that is cut off
    return sums.new_zeros(batch, seq + 1).scatter(1, column, sums)[:, :seq]
