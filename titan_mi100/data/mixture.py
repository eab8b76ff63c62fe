"""Which rows of input an epoch trains on and how often, and which validate."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_mi100.data.ledger import NO_SET, TRAIN, VALIDATION, Ledger
from titan_mi100.data.request import Request
from titan_mi100.data.sft import DUPLICATE
from titan_mi100.errors import UserError

_MANY_REPEATS, _TOO_MANY_REPEATS = 10, 1000  # of a path in an epoch: warned of, refused


@dataclass(frozen=True)
class Mixture:
    times: dict[str, np.ndarray]  # set -> (rows of input,) int64: how often an epoch reads each row's documents
    said: list[str]  # lines for the log
    warnings: list[str]


def mix(ledger: Ledger, row_tokens: np.ndarray, request: Request) -> Mixture:
    """Put each row of input into a set, which is noted in the ledger, and apply data.repeats or data.weights.

    Args:
        row_tokens: (rows of input,) tokens of each row's documents.

    Raises:
        UserError: a path would be read far too often.
    """
    config = request.config
    ledger.sets[:] = _choose_sets(ledger, request)
    mixture = Mixture({"train": (ledger.sets == TRAIN).astype(np.int64)}, [], [])
    if config.validation_path or config.validation_fraction:
        mixture.times["validation"] = (ledger.sets == VALIDATION).astype(np.int64)
    if not (config.weights or config.repeats):
        return mixture
    times = mixture.times["train"]
    path_of_row = request.path_of_file()[ledger.files]  # the number of the path that a row is from
    tokens = np.bincount(path_of_row, row_tokens * times, len(request.patterns))[: len(config.path)]
    repeats = config.repeats or _repeats_for(config.weights, tokens)
    for number, (path, repeat) in enumerate(zip(config.path, repeats, strict=True)):
        said = f"{path}: {int(tokens[number]):,} tokens, read {repeat:,.2f} times an epoch"
        mixture.said.append(said)
        if repeat > _TOO_MANY_REPEATS:
            raise UserError(f"{said}; more than {_TOO_MANY_REPEATS:,} times: lower its weight, or set data.repeats")
        if repeat > _MANY_REPEATS:
            mixture.warnings.append(f"{said}: the model will know it by heart")
        rows = np.flatnonzero((path_of_row == number) & (ledger.sets == TRAIN))
        times[rows] = _times(repeat, ledger.hashes[rows, 1])
    ledger.sets[(ledger.sets == TRAIN) & (times == 0)] = NO_SET
    return mixture


def _choose_sets(ledger: Ledger, request: Request) -> np.ndarray:
    """The set of each row of input, (rows of input,) uint8."""
    config = request.config
    usable = ledger.documents > 0
    if config.duplicates == "drop":
        usable &= ledger.statuses != DUPLICATE
    held_out = ledger.files >= request.n_train_files()
    if config.validation_fraction:
        # A hash of the content is uniform in 0 to 2**64. Decided by content, so that duplicates go the same way.
        held_out |= ledger.hashes[:, 0] < np.uint64(int(config.validation_fraction * 2**64))
    return np.select([usable & held_out, usable], [VALIDATION, TRAIN], NO_SET)


def _repeats_for(weights: Sequence[float], tokens: np.ndarray) -> tuple[float, ...]:
    """Repeats that give each path its share of the tokens; the most abundant one for its weight is read once."""
    wanted = np.array(weights) / np.maximum(tokens, 1)
    return tuple((wanted / wanted[tokens > 0].min(initial=np.inf)).tolist())


def _times(repeat: float, hashes: np.ndarray) -> np.ndarray:
    """How often each row of a path is read, so that it is `repeat` times on average.

    Args:
        repeat: times; 2.25 reads all rows twice, and a quarter of them once more.
        hashes: (rows of the path,) of the rows' content. The lowest ones are read once more: the same in every run.
    """
    whole, part = divmod(repeat, 1.0)
    times = np.full(len(hashes), int(whole), dtype=np.int64)
    times[np.argsort(hashes, kind="stable")[: round(part * len(hashes))]] += 1
    return times
