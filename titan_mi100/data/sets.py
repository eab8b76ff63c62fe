"""Which files belong to which source, and which records each source trains and validates on."""

from typing import NamedTuple

import numpy as np

from titan_mi100.config.assets import is_corpus
from titan_mi100.config.settings import DataConfig, SourceConfig
from titan_mi100.data.encode import DUPLICATE
from titan_mi100.data.ledger import NO_SET, TRAIN, VALIDATION, Ledger

HELD_OUT = -1  # in the place of a source: files to validate on


class Pattern(NamedTuple):
    """A path or glob of the config."""

    path: str
    source: int  # its place among those of files; HELD_OUT
    format: str


def file_sources(config: DataConfig) -> list[SourceConfig]:
    """The sources that are no corpora, so that they have to be prepared."""
    return [source for source in config.sources if not any(map(is_corpus, source.path))]


def patterns(config: DataConfig) -> list[Pattern]:
    """All that is prepared: what the sources read, then the validation files."""
    trained = [
        Pattern(path, number, source.format)
        for number, source in enumerate(file_sources(config))
        for path in source.path
    ]
    return trained + [Pattern(path, HELD_OUT, config.format) for path in config.validation_path]


def set_name(kind: str, source: int, sources: int) -> str:
    """Of a prepared folder's files. Args: kind: train or validation; source: its place; sources: how many there are."""
    return kind if sources == 1 or source == HELD_OUT else f"{kind}-{source}"


def choose_sets(ledger: Ledger, config: DataConfig) -> dict[str, np.ndarray]:
    """Put each record into a set, which is noted in the ledger.

    Returns:
        set -> (records,) bool: those whose documents it holds. The sets to train on first.
    """
    records, all_patterns = ledger.records, patterns(config)
    source = np.array([pattern.source for pattern in all_patterns])[ledger.patterns()]
    usable = records["documents"] > 0
    if config.duplicates == "drop":
        usable &= records["status"] != DUPLICATE
    held_out = source == HELD_OUT
    if config.validation_fraction:
        # A hash of the content is uniform in 0 to 2**64. Decided by content, so that duplicates go the same way.
        held_out |= records["hash"][:, 0] < np.uint64(int(config.validation_fraction * 2**64))
    records["set"] = np.select([usable & held_out, usable], [VALIDATION, TRAIN], NO_SET)
    count = len(file_sources(config))
    sets = {set_name("train", i, count): (records["set"] == TRAIN) & (source == i) for i in range(count)}
    validated = range(count) if config.validation_fraction else [HELD_OUT] if config.validation_path else []
    for i in validated:
        sets[set_name("validation", i, count)] = (records["set"] == VALIDATION) & (source == i)
    return sets
