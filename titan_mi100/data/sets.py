"""Assigns files to sources, and records to the training and validation sets of each source."""

from typing import NamedTuple

import numpy as np

from titan_mi100.config.settings import DataConfig, SourceConfig
from titan_mi100.data.encode import DUPLICATE
from titan_mi100.data.ledger import NO_SET, TRAIN, VALIDATION, Ledger
from titan_mi100.text.assets import is_corpus

HELD_OUT = -1  # used instead of a source's index for the files of data.validation_path


class Pattern(NamedTuple):
    """A path or glob of the config."""

    path: str
    source: int  # index in `file_sources`, or HELD_OUT
    format: str


def file_sources(config: DataConfig) -> list[SourceConfig]:
    """The sources that must be prepared: all that are not corpora, which are tokenised already."""
    return [source for source in config.sources if not any(map(is_corpus, source.path))]


def patterns(config: DataConfig) -> list[Pattern]:
    """The paths and globs to prepare: those of the sources, then those of the validation files."""
    trained = [
        Pattern(path, number, source.format)
        for number, source in enumerate(file_sources(config))
        for path in source.path
    ]
    return trained + [Pattern(path, HELD_OUT, config.format) for path in config.validation_path]


def set_name(kind: str, source: int, sources: int) -> str:
    """The name of a set, which begins the names of its files in the prepared folder.

    Args:
        kind: "train" or "validation".
        source: index of the source, or HELD_OUT.
        sources: number of sources.
    """
    return kind if sources == 1 or source == HELD_OUT else f"{kind}-{source}"


def choose_sets(ledger: Ledger, config: DataConfig) -> dict[str, np.ndarray]:
    """Assign each record to a set, and note the set in the ledger.

    Returns:
        Name of the set -> (records,) bool, the records whose documents it holds. Training sets come first.
    """
    records, all_patterns = ledger.records, patterns(config)
    source = np.array([pattern.source for pattern in all_patterns])[ledger.patterns()]
    usable = records["documents"] > 0
    if config.duplicates == "drop":
        usable &= records["status"] != DUPLICATE
    held_out = source == HELD_OUT
    if config.validation_fraction:
        # The hash of the content is uniform in [0, 2**64). So duplicates go to the same set, and adding other rows does
        # not move this one.
        held_out |= records["hash"][:, 0] < np.uint64(int(config.validation_fraction * 2**64))
    records["set"] = np.select([usable & held_out, usable], [VALIDATION, TRAIN], NO_SET)
    count = len(file_sources(config))
    sets = {set_name("train", i, count): (records["set"] == TRAIN) & (source == i) for i in range(count)}
    validated = range(count) if config.validation_fraction else [HELD_OUT] if config.validation_path else []
    for i in validated:
        sets[set_name("validation", i, count)] = (records["set"] == VALIDATION) & (source == i)
    return sets
