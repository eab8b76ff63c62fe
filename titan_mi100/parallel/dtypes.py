"""The dtypes of computation, master weights and gradient reduction."""

import torch

from titan_mi100.config.settings import OptimizerConfig, TrainingConfig


def compute_dtype(training: TrainingConfig) -> torch.dtype:
    """The dtype of activations, and of the weights in matrix products."""
    return getattr(torch, training.mixed_precision_param)


def master_dtype(training: TrainingConfig, optimizer: OptimizerConfig) -> torch.dtype:
    """The dtype of trained weights and their gradients: fp32, or bf16 with a lean optimizer, or fp64 with fp64 compute.

    fp64 is for tests that compare layouts exactly.
    """
    if optimizer.is_lean:
        return torch.float32 if optimizer.master == "fp32" else torch.bfloat16
    return torch.promote_types(getattr(torch, training.mixed_precision_param), torch.float32)


def reduce_dtype(training: TrainingConfig) -> torch.dtype:
    """The dtype of gradient reduction: as configured, but fp64 with fp64 compute, so that tests in fp64 stay exact."""
    least = torch.float64 if training.mixed_precision_param == "float64" else torch.bfloat16
    return torch.promote_types(getattr(torch, training.mixed_precision_reduce), least)
