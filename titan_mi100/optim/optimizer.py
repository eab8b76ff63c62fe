"""The optimizer of a run, and the learning rate.

The learning rate is a pure function of the step: there is nothing to save, and a resume cannot be off by one.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_mi100.config.settings import LRSchedulerConfig, OptimizerConfig
from titan_mi100.optim.lean import LeanAdamW
from titan_mi100.optim.state import NamedState


class AdamW(NamedState, torch.optim.AdamW):
    """Torch's AdamW (Loshchilov & Hutter, 2019): state in the weights' dtype."""

    @torch.no_grad()
    def update(self, factor: float) -> None:
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        if factor != 1:
            torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], factor)
        self.step()

    def _start(self, parameter: nn.Parameter) -> None:
        # fused kernels want the step count on the parameter's device
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
        self.state[parameter] = {"step": step, **moments}


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    seed: int,
    device: torch.device,
    on_host: Mapping[nn.Parameter, Tensor] | None = None,
) -> NamedState:
    """AdamW in groups: matrices with weight decay, the norms' vectors without. Torch's, fused, unless the config asks
    for state or master weights of fewer bytes, or state is kept on the host.

    Args:
        parameters: by HF name; what is trained.
        seed: of what is rounded at random.
        device: of the parameters.
        on_host: gradients that are there; see LeanAdamW.
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
    if config.is_lean or on_host:
        return LeanAdamW(groups, config, seed, device, on_host)
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
