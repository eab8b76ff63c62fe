"""AdamW over named parameters, and its state by name."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from titan_mi100.config.settings import OptimizerConfig


class AdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter, 2019) whose state can be named before its first step, for a checkpoint to fill."""

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

    def _start(self, parameter: nn.Parameter) -> None:
        # fused kernels want the step count on the parameter's device
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
        self.state[parameter] = {"step": step, **moments}


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, device: torch.device
) -> AdamW:
    """AdamW, fused, in groups: matrices with weight decay, the norms' vectors without.

    Args:
        parameters: by HF name; what is trained.
    """
    matrices: list[tuple[str, nn.Parameter]] = []
    vectors: list[tuple[str, nn.Parameter]] = []
    for name, parameter in parameters:
        (matrices if parameter.ndim > 1 else vectors).append((name, parameter))
    decays = ((matrices, config.weight_decay), (vectors, 0.0))
    groups = [
        {"params": alike, "peak_lr": config.lr, "lr": config.lr, "weight_decay": decay}
        for alike, decay in decays
        if alike
    ]
    return AdamW(groups, betas=(config.beta1, config.beta2), eps=config.eps, fused=device.type in ("cpu", "cuda"))


def scale_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set each group's learning rate to its share of its own peak, for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
