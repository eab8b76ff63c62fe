"""Loss on held-out rows."""

import torch
from torch import nn

from titan_mi100.data.dataset import PackedDataset
from titan_mi100.data.loader import validation_batches
from titan_mi100.distributed import sum_over_ranks
from titan_mi100.layout import IGNORE, Batch
from titan_mi100.parallelize import free_gathered


@torch.no_grad()
def validation_loss(
    model: nn.Module, dataset: PackedDataset, batch: Batch, dp_rank: int, device: torch.device
) -> float:
    """Mean cross-entropy per supervised token of the whole set, the same on every rank. A collective."""
    loss, supervised = 0.0, 0
    for microbatch in validation_batches(dataset, batch, dp_rank):
        supervised += int((microbatch["labels"] != IGNORE).sum())
        loss += model(**{name: tensor.to(device) for name, tensor in microbatch.items()}).item()
    free_gathered(model)
    loss, total = sum_over_ranks([loss, supervised], device)
    return loss / total
