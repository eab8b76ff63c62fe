"""Loss on held-out rows."""

import math
from collections.abc import Callable, Iterator, Sequence

from titan_mi100.config.layout import Batch
from titan_mi100.data.loader import validation_batches
from titan_mi100.data.microbatch import Microbatch, drafted
from titan_mi100.data.prepared import RowSet, SetFacts
from titan_mi100.objectives.base import Objective
from titan_mi100.parallel.base import ParallelModel
from titan_mi100.parallel.distributed import sum_over_ranks

_STOPS_AFTER = 8  # microbatches between two checks whether to stop: each is a collective, which delays a pipeline


def validation_losses(
    model: ParallelModel,
    sets: Sequence[RowSet],
    batch: Batch,
    dp_rank: int,
    stop: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = lambda: None,
    most: int = 0,
) -> list[dict[str, float]] | None:
    """The objective's mean loss (sft: per supervised token) and measures, by name, over all sets, then for each set;
    the same on every rank. A collective.

    Args:
        stop: whether to interrupt the validation; the same on every rank.
        beat: called for each microbatch.
        most: rows of each set; 0: all.

    Returns:
        None: interrupted. NaN for a set without supervised tokens.
    """
    sums, stopped, seen, count, drafts = list[float](), False, 0, 0, 0
    width = model.outputs + 2  # with the counts

    def counted(rows: RowSet) -> Iterator[Microbatch]:
        nonlocal count, drafts, stopped, seen
        for microbatch in validation_batches(rows, batch, dp_rank, most):
            seen += 1
            beat()
            if (seen - 1) % _STOPS_AFTER == 0 and stop():
                stopped = True
                return
            count += model.objective.count(microbatch)
            drafts += drafted(microbatch) if model.draft != "no" else 0
            yield microbatch

    for rows in sets:
        count = drafts = 0
        measured = model.evaluate(counted(rows)).tolist()
        if stopped:
            return None
        sums += [*measured, *((count, drafts) if model.counts_rows else (0, 0))]
    totals = sum_over_ranks(sums, model.device)
    each = [totals[i : i + width] for i in range(0, len(totals), width)]
    every = [[sum(measured) for measured in zip(*each, strict=True)], *each]
    return [_means(model.objective, own[0], own[1:-2], own[-2:]) for own in every]


def _means(objective: Objective, loss: float, measures: Sequence[float], counts: Sequence[float]) -> dict[str, float]:
    def mean(total: float, count: float = counts[0]) -> float:
        return total / count if count else math.nan

    own, of_draft = measures[: len(objective.measures)], measures[len(objective.measures) :]
    names = ("draft_acceptance", "draft_loss")  # from the last
    drafts = {name: mean(total, counts[1]) for name, total in zip(names, reversed(of_draft), strict=False)}
    drafts |= {"draft_slots": counts[1]} if drafts else {}
    return {"loss": mean(loss), **objective.means(dict(zip(objective.measures, own, strict=True)), mean), **drafts}


def bits_per_byte(loss: float, counted: SetFacts) -> float | None:
    """Bits per byte: the summed loss of the supervised tokens, in bits, over the UTF-8 bytes of their text.

    It compares models with different tokenizers. End-of-turn and end-of-text tokens count with their loss, but have no
    bytes.

    Args:
        loss: mean loss per supervised token of a whole set, in nats.
        counted: the set's counts.

    Returns:
        None: the supervised tokens have no text.
    """
    if not counted.supervised_bytes:
        return None
    return loss * counted.supervised / math.log(2) / counted.supervised_bytes
