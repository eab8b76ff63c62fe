"""Loss on held-out rows."""

from titan_mi100.data.dataset import PackedDataset
from titan_mi100.data.loader import validation_batches
from titan_mi100.distributed import sum_over_ranks
from titan_mi100.layout import IGNORE, Batch, Layout
from titan_mi100.parallelize import ParallelModel


def validation_loss(model: ParallelModel, dataset: PackedDataset, batch: Batch, layout: Layout, dp_rank: int) -> float:
    """Mean cross-entropy per supervised token of the whole set, the same on every rank. A collective."""
    loss = model.evaluate(validation_batches(dataset, batch, dp_rank)).item()
    rows = validation_batches(dataset, batch, dp_rank)
    supervised = sum(int((microbatch["labels"] != IGNORE).sum()) for microbatch in rows)
    # every stage of a pipeline has read the same rows, and every tensor-parallel rank has the same loss
    loss, total = sum_over_ranks([loss / layout.tp, supervised / (layout.tp * layout.pp)], model.device)
    return loss / total
