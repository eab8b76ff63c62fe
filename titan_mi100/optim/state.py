"""The optimizer interface that the trainer and the checkpoints use."""

from abc import abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

# reads a slice of a parameter: (name, full shape, offset, size); see model.init.Read
Read = Callable[[str, torch.Size, tuple[int, ...], tuple[int, ...]], Tensor]


class NamedState(torch.optim.Optimizer):
    """An optimizer that can create and name its state before its first step, so that a checkpoint can be loaded."""

    @abstractmethod
    def update(self, factor: float | None, draft_factor: float | None = None) -> None:
        """Do one step.

        Args:
            factor: gradients are multiplied by it first (clipping, loss scale). Their values may be overwritten. None:
                these parameters and their state stay as they are.
            draft_factor: the same of the groups of a draft head that is trained along.
        """

    def keep_residuals(self, read: Read) -> Read:
        """Wrap a function that reads the initial weights, to keep what the parameters cannot hold of them."""
        return read

    @abstractmethod
    def _start(self, parameter: nn.Parameter) -> None:
        """Create a parameter's initial state."""

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (`<parameter>.<state>`, tensor) for everything a resume needs. Missing state is created first.

        The tensors are the optimizer's own: a checkpoint is loaded into them in place. `Optimizer.load_state_dict` is
        no alternative: it casts state to the parameter's dtype, and it identifies parameters by position, not by name.
        """
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if not self.state[parameter]:
                    self._start(parameter)
                for key, tensor in self.state[parameter].items():
                    yield f"{name}.{key}", tensor
