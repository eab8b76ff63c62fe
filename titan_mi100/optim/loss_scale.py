"""Loss scaling for fp16, whose smallest numbers gradients fall below (Micikevicius et al., 2018)."""

from dataclasses import dataclass

LARGEST, SMALLEST = 65536.0, 1.0
_PATIENCE = 2000  # steps without an overflow before the scale is doubled, as in torch.amp.GradScaler


@dataclass
class LossScale:
    """What the loss is multiplied with before backward, and its gradient divided by afterwards.

    It is halved when a gradient overflows and doubled after many steps in which none did. It follows from what all
    ranks know of a step, so it is the same on each.
    """

    value: float = LARGEST
    steps_since: int = 0  # the last overflow or doubling

    def __post_init__(self) -> None:
        if not SMALLEST <= self.value <= LARGEST:
            raise ValueError(f"loss_scale.value = {self.value} must be from {SMALLEST:g} to {LARGEST:g}")

    def can_fall(self) -> bool:
        return self.value > SMALLEST

    def after_step(self, overflowed: bool) -> None:
        """Args: overflowed: the step's loss was finite and its gradients were not."""
        self.steps_since = 0 if overflowed else self.steps_since + 1
        if overflowed:
            self.value = max(SMALLEST, self.value / 2)
        elif self.steps_since == _PATIENCE:
            self.value, self.steps_since = min(LARGEST, self.value * 2), 0
