"""AdamW, and its state by parameter name."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from titan_mi100.settings import OptimizerConfig

_STATE = ("step", "exp_avg", "exp_avg_sq")


def build_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, device: torch.device
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, 2019), fused, with no decay on the norms' vectors."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    for p in parameters:
        (matrices if p.ndim > 1 else vectors).append(p)
    decays = ((matrices, config.weight_decay), (vectors, 0.0))
    groups = [{"params": alike, "weight_decay": decay} for alike, decay in decays if alike]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=device.type in ("cpu", "cuda")
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def named_state(
    parameters: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Tensor]]:
    """(`<parameter>.<state>`, tensor) of AdamW's state, made first where no step has made it yet.

    The tensors are the optimizer's own: loading into them in place restores it. `Optimizer.load_state_dict` would
    cast, and goes by position instead of by name.
    """
    for name, parameter in parameters:
        state = optimizer.state[parameter]
        if not state:
            # fused kernels want the step count on the parameter's device
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        for key in _STATE:
            yield f"{name}.{key}", state[key]
