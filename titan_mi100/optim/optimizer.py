"""AdamW over named parameters, its state by name, and the learning rate.

The learning rate is a pure function of the step: there is nothing to save, and a resume cannot be off by one.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from titan_mi100.config.settings import LRSchedulerConfig, OptimizerConfig


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


def lr_factor(config: LRSchedulerConfig, step: int, steps: int) -> float:
    """The share of the peak learning rate that optimizer step `step` (from 1) of `steps` uses.

    Linear warmup, a constant stretch (none with decay_ratio = 1), then a decay that would reach min_lr_factor on the
    step after the last, so that no step is lost to a rate of 0: linear, half a cosine (Loshchilov & Hutter, 2017), or
    1 - sqrt (Haegele et al., 2024). The warmup takes its steps from the decay where the two would overlap.
    """
    warmup = warmup_steps(config, steps)
    if step <= warmup:
        return step / warmup
    if config.decay_type == "constant":
        return 1.0
    decay = min(steps - warmup, round(steps * config.decay_ratio))
    done = (step - 1 - (steps - decay)) / decay if decay else 0.0
    if done <= 0:
        return 1.0
    shape = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "sqrt": 1 - math.sqrt(done)}
    return config.min_lr_factor + (1 - config.min_lr_factor) * shape[config.decay_type]


def warmup_steps(config: LRSchedulerConfig, steps: int) -> int:
    return config.warmup_steps if config.warmup_steps >= 0 else math.ceil(0.03 * steps)
