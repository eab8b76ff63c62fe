"""Builds the optimizer and computes the learning rate.

The learning rate is a pure function of the step: nothing has to be saved, and a resume cannot be off by one step.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from titan_mi100.config.settings import LRSchedulerConfig, OptimizerConfig
from titan_mi100.device import accelerator
from titan_mi100.device.shards import local_of
from titan_mi100.optim.lean import LeanAdamW
from titan_mi100.optim.state import NamedState
from titan_mi100.shapes.base import DRAFT


class AdamW(NamedState, torch.optim.AdamW):
    """Torch's AdamW (Loshchilov & Hutter, 2019); the state has the weights' dtype."""

    @torch.no_grad()
    def update(self, factor: float | None, draft_factor: float | None = None) -> None:
        for group in self.param_groups:
            own, gradients = draft_factor if group["is_draft"] else factor, [p.grad for p in group["params"]]
            if own is None:
                for parameter in group["params"]:  # without a gradient it is passed over
                    parameter.grad = None
            elif own != 1 and gradients:
                # on the local shards: the product is elementwise, so DTensors are not needed
                torch._foreach_mul_([*map(local_of, gradients)], own)
        self.step()

    def _start(self, parameter: nn.Parameter) -> None:
        # Torch's fused kernels need the step count on the parameter's device.
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
        self.state[parameter] = {"step": step, **moments}


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    seed: int,
    device: torch.device,
    on_host: Mapping[nn.Parameter, Tensor] | None = None,
    b_lr_ratio: float = 1.0,
    draft_lr: float = 0.0,
) -> NamedState:
    """Build AdamW with two parameter groups: matrices with weight decay, vectors (norms, rates of decay) without; and
    two more of a draft head that is trained along.

    It is torch's fused AdamW, or LeanAdamW if the config asks for smaller state or master weights, or if the state is
    kept on the host.

    Args:
        parameters: (HF name, parameter) of the trained parameters.
        seed: seeds stochastic rounding.
        device: the device of the computation.
        on_host: gradients that are kept in host memory, by parameter; see LeanAdamW.
        b_lr_ratio: learning rate of LoRA's B by that of all others (LoRA+; Hayou et al., 2024); not 1: a third group.
        draft_lr: learning rate of a draft head that is trained along; 0: none is.
    """
    groups = dict[tuple[bool, bool, bool], dict[str, Any]]()
    for name, parameter in parameters:
        is_matrix, is_b = parameter.ndim > 1, b_lr_ratio != 1 and name.endswith(".lora_B.weight")
        is_draft = draft_lr > 0 and name.startswith(DRAFT)
        lr, decay = config.lr * (b_lr_ratio if is_b else 1), config.weight_decay if is_matrix else 0.0
        lr = draft_lr if is_draft else lr
        alike = {"params": [], "peak_lr": lr, "lr": lr, "weight_decay": decay, "is_draft": is_draft}
        groups.setdefault((is_draft, not is_matrix, is_b), alike)["params"].append((name, parameter))
    # a pipeline stage may train nothing
    none = {"params": [], "param_names": [], "peak_lr": config.lr, "lr": config.lr, "is_draft": False}
    ordered = [groups[key] for key in sorted(groups)] or [none]
    if config.is_lean or on_host:
        return LeanAdamW(ordered, config, seed, device, on_host)
    return AdamW(
        ordered,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=device.type == "cpu" or accelerator.is_cuda(device),
    )


def scale_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set each group's learning rate for the next step: its peak times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def lr_factor(config: LRSchedulerConfig, step: int, steps: int) -> float:
    """The learning rate of a step, divided by the peak learning rate.

    Args:
        step: the optimizer step, from 1 to `steps`.
        steps: optimizer steps of the run.

    Linear warmup, then a constant phase (none with decay_ratio = 1), then a decay: linear, half a cosine (Loshchilov &
    Hutter, 2017), or 1 - sqrt (Haegele et al., 2024). The decay would reach min_lr_factor one step after the last, so
    that no step is wasted with a learning rate of 0. If warmup and decay overlap, the decay is shortened.
    """
    warmup = warmup_steps(config, steps)
    if step <= warmup:
        return step / warmup
    if config.decay_type == "constant":
        return 1.0
    decay = min(steps - warmup, round(steps * config.decay_ratio))
    done = (step - 1 - (steps - decay)) / decay if decay else 0.0  # fraction of the decay before this step, in [0, 1)
    if done <= 0:
        return 1.0
    # each falls from 1 at done = 0 to 0 at done = 1
    shape = {"linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2, "sqrt": 1 - math.sqrt(done)}
    return config.min_lr_factor + (1 - config.min_lr_factor) * shape[config.decay_type]


def warmup_steps(config: LRSchedulerConfig, steps: int) -> int:
    """Warmup steps of a run of `steps` steps: as configured, or 3% of them if the config has -1."""
    return config.warmup_steps if config.warmup_steps >= 0 else math.ceil(0.03 * steps)
