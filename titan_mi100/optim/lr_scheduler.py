"""The learning rate as a pure function of the step: nothing to save, and a resume cannot be off by one."""

import math

from titan_mi100.config.settings import LRSchedulerConfig


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
