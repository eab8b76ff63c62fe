"""Loss on held-out rows."""

import math
from collections.abc import Callable, Iterator

from titan_mi100.config.layout import IGNORE, Batch
from titan_mi100.data.loader import Microbatch, validation_batches
from titan_mi100.data.prepared import PackedDataset, SetFacts
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import sum_over_ranks

_STOPS_AFTER = 8  # microbatches between two looks at whether to stop: all ranks look, and a pipeline waits for that


def validation_loss(
    model: ParallelModel, dataset: PackedDataset, batch: Batch, dp_rank: int, stop: Callable[[], bool] = lambda: False
) -> float | None:
    """Mean cross-entropy per supervised token of the whole set, the same on every rank. A collective.

    Args:
        stop: says whether to give up; the same on every rank.

    Returns:
        None: given up.
    """
    supervised, stopped = 0, False

    def counted() -> Iterator[Microbatch]:
        nonlocal supervised, stopped
        for number, microbatch in enumerate(validation_batches(dataset, batch, dp_rank)):
            if number % _STOPS_AFTER == 0 and stop():
                stopped = True
                return
            supervised += int((microbatch["labels"] != IGNORE).sum())
            yield microbatch

    loss = model.evaluate(counted()).item()
    if stopped:
        return None
    loss, total = sum_over_ranks([loss, supervised if model.counts_rows else 0], model.device)
    return loss / total


def bits_per_byte(loss: float, counted: SetFacts) -> float | None:
    """What the supervised text costs under the model, whatever the tokenizer: the tokens' summed loss in bits over the
    UTF-8 bytes that they spell. Tokens that end a turn or a text have a loss and no bytes.

    Args:
        loss: mean per supervised token of a whole set.
        counted: the set's counts.

    Returns:
        None: they spell nothing.
    """
    if not counted.supervised_bytes:
        return None
    return loss * counted.supervised / math.log(2) / counted.supervised_bytes
