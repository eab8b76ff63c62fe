"""Warns of what goes wrong: with preferences wrong or unlikely answers, margins that explode, trivial pairs; with
policies a model that has moved too far, or has lost its variety.
"""

from collections import deque

from titan_mi100.log import log
from titan_mi100.trainer import StepResult

_STEPS = 20  # means are over so many
_FALLEN = -0.5  # mean reward of chosen answers: with dpo's beta of 0.1 they are 5 nats less likely than at first
_LARGE = 20.0  # mean margin at which a pair has no gradient left
_WRONG = 0.4  # mean accuracy
_MOVED, _CLIPPED, _CERTAIN = 0.1, 0.3, 0.02  # nats per token, share, nats per token: of policies
_TRIVIAL = 3  # steps in which every pair is right, from the second step on


class PreferenceWatch:
    """A StepObserver that warns of each kind once."""

    _name = "preferences"

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float, float]] = deque(maxlen=_STEPS)
        self._said = set[str]()

    def after_step(self, step: int, result: StepResult) -> None:
        measures = result.measures
        if "accuracy" not in measures or result.skipped:
            return
        self._recent.append((measures["accuracy"], measures.get("reward_chosen", 0.0), measures["margin"]))
        accuracies = [accuracy for accuracy, *_ in self._recent]
        if step == 1 + _TRIVIAL and accuracies[-_TRIVIAL:] == [1.0] * _TRIVIAL:
            reason = "every pair was right within three steps: length or form may tell the answers apart"
            self._warn("trivial", f"{reason}; look at some with titan-mi100 inspect")
        if len(self._recent) == _STEPS:
            accuracy, chosen, margin = (sum(column) / _STEPS for column in zip(*self._recent, strict=True))
            if accuracy < _WRONG:
                reason = f"{accuracy:.0%} of the answers are on the right side (mean of {_STEPS} steps; half is chance)"
                self._warn("wrong", f"{reason}; lower optimizer.lr, and look at pairs and labels: titan-mi100 inspect")
            if chosen < _FALLEN and "below_reference" in measures:  # without a reference the reward is not a change
                reason = f"the chosen answers have become less likely (reward {chosen:.2f}, mean of {_STEPS} steps)"
                self._warn("fallen", f"{reason}; add objective.sft_weight = 0.2, or lower optimizer.lr")
            if margin > _LARGE:
                reason = f"the margin is {margin:.0f}: nearly all pairs are learned, and the model drifts on"
                self._warn("large", f"{reason}; stop here, or lower optimizer.lr")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            log.warning(f"{self._name}: {text}")


class PolicyWatch(PreferenceWatch):
    """Warns of a model that has left the one that has sampled, or lost its variety."""

    _name = "policy"

    def after_step(self, step: int, result: StepResult) -> None:
        measures = result.measures
        if "log_ratio" not in measures or result.skipped:
            return
        self._recent.append((abs(measures["log_ratio"]), measures["clipped"], measures["entropy"]))
        if len(self._recent) == _STEPS:
            moved, clipped, entropy = (sum(column) / _STEPS for column in zip(*self._recent, strict=True))
            if moved > _MOVED or clipped > _CLIPPED:
                reason = f"log ratio {moved:.2f}, {clipped:.0%} of the tokens clipped (means of {_STEPS} steps)"
                self._warn("moved", f"the model has left the one that has sampled: {reason}; sample again from here")
            if entropy < _CERTAIN:
                reason = f"{entropy:.3f} nats per token: its samples hardly differ, so their scores will not either"
                self._warn("certain", f"{reason}; lower optimizer.lr, or set objective.kl_weight")
