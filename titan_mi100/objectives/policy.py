"""Learning from scored samples: the policy gradient of a store of sampled answers, with a clipped ratio.

Legend, per learned token: A advantage, l log p of the token now, o before training, rho = exp(l - o); n its answer's
tokens, s = exp(mean of l - o over the answer); d = l - r, r log p under the reference.

| ratio | loss of a token |
|---|---|
| token | -min(rho A, clip(rho) A): PPO's, GRPO (2402.03300), DAPO (2503.14476), Dr. GRPO (2503.20783) |
| sequence | -min(s A, clip(s) A): GSPO (2507.18071) |
| cispo | -stopgrad(min(rho, 1 + clip_high)) A l: CISPO (2506.13585) |

Divided by: tokens: their number in the step; sequences: their answers, with weight 1 / n a token; length: answers x the
longest allowed one. KL(model || reference), of which the gradient is right on samples of the model: d^2 / 2 (k2), or
rho (exp(-d) + d - 1) (ratio_k3). The reference is what training starts from, so r = o.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from titan_mi100.data.answers import ADVANTAGE, BASE, OLD, SCORE, SHARE
from titan_mi100.data.microbatch import Microbatch
from titan_mi100.model.loss import Predicted
from titan_mi100.objectives.base import Objective
from titan_mi100.objectives.preference import DOCUMENT, sums_of_documents

_MOST = 20.0  # log of a ratio, as in verl: beyond it exp() would overflow, and its gradient with it


class Policy(Objective):
    """Measures, of a token: log_ratio: l - o; clipped: whether it is clipped, so that it has no gradient (of cispo: its
    weight is); kl: to the reference, else to the weights before training (k3); entropy: -l, which is that of the
    model's own samples. Of an answer: score, answer_length.
    """

    _OF_TOKENS = ("log_ratio", "clipped", "kl", "entropy")
    measures = ("answers", "tokens", "score", *_OF_TOKENS)
    printed = ("score", "log_ratio", "clipped")
    has_level = False

    def __init__(
        self, ratio: str, clip: tuple[float, float], divisor: str, longest: int, kl: str, weight: float
    ) -> None:
        """Args: longest: tokens of the longest allowed answer, for the divisor length. weight: of the KL."""
        self._ratio, (self._low, self._high), self._divisor, self._longest = ratio, clip, divisor, longest
        self._kl, self._kl_weight = kl, weight
        self.columns = (DOCUMENT, ADVANTAGE, SHARE, SCORE, OLD, *[BASE] * bool(weight))

    def count(self, microbatch: Microbatch) -> int:
        if self._divisor == "tokens":
            return super().count(microbatch)
        return int((microbatch[DOCUMENT].amax(1) + 1).sum()) * (self._longest if self._divisor == "length" else 1)

    def loss(self, predicted: Predicted, tokens: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        log_p, known = -predicted.losses[:, 0], predicted.known[:, 0]
        advantage, share, score, old = (
            columns[name].flatten()[tokens].to(log_p.dtype) for name in (ADVANTAGE, SHARE, SCORE, OLD)
        )
        change = torch.where(known, log_p - old, 0.0).clamp(-_MOST, _MOST)
        of_sequence = self._of_sequence(change * share, tokens, columns[DOCUMENT])
        ratio = (of_sequence if self._ratio == "sequence" else change).exp()
        bounded = ratio.clamp(1 - self._low, 1 + self._high)
        if self._ratio == "cispo":
            weight = ratio.detach().clamp(max=1 + self._high)
            each, clipped = -weight * advantage * log_p, ratio > 1 + self._high
        else:
            each = -torch.minimum(ratio * advantage, bounded * advantage)
            clipped = bounded * advantage < ratio * advantage
        kl = torch.expm1(-change) + change
        if self._kl_weight:
            base = columns[BASE].flatten()[tokens].to(log_p.dtype)
            apart = torch.where(known, log_p - base, 0.0).clamp(-_MOST, _MOST)
            kl = torch.expm1(-apart) + apart
            each = each + self._kl_weight * (apart.square() / 2 if self._kl == "k2" else change.exp() * kl)
        if self._divisor == "sequences":
            each = each * share
        one = torch.ones_like(log_p)
        parts = [share, one, score * share, change, clipped.to(log_p.dtype), kl, -log_p]
        return torch.stack([torch.where(known, part, 0.0).sum() for part in (each, *(part.detach() for part in parts))])

    def _of_sequence(self, values: Tensor, tokens: Tensor, documents: Tensor) -> Tensor:
        """The sum over its answer for each token, (n,)."""
        if self._ratio != "sequence":
            return values
        sums = sums_of_documents(values, tokens, documents)
        return sums.gather(1, documents.clamp(min=0)).flatten()[tokens]

    def means(self, sums: Mapping[str, float], mean: Callable[[float], float]) -> dict[str, float]:
        answers, tokens = sums["answers"] or float("nan"), sums["tokens"] or float("nan")
        of_tokens = {name: sums[name] / tokens for name in self._OF_TOKENS}
        return {"score": sums["score"] / answers, "answer_length": tokens / answers, **of_tokens}
