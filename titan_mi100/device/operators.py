"""Functions that are operators where somebody looks at operators: torch.compile, fake tensors, counters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def is_watched(x: Tensor) -> bool:
    """Whether operators are traced or counted (torch.compile, fake tensors, dispatch modes), and not only run."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta:
        return True
    return torch._C._len_torch_dispatch_stack() > 0


class CustomOperator:
    """A function of tensors that is called as an operator only where its first tensor is watched: an operator costs the
    host about twice as much.

    Attributes:
        direct: the function, or an autograd.Function of it.
        operator: what torch.library.custom_op made of it.
    """

    def __init__(self, name: str, direct: Callable[..., Any]) -> None:
        self.direct, self.operator = direct, torch.library.custom_op(name, direct, mutates_args=())

    def differentiable(self, gradients: Callable[..., Any], keep: Callable[..., None]) -> None:
        """Give it a backward. Args: as of register_autograd, whose Function is made here once and not for each call."""
        self.operator.register_autograd(gradients, setup_context=keep)
        function = self.direct

        class Direct(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *inputs: Any) -> Any:
                output = function(*inputs)
                keep(ctx, inputs, output)
                return output

            backward = staticmethod(once_differentiable(gradients))  # type: ignore[assignment]

        self.direct = Direct.apply

    def __call__(self, first: Tensor, *others: Any) -> Any:
        return (self.operator if is_watched(first) else self.direct)(first, *others)


def custom_operator(name: str) -> Callable[[Callable[..., Any]], CustomOperator]:
    """Decorate a function that becomes the operator of this name."""
    return lambda function: CustomOperator(name, function)
