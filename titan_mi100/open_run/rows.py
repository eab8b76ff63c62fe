"""The rows of a run: one source, shuffled each epoch, or a mixture. Where a resumed run continues; the last step."""

import numpy as np

from titan_mi100.checkpoint.resume import FoundCheckpoint
from titan_mi100.config.layout import Batch
from titan_mi100.config.settings import DataConfig, TrainingConfig
from titan_mi100.data.loader import RowSource, ShuffledEpochs
from titan_mi100.data.mixture import Mixture
from titan_mi100.data.prepared import Prepared
from titan_mi100.errors import UserError
from titan_mi100.log import log
from titan_mi100.run.progress import Progress
from titan_mi100.wording import plural

_FIRST = _SOME = 32  # rows
_MUCH_PADDING = 0.2  # share of an epoch's rows


def open_rows(
    training: TrainingConfig, wanted: DataConfig, data: Prepared, batch: Batch, progress: Progress, is_pipeline: bool
) -> RowSource:
    """The rows of the run: the one place that knows which sources of rows there are."""
    seed, size, epochs = training.seed, batch.global_batch_size, training.epochs or 1
    if wanted.is_mixture:
        by_documents = wanted.weights_in == "documents"
        return Mixture(
            data.sources, seed, wanted.on_exhausted, by_documents, epochs, progress.segments, progress.rows_consumed
        )
    [source] = data.sources
    rows = ShuffledEpochs(source.rows, seed, size, source.fingerprint, epochs)
    if (padding := 1 - len(source.rows) / rows.rows_per_epoch) > _MUCH_PADDING:
        message = f"the data fill {plural(len(source.rows), 'row')}, a step has {size:,}"
        keys = "training.target_tokens_per_step" if training.target_tokens_per_step else "the rows of a step"
        factors = "local_batch_size x gradient_accumulation_steps x data-parallel ranks"
        remark = ", which a pipeline computes like rows" * is_pipeline
        log.warning(f"{message} ({factors}): {padding:.0%} of an epoch is padding{remark}; lower {keys}")
    return rows


def some_tokens(rows: RowSource) -> set[int]:
    """The tokens in the first rows of the run."""
    first = [rows.row(number) for number in range(min(rows.end, _FIRST))]
    return {int(token) for row in first for token in np.unique(row.input_ids[~row.padding()])}


def usual_lengths(data: Prepared) -> list[int]:
    """Tokens of the documents in a usual row, and of its padding: the row whose attention costs the median, of some in
    each source. It depends on the prepared data only, so a resumed run has the same.
    """
    weights, some = [source.weight or len(source.rows) for source in data.sources], list[np.ndarray]()
    for source, weight in zip(data.sources, weights, strict=True):
        places = np.linspace(0, len(source.rows) - 1, 1 + int(_SOME * weight / sum(weights)), dtype=int).tolist()
        some += [np.unique(row.document_ids, return_counts=True)[1] for row in map(source.rows.row, places)]
    return [*map(int, sorted(some, key=lambda lengths: int(lengths @ lengths))[len(some) // 2])]


def fit_progress(progress: Progress, found: FoundCheckpoint | None, rows: RowSource, plan: str) -> None:
    """Adapt the progress of a resumed run to its rows, which may have changed since the checkpoint.

    Args:
        plan: fingerprint of the rows to train and to validate on.
    """
    if found is not None:
        size = found.manifest["fingerprints"]["global_batch_size"]
        progress.rows_consumed = rows.resume_at(progress.rows_consumed, found.manifest["rows"], size)
        if len(rows.segments) > len(progress.segments):
            log.warning(f"the mixture changes from row {progress.rows_consumed:,} on, step {progress.step}")
            if not progress.segments:
                log.warning("the run had no mixture until now, so each of its sources is read from its beginning")
    progress.segments = [*rows.segments]
    if progress.plan != plan:
        if progress.best_step is not None:
            log.warning("the prepared rows, or what validation measures, have changed: the best so far is discarded")
        progress.plan, progress.best_step, progress.best_loss, progress.best_match = plan, None, None, None
        progress.validations_since_best = 0


def last_step(steps: int, warmup: int, progress: Progress, rows: RowSource, batch: Batch) -> int:
    """The number of the run's last step. Logs how often each source of a mixture will have been read by then.

    Args:
        steps, warmup: as configured, see TrainingConfig and LRSchedulerConfig.
    """
    if not steps or rows.on_exhausted != "repeat":
        last = progress.step + max(0, -(-(rows.end - progress.rows_consumed) // batch.global_batch_size))
        if steps > last:
            message = f"[training] steps = {steps}, but the data end with step {last}: so does the run"
            log.warning(f'{message} ([data] on_exhausted = "{rows.on_exhausted}")')
        steps = min(steps or last, last)
    if warmup > steps:
        raise UserError(f"[lr_scheduler] warmup_steps = {warmup} is more than the run's {steps} steps; use -1 for 3%")
    lines, warnings = rows.describe(progress.rows_consumed + max(0, steps - progress.step) * batch.global_batch_size)
    for line in lines:
        log.info(line)
    for line in warnings:
        log.warning(line)
    return steps
