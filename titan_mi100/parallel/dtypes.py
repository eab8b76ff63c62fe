"""In which dtypes weights, optimizer state and gradients are kept and reduced."""

import torch

from titan_mi100.config.settings import OptimizerConfig, TrainingConfig


def compute_dtype(training: TrainingConfig) -> torch.dtype:
    return getattr(torch, training.mixed_precision_param)


def master_dtype(training: TrainingConfig, optimizer: OptimizerConfig) -> torch.dtype:
    """Of trained weights and their gradients: as configured, but float64 where computation and state are exact."""
    if optimizer.is_lean:
        return torch.float32 if optimizer.master == "fp32" else torch.bfloat16
    return torch.promote_types(getattr(torch, training.mixed_precision_param), torch.float32)


def reduce_dtype(training: TrainingConfig) -> torch.dtype:
    """In which gradients are reduced: as configured, but float64 if the computation is, so that checks in fp64 keep
    their precision.
    """
    least = torch.float64 if training.mixed_precision_param == "float64" else torch.bfloat16
    return torch.promote_types(getattr(torch, training.mixed_precision_reduce), least)
