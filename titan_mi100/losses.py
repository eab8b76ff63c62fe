"""The preference losses: formulas, and the defaults of the papers. Importing it imports no torch, so config/ can.

Legend: l sum of log p over an answer's tokens, r that of the reference, n the answer's tokens; c chosen, r rejected;
h = (lc - rc) - (lr - rr), beta, gamma, e: settings; s the sigmoid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Logps(NamedTuple):
    """Log probabilities of answers, of the same shape, in fp32 or fp64."""

    sums: Tensor  # log p of each
    reference: Tensor  # the reference's log p; zeros without a reference
    tokens: Tensor  # learned tokens of each

    @property
    def mean(self) -> Tensor:
        """Mean of log p per token."""
        return self.sums / self.tokens

    @property
    def ratio(self) -> Tensor:
        """Difference of log p and the reference's."""
        return self.sums - self.reference

    @property
    def mean_ratio(self) -> Tensor:
        return self.ratio / self.tokens


class LossSettings(NamedTuple):
    beta: float
    gamma: float = 0.0  # SimPO's margin
    e: float = 0.0  # share of the labels that is wrong


@dataclass(frozen=True)
class Loss:
    """A loss of pairs, or of single answers.

    Attributes:
        of: (settings, chosen, rejected) -> loss of each pair; unpaired: (settings, answers, sign); sign is +1 for a
            wanted answer, else -1.
        defaults: of its settings; 0: it does not have the setting.
        is_per_token: a reward is beta times the mean over an answer's tokens, not the sum.
    """

    of: Callable[[LossSettings, Logps, Any], Tensor]
    defaults: LossSettings
    has_reference: bool = True
    is_paired: bool = True
    is_per_token: bool = False

    def reward(self, beta: float, answers: Logps) -> Tensor:
        """The reward beta log(p / reference); without a reference, which is zero, beta log p."""
        return beta * (answers.mean_ratio if self.is_per_token else answers.ratio)


def _log_sigmoid(x: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(x)


def _dpo(f: LossSettings, chosen: Logps, rejected: Logps) -> Tensor:
    """-log s(beta h)."""
    return -_log_sigmoid(f.beta * (chosen.ratio - rejected.ratio))


def _cdpo(f: LossSettings, chosen: Logps, rejected: Logps) -> Tensor:
    """-(1 - e) log s(beta h) - e log s(-beta h)."""
    h = f.beta * (chosen.ratio - rejected.ratio)
    return -(1 - f.e) * _log_sigmoid(h) - f.e * _log_sigmoid(-h)


def _ipo(f: LossSettings, chosen: Logps, rejected: Logps) -> Tensor:
    """((lc - rc) / nc - (lr - rr) / nr - 1 / (2 beta))^2: per token, or sums would grow with the answers' lengths."""
    return (chosen.mean_ratio - rejected.mean_ratio - 1 / (2 * f.beta)).square()


def _dpo_norm(f: LossSettings, chosen: Logps, rejected: Logps) -> Tensor:
    """-log s(beta ((lc - rc) / nc - (lr - rr) / nr))."""
    return -_log_sigmoid(f.beta * (chosen.mean_ratio - rejected.mean_ratio))


def _simpo(f: LossSettings, chosen: Logps, rejected: Logps) -> Tensor:
    """-log s(beta (lc / nc - lr / nr) - gamma)."""
    return -_log_sigmoid(f.beta * (chosen.mean - rejected.mean) - f.gamma)


def _orpo(f: LossSettings, chosen: Logps, rejected: Logps) -> Tensor:
    """-lc / nc - beta log s(odds(lc / nc) - odds(lr / nr)), odds(m) = m - log(1 - exp(m)). The paper's lambda is beta.
    The likelihood is that of the answer alone (TRL's covers the prompt, too).
    """
    odds = [m - log_of_rest(m) for m in (chosen.mean, rejected.mean)]
    return -chosen.mean - f.beta * _log_sigmoid(odds[0] - odds[1])


def log_of_rest(log_p: Tensor) -> Tensor:
    """Computes log(1 - exp(log_p)), accurate on both sides of -log 2 (Maechler, "log1mexp", 2012); finite at 0."""
    import torch

    log_p = log_p.clamp(max=-torch.finfo(log_p.dtype).eps)
    is_near = log_p > -0.6931471805599453
    # where() hands zeros to the branch that is not taken, which must not turn them into NaN
    near, far = torch.where(is_near, log_p, -1.0), torch.where(is_near, -1.0, log_p)
    return torch.where(is_near, (-torch.expm1(near)).log(), torch.log1p(-far.exp()))


def _apo_zero(f: LossSettings, answers: Logps, wanted: Tensor) -> Tensor:
    """1 - s(beta (l - r)) of an answer that is wanted, s(beta (l - r)) of the others."""
    return (-wanted * f.beta * answers.ratio).sigmoid()


LOSSES = {
    "dpo": Loss(_dpo, LossSettings(0.1)),  # Rafailov et al., 2023
    "cdpo": Loss(_cdpo, LossSettings(0.1, e=0.1)),  # Mitchell, "A note on DPO with noisy preferences", 2023
    "ipo": Loss(_ipo, LossSettings(0.1), is_per_token=True),  # Azar et al., 2023
    "dpo_norm": Loss(_dpo_norm, LossSettings(5.0), is_per_token=True),  # Lambert et al., "Tulu 3", 2024
    "simpo": Loss(_simpo, LossSettings(2.0, gamma=1.0), False, is_per_token=True),  # Meng et al., 2024
    "orpo": Loss(_orpo, LossSettings(0.1), False, is_per_token=True),  # Hong et al., 2024
    # D'Oosterlinck et al., 2024: as KTO, but for a mean over the batch, which depends on how a step is cut
    "apo_zero_unpaired": Loss(_apo_zero, LossSettings(0.1), is_paired=False),
}
