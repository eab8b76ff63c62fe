"""What an optimizer is to the trainer and to checkpoints."""

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class NamedState(torch.optim.Optimizer):
    """An optimizer whose state can be named before its first step, for a checkpoint to fill."""

    @abstractmethod
    def update(self, factor: float) -> None:
        """One step. Args: factor: what gradients are multiplied with first; they may be lost."""

    @abstractmethod
    def _start(self, parameter: nn.Parameter) -> None:
        """Make a parameter's state, as it is before the first step."""

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """(`<parameter>.<state>`, tensor) of everything a resume needs; made here where no step has made it yet.

        The tensors are the optimizer's own: loading into them in place restores it. `Optimizer.load_state_dict` would
        cast them to the parameter's dtype, and goes by position instead of by name.
        """
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if not self.state[parameter]:
                    self._start(parameter)
                for key, value in self.state[parameter].items():
                    yield f"{name}.{key}", value
