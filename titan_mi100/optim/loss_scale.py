"""Loss scaling for fp16 (Micikevicius et al., 2018): without it, small gradients underflow to zero."""

from dataclasses import dataclass

LARGEST, SMALLEST = 65536.0, 1.0
_PATIENCE = 2000  # steps without an overflow before the scale is doubled, as in torch.amp.GradScaler


@dataclass
class LossScale:
    """The loss is multiplied by the scale before backward, and the gradients are divided by it afterwards.

    The scale is halved when a gradient overflows, and doubled after 2000 steps without an overflow. All ranks know
    whether a step overflowed, so the scale is the same on every rank.
    """

    value: float = LARGEST
    steps_since: int = 0  # steps since the last overflow or doubling

    def __post_init__(self) -> None:
        if not SMALLEST <= self.value <= LARGEST:
            raise ValueError(f"loss_scale.value = {self.value} must be from {SMALLEST:g} to {LARGEST:g}")

    def can_fall(self) -> bool:
        return self.value > SMALLEST

    def after_step(self, overflowed: bool) -> None:
        """Adapt the scale.

        Args:
            overflowed: the step's loss was finite but its gradients were not. A loss that is not finite does not count:
                a smaller scale would not help.
        """
        # A step that overflowed is skipped, so halving costs one step; growth is slow to make that rare.
        self.steps_since = 0 if overflowed else self.steps_since + 1
        if overflowed:
            self.value = max(SMALLEST, self.value / 2)
        elif self.steps_since == _PATIENCE:
            self.value, self.steps_since = min(LARGEST, self.value * 2), 0
