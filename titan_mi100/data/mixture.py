"""Which records an epoch trains on and how often, and which validate."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_mi100.config.settings import DataConfig
from titan_mi100.data.encode import DUPLICATE
from titan_mi100.data.ledger import NO_SET, TRAIN, VALIDATION, Ledger
from titan_mi100.errors import UserError

_MANY_REPEATS, _TOO_MANY_REPEATS = 10, 1000  # of a path in an epoch: warned of, refused


@dataclass(frozen=True)
class Mixture:
    times: dict[str, np.ndarray]  # set -> (records,) int64: how often an epoch reads each one's documents
    said: list[str]  # lines for the log
    warnings: list[str]


def mix(ledger: Ledger, tokens: np.ndarray, config: DataConfig) -> Mixture:
    """Put each record into a set, which is noted in the ledger, and apply data.repeats or data.weights.

    Args:
        tokens: (records,) of each record's documents.

    Raises:
        UserError: a path would be read far too often.
    """
    records = ledger.records
    path_of_record = ledger.patterns()  # the paths are numbered first, then the validation paths
    sets = records["set"] = _choose_sets(records, path_of_record >= len(config.path), config)
    mixture = Mixture({"train": (sets == TRAIN).astype(np.int64)}, [], [])
    if config.validation_path or config.validation_fraction:
        mixture.times["validation"] = (sets == VALIDATION).astype(np.int64)
    if not (config.weights or config.repeats):
        return mixture
    times = mixture.times["train"]
    tokens_of_path = np.bincount(path_of_record, tokens * times, len(config.path))[: len(config.path)]
    repeats = config.repeats or _repeats_for(config.weights, tokens_of_path)
    for number, (path, repeat) in enumerate(zip(config.path, repeats, strict=True)):
        said = f"{path}: {int(tokens_of_path[number]):,} tokens, read {repeat:,.2f} times an epoch"
        mixture.said.append(said)
        if repeat > _TOO_MANY_REPEATS:
            raise UserError(f"{said}; more than {_TOO_MANY_REPEATS:,} times: lower its weight, or set data.repeats")
        if repeat > _MANY_REPEATS:
            mixture.warnings.append(f"{said}: the model will know it by heart")
        chosen = np.flatnonzero((path_of_record == number) & (sets == TRAIN))
        times[chosen] = _times(repeat, records["hash"][chosen, 1])
    records["set"][(sets == TRAIN) & (times == 0)] = NO_SET
    return mixture


def _choose_sets(records: np.ndarray, held_out: np.ndarray, config: DataConfig) -> np.ndarray:
    """The set of each record, (records,) uint8; `held_out`: (records,) bool, those of the validation files."""
    usable = records["documents"] > 0
    if config.duplicates == "drop":
        usable &= records["status"] != DUPLICATE
    if config.validation_fraction:
        # A hash of the content is uniform in 0 to 2**64. Decided by content, so that duplicates go the same way.
        held_out = held_out | (records["hash"][:, 0] < np.uint64(int(config.validation_fraction * 2**64)))
    return np.select([usable & held_out, usable], [VALIDATION, TRAIN], NO_SET)


def _repeats_for(weights: Sequence[float], tokens: np.ndarray) -> tuple[float, ...]:
    """Repeats that give each path its share of the tokens; the most abundant one for its weight is read once."""
    wanted = np.array(weights) / np.maximum(tokens, 1)
    return tuple((wanted / wanted[tokens > 0].min(initial=np.inf)).tolist())


def _times(repeat: float, hashes: np.ndarray) -> np.ndarray:
    """How often each record of a path is read, so that it is `repeat` times on average.

    Args:
        repeat: times; 2.25 reads all records twice, and a quarter of them once more.
        hashes: (records of the path,) of their content. The lowest ones are read once more: the same in every run.
    """
    whole, part = divmod(repeat, 1.0)
    times = np.full(len(hashes), int(whole), dtype=np.int64)
    times[np.argsort(hashes, kind="stable")[: round(part * len(hashes))]] += 1
    return times
